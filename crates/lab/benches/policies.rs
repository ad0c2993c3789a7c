//! `cargo bench --bench policies`: what a map of policies by range costs, by its number of ranges.
//!
//! One pinned thread makes rounds. In each round, every operation is measured once, on maps of
//! every size, so that other load on the machine affects all of them alike.

use anyhow::Result;
use pinfold::mempolicy::{Mempolicy, SharedPolicy};
use pinfold_lab::machine::settle_index;
use pinfold_lab::output::{Table, print};
use pinfold_lab::{Machine, Pool, cycles, stats};
use std::hint::black_box;

const RANGES: [u64; 4] = [16, 1000, 8000, 64_000];
/// Pages of a range, and from one range's beginning to the next.
const PAGES: u64 = 16;
const STEP: u64 = 32;
/// Calls of an operation in a round. A round is short, so that little else runs meanwhile.
const CALLS: u64 = 100;
const ROUNDS: usize = 301;

/// An operation on the map's range of a number.
type Operation = fn(&SharedPolicy, u64, &Mempolicy);

const OPERATIONS: [(&str, Operation); 3] = [
    ("set", |map, range, policy| {
        let begin = range * STEP;
        let set = map.set(begin..begin + PAGES, Some(policy));
        assert_eq!(set, Ok(()), "the map's memory was made before");
    }),
    ("lookup", |map, range, _| {
        black_box(map.lookup(range * STEP));
    }),
    ("node_for", |map, range, _| {
        black_box(map.node_for(range * STEP));
    }),
];

fn main() -> Result<()> {
    settle_index();
    let pool = Pool::new(Some(1), CALLS as usize, 1)?;
    let policies = [Mempolicy::parse("bind:0")?, Mempolicy::parse("prefer:0")?];
    let mut maps = Vec::new();
    for ranges in RANGES {
        let map = SharedPolicy::new();
        for range in 0..ranges {
            let begin = range * STEP;
            map.set(begin..begin + PAGES, Some(&policies[0]))?;
        }
        maps.push(map);
    }
    let rows: Vec<_> = (OPERATIONS.iter())
        .flat_map(|operation| RANGES.iter().zip(&maps).map(move |map| (operation, map)))
        .collect();
    let mut samples = vec![Vec::new(); rows.len()];
    for round in 0..ROUNDS {
        for (((_, operation), (ranges, map)), samples) in rows.iter().zip(&mut samples) {
            let policy = &policies[round % 2];
            let work = || {
                for call in 0..CALLS {
                    // Jumps through the map, to another range at each call.
                    operation(map, (call + round as u64) * 7919 % **ranges, policy);
                }
            };
            let all = pool.run(1, |_| cycles::of(work))?;
            samples.push(all[0] as f64 / CALLS as f64);
        }
    }
    let machine = Machine::read();
    let ns = 1e9 / machine.tsc_hz as f64;
    let shown = rows.iter().zip(&samples);
    let table = Table::of(shown.map(|(row, samples)| (row, stats::median(samples), samples)))
        .column("operation", |(((name, _), _), ..)| name)
        .column("ranges", |((_, (ranges, _)), ..)| ranges)
        .column("ns", |(_, median, all)| stats::marked(median * ns, 1, all))
        .column("least", |(.., all)| {
            format!("{:.1}", stats::quantile(all, 0.0) * ns)
        })
        .table();
    print(&format!(
        "{machine}\nMedians of {ROUNDS} rounds of {CALLS} calls, on one thread.\n\n{table}"
    ))
}
