//! Shows this process to other processes: makes its statistics segment and its mailbox, and serves
//! the requests that arrive in the mailbox.
//!
//! The module [`segment`](crate::segment) has the layout of both. A process that counts every call
//! has its segment in a file (`file`). Any other process has its segment in memory (`live`).

mod file;
mod live;
mod memory;

pub(crate) use file::{start_file, start_file_in_child};
pub use live::{VARIABLE, parse};
pub(crate) use live::{before_fork, in_child, process, shared_memory, start};

use crate::segment::{self, Answer, Parts, Segment};
use crate::{arena, shepherd, slab};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// What serves the requests of other processes.
pub struct Server {
    /// Shows the present values of the settings in the segment.
    pub publish: fn(),
    /// Returns whether `serve` may make system calls for this request that malloc does not make.
    pub makes_new_calls: fn(what: u32, argument: u64) -> bool,
    /// Does what the request asks for.
    pub serve: fn(what: u32, argument: u64, reach: shepherd::Reach) -> Answer,
}

/// The server. Null until [`serve_by`] is called. Requests wait until then.
static SERVER: AtomicPtr<Server> = AtomicPtr::new(null_mut());

/// Has `server` serve the requests of other processes from now on, and shows the settings.
pub fn serve_by(server: &'static Server) {
    // Release pairs with the acquire in `server`.
    SERVER.store(core::ptr::from_ref(server).cast_mut(), Release);
    (server.publish)();
}

fn server() -> Option<&'static Server> {
    // Acquire pairs with the release in `serve_by`: this thread sees the server's functions.
    // SAFETY: the address is null, or that of a static.
    unsafe { SERVER.load(Acquire).as_ref() }
}

/// Makes the library count in the segment at `head`: a zeroed mapping of all parts of a segment,
/// which stays mapped.
fn begin(head: *mut u8) {
    // SAFETY: the mapping has a segment's parts, and stays mapped.
    unsafe { segment::install(head.cast()) };
    slab::show_all();
    arena::publish();
}

/// Writes the segment's head for the process `pid`. The rest of the segment has its content.
// Not inlined, because the analysis of the stack has a rule for this function.
#[inline(never)]
fn announce(segment: &Segment, pid: u32) {
    segment.fill_in(Parts::here());
    publish_settings();
    segment.pid.store(pid, Relaxed);
    // Release pairs with the acquire of a process that reads the segment: it sees all stores above.
    segment.magic.store(segment::MAGIC, Release);
}

/// Shows the present settings in the segment, if there is a server.
fn publish_settings() {
    if let Some(server) = server() {
        (server.publish)();
    }
}
