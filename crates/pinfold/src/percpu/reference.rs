//! A reference count with a word for each CPU.

use super::list::register_fork;
use super::ref_count::{FRESH, Killed, RefCount};
use super::ring::READERS;
use crate::counter_units::LazyBlock;
use crate::fork;
use core::fmt;
use core::sync::atomic::AtomicU64;
use pinfold_rseq::FenceError;

/// A reference count that many CPUs change without sharing a cache line. The kernel's `percpu_ref`.
///
/// A new count has one reference, the *initial* one. While the count is *live*, a
/// [`get`](Self::get) or a [`put`](Self::put) is one critical section on this CPU's word.
/// [`kill`](Self::kill) ends this: it takes the initial reference away, and from then on the count
/// is one atomic. When no reference is left, the *release function* is called, exactly once.
///
/// Use it for an object that many threads use for a long time, and that one thread takes out of
/// use: a configuration, a device, a listening socket. For an object in memory of its own, see
/// [`PerCpuArc`](crate::arc::PerCpuArc).
///
/// The count takes 24 bytes, and 8 bytes on each CPU that uses it. The first get or put allocates
/// them. If there is no memory for them, or if the kernel cannot fence when the count is first
/// used, the count is one atomic all the time.
///
/// Every function except [`kill`](Self::kill), [`reinit`](Self::reinit) and
/// [`resurrect`](Self::resurrect) may be called in a signal handler, if the release function may.
/// The child of a fork goes on with the references of the parent's threads, as with an `Arc`.
///
/// ```
/// use pinfold::percpu::PerCpuRef;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// static CLOSED: AtomicBool = AtomicBool::new(false);
/// static REQUESTS: PerCpuRef = PerCpuRef::new(|_| CLOSED.store(true, Ordering::Release));
///
/// // A thread begins a request unless the service is shutting down, and ends it.
/// assert!(REQUESTS.tryget_live());
///
/// // Another thread shuts the service down.
/// REQUESTS.kill()?;
/// assert!(!REQUESTS.tryget_live());
/// assert!(!CLOSED.load(Ordering::Acquire));
///
/// // The last request ends.
/// REQUESTS.put();
/// assert!(CLOSED.load(Ordering::Acquire));
/// # Ok::<(), pinfold_rseq::FenceError>(())
/// ```
#[doc(alias = "percpu_ref")]
pub struct PerCpuRef {
    count: RefCount,
    release: fn(&PerCpuRef),
}

impl Default for RefCount {
    fn default() -> Self {
        Self::new()
    }
}

impl RefCount {
    /// Returns a live count with its initial reference. Allocates nothing.
    pub const fn new() -> Self {
        RefCount {
            gate: LazyBlock::new(),
            shared: AtomicU64::new(FRESH),
        }
    }
}

impl PerCpuRef {
    /// Returns a live count with its initial reference. A static can hold it. Allocates nothing.
    ///
    /// The count calls `release` when no reference is left: in the thread that puts the last one.
    /// That thread sees what all other threads did before they put theirs. `release` may free the
    /// count's memory.
    #[doc(alias = "percpu_ref_init")]
    pub const fn new(release: fn(&PerCpuRef)) -> Self {
        PerCpuRef {
            count: RefCount::new(),
            release,
        }
    }

    /// Adds a reference. The caller has one already; otherwise use [`tryget`](Self::tryget). Costs
    /// one critical section, or an atomic add after [`kill`](Self::kill).
    #[doc(alias = "percpu_ref_get")]
    #[inline]
    pub fn get(&self) {
        self.count.get();
    }

    /// Adds a reference if there is one left, and returns whether it did. Costs what
    /// [`get`](Self::get) costs.
    #[doc(alias = "percpu_ref_tryget")]
    #[inline]
    pub fn tryget(&self) -> bool {
        self.count.try_get()
    }

    /// Adds a reference if the count is live, and returns whether it did. A call that begins after
    /// [`kill`](Self::kill) has returned returns false. Costs what [`get`](Self::get) costs.
    ///
    /// While `kill` is under way this may return true or false, even if the `kill` then fails.
    #[doc(alias = "percpu_ref_tryget_live")]
    #[inline]
    pub fn tryget_live(&self) -> bool {
        self.count.try_get_live()
    }

    /// Takes a reference away, which the caller has. Calls the release function if it was the last
    /// one. Costs what [`get`](Self::get) costs.
    #[doc(alias = "percpu_ref_put")]
    #[inline]
    pub fn put(&self) {
        if self.count.put() {
            (self.release)(self);
        }
    }

