//! The machine of the counters' models: the words of each CPU, the critical sections, and the
//! fence.
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
//! | `install_here` | `pinfold/src/counter_units.rs` `install_here` | `3e7c1e0c5d517fc8` |
//! | `count` | `rseq/src/shard.rs` `Units::count_up` | `b435d3ff3c862d45` |
//! | `count` | `rseq/src/arch/x86_64.rs` `count_up` | `0112feb1abbb31ed` |
//! | `count` | `rseq/src/arch/aarch64.rs` `count_up` | `0f806e2197c75a4c` |
//! | `count` | `rseq/src/shard.rs` `Units::count_down` | `736444904e9c6d67` |
//! | `count` | `rseq/src/arch/x86_64.rs` `count_down` | `2dbdb12ddbed8457` |
//! | `count` | `rseq/src/arch/aarch64.rs` `count_down` | `31cf21d6cc5ce5b3` |
//! | `Units::claim` | `rseq/src/shard.rs` `Units::claim` | `ab53242aa3d3a6ab` |
//! | `Units::claim` | `rseq/src/arch/x86_64.rs` `claim` | `a2c6f2c455a63584` |
//! | `Units::claim` | `rseq/src/arch/aarch64.rs` `claim` | `18ede400216b2b6e` |
//! | `count` | `rseq/src/atomic.rs` `count` | `b9c975addab84e2a` |
//! | `Units::claim` | `rseq/src/atomic.rs` `claim` | `b5d6d6b5ed175485` |
//! | `Claim::release` | `rseq/src/shard.rs` `Claim::release` | `b3cd18beb94792f8` |
//! | `blocks_of` | `pinfold/src/counter_units.rs` `blocks_of` | `5c7cd36146fb47ec` |
//! | `Units::quiesce` | `rseq/src/units.rs` `Units::quiesce` | `4d242a11bc5a7504` |
//! | `Units::quiesce` | `rseq/src/fence.rs` `membarrier` | `0db18c39a35d1294` |

use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;
use pinfold_rseq::shard::{REFUSED, is_claimed};
use std::cell::Cell;

const MOST_CPUS: usize = 2;
/// A CPU without a unit, where threads are that do not add.
pub const NOWHERE: usize = MOST_CPUS;
/// The offset of the block.
pub const BLOCK: usize = 32;
const WORDS: usize = 4;
const FOLDED: usize = 2;
const BATCH: usize = 3;
/// No counter of the models is without a block.
pub const CLOSED: usize = 0;

/// A planted fault, which a model must find.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    /// There is none.
    Nothing,
    /// [`Units::quiesce`] does not wait.
    NoFence,
    /// [`Units::claim`] stores no token.
    NoClaim,
    /// A thread that sums does not order its own adds.
    NoOwnFence,
}

/// The words of one unit, and what the machine knows of its CPU.
#[derive(Default)]
struct Unit {
    words: [AtomicU64; WORDS],
    /// Only its own CPU writes `up` and `down`. These copies spare the section a load. A load right
    /// before a store would hide from loom that the store conflicts with other threads' loads.
    own_words: [std::sync::atomic::AtomicU64; 2],
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

pub fn blocks_of<const N: usize>(unit: usize) -> impl Fn(usize) -> &'static [AtomicU64; N] + Copy {
    move |_offset| UNITS[unit].words[..N].try_into().unwrap()
}

pub fn install_here() -> Option<usize> {
    Some(current()).filter(|&cpu| cpu < cpus())
}

/// A claim of a shard, as `pinfold_rseq::shard::Claim`.
pub struct Claim {
    unit: &'static Unit,
    pub net: u64,
    pub folded: u64,
    pub batch: u64,
}

impl Claim {
    pub fn release(self, folded: u64) {
        self.unit.words[FOLDED].store(folded, Release);
    }
}

/// Begins a critical section.
///
/// An exchange, so that a fence that came before is seen with everything that came before the
/// fence. If another thread's section is under way, this one comes later: the kernel aborts a
/// section before it lets another thread run on the CPU.
fn enter(unit: &Unit) {
    while unit.running.swap(1, AcqRel) != 0 {
        thread::yield_now();
    }
}

/// Loads the net, `folded` and `batch` in a section.
///
/// The machine orders the last two loads before the section's store, which depends on them. The
/// language needs an acquire for that.
fn look(unit: &Unit) -> [u64; 3] {
    let [up, down] = [0, 1].map(|at: usize| unit.own_words[at].load(Relaxed));
    let [batch, folded] = [BATCH, FOLDED].map(|at: usize| unit.words[at].load(Acquire));
    [up.wrapping_sub(down), folded, batch]
}

/// Runs one critical section: adds `n` to `up` or `down`, if the distance allows.
fn count(at: usize, n: i64) -> i64 {
    let Some(unit) = install_here().map(|cpu| &UNITS[cpu]) else {
        return REFUSED;
    };
    enter(unit);
    let [net, folded, batch] = look(unit);
    let distance = net.wrapping_sub(folded) as i64;
    let towards = if at == 0 {
        distance
    } else {
        distance.wrapping_neg()
    };
    let left = (batch as i64).wrapping_sub(towards).wrapping_sub(n);
    let fits = left.wrapping_add(batch as i64) as u64 >> 43 == 0;
    if fits {
        let after = unit.own_words[at].load(Relaxed).wrapping_add_signed(n);
        unit.own_words[at].store(after, Relaxed);
        unit.words[at].store(after, Release);
    }
    unit.running.swap(0, AcqRel);
    if fits { left } else { REFUSED }
}

pub struct Units;

pub static COUNTER_UNITS: Units = Units;

pub fn units() -> &'static Units {
    &COUNTER_UNITS
}

impl Units {
    /// Adds `n` to `up`.
    ///
    /// # Safety
    ///
    /// None is needed, here and below. The functions are unsafe because those are that they stand
    /// for.
    pub unsafe fn count_up(&self, _offset: usize, n: i64) -> i64 {
        count(0, n)
    }

    /// Adds `n` to `down`.
    ///
    /// # Safety
    ///
    /// See `count_up`.
    pub unsafe fn count_down(&self, _offset: usize, n: i64) -> i64 {
        count(1, n)
    }

    /// Claims the shard of the CPU.
    ///
    /// # Safety
    ///
    /// See `count_up`.
    pub unsafe fn claim(&self, _offset: usize, token: u64) -> Option<Claim> {
        let unit = install_here().map(|cpu| &UNITS[cpu])?;
        enter(unit);
        let [net, folded, batch] = look(unit);
        let claimed = is_claimed(net, folded) || batch as i64 <= 0;
        if !claimed && fault() != Fault::NoClaim {
            unit.words[FOLDED].store(net.wrapping_add(token), Release);
        }
        unit.running.swap(0, AcqRel);
        (!claimed).then_some(Claim {
            unit,
            net,
            folded,
            batch,
        })
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
