//! The C API of the reports that the debugging checks make, and of the handler that decides what
//! happens after a report.

use super::support::boxed;
use super::text::{Text, c_name};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt::{self, Write};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};
use pinfold::internal::heap;
use pinfold::slab::debug::{self, Kind, Report, Verdict};
use pinfold_rseq::kernel;

/// Bytes for a report's text. Two backtraces with files and lines take about four thousand bytes.
const MAX_TEXT: usize = 16 << 10;
/// Bytes for a report's text if there is no memory for [`MAX_TEXT`].
const MIN_TEXT: usize = 256;

/// A report as C sees it: `struct pinfold_slab_report`.
#[repr(C)]
#[derive(Debug)]
pub struct CReport {
    /// The whole report, in lines.
    pub text: *const c_char,
    /// The cache's name.
    pub cache: *const c_char,
    /// The object, or the address that was freed.
    pub object: *const c_void,
    /// Size of the object in bytes.
    pub size: usize,
    /// The offset of the first overwritten byte from the object's start; 0 for other faults.
    pub offset: isize,
    /// `PINFOLD_SLAB_OVERWRITTEN` and so on.
    pub kind: c_int,
}

/// The type of a C function that receives a report for which the program asked.
pub type Each = unsafe extern "C" fn(*const CReport, *mut c_void);
/// The type of a C function that gets a report for which the program did not ask. If the function
/// returns 0, the process ends. Otherwise the process goes on.
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
        Kind::UsedAfterFree => (8, 0),
        Kind::WrongSize(_) => (9, 0),
    }
}

/// Makes a C report of a fault, and calls `f` with it.
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
    let block = heap::alloc(MAX_TEXT);
    if block.is_null() {
        let mut little = [0; MIN_TEXT];
        let mut written = Text::new(&mut little);
        let _ = write!(written, "{text}");
        return f(&told(written.as_ptr()));
    }
    // SAFETY: the block was just allocated with this size, and is zeroed before the slice is made.
    let bytes = unsafe {
        block.write_bytes(0, MAX_TEXT);
        core::slice::from_raw_parts_mut(block, MAX_TEXT)
    };
    let mut written = Text::new(bytes);
    let _ = write!(written, "{text}");
    let answer = f(&told(written.as_ptr()));
    // SAFETY: the block was allocated above. Only `f`, which has returned, used the text in it.
    unsafe { heap::free(block) };
    answer
}

/// Makes a C report of `report`, and calls `f` with it.
pub(crate) fn tell_report<R>(report: &Report<'_>, f: impl FnOnce(&CReport) -> R) -> R {
    tell(
        (report.kind, report.cache),
        (report.object, report.size),
        report,
        f,
    )
}

/// A handler with the context that it is called with.
struct Registered {
    handler: Handler,
    context: *mut c_void,
}

/// The handler that gets the reports; null for the default. A handler that was replaced is never
/// freed, because another thread may still be using it.
static REGISTERED: AtomicPtr<Registered> = AtomicPtr::new(null_mut());

/// Decides what happens after a report. Calls the C program's handler. Without a handler, prints
/// the report and ends the process.
fn decide(report: &Report<'_>) -> Verdict {
    // Acquire pairs with the release in `pinfold_slab_on_report`: this thread sees the handler and
    // its context.
    // SAFETY: the pointer is null, or leads to a value that was written before the pointer was
    // stored. The value is never freed.
    let Some(registered) = (unsafe { REGISTERED.load(Acquire).as_ref() }) else {
        tell_report(report, |told| {
            // Text that cannot be written is lost.
            // SAFETY: `tell` ends the text with a NUL.
            let _ = kernel::write(2, unsafe { CStr::from_ptr(told.text) }.to_bytes());
        });
        return Verdict::Abort;
    };
    let context = registered.context;
    // SAFETY: the caller of `pinfold_slab_on_report` promised that the handler takes this context.
    match tell_report(report, |told| unsafe {
        (registered.handler)(told, context)
    }) {
        0 => Verdict::Abort,
        _ => Verdict::Continue,
    }
}

/// Sets the handler that gets the reports of the whole process, and decides whether the process
/// goes on. If `handler` is null, a report goes to standard error and the process ends.
///
/// Returns 0, or −1 with ENOMEM. Each handler takes some bytes that are never freed.
///
/// # Safety
///
/// `handler` is null or can be called with `context` from any thread, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_slab_on_report(
    handler: Option<Handler>,
    context: *mut c_void,
) -> c_int {
    heap::ready();
    let registered = match handler {
        None => null_mut(),
        Some(handler) => {
            let registered = boxed(Registered { handler, context });
            if registered.is_null() {
                return -1;
            }
            registered
        }
    };
    REGISTERED.store(registered, Release);
    debug::on_report(decide);
    0
}
