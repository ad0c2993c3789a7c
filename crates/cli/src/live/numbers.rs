//! The numbers that processes have in their own PID namespaces.
//!
//! A request in a mailbox is for one of these numbers. Two processes can share a mailbox and have
//! the same number: a parent, and its child in another namespace. Neither can be asked, because the
//! other one could take the request.

use super::source::{folder, inner_pid, pids};
use std::collections::HashMap;

/// The processes of this machine by the numbers that they have themselves.
#[derive(Default)]
pub struct Numbers(HashMap<u32, Vec<u32>>);

impl Numbers {
    /// Reads the numbers of all processes. Where /proc cannot be read, there are none.
    pub fn read() -> Numbers {
        let mut numbers = Numbers::default();
        for pid in pids().unwrap_or_default() {
            let inner = inner_pid(&folder(pid), pid);
            numbers.0.entry(inner).or_default().push(pid);
        }
        numbers
    }

    /// Returns the processes beside `pid` that have the number `inner` themselves.
    pub fn others(&self, pid: u32, inner: u32) -> impl Iterator<Item = u32> {
        let all = self.0.get(&inner).into_iter().flatten();
        all.copied().filter(move |&other| other != pid)
    }
}
