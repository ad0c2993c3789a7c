//! The table of handles: what it costs to clone a handle of a shared value and to drop the clone,
//! in one thread, and in two threads that share the value.

use super::{Row, rounded};
use anyhow::{Context, Result};
use pinfold::arc::PerCpuArcOwner;
use pinfold::percpu::PerCpuRef;
use pinfold::slab::SharedCache;
use pinfold_lab::output::{Table, figure};

use pinfold_lab::{Pool, cycles, stats};
use std::hint::black_box;
use std::sync::{Arc, Barrier};

/// Pairs of a clone and a drop in a figure of one round.
const PAIRS: u32 = 100_000;
const OP: &str = "clone_drop";
/// The subject that the others are divided by.
const BESIDE: &str = "arc";

/// A subject: its name, and a loop of `PAIRS` pairs.
type Loop<'l> = (&'static str, Box<dyn Fn() + Sync + 'l>);

/// Measures every subject in one thread and in two.
pub fn measure(pool: &Pool, rounds: u32) -> Result<Vec<Row>> {
    let arc = Arc::new(7u64);
    let owner = PerCpuArcOwner::new(7u64).ok().context("no memory")?;
    let handle = owner.share();
    let count = PerCpuRef::new(|_| ());
    let cache = SharedCache::new("bench")?;
    let shared = cache.alloc(7u64).ok().context("no memory")?;
    let subjects: [Loop<'_>; 4] = [
        (BESIDE, Box::new(|| pairs(|| drop(black_box(arc.clone()))))),
        (
            "pinfold-shared",
            Box::new(|| pairs(|| drop(black_box(shared.clone())))),
        ),
        (
            "pinfold-arc",
            Box::new(|| pairs(|| drop(black_box(handle.clone())))),
        ),
        (
            "pinfold-ref",
            Box::new(|| {
                pairs(|| {
                    count.get();
                    black_box(());
                    count.put();
                });
            }),
        ),
    ];
    let mut rows = Vec::new();
    for threads in 1..=pool.len() {
        let mut figures = [const { Vec::new() }; 4];
        // The first round only touches memory and trains the branch predictor.
        for round in 0..=rounds as usize {
            for subject in stats::turns(subjects.len(), round) {
                let cycles = once(pool, threads, &subjects[subject].1)?;
                if round > 0 {
                    figures[subject].push(cycles);
                }
            }
        }
        let arc = stats::median(&figures[0]);
        for ((subject, _), rounds) in subjects.iter().zip(figures) {
            let median = stats::median(&rounds);
            rows.push(Row {
                subject,
                op: OP,
                cycles: rounded(median),
                ratio: (*subject != BESIDE).then(|| rounded(median / arc)),
                threads: Some(threads),
                rounds,
            });
        }
    }
    Ok(rows)
}

fn pairs(mut pair: impl FnMut()) {
    (0..PAIRS).for_each(|_| pair());
}

/// Returns the cycles of a pair, as the mean of the threads.
fn once(pool: &Pool, threads: usize, subject: &(dyn Fn() + Sync)) -> Result<f64> {
    let start = Barrier::new(threads);
    let cycles = pool.run(threads, |_| {
        start.wait();
        cycles::of(subject) as f64 / f64::from(PAIRS)
    })?;
    Ok(cycles.iter().sum::<f64>() / threads as f64)
}

/// Returns the table of [`measure`]'s rows: a line for each number of threads.
pub fn text(rows: &[Row]) -> String {
    let subjects = stats::distinct(rows.iter().map(|row| row.subject));
    let mut table = Table::of(rows.chunks(subjects.len()))
        .column("threads", |row| row[0].threads.unwrap_or(0).to_string());
    for (at, subject) in subjects.into_iter().enumerate() {
        table = table.column(subject, move |row| {
            stats::marked(row[at].cycles, 2, &row[at].rounds)
        });
        if subject != BESIDE {
            table = table.column("ratio", move |row| figure(row[at].ratio, 3));
        }
    }
    format!(
        "\ncycles for a clone of a handle and its drop:\n{}",
        table.table()
    )
}
