//! What debugging has found, as text and to whom.

use super::plan::{Found, Part};
use super::{DebugFlags, Track};
use crate::sys;
use core::fmt::{self, Write};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes in or around the object are not what they were: somebody wrote there.
    Overwritten(Found),
    /// An object was freed that is free.
    DoubleFree,
    /// A free object of a hardened cache was written to.
    WrittenAfterFree,
    /// An address was freed that is no object's.
    NotAnObject,
    /// An object was freed to this cache that is another's.
    WrongCache,
    /// An object has not come back when its cache ended.
    Leaked,
    /// The cache's own records contradict each other.
    Records(&'static str),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Overwritten(found) => match found.part {
                Part::LeftRedZone => "left red zone overwritten",
                Part::RightRedZone => "right red zone overwritten",
                Part::Poison => "poison overwritten: written to after it was freed",
                Part::Padding => "padding overwritten",
            },
            Kind::DoubleFree => "object freed twice",
            Kind::WrittenAfterFree => "object written to after it was freed",
            Kind::NotAnObject => "not the start of an object",
            Kind::WrongCache => "object of another cache",
            Kind::Leaked => "object not freed",
            Kind::Records(what) => what,
        })
    }
}

/// What was found wrong, and where. Shown as text it is what the kernel would print.
#[derive(Clone, Debug)]
pub struct Report<'r> {
    /// What is wrong.
    pub kind: Kind,
    /// The cache's name.
    pub cache: &'r str,
    /// The cache that the object is of, where that is another.
    pub other: Option<&'r str>,
    /// The checks that the cache makes.
    pub flags: DebugFlags,
    /// The object, or the address that was freed.
    pub object: *const u8,
    /// Bytes of the object.
    pub size: usize,
    /// The slab, its object's number, and how many it has; null when there is none.
    pub slab: (*const u8, usize, usize),
    /// Whether the object is in use.
    pub in_use: bool,
    /// Who allocated and who freed it last, where that is kept.
    pub tracks: [Track; 2],
    /// The bytes around the first wrong one, from which address on.
    pub bytes: Option<(*const u8, [u8; 16])>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "pinfold: cache {}: {}", self.cache, self.kind)?;
        let state = if self.in_use { "in use" } else { "free" };
        write!(
            f,
            "  object {:p} of {} bytes, {state}",
            self.object, self.size
        )?;
        if let Some(other) = self.other {
            write!(f, ", of cache {other}")?;
        }
        let (slab, nth, of) = self.slab;
        if !slab.is_null() {
            write!(f, "; slab {slab:p}, object {nth} of {of}")?;
        }
        writeln!(f, "; checks {}", self.flags)?;
        if let Kind::Overwritten(found) = self.kind {
            writeln!(
                f,
                "  at offset {}: {:#04x} instead of {:#04x}, {} wrong in all",
                found.offset, found.found, found.expected, found.wrong
            )?;
        }
        if let Some((from, bytes)) = self.bytes {
            write!(f, "  {from:p}:")?;
            for byte in bytes {
                write!(f, " {byte:02x}")?;
            }
            writeln!(f)?;
        }
        self.tracks[0].write("allocated", f)?;
        self.tracks[1].write("freed", f)
    }
}

/// What to do about a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// End the process: what comes next cannot be trusted.
    Abort,
    /// Go on: bytes are put right, an object that cannot be trusted is never used again.
    Continue,
}

type Handler = fn(&Report<'_>) -> Verdict;
type Symbolizer = fn(usize, &mut dyn Write) -> fmt::Result;

static HANDLER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());
static SYMBOLIZER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());
/// The thread that is writing a report: one that finds another fault on its way is not to write again.
static WRITING: AtomicU64 = AtomicU64::new(0);
/// How often a second report waits for the first, a tenth of a millisecond each.
const PATIENCE: u32 = 20_000;

/// Has `handler` decide about what debugging finds from now on, for the whole process. Without one a report goes to standard
/// error and the process ends.
///
/// The handler is called in the thread that has found it, and may allocate: without any lock, but where an object that was freed
/// deferred is found wrong, which keeps others from waiting for what that cache defers.
///
/// ```
/// use pinfold::slab::debug::{Verdict, on_report};
/// use pinfold::slab::{DebugFlags, KmemCache};
/// use std::alloc::Layout;
///
/// on_report(|report| {
///     eprintln!("{report}");
///     Verdict::Continue
/// });
/// let cache = KmemCache::builder("watched", Layout::new::<[u8; 64]>())
///     .debug(DebugFlags::RED_ZONE)
///     .build()?;
/// let object = cache.alloc().unwrap();
/// // SAFETY: behind the object is its red zone, which is memory of the cache's.
/// unsafe { object.as_ptr().add(64).write(0x12) };
/// assert_eq!(cache.validate().unwrap_err().errors, 1);
/// // SAFETY: the object is of this cache.
/// unsafe { cache.free(object) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub fn on_report(handler: fn(&Report<'_>) -> Verdict) {
    HANDLER.store(handler as *mut (), Release);
}

