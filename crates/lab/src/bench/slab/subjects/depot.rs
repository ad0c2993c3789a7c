//! Where CPUs exchange an empty array or list for a full one, and the reverse, as Pinfold's CPUs
//! exchange sheaves at a node's barn. So the slow paths of the rivals differ from Pinfold's as
//! little as their fast paths do: what moves is one word or two, however many objects there are.
//!
//! # Who may touch an array or a list
//!
//! | it is | only this may touch it |
//! |---|---|
//! | in the depot | the thread that holds the depot's lock |
//! | with a CPU | a thread that follows the rival's protocol for that CPU |
//! | in hand | the thread that took it |
//!
//! A signal handler may interrupt the thread that holds the lock. So no thread waits for the lock
//! forever: after some attempts it does without the depot, and uses the cache.

use crate::bench::Spinlock;
use pinfold::slab::KmemCache;
use std::cell::UnsafeCell;
use std::collections::VecDeque;

/// How often a thread tries to take the lock. A holder needs fewer cycles than these attempts take.
const ATTEMPTS: usize = 100;
/// The most bytes in the full arrays or lists of a depot, and bounds for their number. A barn of a
/// `KmemCache` has the same bounds (`tune.rs`).
const BYTES: usize = 2 << 20;
const LEAST: usize = 4;
const MOST: usize = 128;

/// Full and empty arrays or lists of one cache's objects. Their number never changes.
pub struct Depot<T> {
    lock: Spinlock,
    /// Belongs to the thread that holds the lock.
    stock: UnsafeCell<Stock<T>>,
}

struct Stock<T> {
    /// The newest is at the back.
    full: VecDeque<T>,
    empty: Vec<T>,
}

// SAFETY: `stock` is accessed by the thread that holds the lock, or through `&mut`.
unsafe impl<T: Send> Sync for Depot<T> {}

/// Returns how many full arrays or lists of `capacity` objects a depot holds for `cache`.
pub fn bound(cache: &KmemCache, capacity: usize) -> usize {
    (BYTES / (cache.object_size() * capacity)).clamp(LEAST, MOST)
}

impl<T> Depot<T> {
    /// Makes a depot of empty arrays or lists. It holds at most as many full ones.
    pub fn new(empty: Vec<T>) -> Depot<T> {
        Depot {
            lock: Spinlock::default(),
            stock: UnsafeCell::new(Stock {
                full: VecDeque::with_capacity(empty.len() + 1),
                empty,
            }),
        }
    }

    /// Runs `work` while holding the lock. Returns `None` if the lock stays taken.
    fn with<R>(&self, mut work: impl FnMut(&mut Stock<T>) -> R) -> Option<R> {
        (0..ATTEMPTS).find_map(|_| {
            // SAFETY: this thread holds the lock, so no other thread accesses the stock.
            let done = (self.lock).try_with(|| work(unsafe { &mut *self.stock.get() }));
            if done.is_none() {
                std::hint::spin_loop();
            }
            done
        })
    }

    /// Exchanges `empty` for the newest full one. Returns false and changes nothing if there is
    /// none, or the lock stays taken.
    pub fn exchange_for_full(&self, empty: &mut T) -> bool {
        let exchanged = self.with(|stock| {
            let full = stock.full.pop_back()?;
            stock.empty.push(std::mem::replace(empty, full));
            Some(())
        });
        exchanged.flatten().is_some()
    }

    /// Exchanges `full` for an empty array, and returns true. If the depot has no empty array,
    /// exchanges `full` for the oldest full one, and returns false. The caller then gives the
    /// objects of that one back to the cache: they are the least likely to be in the CPU's caches.
    pub fn exchange_for_empty(&self, full: &mut T) -> bool {
        let has_empty = self.with(|stock| {
            let empty = stock.empty.pop();
            let has_empty = empty.is_some();
            if let Some(other) = empty.or_else(|| stock.full.pop_front()) {
                stock.full.push_back(std::mem::replace(full, other));
            }
            has_empty
        });
        has_empty.unwrap_or(false)
    }

    /// Lets `empty` empty all that are full.
    pub fn drain(&mut self, mut empty: impl FnMut(&mut T)) {
        let stock = self.stock.get_mut();
        for mut full in stock.full.drain(..) {
            empty(&mut full);
            stock.empty.push(full);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers stand for arrays: 0 is an empty one.
    #[test]
    fn the_newest_full_one_comes_back_and_the_oldest_goes() {
        let depot = Depot::new(vec![0, 0]);
        let put = |mut full| (depot.exchange_for_empty(&mut full), full);
        let take = || {
            let mut empty = 0;
            (depot.exchange_for_full(&mut empty), empty)
        };
        assert_eq!(take(), (false, 0));
        assert_eq!([put(1), put(2)], [(true, 0), (true, 0)]);
        // The depot is full, so the caller gets the oldest.
        assert_eq!(put(3), (false, 1));
        assert_eq!([take(), take(), take()], [(true, 3), (true, 2), (false, 0)]);
        // The empty ones of the exchanges are in the depot again.
        assert_eq!([put(4), put(5)], [(true, 0), (true, 0)]);
    }

    /// A handler that interrupted the holder of the lock must not wait for it.
    #[test]
    fn a_depot_whose_lock_stays_taken_is_left_alone() {
        let depot = Depot::new(vec![0]);
        depot.lock.with(|| {
            let (mut empty, mut full) = (0, 1);
            assert!(!depot.exchange_for_full(&mut empty) && empty == 0);
            assert!(!depot.exchange_for_empty(&mut full) && full == 1);
        });
    }
}
