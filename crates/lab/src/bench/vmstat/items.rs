//! Increments of several items, in three tables.
//!
//! - In turn: what it costs that an item takes 32 bytes of each CPU in Pinfold, and one byte in the
//!   kernel.
//! - Displaced: whether the width of an item matters when the program's other data has used the
//!   caches in between. A round reads a buffer that is larger than the caches of a core. Then it
//!   increments some items, each once, and only these increments are timed. The packed forms are
//!   plain code that differs only in the bytes from one item to the next. So their rows show what
//!   the width alone costs. The row of a `VmStat` shows what an increment costs in Pinfold, with
//!   all the other lines that it reads.
//! - Read elsewhere: another CPU has read the items' lines, so that both CPUs share them. The first
//!   table of the document explains the cost of a compare-exchange by such lines: the CPU acquires
//!   the line for reading, and then for writing.

use super::Row;
use super::subject::{MOST, Nth, Op, Subject, for_each_cpu, threshold};
use super::zone::{Zone as Totals, step};
use crate::{Padded, cpus, cycles};
use anyhow::{Result, bail, ensure};
use pinfold::vmstat::{VmStat, Zone};
use std::hint::black_box;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI8};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// The numbers of items that are incremented.
pub const ITEMS: [usize; 3] = [1, 4, MOST];

/// Bytes that displace the caches: more than the second-level cache of a core has.
const DISPLACING: usize = 8 << 20;
const LINE: usize = 64;

/// The rows of each form, one for each of [`ITEMS`].
pub type Rows = Vec<[Row; ITEMS.len()]>;

/// A form of the items. Only a whole loop is one dynamic call.
trait Form: Sync {
    /// Returns the cycles of a loop of `calls` increments, of each of `items` items in turn. The
    /// number of items is a power of two.
    fn cycles(&self, items: usize, calls: usize) -> u64;

    /// Returns the number of increments.
    fn total(&self) -> Option<i64>;
}

#[inline(always)]
fn in_turn(items: usize, calls: usize, inc: impl Fn(usize)) -> u64 {
    cycles::of(|| (0..calls).for_each(|call| inc(call & (items - 1))))
}

/// Pinfold's items.
struct Pinfold<'a>(&'a VmStat<Nth>);

impl Form for Pinfold<'_> {
    fn cycles(&self, items: usize, calls: usize) -> u64 {
        in_turn(items, calls, |item| self.0.inc(Zone::normal(0), Nth(item)))
    }

    fn total(&self) -> Option<i64> {
        Some((0..MOST).map(|item| self.0.sum(Nth(item))).sum())
    }
}

/// Changes a difference of one byte without protection.
#[inline(always)]
fn inc(difference: &AtomicI8, threshold: i8, total: &Totals) {
    let (after, fold) = step::<1>(difference.load(Relaxed), threshold);
    difference.store(after, Relaxed);
    if fold != 0 {
        total.add(fold);
    }
}

/// Differences of one byte. All of a CPU's share one cache line.
struct Bytes {
    threshold: i8,
    totals: [Totals; MOST],
    locals: Box<[Padded<[AtomicI8; MOST]>]>,
}

impl Form for Bytes {
    fn cycles(&self, items: usize, calls: usize) -> u64 {
        in_turn(items, calls, |item| {
            let local = &self.locals[pinfold_rseq::current()].0;
            inc(&local[item], self.threshold, &self.totals[item]);
        })
    }

    fn total(&self) -> Option<i64> {
        let bytes = self.locals.iter().flat_map(|local| &local.0);
        let kept: i64 = bytes.map(|byte| i64::from(byte.load(Relaxed))).sum();
        let totals = self.totals.iter().map(Totals::read);
        Some(kept + totals.sum::<Option<i64>>()?)
    }
}

/// Differences of one byte, a number of bytes apart, without a difference for each CPU.
struct Packed {
    width: usize,
    threshold: i8,
    total: Totals,
    lines: Box<[Padded<[AtomicI8; 2 * LINE]>]>,
}

