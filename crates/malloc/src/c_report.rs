//! The C API of what debugging finds: reports as C sees them, and who decides about them.

use crate::heap::{self, set_errno};
use crate::{c_counter::boxed, init};
use core::ffi::{c_char, c_int, c_void};
use core::fmt::{self, Write};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};
use pinfold::slab::debug::{self, Kind, Report, Verdict};

/// Bytes of a report's text; two backtraces with files and lines take some four thousand.
const TEXT_MOST: usize = 16 << 10;
/// As much where there is no memory for that.
const TEXT_LEAST: usize = 256;
/// Bytes of a cache's name, with the NUL.
pub(crate) const NAME_ROOM: usize = 33;

/// What was found wrong, and where.
#[repr(C)]
#[derive(Debug)]
pub struct CReport {
    /// All of it, in lines.
    pub text: *const c_char,
    /// The cache's name.
    pub cache: *const c_char,
    /// The object, or the address that was freed.
    pub object: *const c_void,
    /// Bytes of the object.
    pub size: usize,
    /// Of overwritten bytes the first one's distance from the object's start; else 0.
    pub offset: isize,
    /// `PINFOLD_SLAB_OVERWRITTEN` and so on.
    pub kind: c_int,
}

/// What C does about a report that it looks for.
pub type Each = unsafe extern "C" fn(*const CReport, *mut c_void);
/// What C decides about a report that comes by itself: 0 to end the process, others to go on.
pub type Handler = unsafe extern "C" fn(*const CReport, *mut c_void) -> c_int;

fn number_of(kind: Kind) -> (c_int, isize) {
    match kind {
        Kind::Overwritten(found) => (1, found.offset),
        Kind::DoubleFree => (2, 0),
        Kind::WrittenAfterFree => (3, 0),
        Kind::NotAnObject => (4, 0),
        Kind::WrongCache => (5, 0),
        Kind::Leaked => (6, 0),
        Kind::Records(_) => (7, 0),
    }
}

/// Text with a NUL behind it; what does not fit is left out.
pub(crate) struct Text<'b> {
    bytes: &'b mut [u8],
    length: usize,
}

impl<'b> Text<'b> {
    /// Begins in `bytes`, which are not empty.
    pub(crate) fn new(bytes: &'b mut [u8]) -> Text<'b> {
        bytes[0] = 0;
        Text { bytes, length: 0 }
    }

    fn as_ptr(&self) -> *const c_char {
        self.bytes.as_ptr().cast()
    }
}

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - 1 - self.length;
        let mut taken = text.len().min(room);
        while !text.is_char_boundary(taken) {
            taken -= 1;
        }
        self.bytes[self.length..][..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        self.bytes[self.length] = 0;
        if taken < text.len() {
            Err(fmt::Error)
        } else {
            Ok(())
        }
    }
}

/// `name` with a NUL behind it, cut where it is too long.
pub(crate) fn c_name(name: &str) -> [u8; NAME_ROOM] {
    let mut room = [0; NAME_ROOM];
    let _ = Text::new(&mut room).write_str(name);
    room
}

/// Hands a fault to `f` as C sees it.
pub(crate) fn tell<R>(
    (kind, cache): (Kind, &str),
    (object, size): (*const u8, usize),
    text: &dyn fmt::Display,
    f: impl FnOnce(&CReport) -> R,
) -> R {
    let name = c_name(cache);
    let (kind, offset) = number_of(kind);
    let told = |text: *const c_char| CReport {
        text,
        cache: name.as_ptr().cast(),
        object: object.cast(),
        size,
        offset,
        kind,
    };
    let block = heap::alloc(TEXT_MOST);
    if block.is_null() {
        let mut little = [0; TEXT_LEAST];
        let mut written = Text::new(&mut little);
        let _ = write!(written, "{text}");
        return f(&told(written.as_ptr()));
    }
    // SAFETY: the block is ours and that large.
    let bytes = unsafe {
        block.write_bytes(0, TEXT_MOST);
        core::slice::from_raw_parts_mut(block, TEXT_MOST)
    };
    let mut written = Text::new(bytes);
    let _ = write!(written, "{text}");
    let answer = f(&told(written.as_ptr()));
    // SAFETY: ours, and nobody uses it any more.
    unsafe { heap::free(block) };
    answer
}

/// Hands a report to `f` as C sees it.
pub(crate) fn tell_report<R>(report: &Report<'_>, f: impl FnOnce(&CReport) -> R) -> R {
    tell(
        (report.kind, report.cache),
        (report.object, report.size),
        report,
        f,
    )
}

/// A handler with what it is to be given.
struct Registered {
    handler: Handler,
    context: *mut c_void,
}

/// Who decides. Those that were replaced stay, as threads may be in them.
static REGISTERED: AtomicPtr<Registered> = AtomicPtr::new(null_mut());

/// What the library calls.
fn decide(report: &Report<'_>) -> Verdict {
    // SAFETY: null, or written before it was stored, and never freed.
    let Some(registered) = (unsafe { REGISTERED.load(Acquire).as_ref() }) else {
        tell_report(report, |told| {
            // SAFETY: the text is a C string. What cannot be written is lost.
            unsafe { libc::write(2, told.text.cast(), libc::strlen(told.text)) };
        });
        return Verdict::Abort;
    };
    let context = registered.context;
    // SAFETY: who registered it promised that it can be called with its context.
    match tell_report(report, |told| unsafe {
        (registered.handler)(told, context)
    }) {
        0 => Verdict::Abort,
        _ => Verdict::Continue,
    }
}

/// Has `handler` decide about what debugging finds from now on, for the whole process; null: a report goes to standard error
/// and the process ends. 0, or −1 with ENOMEM.
///
/// # Safety
///
/// `handler` can be called with `context` from any thread, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_slab_on_report(
    handler: Option<Handler>,
    context: *mut c_void,
) -> c_int {
    init::ready();
    let registered = match handler {
        None => null_mut(),
        Some(handler) => {
            let registered = boxed(Registered { handler, context });
            if registered.is_null() {
                set_errno(libc::ENOMEM);
                return -1;
            }
            registered
        }
    };
    REGISTERED.store(registered, Release);
    debug::on_report(decide);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_between_characters_and_ends_with_a_nul() {
        let mut room = [0xff; 6];
        let mut text = Text::new(&mut room);
        assert!(text.write_str("pin").is_ok());
        assert!(text.write_str("fö").is_err());
        assert_eq!(&room, b"pinf\0\xff");
        assert_eq!(&c_name("sheaf")[..6], b"sheaf\0");
        assert_eq!(c_name(&"x".repeat(32))[31..], *b"x\0");
    }
}
