//! The numbers that processes have in their own PID namespaces.
//!
//! A request in a mailbox is for one of these numbers. Two processes can share a mailbox and have
//! the same number: a parent, and its child in another namespace. Neither can be asked, because the
//! other one could take the request.

use crate::foreign::{Process, has_ended, pids};
use std::collections::HashMap;
use std::path::Path;

/// The processes of this machine by the numbers that they have themselves.
#[derive(Default)]
pub struct Numbers {
    known: HashMap<u32, Vec<u32>>,
    /// The processes whose own numbers cannot be read.
    unknown: Vec<u32>,
}

impl Numbers {
    /// Reads the numbers of all processes. Where /proc cannot be read, there are none.
    pub fn read() -> Numbers {
        let mut numbers = Numbers::default();
        for pid in pids(Path::new("/proc")).unwrap_or_default() {
            match Process::open(pid).and_then(|process| process.inner_pid()) {
                Ok(inner) => numbers.known.entry(inner).or_default().push(pid),
                Err(error) if has_ended(&error) => {}
                Err(_) => numbers.unknown.push(pid),
            }
        }
        numbers
    }

    /// Returns the processes beside `pid` that have the number `inner` themselves, or may have it.
    pub fn others(&self, pid: u32, inner: u32) -> impl Iterator<Item = u32> {
        let known = self.known.get(&inner).into_iter().flatten();
        let all = known.chain(&self.unknown);
        all.copied().filter(move |&other| other != pid)
    }
}