    /// Makes the count atomic, and takes the initial reference away. Calls the release function if
    /// it was the last one. Returns false, and does nothing, if the count was killed before.
    ///
    /// When this returns, no get or put on a CPU's word is under way, and none will begin.
    ///
    /// Interrupts each CPU that runs a thread of this process, once (see
    /// [`fence`](pinfold_rseq::fence())), if the count has words on CPUs. Waits while another
    /// thread kills a count, takes the items of all CPUs, or reads a ring. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel or a sandbox no longer allows the fence. Returns it with
    /// `EDEADLK` if a signal handler calls this function and has interrupted a holder of a lock of
    /// the library, and with `EBUSY` if another thread's fork or (without restartable sequences)
    /// another thread's operation does not end within about a second. The count is live then, and
    /// still has its initial reference.
    #[doc(alias = "percpu_ref_kill")]
    pub fn kill(&self) -> Result<bool, FenceError> {
        let killed = kill(&self.count)?;
        if killed == Killed::Last {
            (self.release)(self);
        }
        Ok(killed != Killed::Before)
    }

    /// Gives a killed count a new initial reference, and makes it live again. Returns false, and
    /// does nothing, if the count is live or has no reference left. Waits as [`kill`](Self::kill)
    /// does, and interrupts no CPU. Not for signal handlers.
    ///
    /// ```
    /// use pinfold::percpu::PerCpuRef;
    ///
    /// let device = PerCpuRef::new(|_| ());
    /// device.get();
    /// device.kill()?;
    /// assert!(device.resurrect() && device.tryget_live());
    /// # Ok::<(), pinfold_rseq::FenceError>(())
    /// ```
    #[doc(alias = "percpu_ref_resurrect")]
    pub fn resurrect(&self) -> bool {
        revive(&self.count, false)
    }

    /// Gives a count without references its initial reference, and makes it live again. Returns
    /// false, and does nothing, if the count has a reference. Waits as [`kill`](Self::kill) does,
    /// and interrupts no CPU. Not for signal handlers.
    ///
    /// ```
    /// use pinfold::percpu::PerCpuRef;
    ///
    /// let device = PerCpuRef::new(|_| ());
    /// device.kill()?;
    /// assert!(!device.tryget());
    /// assert!(device.reinit() && device.tryget());
    /// # Ok::<(), pinfold_rseq::FenceError>(())
    /// ```
    #[doc(alias = "percpu_ref_reinit")]
    pub fn reinit(&self) -> bool {
        revive(&self.count, true)
    }

    /// Returns whether the count was killed. One load.
    #[doc(alias = "percpu_ref_is_dying")]
    pub fn is_dying(&self) -> bool {
        self.count.is_dead()
    }

    /// Returns whether no reference is left. One load.
    #[doc(alias = "percpu_ref_is_zero")]
    pub fn is_zero(&self) -> bool {
        self.count.is_zero()
    }
}

/// Kills a count, with `READERS` held: only one thread at a time kills or revives, and a fork
/// waits for that thread.
pub fn kill(count: &RefCount) -> Result<Killed, FenceError> {
    let busy = |errno| FenceError { errno };
    fork::retry(|| register_fork().then_some(())).ok_or(busy(libc::EBUSY))?;
    let _reading = READERS.lock().ok_or(busy(libc::EDEADLK))?;
    count.kill()
}

/// Revives a count, with `READERS` held.
pub fn revive(count: &RefCount, from_zero: bool) -> bool {
    // A count that was killed has registered what a fork waits for.
    READERS
        .lock()
        .is_some_and(|_reading| count.revive(from_zero))
}

impl fmt::Debug for PerCpuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerCpuRef")
            .field("is_dying", &self.is_dying())
            .field("is_zero", &self.is_zero())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Each count frees its words, so that later counts use them again. Other tests of this process
    /// take and free words meanwhile.
    #[test]
    fn a_dropped_count_gives_its_words_back() {
        const COUNTS: usize = 64;
        let mut seen = HashSet::new();
        for turn in 0..COUNTS {
            let count = PerCpuRef::new(|_| ());
            count.get();
            seen.insert(count.count.gate.load());
            // A count is dropped live, or killed.
            if turn % 2 == 0 {
                count.kill().unwrap();
            }
        }
        assert!(seen.len() < COUNTS / 2, "{seen:?}");
    }
}
