//! Ends the process because of a wrong free that a cache without checks has found.

use super::slab_bits::Wrong;
use crate::arena::{self, COLOURED, LARGE};
use crate::cache_units::STOPPING;
use crate::last_words;
use crate::lock::{Rank, count_held};
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry::{for_each, pin_by_entry};
use crate::slab::checks::debug::write_callers;
use core::fmt;

impl Descriptor {
    /// Ends the process because the address in `wrong` cannot be freed to this cache. The caller
    /// holds the lock of one of the cache's nodes. The data under this lock must be consistent,
    /// because another thread may take the lock before the process has ended.
    #[cold]
    pub(crate) fn refuse(&self, wrong: Wrong) -> ! {
        let name = self.name();
        match wrong {
            Wrong::FreeTwice(object) => last_words::write(format_args!(
                "double free of {object:p}, object of cache {name}"
            )),
            Wrong::NotAnObject(object) => last_words::write(format_args!(
                "free of {object:p}: not the start of an object of cache {name}"
            )),
            Wrong::Foreign(object) => self.name_foreign(object),
        }
        if give_back_node_lock() {
            write_callers();
        }
        // SAFETY: `abort` has no preconditions.
        unsafe { libc::abort() }
    }

    fn name_foreign(&self, object: *mut u8) {
        let name = self.name();
        let write = |owner: fmt::Arguments<'_>| {
            last_words::write(format_args!("free of {object:p} to cache {name}: {owner}"));
        };
        match arena::entry(object as usize) {
            0 => write(format_args!("{}", arena::describe_unused(object as usize))),
            LARGE | COLOURED => write(format_args!("it is a large block of malloc's")),
            entry => {
                let other = pin_by_entry(entry);
                let other = other.as_ref().map_or("(destroyed)", |other| other.name());
                write(format_args!("the object belongs to cache {other}"));
            }
        }
    }
}

/// Gives back the node's lock that the calling thread holds, before the process ends. Returns
/// whether the thread then holds no lock.
///
/// The walk of the stack and the search for names may wait for the loader's lock. Its holder may
/// be in malloc, and wait for the lock of this node. So the thread gives that lock back before it
/// walks. If the thread holds another lock too, a signal handler may have interrupted a change of
/// the data under one of the locks. Then the thread gives no lock back.
///
/// [`STOPPING`] is an exception. It guards no data: another thread that takes it stops and resumes
/// the units again, from any state. So a thread that drains the units gives it back as well.
#[cold]
fn give_back_node_lock() -> bool {
    let drains = STOPPING.is_held();
    if count_held(Rank::Fork) != 1 + usize::from(drains) {
        return false;
    }
    let mut is_a_node_s = false;
    for_each(|cache| {
        for node in cache.parts().filter(|node| node.stock.is_held()) {
            is_a_node_s = true;
            // SAFETY: this thread holds the lock. The frames that hold the guard do not go on,
            // because the process ends.
            unsafe { node.stock.unlock() };
        }
    });
    if is_a_node_s && drains {
        // SAFETY: this thread holds the lock, and ends the process, as above.
        unsafe { STOPPING.unlock() };
    }
    is_a_node_s
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::KmemCache;
    use core::alloc::Layout;

    // Another thread may need the lock before the ending thread can walk its stack.
    #[test]
    fn a_thread_that_ends_the_process_gives_one_lock_back_and_not_two() {
        let [one, other] = ["one", "other"].map(|name| {
            let cache = KmemCache::new(name, Layout::new::<u64>());
            cache.unwrap()
        });
        let [one, other] = [&one, &other].map(|cache| &cache.descriptor.nodes()[0]);
        assert!(!give_back_node_lock());
        let guard = one.stock_after_fork().unwrap();
        let inner = other.stock_after_fork().unwrap();
        assert!(!give_back_node_lock());
        drop(inner);
        assert!(give_back_node_lock());
        core::mem::forget(guard);
        drop(one.stock.try_lock().expect("the lock is free"));
        // A fault that is found while the units are drained.
        core::mem::forget(STOPPING.lock().unwrap());
        assert!(!give_back_node_lock());
        core::mem::forget(one.stock_after_fork().unwrap());
        assert!(give_back_node_lock());
        drop(one.stock.try_lock().expect("the lock is free"));
        drop(STOPPING.try_lock().expect("the lock is free"));
    }
}
