//! A reference count that is kept per CPU while the object is alive.
//!
//! An atomic count is a cache line that every CPU writes. A count per CPU is cheap to change, but
//! no thread notices when the sum of all CPUs becomes 0. So a count is kept per CPU only while it
//! is *live*: while one thread holds the *initial* reference, which keeps the sum above 0. That
//! thread *kills* the count: the count becomes atomic, and the initial reference goes. From then
//! on, each put sees whether it was the last one. This is the kernel's `percpu_ref`.
//!
//! # The words
//!
//! | word | where | content |
//! |---|---|---|
//! | *gate* | the handle | the offset of the CPUs' words; with [`DEAD`] while killed; with
//! [`NO_BLOCK`] before the words are allocated |
//! | *shared* | the handle | references that are not in the CPUs' words; with [`BIAS`] while live |
//! | a CPU's word | its unit | gets less puts that ran on the CPU, modulo 2^64 |
//!
//! The number of references is `shared` plus all CPUs' words, less [`BIAS`], while live. While
//! killed, the CPUs' words do not count: they are at rest, and `kill` has added their sum to
//! `shared`. `revive` subtracts the same sum again. So no thread ever writes another CPU's word.
//!
//! # Writers
//!
//! * A CPU's word: the CPU itself, in a critical section that first compares the gate with the
//!   word's offset. So the section adds only while the gate is open: while it has no flag.
//! * `shared`: any thread, by atomic instructions. Gets and puts go there if the gate is closed, or
//!   if their CPU cannot have a word. While the count is live, the bias keeps `shared` from 0.
//! * The gate: a thread that publishes the block, by the steps of [`LazyBlock`]; and a thread that
//!   kills or revives. The callers of `kill` and `revive` hold a lock.
//!
//! # Kill
//!
//! 1. Set [`DEAD`] in the gate. A section that begins later fails, and its get or put goes to
//!    `shared`.
//! 2. Wait until the sections that began earlier have committed or were aborted
//!    ([`Units::quiesce`](pinfold_rseq::Units::quiesce)). The CPUs' words are at rest now.
//! 3. Add their sum to `shared`, and subtract the bias and the initial reference, in one atomic
//!    add. Until this step, `shared` cannot reach 0. After it, `shared` is the number of
//!    references.
//!
//! Step 3 reads all that was put before it: each section's add is a release, and the sum acquires.
//! The put that finds a `shared` of 1 acquires too. So the thread that drops the last reference
//! sees what all other threads did with theirs.
//!
//! If the kernel refuses the fence of step 2, `kill` clears [`DEAD`] again. Gets and puts that went
//! to `shared` meanwhile count there as well as on a CPU.

use super::primitive::{AtomicU64, MOVES, fence, possible, register};
use crate::counter_units::{self, COUNTER_UNITS, LazyBlock, units};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use pinfold_rseq::FenceError;

/// Bytes of the block: a word on each CPU.
const SIZE: usize = 8;
/// Flag in the gate: the count is atomic, and its initial reference is gone. Offsets are multiples
/// of 8.
const DEAD: usize = 1;
/// Flag in the gate: no block is allocated. The other bits, except [`DEAD`], are 0.
const NO_BLOCK: usize = 2;
/// Keeps `shared` from 0 while the count is live, as long as there are fewer than 2^63 references.
const BIAS: u64 = 1 << 63;
/// The first value of `shared`: only the initial reference.
pub(super) const FRESH: u64 = BIAS + 1;
/// What a put adds to a CPU's word.
const MINUS_ONE: u64 = u64::MAX;

/// What [`RefCount::kill`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Killed {
    /// The count had been killed before.
    Before,
    /// References are left.
    Left,
    /// The initial reference was the last one.
    Last,
}

/// A count of references. A new one is live, and has its initial reference.
#[derive(Debug)]
// The C header initialises statics with this layout.
#[repr(C)]
pub struct RefCount {
    pub(super) gate: LazyBlock<NO_BLOCK>,
    pub(super) shared: AtomicU64,
}

impl RefCount {
    /// Adds a reference. The caller has one.
    #[inline(always)]
    pub fn get(&self) {
        if !self.add_here(1) {
            self.get_slow();
        }
    }

    /// Adds a reference, unless none is left. Returns whether it did.
    #[inline]
    pub fn try_get(&self) -> bool {
        self.add_here(1) || self.add_slow(1) || self.try_get_shared()
    }

    /// Adds a reference, unless the count was killed. Returns whether it did.
    #[inline]
    pub fn try_get_live(&self) -> bool {
        self.add_here(1) || self.add_slow(1) || (!self.is_dead() && self.try_get_shared())
    }

    /// Takes a reference away, which the caller has. Returns whether it was the last one. The
    /// caller then sees what other threads did with theirs.
    ///
    /// If this returns false, the count may be freed by another thread.
    #[inline(always)]
    pub fn put(&self) -> bool {
        !self.add_here(MINUS_ONE) && self.put_slow()
    }

    /// Adds `n` to this CPU's word. Returns false if the gate is closed, or the CPU has no word.
    #[inline(always)]
    fn add_here(&self, n: u64) -> bool {
        let offset = self.gate.load();
        if offset & (DEAD | NO_BLOCK) != 0 {
            return false;
        }
        // SAFETY: without a flag, the gate is the offset of this count's block, which is freed only
        // when the count is dropped.
        unsafe { units().add_gated(offset, n, self.gate.word()) }
    }

