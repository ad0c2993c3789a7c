//! The machine of the counters' models: the words of each CPU, the critical section that adds to
//! them, and the fence.
//!
//! Stands for `counter_units.rs` and for `pinfold_rseq::Units`, in loom's atomics. There is one
//! block of four words. Each CPU has one, and so has the shared unit.
//!
//! A critical section marks its CPU as running it. A CPU runs one section at a time, but threads on
//! other CPUs see the section's loads and its store as separate steps. The fence waits until it has
//! seen each CPU outside of a section.
//!
//! # What is mirrored
//!
//! `model_mirrors.rs` fails when one of these functions changes.
//!
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `word_at` | `pinfold/src/counter_units.rs` `word_at` | `c5748b1856c139da` |
//! | `shared` | `pinfold/src/counter_units.rs` `shared` | `b207ed5b4d4780e9` |
//! | `used` | `pinfold/src/counter_units.rs` `used` | `e8479b010a392c78` |
//! | `for_each_used` | `pinfold/src/counter_units.rs` `for_each_used` | `2606b1127739193f` |
//! | `install_here` | `pinfold/src/counter_units.rs` `install_here` | `39deb9e09da16643` |
//! | `Units::add_within` | `rseq/src/units.rs` `Units::add_within` | `43e6bd71a40d8502` |
//! | `Units::add_within` | `rseq/src/atomic.rs` `add_within` | `5a15803686b58239` |
//! | `Units::add_within` | `rseq/src/arch/x86_64.rs` `add_within` | `84cbdc41d455571c` |
//! | `Units::add_within` | `rseq/src/arch/aarch64.rs` `add_within` | `e35a76c5332adf83` |
//! | `Units::quiesce` | `rseq/src/units.rs` `Units::quiesce` | `4d242a11bc5a7504` |
//! | `Units::quiesce` | `rseq/src/fence.rs` `membarrier` | `0db18c39a35d1294` |

use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;
use std::cell::Cell;

const MOST_CPUS: usize = 2;
/// A CPU without a unit, where threads are that do not add.
pub const NOWHERE: usize = MOST_CPUS;
/// The offset of the block.
pub const BLOCK: usize = 32;
const WORDS: usize = 4;

/// A planted fault, which a model must find.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    /// There is none.
    Nothing,
    /// [`Units::quiesce`] does not wait.
    NoFence,
    /// A thread that sums does not order its own adds.
    NoOwnFence,
}

/// The words of one unit, and what the machine knows of its CPU.
#[derive(Default)]
struct Unit {
    words: [AtomicU64; WORDS],
    /// Only its own CPU writes a word. This copy of the word spares the section a load. A load
    /// right before a store would hide from loom that the store conflicts with other threads'
    /// loads.
    own_words: [std::sync::atomic::AtomicU64; WORDS],
    /// 1 while the CPU is in a critical section.
    running: AtomicUsize,
    /// The lock of the CPU's shard.
    lock: AtomicU64,
}

loom::lazy_static! {
    /// The units of the CPUs, and the shared unit behind them.
    static ref UNITS: [Unit; MOST_CPUS + 1] = Default::default();
}

std::thread_local! {
    /// The planted fault, and the number of CPUs. A plain thread-local: loom runs all threads of a
    /// model on the thread that explores it.
    static SETTING: Cell<(Fault, usize)> = const { Cell::new((Fault::Nothing, 1)) };
}

loom::thread_local! {
    static HERE: Cell<usize> = Cell::new(NOWHERE);
}

/// Explores `model` with at most `bound` preemptions, on a machine of `cpus` CPUs with a fault.
pub fn explore(bound: usize, cpus: usize, fault: Fault, model: impl Fn() + Sync + Send + 'static) {
    SETTING.set((fault, cpus));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.max_branches = 10_000;
    builder.check(model);
}

pub fn fault() -> Fault {
    SETTING.get().0
}

pub fn cpus() -> usize {
    SETTING.get().1
}

/// Moves the calling thread to `cpu`.
pub fn move_to(cpu: usize) {
    HERE.with(|here| here.set(cpu));
}

pub fn current() -> usize {
    HERE.with(Cell::get)
}

/// Returns the CPU on which the thread runs now. No other thread's section is under way there: the
/// kernel aborted it when it let this thread run. A section cannot be aborted here, so this waits
/// for the section's end. An aborted section is one that begins later.
pub fn current_alone() -> usize {
    let here = current();
    if here < cpus() {
        while UNITS[here].running.fetch_add(0, AcqRel) != 0 {
            thread::yield_now();
        }
    }
    here
}

/// Returns the lock of the shard of `unit`.
pub fn lock_of(unit: usize) -> &'static AtomicU64 {
    &UNITS[unit].lock
}

pub fn word_at(unit: usize, offset: usize) -> &'static AtomicU64 {
    &UNITS[unit].words[(offset - BLOCK) / 8]
}

pub fn shared(offset: usize) -> &'static AtomicU64 {
    word_at(MOST_CPUS, offset)
}

pub fn used() -> impl Iterator<Item = usize> {
    0..cpus()
}

pub fn for_each_used<const N: usize>(offset: usize, mut f: impl FnMut(&[AtomicU64; N])) {
    let at = (offset - BLOCK) / 8;
    used().for_each(|unit| f(UNITS[unit].words[at..at + N].try_into().unwrap()));
}

pub fn install_here() -> Option<usize> {
    Some(current()).filter(|&cpu| cpu < cpus())
}

pub struct Units;

pub static COUNTER_UNITS: Units = Units;

pub fn units() -> &'static Units {
    &COUNTER_UNITS
}

impl Units {
    /// Runs one critical section: adds `n` to the word if its limit leaves headroom.
    ///
    /// # Safety
    ///
    /// None is needed. The function is unsafe because the one that it stands for is.
    pub unsafe fn add_within(&self, offset: usize, n: i64) -> bool {
        let Some(unit) = install_here().map(|cpu| &UNITS[cpu]) else {
            return false;
        };
        let at = (offset - BLOCK) / 8;
        // An exchange, so that a fence that came before is seen with everything that came before
        // the fence. If another thread's section is under way, this one comes later: the kernel
        // aborts a section before it lets another thread run on the CPU.
        while unit.running.swap(1, AcqRel) != 0 {
            thread::yield_now();
        }
        let now = unit.own_words[at].load(Relaxed);
        // The machine orders this load before the store, which depends on it. The language needs an
        // acquire for that.
        let fits = unit.words[at + 1].load(Acquire).wrapping_sub(now) as i64 >= n;
        if fits {
            let after = now.wrapping_add_signed(n);
            unit.own_words[at].store(after, Relaxed);
            unit.words[at].store(after, Release);
        }
        unit.running.swap(0, AcqRel);
        fits
    }

    /// Waits until each CPU was seen outside of a section. A section that begins later finds the
    /// lower limit.
    pub fn quiesce(&self, cpus: usize) -> Result<(), ()> {
        if fault() == Fault::NoFence {
            return Ok(());
        }
        for unit in &UNITS[..cpus] {
            while unit.running.fetch_add(0, AcqRel) != 0 {
                thread::yield_now();
            }
        }
        Ok(())
    }
}