/// Has reports name callers by `symbolizer`, which writes the name of the function at an address. Without one, debug information
/// is read (feature `symbols`), or the C library's `dladdr` is asked, which knows exported functions only.
pub fn symbolize_with(symbolizer: fn(usize, &mut dyn Write) -> fmt::Result) {
    SYMBOLIZER.store(symbolizer as *mut (), Release);
}

/// Hands a report to whoever decides; ends the process unless that says otherwise. With no lock held.
#[cold]
pub(in crate::slab) fn raise(report: &Report<'_>) {
    if silently() {
        // Found while this thread writes another.
        return;
    }
    let me = pinfold_rseq::thread_pointer() as u64;
    // Another thread's report is let out first, unless it takes its time.
    for _ in 0..PATIENCE {
        if WRITING.compare_exchange(0, me, AcqRel, Acquire).is_ok() {
            break;
        }
        sys::sleep_microseconds(100);
    }
    WRITING.store(me, Release);
    let handler = HANDLER.load(Acquire);
    let verdict = if handler.is_null() {
        let _ = write!(StandardError, "{report}");
        Verdict::Abort
    } else {
        // SAFETY: stored from a function of this type.
        let handler = unsafe { core::mem::transmute::<*mut (), Handler>(handler) };
        handler(report)
    };
    if verdict == Verdict::Abort {
        // SAFETY: no preconditions.
        unsafe { libc::abort() };
    }
    // Unless another thread lost its patience and began to write.
    let _ = WRITING.compare_exchange(me, 0, AcqRel, Acquire);
}

/// Whether this thread is writing a report: what it allocates on the way is not to be reported, nor traced.
pub(in crate::slab) fn silently() -> bool {
    WRITING.load(Acquire) == pinfold_rseq::thread_pointer() as u64
}

/// Writes to standard error, without a buffer.
pub(super) struct StandardError;

impl Write for StandardError {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: the text is readable for its length. What cannot be written is lost.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        Ok(())
    }
}

/// Writes a line for a caller.
pub(super) fn write_frame(address: usize, to: &mut dyn Write) -> fmt::Result {
    write!(to, "    {address:#x} ")?;
    let symbolizer = SYMBOLIZER.load(Acquire);
    if symbolizer.is_null() {
        write_name(address, to)?;
    } else {
        // SAFETY: stored from a function of this type.
        let symbolizer = unsafe { core::mem::transmute::<*mut (), Symbolizer>(symbolizer) };
        symbolizer(address, to)?;
    }
    writeln!(to)
}

/// What debug information says: the function, file and line; or what the dynamic linker knows.
#[cfg(feature = "symbols")]
fn write_name(address: usize, to: &mut dyn Write) -> fmt::Result {
    let mut written = None;
    // The address is where the call returns to: before it is the call.
    backtrace::resolve((address - 1) as *mut _, |symbol| {
        let Some(name) = symbol.name() else {
            return;
        };
        // Inlined calls come innermost first.
        let between = if written.is_some() { " in " } else { "" };
        let name = write!(to, "{between}{name:#}");
        let line = match (symbol.filename(), symbol.lineno()) {
            (Some(file), Some(line)) => write!(to, " {}:{line}", file.display()),
            _ => Ok(()),
        };
        written = Some(written.unwrap_or(Ok(())).and(name).and(line));
    });
    written.unwrap_or_else(|| write_exported(address, to))
}

#[cfg(not(feature = "symbols"))]
use write_exported as write_name;

/// What the dynamic linker knows: the exported function, or the object and the offset in it, for `addr2line`.
fn write_exported(address: usize, to: &mut dyn Write) -> fmt::Result {
    // SAFETY: plain pointers, for which zeroes are values.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is writable.
    if unsafe { libc::dladdr(address as *const _, &raw mut info) } == 0 {
        return to.write_str("?");
    }
    let text = |text: *const core::ffi::c_char| {
        // SAFETY: the dynamic linker's names are C strings that stay.
        (!text.is_null())
            .then(|| unsafe { core::ffi::CStr::from_ptr(text) })
            .and_then(|text| text.to_str().ok())
            .unwrap_or("?")
    };
    if !info.dli_sname.is_null() {
        let offset = address.wrapping_sub(info.dli_saddr as usize);
        write!(to, "{}+{offset:#x} ", text(info.dli_sname))?;
    }
    let offset = address.wrapping_sub(info.dli_fbase as usize);
    write!(to, "({}+{offset:#x})", text(info.dli_fname))
}