    /// Adds `n` to this CPU's word, which it makes if need be. Returns false if the gate is closed,
    /// or the CPU cannot have a word.
    #[cold]
    #[inline(never)]
    fn add_slow(&self, n: u64) -> bool {
        // The thread may move to a CPU without a unit between the steps.
        (0..MOVES).any(|_| self.prepare() && self.add_here(n))
    }

    #[cold]
    #[inline(never)]
    fn get_slow(&self) {
        if !self.add_slow(1) {
            // Relaxed: the caller has a reference, so the count does not reach 0 meanwhile.
            self.shared.fetch_add(1, Relaxed);
        }
    }

    #[cold]
    #[inline(never)]
    fn put_slow(&self) -> bool {
        if self.add_slow(MINUS_ONE) {
            return false;
        }
        // Release pairs with the fence below, in the thread that takes the last reference away.
        if self.shared.fetch_sub(1, Release) != 1 {
            return false;
        }
        // Pairs with the release above, and with that of `kill`, which has seen the CPUs' words.
        fence(Acquire);
        true
    }

    /// Adds a reference to `shared`, unless that is 0.
    fn try_get_shared(&self) -> bool {
        let more = |now| (now != 0).then(|| now + 1);
        // Acquire pairs with the release in `revive`: this thread sees what came before it.
        self.shared.fetch_update(Acquire, Relaxed, more).is_ok()
    }

    /// Makes sure that there is a block, and that this CPU has a unit. Returns false if the gate is
    /// closed, or there is no memory.
    fn prepare(&self) -> bool {
        let gate = self.gate.get_or_alloc(SIZE, register, |offset| offset);
        gate.is_some_and(|gate| gate & DEAD == 0) && counter_units::install_here().is_some()
    }

    /// Makes the count atomic, and takes the initial reference away. When this returns, no section
    /// on a CPU's word is under way, and none will begin.
    ///
    /// The caller keeps other calls of this function and of [`revive`](Self::revive) out.
    ///
    /// # Errors
    ///
    /// Returns the error of the fence. The count is live again then.
    pub fn kill(&self) -> Result<Killed, FenceError> {
        // AcqRel: sections and slow paths that see the flag see what came before the kill.
        let gate = self.gate.word().fetch_or(DEAD, AcqRel);
        if gate & DEAD != 0 {
            return Ok(Killed::Before);
        }
        if gate & NO_BLOCK == 0
            && let Err(refused) = COUNTER_UNITS.quiesce(possible())
        {
            self.gate.word().fetch_and(!DEAD, Release);
            return Err(refused);
        }
        let change = self.in_words(gate).wrapping_sub(FRESH);
        // Release pairs with the acquire in `put_slow`: the thread that takes the last reference
        // away sees what the sum has seen. Acquire: this thread may be that one.
        let left = (self.shared.fetch_add(change, AcqRel)).wrapping_add(change);
        Ok(if left == 0 {
            Killed::Last
        } else {
            Killed::Left
        })
    }

    /// Gives a killed count a new initial reference, and keeps it per CPU again. Returns false, and
    /// does nothing, if the count is live, or if it has no references and `from_zero` is false, or
    /// the other way round.
    ///
    /// The caller keeps other calls of this function and of [`kill`](Self::kill) out.
    pub fn revive(&self, from_zero: bool) -> bool {
        let gate = self.gate.load();
        if gate & DEAD == 0 {
            return false;
        }
        // The gate is closed, and `kill` has waited, so the words are what they were then.
        let change = FRESH.wrapping_sub(self.in_words(gate));
        let revived = |now: u64| ((now == 0) == from_zero).then(|| now.wrapping_add(change));
        // AcqRel pairs with the puts before, and with `try_get_shared` and the puts after.
        let done = self.shared.fetch_update(AcqRel, Relaxed, revived).is_ok();
        if done {
            // Release: a section that finds the gate open adds after the sum above.
            self.gate.word().fetch_and(!DEAD, Release);
        }
        done
    }

    /// Returns the sum of the CPUs' words, which are at rest.
    fn in_words(&self, gate: usize) -> u64 {
        let mut sum = 0u64;
        if gate & NO_BLOCK == 0 {
            counter_units::for_each_used(gate & !DEAD, |[word]| {
                // Acquire pairs with the release of the sections' adds.
                sum = sum.wrapping_add(word.load(Acquire));
            });
        }
        sum
    }

    /// Returns whether the count was killed.
    pub fn is_dead(&self) -> bool {
        self.gate.load() & DEAD != 0
    }

    /// Returns whether no reference is left.
    pub fn is_zero(&self) -> bool {
        // Acquire pairs with the releases of the puts.
        self.shared.load(Acquire) == 0
    }
}

impl Drop for RefCount {
    fn drop(&mut self) {
        if self.gate.load() & NO_BLOCK == 0 {
            self.gate.word().fetch_and(!DEAD, Relaxed);
            // SAFETY: `prepare` allocated the block with this size. `drop` has the only reference,
            // so no thread works on the block any more.
            unsafe { self.gate.free(SIZE) };
        }
    }
}
