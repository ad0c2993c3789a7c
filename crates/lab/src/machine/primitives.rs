//! What the machine's primitives cost: the operations of which the measured designs are made.
//!
//! Two hosts with the same CPU model can differ by several times in one of them. For example, an
//! uncontended locked add takes 3 cycles on one virtual machine and 12 to 14 on others. Then a
//! ratio between a design with a locked instruction and one without it holds on one of the two
//! only. So each run says what its machine's primitives cost.
//!
//! Each figure is the lower quartile of some rounds. Whatever else runs on the machine makes rounds
//! longer, and rarely a quarter of them shorter. All figures together take less than half a second,
//! unless the machine is emulated.

use crate::stats::quantile;
use crate::{Padded, cpus, cycles};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hint::black_box;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::{Builder, scope, yield_now};
use std::time::{Duration, Instant};

/// The fewest rounds of a figure, and the most.
const ROUNDS: (usize, usize) = (3, 41);
/// The time for a figure's rounds, once it has the fewest.
const TIME: Duration = Duration::from_millis(20);

/// Cycles of each primitive. A figure is absent if the machine cannot show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Primitives {
    /// A locked add to a word that no other CPU uses, one add after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locked_add_cycles: Option<f64>,
    /// The same while another CPU adds to the word too. Absent on one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_locked_add_cycles: Option<f64>,
    /// A system call that does nothing: `getppid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_call_cycles: Option<f64>,
    /// A cache line from another CPU: half the time in which two CPUs answer each other through one
    /// word. Absent on one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_line_cycles: Option<f64>,
    /// The first write to a page of anonymous memory, in memory without huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_fault_cycles: Option<f64>,
    /// A miss of the TLB: a load from one of 8,192 pages in random order, less a load of as many
    /// cache lines on 128 pages. Each load waits for the one before it. Absent where pages are
    /// larger than 4 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tlb_miss_cycles: Option<f64>,
}

impl Primitives {
    /// Measures all of them, on threads of its own. The calling thread stays where it is.
    pub fn measure() -> Primitives {
        scope(|scope| {
            let thread = Builder::new().name("primitives".into());
            let thread = thread.spawn_scoped(scope, measure);
            thread.map_or_else(
                |_| Primitives::default(),
                |thread| thread.join().unwrap_or_default(),
            )
        })
    }

    /// Returns the primitives with their names.
    pub fn named(&self) -> [(&'static str, Option<f64>); 6] {
        [
            ("locked add", self.locked_add_cycles),
            (
                "locked add shared by two CPUs",
                self.shared_locked_add_cycles,
            ),
            ("system call", self.system_call_cycles),
            ("cache line from another CPU", self.cache_line_cycles),
            ("page fault", self.page_fault_cycles),
            ("TLB miss", self.tlb_miss_cycles),
        ]
    }
}

/// A line for people.
impl fmt::Display for Primitives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = self.named().map(|(name, cycles)| match cycles {
            Some(cycles) if cycles < 100.0 => format!("{name} {cycles:.1}"),
            Some(cycles) => format!("{name} {cycles:.0}"),
            None => format!("{name} -"),
        });
        write!(f, "cycles here: {}", figures.join(", "))
    }
}

fn measure() -> Primitives {
    let cpus = cpus::allowed().unwrap_or_default();
    // The two CPUs with the most different numbers: neighbours may be threads of one core.
    let (first, last) = (cpus.first().copied(), cpus.last().copied());
    let is_pinned = first.is_some_and(|cpu| cpus::pin(cpu).is_ok());
    let other = last.filter(|_| is_pinned && cpus.len() > 1);
    let memory = Memory::map(FAR_PAGES + NEAR_PAGES);
    Primitives {
        locked_add_cycles: locked_add(),
        shared_locked_add_cycles: other.and_then(shared_locked_add),
        system_call_cycles: system_call(),
        cache_line_cycles: other.and_then(cache_line),
        page_fault_cycles: memory.as_ref().and_then(page_fault),
        tlb_miss_cycles: memory.as_ref().and_then(tlb_miss),
    }
}

/// Returns the lower quartile of what rounds return. A round that says nothing returns `None`, and
/// is repeated for some time.
fn quartile(mut round: impl FnMut() -> Option<f64>) -> Option<f64> {
    let (start, mut values) = (Instant::now(), Vec::new());
    // The first round warms up.
    round();
    while values.len() < ROUNDS.1 && (values.len() < ROUNDS.0 || start.elapsed() < TIME) {
        match round() {
            Some(value) => values.push(value),
            None if start.elapsed() < 10 * TIME => (),
            None => break,
        }
    }
    (values.len() >= ROUNDS.0).then(|| significant(quantile(&values, 0.25)))
}

