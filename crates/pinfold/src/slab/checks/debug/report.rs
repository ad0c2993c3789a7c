//! Reports of the faults that debugged and hardened caches find: their text, and the handler that
//! decides what the process does then.

use super::slot_layout::{Found, Part};
use super::{DebugFlags, Track};
use crate::last_words::ThisProcess;
use crate::profile::walks_are_forbidden;
use crate::{arena, sys};
use core::fmt::{self, Write};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64};
use pinfold_rseq::kernel;

/// The kind of a fault.
///
/// ```
/// use pinfold::slab::debug::Kind;
/// use pinfold::slab::{DebugFlags, KmemCache};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::builder("session", Layout::new::<u64>())
///     .debug(DebugFlags::CONSISTENCY)
///     .build()?;
/// let session = cache.alloc().expect("memory");
/// let leaks = cache.leaks_with(|report| assert_eq!(report.kind, Kind::Leaked));
/// assert_eq!(leaks, 1);
/// # // SAFETY: the object came from this cache and is not used afterwards.
/// # unsafe { cache.free(session) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes in or around the object were overwritten.
    Overwritten(Found),
    /// A free object was freed.
    DoubleFree,
    /// A free object was passed to a function that takes objects in use.
    UsedAfterFree,
    /// An object was freed with this size, for which it cannot have been allocated.
    WrongSize(usize),
    /// A free object of a hardened cache was written to.
    WrittenAfterFree,
    /// An address at which no object begins was freed.
    NotAnObject,
    /// An object of another cache was freed to this cache.
    WrongCache,
    /// The object was not freed when its cache ended.
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
            Kind::UsedAfterFree => {
                "object used after it was freed, by realloc or malloc_usable_size"
            }
            Kind::WrongSize(_) => "object freed with a size that is not its own",
            Kind::WrittenAfterFree => "object written to after it was freed",
            Kind::NotAnObject => "not the start of an object",
            Kind::WrongCache => "object of another cache",
            Kind::Leaked => "object not freed",
            Kind::Records(what) => what,
        })
    }
}

/// A fault, and the place of the fault. The text of a report has the form of the kernel's reports.
///
/// ```
/// use pinfold::slab::debug::{Verdict, on_report};
///
/// // Logs a line instead of the whole report.
/// on_report(|report| {
///     eprintln!("cache {}: {} at {:p}", report.cache, report.kind, report.object);
///     Verdict::Abort
/// });
/// ```
#[derive(Clone, Debug)]
pub struct Report<'r> {
    /// The kind of the fault.
    pub kind: Kind,
    /// The cache's name.
    pub cache: &'r str,
    /// The name of the cache that owns the object, if the object was freed to the wrong cache.
    pub other: Option<&'r str>,
    /// The checks that the cache makes.
    pub flags: DebugFlags,
    /// The object, or the address that was freed if no object begins there.
    pub object: *const u8,
    /// Bytes of the object.
    pub size: usize,
    /// The slab's address, the object's number in the slab, and the number of objects in the slab.
    /// The address is null if the slab is not known.
    pub slab: (*const u8, usize, usize),
    /// Whether the object is in use.
    pub in_use: bool,
    /// The tracks of the object's last allocation and last free. Empty if the cache keeps no
    /// tracks.
    pub tracks: [Track; 2],
    /// The bytes around the first wrong byte, and their address.
    pub bytes: Option<(*const u8, [u8; 16])>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let now = sys::coarse_milliseconds();
        // If no cache owns the memory at the address, the object is not another cache's.
        let is_nothing = self.kind == Kind::WrongCache && self.other.is_none();
        match is_nothing {
            true => writeln!(
                f,
                "pinfold: cache {}: not an object of any cache",
                self.cache
            )?,
            false => writeln!(f, "pinfold: cache {}: {}", self.cache, self.kind)?,
        }
        writeln!(f, "  {}", ThisProcess)?;
        if is_nothing {
            let place = arena::describe_unused(self.object as usize);
            write!(f, "  address {:p}: {place}", self.object)?;
        } else {
            let state = if self.in_use { "in use" } else { "free" };
            let (object, size) = (self.object, self.size);
            write!(f, "  object {object:p} of {size} bytes, {state}")?;
        }
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
        if let Kind::WrongSize(size) = self.kind {
            writeln!(f, "  freed with a size of {size} bytes")?;
        }
        if let Some((from, bytes)) = self.bytes {
            write!(f, "  {from:p}:")?;
            for byte in bytes {
                write!(f, " {byte:02x}")?;
            }
            writeln!(f)?;
        }
        self.tracks[0].write("allocated", now, f)?;
        self.tracks[1].write("freed", now, f)
    }
}

