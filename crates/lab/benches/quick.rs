//! `cargo bench`: what the common operations cost on this machine, in a few seconds.
//!
//! One pinned thread makes rounds. In each round, every operation is measured once, so that other
//! load on the machine affects all of them alike. `cargo bench -- malloc` measures only the
//! operations whose name contains `malloc`.

use anyhow::Result;
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::heaps::Heap;
use pinfold::internal::heap::scope;
use pinfold_lab::machine::settle_index;
use pinfold_lab::output::{Table, print};
use pinfold_lab::{
    CMalloc, Machine, PinfoldCache, PinfoldMalloc, Pool, Scenario, Subject, cache, cycles, stats,
};
use std::hint::black_box;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Calls of an operation in a round, and objects that are held at the same time.
const CALLS: usize = 10_000;
const ROUNDS: usize = 501;
/// Bytes of an object.
const SIZE: usize = 64;

static EVENTS: EventCounter = EventCounter::new();
static COUNTER: PerCpuCounter = PerCpuCounter::new();
static ATOMIC: AtomicU64 = AtomicU64::new(0);

/// Makes one round. Returns the cycles of each operation.
type Round<'a> = Box<dyn Fn(usize) -> Result<Vec<f64>> + 'a>;

/// The names of the operations of a round, and the round.
type Measurement<'a> = (Vec<String>, Round<'a>);

fn objects<'a>(
    name: &str,
    pool: &'a Pool,
    subject: &'a impl Subject,
    scenario: Scenario,
) -> Measurement<'a> {
    let operations = scenario.operations().iter();
    let names = operations.map(|op| format!("{name}, {}", op.name()));
    let round = move |round| {
        let timings = scenario.measure(pool, subject, round)?;
        Ok(timings.iter().map(|timing| timing.cycles).collect())
    };
    (names.collect(), Box::new(round))
}

fn calls<'a>(name: &str, pool: &'a Pool, call: impl Fn() + Sync + 'a) -> Measurement<'a> {
    let work = move || {
        for _ in 0..CALLS {
            call();
            black_box(());
        }
    };
    let round = move |_| {
        let cycles = pool.run(1, |_| cycles::of(&work))?;
        Ok(vec![cycles[0] as f64 / CALLS as f64])
    };
    (vec![name.to_owned()], Box::new(round))
}

/// Blocks of [`SIZE`] bytes from a heap.
struct FromHeap<'h>(&'h Heap);

impl Subject for FromHeap<'_> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.0.alloc(SIZE).map_or(null_mut(), NonNull::as_ptr)
    }

    #[inline(always)]
    unsafe fn free(&self, block: *mut u8) {
        if let Some(block) = NonNull::new(block) {
            // SAFETY: the caller promises that the block came from this heap and is unused.
            unsafe { self.0.free(block) };
        }
    }
}

/// Blocks from malloc, in threads that never leave a scope of the heap.
struct InScope<'h>(&'h Heap, CMalloc<PinfoldMalloc>);

impl Subject for InScope<'_> {
    fn enter_thread(&self) {
        // SAFETY: the pool's threads end before the heap.
        unsafe { scope::enter(self.0) };
    }

    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.1.alloc()
    }

    #[inline(always)]
    unsafe fn free(&self, block: *mut u8) {
        // SAFETY: the caller passes on what it promises.
        unsafe { self.1.free(block) };
    }
}

/// An operation with the cycles of each round.
type Row = (String, Vec<f64>);

/// Measures the operations whose names contain a word of `filter`, or all if it is empty.
fn measure(mut measurements: Vec<Measurement<'_>>, filter: &[String]) -> Result<Vec<Row>> {
    measurements.retain(|(names, _)| {
        let contains = |word: &String| names.iter().any(|name| name.contains(word.as_str()));
        filter.is_empty() || filter.iter().any(contains)
    });
    let mut rows: Vec<Vec<Row>> = (measurements.iter())
        .map(|(names, _)| {
            names
                .iter()
                .map(|name| (name.clone(), Vec::new()))
                .collect()
        })
        .collect();
    for round in 0..ROUNDS {
        for ((_, measure), rows) in measurements.iter().zip(&mut rows) {
            for (cycles, (_, samples)) in measure(round)?.into_iter().zip(rows) {
                samples.push(cycles);
            }
        }
    }
    Ok(rows.into_iter().flatten().collect())
}

fn main() -> Result<()> {
    settle_index();
    // Cargo passes `--bench`.
    let words = std::env::args().skip(1);
    let filter: Vec<_> = words.filter(|word| !word.starts_with('-')).collect();
    let pool = Pool::new(Some(1), CALLS, 1)?;
    let cache = PinfoldCache(cache(SIZE)?);
    let heap = Heap::new("bench")?;
    let from_heap = FromHeap(&heap);
    let malloc = CMalloc::<PinfoldMalloc>::new(SIZE);
    let mut rows = measure(
        vec![
            objects("KmemCache", &pool, &cache, Scenario::Single),
            objects("KmemCache", &pool, &cache, Scenario::Pair),
            objects("malloc and free", &pool, &malloc, Scenario::Single),
            objects("malloc and free", &pool, &malloc, Scenario::Pair),
            objects("Heap", &pool, &from_heap, Scenario::Single),
            objects("Heap", &pool, &from_heap, Scenario::Pair),
            calls("EventCounter::inc", &pool, || EVENTS.inc()),
            calls("PerCpuCounter::add", &pool, || COUNTER.add(1)),
            calls("an atomic add", &pool, || {
                ATOMIC.fetch_add(1, Relaxed);
            }),
        ],
        &filter,
    )?;
    // The first scope changes what each later malloc costs.
    scope::scope(&heap, || ());
    let outside = "malloc and free after a scope";
    rows.extend(measure(
        vec![
            objects(outside, &pool, &malloc, Scenario::Single),
            objects(outside, &pool, &malloc, Scenario::Pair),
        ],
        &filter,
    )?);
    let (within, inside) = (InScope(&heap, malloc), "malloc and free in a scope");
    rows.extend(measure(
        vec![
            objects(inside, &pool, &within, Scenario::Single),
            objects(inside, &pool, &within, Scenario::Pair),
        ],
        &filter,
    )?);
    let machine = Machine::read();
    let all = rows.iter().map(|(name, samples)| (name, samples));
    let ns = 1e9 / machine.tsc_hz as f64;
    let table = Table::of(all.map(|(name, samples)| (name, stats::median(samples), samples)))
        .column("operation", |(name, ..)| name)
        .column("cycles", |(_, median, all)| stats::marked(median, 1, all))
        .column("ns", |(_, median, _)| format!("{:.2}", median * ns))
        .column("least", |(.., all)| {
            format!("{:.1}", stats::quantile(all, 0.0))
        })
        .table();
    print(&format!(
        "{machine}\n{}\nObjects of {SIZE} bytes; medians of {ROUNDS} rounds of {CALLS} calls, on one thread.\n\n{table}",
        machine.primitives
    ))
}