impl Packed {
    fn new(width: usize, threshold: i8) -> Packed {
        Packed {
            width,
            threshold,
            total: Totals::default(),
            lines: (0..(MOST * width).div_ceil(2 * LINE))
                .map(|_| Padded([const { AtomicI8::new(0) }; 2 * LINE]))
                .collect(),
        }
    }

    fn difference(&self, item: usize) -> &AtomicI8 {
        let at = item * self.width;
        &self.lines[at / (2 * LINE)].0[at % (2 * LINE)]
    }
}

impl Form for Packed {
    fn cycles(&self, items: usize, calls: usize) -> u64 {
        in_turn(items, calls, |item| {
            inc(self.difference(item), self.threshold, &self.total);
        })
    }

    fn total(&self) -> Option<i64> {
        let kept = (0..MOST).map(|item| i64::from(self.difference(item).load(Relaxed)));
        Some(self.total.read()? + kept.sum::<i64>())
    }
}

/// Measures `calls` increments of several items in turn.
pub fn measure_in_turn(rounds: u32, calls: u32) -> Result<Rows> {
    static STAT: VmStat<Nth> = VmStat::new();
    let bytes = Bytes {
        threshold: threshold(&STAT),
        totals: Default::default(),
        locals: for_each_cpu(),
    };
    let forms: [(_, &dyn Form); 2] = [("unprotected-byte", &bytes), ("rseq", &Pinfold(&STAT))];
    measure(&forms, rounds, |form, items| {
        (form.cycles(items, calls as usize), calls as usize)
    })
}

/// Measures an increment of each of several items that were displaced from the caches.
pub fn measure_displaced(rounds: u32) -> Result<Rows> {
    static STAT: VmStat<Nth> = VmStat::new();
    let threshold = threshold(&STAT);
    let packed = [1, 8, 16, 32].map(|width| Packed::new(width, threshold));
    let mut forms: Vec<(_, &dyn Form)> = vec![
        ("cold-1-byte", &packed[0]),
        ("cold-8-bytes", &packed[1]),
        ("cold-16-bytes", &packed[2]),
        ("cold-32-bytes", &packed[3]),
    ];
    #[cfg(target_arch = "x86_64")]
    let sectioned = super::sections::Place::find().map(|place| {
        let cmpxchg = Sectioned::<true>::new(place, threshold);
        (cmpxchg, Sectioned::<false>::new(place, threshold))
    });
    #[cfg(target_arch = "x86_64")]
    if let Some((cmpxchg, inc_check)) = &sectioned {
        forms.push(("cold-cmpxchg", cmpxchg));
        forms.push(("cold-inc-check", inc_check));
    }
    let pinfold = Pinfold(&STAT);
    forms.push(("cold-rseq", &pinfold));
    let displacing: Vec<u64> = vec![1; DISPLACING / size_of::<u64>()];
    measure(&forms, rounds, |form, items| {
        let lines = displacing.iter().step_by(LINE / size_of::<u64>());
        black_box(lines.fold(0u64, |sum, word| sum.wrapping_add(*word)));
        (form.cycles(items, items), items)
    })
}

/// An item for each number, by one of the document's two experiments.
#[cfg(target_arch = "x86_64")]
struct Sectioned<const CMPXCHG: bool>(Vec<super::sections::Sectioned<CMPXCHG>>);

#[cfg(target_arch = "x86_64")]
impl<const CMPXCHG: bool> Sectioned<CMPXCHG> {
    fn new(place: super::sections::Place, threshold: i8) -> Self {
        let item = |_| super::sections::Sectioned::new(place, threshold);
        Sectioned((0..MOST).map(item).collect())
    }
}

#[cfg(target_arch = "x86_64")]
impl<const CMPXCHG: bool> Form for Sectioned<CMPXCHG> {
    fn cycles(&self, items: usize, calls: usize) -> u64 {
        in_turn(items, calls, |item| self.0[item].change(Op::Inc))
    }

    fn total(&self) -> Option<i64> {
        self.0.iter().map(Subject::total).sum()
    }
}