/// A handler's decision about a report.
///
/// ```
/// use pinfold::slab::debug::{Kind, Verdict, on_report};
///
/// // Goes on after stray writes, which are repaired. Ends the process after other faults.
/// on_report(|report| match report.kind {
///     Kind::Overwritten(_) => Verdict::Continue,
///     _ => Verdict::Abort,
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// End the process, because memory can no longer be trusted.
    Abort,
    /// Let the process go on. Wrong bytes are repaired, and an object that cannot be trusted is
    /// never used again.
    Continue,
}

type Handler = fn(&Report<'_>) -> Verdict;
type Symbolizer = fn(usize, &mut dyn Write) -> fmt::Result;

static HANDLER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());
static SYMBOLIZER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());
/// The thread pointer of the thread that is writing a report, or 0. Until the report is done, that
/// thread does not report further faults that it finds.
static WRITING: AtomicU64 = AtomicU64::new(0);
/// The most times that a thread checks, every 0.1 ms, whether another thread's report is done.
const PATIENCE: u32 = 20_000;

/// Makes `handler` decide about all faults that are found in this process from now on. Without a
/// handler, a report goes to standard error and the process ends.
///
/// The thread that finds a fault calls the handler, and holds none of the library's locks. The
/// handler may allocate, even from the cache that has the fault. It may wait for deferred frees.
/// Such a wait leaves out the deferred free that the thread itself was making when it found the
/// fault.
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
/// // SAFETY: behind the object is its red zone, which is the cache's memory.
/// unsafe { object.as_ptr().add(64).write(0x12) };
/// assert_eq!(cache.validate().unwrap_err().errors, 1);
/// // SAFETY: the object is of this cache.
/// unsafe { cache.free(object) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub fn on_report(handler: fn(&Report<'_>) -> Verdict) {
    HANDLER.store(handler as *mut (), Release);
}

/// Makes reports use `symbolizer` to name callers. It gets an address, and writes the name of the
/// function there.
///
/// Without a symbolizer, names come from debug information (feature `symbols`), or else from the C
/// library's `dladdr`, which knows only exported functions.
///
/// ```
/// use pinfold::slab::debug::symbolize_with;
///
/// symbolize_with(|address, to| write!(to, "function at {address:#x}"));
/// ```
pub fn symbolize_with(symbolizer: fn(usize, &mut dyn Write) -> fmt::Result) {
    SYMBOLIZER.store(symbolizer as *mut (), Release);
}

/// Passes a report to the handler, and ends the process if the handler does not decide to go on.
/// The caller holds no lock.
#[cold]
pub(crate) fn raise(report: &Report<'_>) {
    if silently() {
        // This thread is writing another report, and its handler found this fault.
        return;
    }
    let me = pinfold_rseq::thread_pointer() as u64;
    // Waits until no other thread is writing a report, for about two seconds at most.
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
        write_callers();
        Verdict::Abort
    } else {
        // SAFETY: only `on_report` stores an address in `HANDLER`, and it stores a function of this
        // type.
        let handler = unsafe { core::mem::transmute::<*mut (), Handler>(handler) };
        handler(report)
    };
    if verdict == Verdict::Abort {
        // SAFETY: `abort` has no preconditions.
        unsafe { libc::abort() };
    }
    // This exchange fails if another thread has stopped waiting for this one, and is writing its
    // own report.
    let _ = WRITING.compare_exchange(me, 0, AcqRel, Acquire);
}

