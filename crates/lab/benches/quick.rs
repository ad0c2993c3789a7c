//! `cargo bench`: what the common operations cost on this machine, in a few seconds.
//!
//! One pinned thread makes rounds. In each round, every operation is measured once, so that other
//! load on the machine affects all of them alike. `cargo bench -- malloc` measures only the
//! operations whose name contains `malloc`.

use anyhow::Result;
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold_lab::machine::settle_index;
use pinfold_lab::output::{Table, print};
use pinfold_lab::{
    CMalloc, Machine, PinfoldCache, PinfoldMalloc, Pool, Scenario, Subject, cache, cycles, stats,
};
use std::hint::black_box;
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

fn main() -> Result<()> {
    settle_index();
    // Cargo passes `--bench`.
    let words: Vec<_> = std::env::args().skip(1).collect();
    let filter: Vec<_> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let pool = Pool::new(Some(1), CALLS, 1)?;
    let cache = PinfoldCache(cache(SIZE)?);
    let malloc = CMalloc::<PinfoldMalloc>::new(SIZE);
    let mut measurements = vec![
        objects("KmemCache", &pool, &cache, Scenario::Single),
        objects("KmemCache", &pool, &cache, Scenario::Pair),
        objects("malloc and free", &pool, &malloc, Scenario::Single),
        objects("malloc and free", &pool, &malloc, Scenario::Pair),
        calls("EventCounter::inc", &pool, || EVENTS.inc()),
        calls("PerCpuCounter::add", &pool, || COUNTER.add(1)),
        calls("an atomic add", &pool, || {
            ATOMIC.fetch_add(1, Relaxed);
        }),
    ];
    measurements.retain(|(names, _)| {
        let contains = |word: &&String| names.iter().any(|name| name.contains(word.as_str()));
        filter.is_empty() || filter.iter().any(contains)
    });
    let mut samples: Vec<Vec<Vec<f64>>> = (measurements.iter())
        .map(|(names, _)| vec![Vec::new(); names.len()])
        .collect();
    for round in 0..ROUNDS {
        for ((_, measure), samples) in measurements.iter().zip(&mut samples) {
            for (cycles, samples) in measure(round)?.into_iter().zip(samples) {
                samples.push(cycles);
            }
        }
    }
    let machine = Machine::read();
    let all = measurements.iter().zip(&samples);
    let all = all.flat_map(|((names, _), samples)| names.iter().zip(samples));
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