/// Measures an increment of each of several items whose lines the CPU `elsewhere` has read.
pub fn measure_read_elsewhere(rounds: u32, elsewhere: usize) -> Result<Rows> {
    static STAT: VmStat<Nth> = VmStat::new();
    let threshold = threshold(&STAT);
    let plain = Packed::new(2 * LINE, threshold);
    let mut forms: Vec<(_, Box<dyn Form>)> = vec![("read-unprotected", Box::new(plain))];
    #[cfg(target_arch = "x86_64")]
    if let Some(place) = super::sections::Place::find() {
        let cmpxchg = Sectioned::<true>::new(place, threshold);
        let inc_check = Sectioned::<false>::new(place, threshold);
        forms.push(("read-cmpxchg", Box::new(cmpxchg)));
        forms.push(("read-inc-check", Box::new(inc_check)));
    }
    forms.push(("read-rseq", Box::new(Pinfold(&STAT))));
    let forms: Vec<(_, &dyn Form)> = forms.iter().map(|(name, form)| (*name, &**form)).collect();
    let reader = Reader::default();
    thread::scope(|scope| {
        let reading = scope.spawn(|| reader.serve(elsewhere));
        let rows = {
            let _end = Ending(&reader);
            measure(&forms, rounds, |form, items| {
                reader.read(form);
                (form.cycles(items, items), items)
            })
        };
        let read = reading.join();
        read.unwrap_or_else(|_| bail!("the reading thread panicked"))?;
        rows
    })
}

/// A thread on another CPU that reads what it is told to.
#[derive(Default)]
struct Reader<'a> {
    /// What is to be read, or `None` while there is nothing to do.
    form: Mutex<Option<&'a dyn Form>>,
    /// Whether the measurement is over, or the thread could not be pinned.
    ended: AtomicBool,
}

impl<'a> Reader<'a> {
    fn serve(&self, cpu: usize) -> Result<()> {
        // However this ends, `read` must not wait for it.
        let _end = Ending(self);
        cpus::pin(cpu)?;
        while !self.ended.load(Relaxed) {
            let mut form = self.form.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(form) = form.take() {
                black_box(form.total());
            }
            drop(form);
            thread::yield_now();
        }
        Ok(())
    }

    /// Returns after the other CPU has read the lines.
    fn read(&self, form: &'a dyn Form) {
        *self.form.lock().unwrap_or_else(PoisonError::into_inner) = Some(form);
        let is_due = || {
            self.form
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_some()
        };
        while !self.ended.load(Relaxed) && is_due() {
            thread::yield_now();
        }
    }
}

/// Ends the reader, even if the measurement panics.
struct Ending<'r, 'a>(&'r Reader<'a>);

impl Drop for Ending<'_, '_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Relaxed);
    }
}

/// Measures all forms, interleaved. `cycles` returns the cycles of a loop and its increments. Fails
/// if a total is wrong afterwards.
fn measure<'f>(
    forms: &[(&'static str, &'f dyn Form)],
    rounds: u32,
    cycles: impl Fn(&'f dyn Form, usize) -> (u64, usize),
) -> Result<Rows> {
    let mut samples = vec![[const { Vec::new() }; ITEMS.len()]; forms.len()];
    let mut made = vec![0; forms.len()];
    // Round 0 warms up.
    for round in 0..=rounds {
        for (at, items) in ITEMS.into_iter().enumerate() {
            for (nth, (_, form)) in forms.iter().enumerate() {
                let (taken, calls) = cycles(*form, items);
                made[nth] += calls as i64;
                if round > 0 {
                    samples[nth][at].push(taken as f64 / calls as f64);
                }
            }
        }
    }
    for ((name, form), made) in forms.iter().zip(made) {
        let total = form.total();
        ensure!(
            total == Some(made),
            "{name} counted {total:?} after {made} increments of several items; please report this"
        );
    }
    let rows = forms.iter().zip(&samples).map(|((name, _), samples)| {
        let row = |at: usize| Row::new(name, Op::Inc, ITEMS[at], false, &samples[at]);
        std::array::from_fn(row)
    });
    Ok(rows.collect())
}