/// Rounds to four significant digits: on some machines, a cycle of the counter is many instructions
/// long.
fn significant(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// Returns the cycles of one of `count` operations.
fn each(count: u64, work: impl Fn()) -> f64 {
    let cycles = cycles::of(|| (0..count).for_each(|_| work()));
    cycles as f64 / count as f64
}

fn locked_add() -> Option<f64> {
    let word = Padded(AtomicU64::new(0));
    // Once, and not for each add: it stores the address, and a locked add waits for that store.
    let word = &black_box(&word).0;
    quartile(|| {
        Some(each(10_000, || {
            word.fetch_add(1, Relaxed);
        }))
    })
}

fn system_call() -> Option<f64> {
    quartile(|| {
        Some(each(100, || {
            // SAFETY: the call takes no arguments and touches no memory.
            unsafe { libc::syscall(libc::SYS_getppid) };
        }))
    })
}

/// Runs `work` while a thread on the CPU `other` runs `beside`. `beside` gets a flag that says
/// whether it should end.
fn with_other<R>(
    other: usize,
    beside: impl Fn(&AtomicBool) + Sync,
    work: impl FnOnce() -> Option<R>,
) -> Option<R> {
    let over = AtomicBool::new(false);
    scope(|scope| {
        let thread = Builder::new().name("primitives".into());
        let run = || {
            if cpus::pin(other).is_ok() {
                beside(&over);
            }
        };
        thread.spawn_scoped(scope, run).ok()?;
        let result = work();
        over.store(true, Relaxed);
        result
    })
}

fn shared_locked_add(other: usize) -> Option<f64> {
    const ADDS: u64 = 1000;
    let word = Padded(AtomicU64::new(0));
    let beside = |over: &AtomicBool| {
        while !over.load(Relaxed) {
            word.0.fetch_add(1, Relaxed);
        }
    };
    with_other(other, beside, || {
        quartile(|| {
            let before = word.0.load(Relaxed);
            let cycles = each(ADDS, || {
                word.0.fetch_add(1, Relaxed);
            });
            // If one of the threads added far more than the other, the other one did not run all
            // the time.
            let by_other = word.0.load(Relaxed) - before - ADDS;
            (ADDS / 8..=ADDS * 8).contains(&by_other).then_some(cycles)
        })
    })
}

fn cache_line(other: usize) -> Option<f64> {
    const TRIPS: u64 = 100;
    // Odd numbers are this thread's, and the other one answers each by the next even number. Each
    // releasing store pairs with the acquiring load that waits for it.
    let word = Padded(AtomicU64::new(0));
    let beside = |over: &AtomicBool| {
        loop {
            let asked = spin(&word.0, |now| now % 2 == 1 || over.load(Relaxed));
            if over.load(Relaxed) {
                return;
            }
            word.0.store(asked + 1, Release);
        }
    };
    // A thread that could not be pinned does not answer.
    let answers = || {
        word.0.store(1, Release);
        let start = Instant::now();
        let waits = |now| now == 2 || start.elapsed() > Duration::from_secs(1);
        spin(&word.0, waits) == 2
    };
    with_other(other, beside, || {
        answers().then_some(())?;
        quartile(|| {
            let cycles = each(TRIPS, || {
                let asked = word.0.load(Relaxed) + 1;
                word.0.store(asked, Release);
                spin(&word.0, |now| now == asked + 1);
            });
            Some(cycles / 2.0)
        })
    })
}

/// Loads the word until `done` accepts it, and returns it. Does not pause between two loads: on
/// some CPUs a pause takes as long as what is measured.
fn spin(word: &AtomicU64, done: impl Fn(u64) -> bool) -> u64 {
    let mut turn = 0;
    loop {
        let now = word.load(Acquire);
        if done(now) {
            return now;
        }
        turn += 1;
        // The other thread may wait for this CPU.
        if turn % 100_000 == 0 {
            yield_now();
        }
    }
}

const PAGE: usize = 4096;
const LINE: usize = 64;
/// More pages than the TLBs of today's CPUs hold, with a cache line of each.
const FAR_PAGES: usize = 8192;
/// The pages that as many cache lines take without gaps.
const NEAR_PAGES: usize = FAR_PAGES * LINE / PAGE;

/// A private mapping without huge pages.
struct Memory {
    start: *mut u8,
    pages: usize,
}

impl Memory {
    /// Maps fresh memory. Returns `None` without memory, and where pages do not have [`PAGE`]
    /// bytes.
    fn map(pages: usize) -> Option<Memory> {
        use libc::{
            MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE,
        };
        let (protection, flags) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        // SAFETY: the call reads no memory.
        if unsafe { libc::sysconf(libc::_SC_PAGESIZE) } != PAGE as i64 {
            return None;
        }
        let none = std::ptr::null_mut();
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other memory.
        let start = unsafe { libc::mmap(none, pages * PAGE, protection, flags, -1, 0) };
        if start == MAP_FAILED {
            return None;
        }
        // A kernel without huge pages refuses, and gives none.
        // SAFETY: the range is the new mapping, and the advice changes no content.
        unsafe { libc::madvise(start, pages * PAGE, MADV_NOHUGEPAGE) };
        let start = start.cast();
        Some(Memory { start, pages })
    }

    /// Returns the word at a distance from the start. Panics if it is not in the mapping.
    fn word(&self, at: usize) -> *mut usize {
        assert!(at < self.pages * PAGE && at.is_multiple_of(8));
        self.start.wrapping_add(at).cast()
    }

    /// Writes the address of each word into the word before it, in a circle.
    fn link(&self, words: impl Iterator<Item = usize> + Clone) -> *mut usize {
        let next = words.clone().cycle().skip(1);
        let mut first = std::ptr::null_mut();
        for (at, next) in words.zip(next) {
            first = self.word(at);
            // SAFETY: the word is in the mapping, aligned, and only this thread uses the mapping.
            unsafe { first.write(self.word(next) as usize) };
        }
        first
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping, and this value alone knew its address.
        unsafe { libc::munmap(self.start.cast(), self.pages * PAGE) };
    }
}

/// Touches all pages of fresh memory.
fn page_fault(memory: &Memory) -> Option<f64> {
    const PAGES: usize = 128;
    let touch = |page: usize| {
        // SAFETY: the word is in the mapping, aligned, and only this thread uses the mapping.
        unsafe { memory.word(page * PAGE).write_volatile(1) };
    };
    let rounds = (0..memory.pages).step_by(PAGES).map(|from| {
        let pages = from..memory.pages.min(from + PAGES);
        let count = pages.len();
        cycles::of(|| pages.for_each(touch)) as f64 / count as f64
    });
    let rounds: Vec<f64> = rounds.collect();
    Some(significant(quantile(&rounds, 0.25)))
}

fn tlb_miss(memory: &Memory) -> Option<f64> {
    let order = shuffled(FAR_PAGES);
    // The lines of successive pages differ in their places on the page, so that they do not contend
    // for the same sets of the caches.
    let far = |page: usize| page * PAGE + page * LINE % PAGE;
    let near = |line: usize| FAR_PAGES * PAGE + line * LINE;
    let far = memory.link(order.iter().map(|&page| far(page)));
    let near = memory.link(order.iter().map(|&line| near(line)));
    let chase = |mut at: *mut usize| {
        let cycles = cycles::of(|| {
            for _ in 0..FAR_PAGES {
                // SAFETY: `link` wrote into each word the address of another one of the mapping.
                at = unsafe { at.read_volatile() } as *mut usize;
            }
        });
        black_box(at);
        Some(cycles as f64 / FAR_PAGES as f64)
    };
    let [far, near] = [far, near].map(|start| quartile(|| chase(start)));
    Some(significant((far? - near?).max(0.0)))
}

/// Returns the numbers below `count` in an order without a pattern, which is the same in each run.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut random = 1_u64;
    for at in (1..count).rev() {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
        order.swap(at, (random >> 33) as usize % (at + 1));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_has_every_number_once() {
        let mut order = shuffled(1000);
        assert!(order.iter().zip(0..).any(|(&one, at)| one != at));
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }

    #[test]
    fn a_round_that_says_nothing_does_not_count() {
        let mut turn = 0;
        let found = quartile(|| {
            turn += 1;
            (turn % 2 == 0).then_some(7.0)
        });
        assert_eq!(found, Some(7.0));
        assert_eq!(quartile(|| None), None);
    }

    /// A user who compares two runs relies on figures that are there and positive.
    #[test]
    fn every_primitive_of_this_machine_is_measured() {
        let primitives = Primitives::measure();
        let has_two = cpus::allowed().unwrap().len() > 1;
        for (name, cycles) in primitives.named() {
            let needs_two = name.contains("CPU");
            // A CPU that others use may leave no round in which both add, so absence is no fault.
            match cycles {
                Some(cycles) => assert!(cycles >= 0.0 && (has_two || !needs_two), "{name}"),
                None => assert!(
                    needs_two || name == "TLB miss" || name == "page fault",
                    "{name}"
                ),
            }
        }
    }

    #[test]
    fn a_figure_that_is_absent_is_shown_as_absent() {
        let text = Primitives {
            locked_add_cycles: Some(3.08),
            page_fault_cycles: Some(1799.6),
            ..Primitives::default()
        };
        let text = text.to_string();
        assert!(text.contains("locked add 3.1, "), "{text}");
        assert!(text.contains("locked add shared by two CPUs -, "), "{text}");
        assert!(text.contains("page fault 1800, "), "{text}");
    }
}
