//! Two CPUs, and two counts.
//!
//! - Both CPUs: two threads, each pinned to a CPU, change one item at the same time.
//! - Two counts: a thread adds to two counts, in one section or in two.

use super::subject::{self, Measurable, Op, Subject};
use super::{Row, loops};
use crate::{cpus, cycles};
use anyhow::{Context, Result, ensure};
use pinfold::counter::{EventCounter, EventPair};
use std::sync::Barrier;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

/// `atomic`: one word that all CPUs add to.
#[derive(Default)]
struct Atomic {
    item: AtomicI64,
    events: AtomicI64,
}

impl Subject for Atomic {
    #[inline(always)]
    fn change(&self, op: Op) {
        let word = if op == Op::Event {
            &self.events
        } else {
            &self.item
        };
        word.fetch_add(op.by(), Relaxed);
    }

    fn total(&self) -> Option<i64> {
        Some(self.item.load(Relaxed))
    }

    fn events(&self) -> i64 {
        self.events.load(Relaxed)
    }
}

/// Measures increments of an item by two CPUs at the same time, in cycles of one CPU's increment.
pub fn measure_cpus(rounds: u32, calls: u32, cpus: [usize; 2]) -> Result<Vec<Row>> {
    let mut subjects = vec![subject::named("atomic", Atomic::default())];
    subjects.extend(subject::all());
    let mut rows = Vec::new();
    for (name, subject) in &subjects {
        let before = subject
            .total()
            .context("the totals contradict each other")?;
        let samples = on_both(cpus, rounds, subject.as_ref(), calls)?;
        let made = 2 * (i64::from(rounds) + 1) * i64::from(calls);
        let total = subject.total().map(|total| total - before);
        ensure!(
            total == Some(made),
            "{name} counted {total:?} after {made} increments by two CPUs; please report this"
        );
        rows.push(Row {
            cpus: 2,
            ..Row::new(name, Op::Inc, 1, false, &samples)
        });
    }
    Ok(rows)
}

/// Returns the mean cycles of both CPUs for each round but the first, which warms up.
fn on_both(
    cpus: [usize; 2],
    rounds: u32,
    subject: &dyn Measurable,
    calls: u32,
) -> Result<Vec<f64>> {
    let barrier = Barrier::new(cpus.len());
    let work = |cpu| -> Result<Vec<f64>> {
        // An error is returned after the rounds, because the other thread waits in each.
        let pinned = cpus::pin(cpu);
        let round = |_| {
            barrier.wait();
            loops(subject, Op::Inc, calls, Duration::ZERO).cycles_per_call()
        };
        let samples = (0..=rounds).map(round).collect();
        pinned.map(|()| samples)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| work(cpus[1]));
        let here = scope.spawn(|| work(cpus[0]));
        let ended = [here, other].map(|thread| thread.join().ok());
        let [Some(here), Some(other)] = ended else {
            anyhow::bail!("a measuring thread panicked");
        };
        let both = here?.into_iter().zip(other?).skip(1);
        Ok(both
            .map(|(here, other)| f64::midpoint(here, other))
            .collect())
    })
}

/// Measures adds to two counts: by two sections, by one section, and by one locked add to each.
pub fn measure_pairs(rounds: u32, calls: u32) -> Result<Vec<Row>> {
    static TWO: [EventCounter; 2] = [const { EventCounter::new() }; 2];
    static PAIR: EventPair = EventPair::new();
    let locked = [const { AtomicI64::new(0) }; 2];
    let two = || {
        TWO[0].inc();
        TWO[1].add(64);
    };
    let atomic = || {
        locked[0].fetch_add(1, Relaxed);
        locked[1].fetch_add(64, Relaxed);
    };
    let loops = |calls: u32| {
        [
            cycles::of(|| (0..calls).for_each(|_| atomic())),
            cycles::of(|| (0..calls).for_each(|_| two())),
            cycles::of(|| (0..calls).for_each(|_| PAIR.add(1, 64))),
        ]
    };
    let mut samples = [const { Vec::new() }; 3];
    for round in 0..=rounds {
        for (samples, taken) in samples.iter_mut().zip(loops(calls)) {
            // Round 0 warms up.
            if round > 0 {
                samples.push(taken as f64 / f64::from(calls));
            }
        }
    }
    let made = (u64::from(rounds) + 1) * u64::from(calls);
    let counted = [PAIR.sum(), (TWO[0].sum(), TWO[1].sum())];
    ensure!(
        counted == [(made, 64 * made); 2],
        "two counts are {counted:?} after {made} adds of 1 and 64; please report this"
    );
    let names = ["two-atomics", "two-events", "event-pair"]
        .iter()
        .zip(&samples);
    let row =
        |(name, samples): (&&'static str, &Vec<f64>)| Row::new(name, Op::Event, 2, false, samples);
    Ok(names.map(row).collect())
}