/// Writes the calling thread's stack to standard error, before the process ends.
///
/// The walk may load the unwinder's library, and the loader allocates. So the caller holds no lock
/// of this library, and has written its message already: a process whose memory is broken may not
/// survive the walk. Writes nothing if walks are forbidden, because a walk might wait without end
/// for a lock of the loader or of the unwinder.
#[cold]
#[inline(never)]
pub(crate) fn write_callers() {
    if !walks_are_forbidden() {
        let now = sys::coarse_milliseconds();
        let _ = Track::here().write("found", now, &mut StandardError);
    }
}

/// Returns whether this thread is writing a report. Meanwhile, its allocations and frees are not
/// traced, and faults that they find are not reported.
pub(crate) fn silently() -> bool {
    WRITING.load(Acquire) == pinfold_rseq::thread_pointer() as u64
}

/// Writes to standard error, unbuffered. Fails if standard error is a pipe without a reader, and
/// ignores other errors: there is no place to report them.
pub(crate) struct StandardError;

impl Write for StandardError {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        match kernel::write(2, text.as_bytes()) {
            Err(libc::EPIPE) => Err(fmt::Error),
            _ => Ok(()),
        }
    }
}

/// Writes a line for each caller, innermost first. Leaves out the innermost callers that are code
/// of a shared library that contains Pinfold.
pub(crate) fn write_frames(frames: impl Iterator<Item = usize>, to: &mut dyn Write) -> fmt::Result {
    let own = own_library();
    frames
        .skip_while(|&frame| own.is_some() && library_of(frame) == own)
        .try_for_each(|frame| write_frame(frame, to))
}

/// Returns the address of the shared library that contains this code. Returns `None` in a program
/// that contains this code itself: its own functions are in the same file.
fn own_library() -> Option<usize> {
    // SAFETY: `getauxval` only reads the auxiliary vector.
    let program = unsafe { libc::getauxval(libc::AT_PHDR) } as usize;
    library_of(own_library as fn() -> Option<usize> as usize)
        .filter(|&own| library_of(program) != Some(own))
}

/// Returns the address of the program or the shared library that contains an address.
fn library_of(address: usize) -> Option<usize> {
    // SAFETY: `Dl_info` holds pointers only, for which null is valid.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is writable, and the call only looks the address up.
    let found = unsafe { libc::dladdr(address as *const _, &raw mut info) } != 0;
    found.then_some(info.dli_fbase as usize)
}

/// Writes the line for one caller.
fn write_frame(address: usize, to: &mut dyn Write) -> fmt::Result {
    write!(to, "    {address:#x} ")?;
    let symbolizer = SYMBOLIZER.load(Acquire);
    if symbolizer.is_null() {
        write_name(address, to)?;
    } else {
        // SAFETY: only `symbolize_with` stores an address in `SYMBOLIZER`, and it stores a function
        // of this type.
        let symbolizer = unsafe { core::mem::transmute::<*mut (), Symbolizer>(symbolizer) };
        symbolizer(address, to)?;
    }
    writeln!(to)
}

/// Writes the functions, files and lines that debug information has for an address. If it has none,
/// writes what the dynamic linker knows of the address.
#[cfg(feature = "symbols")]
fn write_name(address: usize, to: &mut dyn Write) -> fmt::Result {
    let mut written = None;
    // `address` is the address to which a call returns. `resolve` looks up the byte before it,
    // which belongs to the call.
    backtrace::resolve(address as *mut _, |symbol| {
        let Some(name) = symbol.name() else {
            return;
        };
        // The innermost inlined function comes first.
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

/// Writes what the dynamic linker knows of an address: the exported function, and the file with the
/// offset in it, for `addr2line`.
fn write_exported(address: usize, to: &mut dyn Write) -> fmt::Result {
    // SAFETY: `Dl_info` holds pointers only, for which null is valid.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is a live `Dl_info` that this function may write to.
    if unsafe { libc::dladdr(address as *const _, &raw mut info) } == 0 {
        return to.write_str("?");
    }
    let text = |text: *const core::ffi::c_char| {
        // SAFETY: `dladdr` succeeded, so a pointer that is not null is a C string of the dynamic
        // linker. The string lives as long as the shared object is loaded.
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
