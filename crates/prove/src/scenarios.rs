//! The situations in which each section is checked.

use crate::scene::{Actor, Place, SET_BEFORE, Scenario, Seen, item};
use crate::spec::{Operation as Op, Ring, Unit};
use pinfold_rseq::shard::TOKEN;

/// All sections.
pub const NAMES: [&str; 24] = [
    "add",
    "count_up",
    "count_down",
    "claim",
    "add_gated",
    "store_if_equal",
    "pop",
    "pop_counted",
    "push",
    "pop_batch",
    "push_batch",
    "store",
    "and",
    "or",
    "fetch_add",
    "swap",
    "compare_exchange",
    "compare_exchange_pair",
    "add_pair",
    "store_two_if_equal",
    "store_if_both_equal",
    "list_push",
    "list_pop",
    "append",
];

/// The offset of the word that all sections work on, from the start of its unit.
const WORD: u64 = 64;

/// A section's operation, one that runs beside it, and the states in which it is run.
struct Case {
    /// What the units of index 0 and index 1 hold. The operation succeeds on both, so that no
    /// failure passes for one on the other unit.
    units: [Unit; 2],
    operation: Op,
    /// An operation whose result shows whether `operation` has taken effect before it.
    beside: Op,
    /// States of a unit in which the operation runs alone.
    edges: Vec<(Unit, Op)>,
    /// What another CPU may rely on when it sees the commit.
    seen: Option<Seen>,
}

fn words(first: u64, second: u64) -> Unit {
    Unit {
        words: [first, second],
        ..Unit::default()
    }
}

fn stack(items: &[u64], count: u64) -> Unit {
    Unit {
        words: [0, count],
        stack: Some(items.iter().map(|number| item(*number)).collect()),
        ..Unit::default()
    }
}

fn no_stack() -> Unit {
    words(0, 20)
}

fn list(items: &[u64]) -> Unit {
    Unit {
        list: Some(items.iter().map(|number| item(*number)).collect()),
        ..Unit::default()
    }
}

fn shard(words: [u64; 4]) -> Unit {
    Unit {
        shard: Some(words),
        ..Unit::default()
    }
}

fn ring(head: u64, records: &[[u64; 2]]) -> Unit {
    Unit {
        ring: Some(Ring {
            head,
            tail: head - 16 * records.len() as u64,
            records: records.to_vec(),
        }),
        ..Unit::default()
    }
}

/// Another CPU sees what the thread did before, once it sees `when` in the word.
fn release(when: u64) -> Option<Seen> {
    also(when, vec![])
}

fn also(when: u64, mut then: Vec<(Place, u64)>) -> Option<Seen> {
    then.push((SET_BEFORE, 1));
    Some(Seen {
        first: Place::Unit(WORD),
        when,
        then,
    })
}

fn case(name: &str) -> Case {
    match name {
        "pop" | "pop_counted" | "push" | "pop_batch" | "push_batch" => on_stacks(name),
        "list_push" | "list_pop" | "append" => on_lists(name),
        "count_up" | "count_down" | "claim" => on_shards(name),
        "compare_exchange_pair" | "add_pair" | "store_two_if_equal" | "store_if_both_equal" => {
            on_pairs(name)
        }
        _ => on_words(name),
    }
}

fn on_words(name: &str) -> Case {
    let mut units = [words(10, 3), words(1000, 4)];
    let mut edges = vec![];
    let (operation, beside, seen) = match name {
        "add" => (Op::Add(5), Op::Swap(100), None),
        "add_gated" => {
            edges = vec![(words(10, 3), Op::AddGated(5, false))];
            (Op::AddGated(5, true), Op::Swap(100), release(15))
        }
        "store_if_equal" => {
            units[1] = words(10, 4);
            edges = vec![(words(12, 3), Op::StoreIfEqual(10, 11))];
            (Op::StoreIfEqual(10, 11), Op::Swap(10), None)
        }
        "store" => (Op::Store(11), Op::Swap(12), release(11)),
        "and" => (Op::And(6), Op::Swap(255), release(2)),
        "or" => (Op::Or(5), Op::Swap(16), release(15)),
        "fetch_add" => (Op::FetchAdd(5), Op::Swap(100), release(15)),
        "swap" => (Op::Swap(11), Op::FetchAdd(5), release(11)),
        "compare_exchange" => {
            units[1] = words(10, 4);
            edges = vec![(words(12, 3), Op::CompareExchange(10, 11))];
            (Op::CompareExchange(10, 11), Op::Swap(10), release(11))
        }
        _ => unreachable!("{name} is no operation on a word"),
    };
    Case {
        units,
        operation,
        beside,
        edges,
        seen,
    }
}

fn on_pairs(name: &str) -> Case {
    let both = |operation: &Op| {
        [words(10, 9), words(12, 3), words(12, 9)]
            .map(|unit| (unit, operation.clone()))
            .to_vec()
    };
    let (operation, seen) = match name {
        "compare_exchange_pair" => {
            let seen = release(11);
            (Op::CompareExchangePair([10, 3], [11, 4]), seen)
        }
        "add_pair" => (Op::AddPair([5, 7]), release(15)),
        "store_two_if_equal" => {
            let seen = also(11, vec![(Place::Unit(WORD + 8), 9)]);
            (Op::StoreTwoIfEqual(10, 11, 9), seen)
        }
        _ => (Op::StoreIfBothEqual(10, 11, 3), release(11)),
    };
    Case {
        units: [words(10, 3), words(10, 3)],
        beside: Op::Swap(10),
        edges: both(&operation),
        operation,
        seen,
    }
}

fn on_stacks(name: &str) -> Case {
    let (operation, beside) = match name {
        "pop" => (Op::Pop, Op::Pop),
        "pop_counted" => (Op::PopCounted(5), Op::PopCounted(5)),
        "push" => (Op::Push(item(5)), Op::Pop),
        "pop_batch" => (Op::PopBatch(2), Op::Pop),
        _ => (Op::PushBatch(vec![item(5), item(6)]), Op::Pop),
    };
    let units = match name {
        "pop" | "pop_counted" => [stack(&[1, 2], 20), stack(&[3], 20)],
        "push" => [stack(&[1], 20), stack(&[], 20)],
        "pop_batch" => [stack(&[1, 2, 4], 20), stack(&[3], 20)],
        _ => [stack(&[1], 20), stack(&[2, 3], 20)],
    };
    let edges = [
        no_stack(),
        stack(&[], 20),
        stack(&[1], 5),
        stack(&[1], 6),
        stack(&[1], 4),
        stack(&[1, 2], 20),
        stack(&[1, 2, 3], 20),
    ];
    Case {
        units,
        edges: edges.map(|unit| (unit, operation.clone())).to_vec(),
        operation,
        beside,
        seen: None,
    }
}

fn on_shards(name: &str) -> Case {
    const CLAIMED: u64 = TOKEN + 0x1230;
    let (operation, first, when) = match name {
        "count_up" => (Op::CountUp(5), WORD, 105),
        "count_down" => (Op::CountDown(5), WORD + 8, 45),
        _ => (Op::Claim(CLAIMED), WORD + 16, 60 + CLAIMED),
    };
    let frozen = |batch: u64| batch.wrapping_sub(1 << 44);
    // The net is 60. The distances from what was folded lie around those that decide.
    let distances = [-20i64, -16, -15, -14, 0, 14, 15, 16, 20];
    let near = distances.map(|distance| [100, 40, 60u64.wrapping_add_signed(-distance), 10]);
    let others = [
        [0, 0, 0, 0],
        [100, 40, 60, frozen(10)],
        [100, 40, 60 + CLAIMED, 10],
        [100, 40, 60 + 2 * TOKEN - 1, 10],
        [3, u64::MAX - 1, 7, 10],
        [100, 40, 60, 1 << 40],
    ];
    let edges = near.into_iter().chain(others);
    let mut edges: Vec<_> = edges
        .map(|words| (shard(words), operation.clone()))
        .collect();
    if name != "claim" {
        let large = match name {
            "count_up" => Op::CountUp(1 << 40),
            _ => Op::CountDown(1 << 40),
        };
        for folded in [60, 60 + CLAIMED, 60 + 2 * TOKEN - 1] {
            edges.push((shard([100, 40, folded, 10]), large.clone()));
            edges.push((shard([100, 40, folded, 1 << 40]), large.clone()));
        }
    }
    Case {
        units: [[100, 40, 56, 10], [1000, 1100, (-99i64) as u64, 20]].map(shard),
        beside: match name {
            "claim" => Op::Claim(TOKEN + 0x4560),
            _ => Op::CountUp(3),
        },
        operation,
        edges,
        seen: Some(Seen {
            first: Place::Unit(first),
            when,
            then: vec![(SET_BEFORE, 1)],
        }),
    }
}

fn on_lists(name: &str) -> Case {
    match name {
        "list_push" => Case {
            units: [list(&[1]), list(&[2])],
            operation: Op::ListPush(item(5)),
            beside: Op::ListPop,
            edges: vec![(list(&[]), Op::ListPush(item(5)))],
            seen: also(item(5), vec![(Place::At(item(5)), item(1))]),
        },
        "list_pop" => Case {
            units: [list(&[1, 2]), list(&[3])],
            operation: Op::ListPop,
            beside: Op::ListPop,
            edges: vec![(list(&[]), Op::ListPop), (list(&[1]), Op::ListPop)],
            seen: release(item(2)),
        },
        _ => {
            let record = [0xa1, 0xa2];
            // The head is at 80, so the record goes to the second of two slots.
            let slot = WORD + 128 + 16;
            let record_seen = vec![(Place::Unit(slot), 0xa1), (Place::Unit(slot + 8), 0xa2)];
            Case {
                units: [ring(80, &[]), ring(160, &[])],
                operation: Op::Append(record),
                beside: Op::Append([0xb1, 0xb2]),
                edges: vec![
                    (ring(80, &[[1, 2], [3, 4]]), Op::Append(record)),
                    (ring(80, &[[1, 2]]), Op::Append(record)),
                    (ring(96, &[[1, 2]]), Op::Append(record)),
                ],
                seen: also(96, record_seen),
            }
        }
    }
}

fn actor(cpu: u8, operation: &Op) -> Actor {
    Actor {
        cpu,
        operations: vec![operation.clone()],
        handler: None,
    }
}

/// Returns the scenarios of a section, the quickest first. `budget` is the number of disturbances.
pub fn scenarios(name: &str, budget: u8, thorough: bool) -> Vec<Scenario> {
    let case = case(name);
    let plain = Scenario {
        name: "alone",
        units: case.units.iter().cloned().map(Some).collect(),
        actors: vec![actor(0, &case.operation)],
        takes: false,
        reads: None,
        budget: 0,
        cids: false,
        offline: false,
        unregistered: false,
        storm: false,
        stepped: false,
    };
    let mut all = vec![plain.clone()];
    for (unit, operation) in &case.edges {
        all.push(Scenario {
            name: "edge",
            units: vec![Some(unit.clone()), Some(case.units[1].clone())],
            actors: vec![actor(0, operation)],
            budget: 1,
            ..plain.clone()
        });
        all.push(Scenario {
            name: "edge, undisturbed",
            units: vec![Some(unit.clone()), None],
            actors: vec![actor(0, operation)],
            ..plain.clone()
        });
    }
    all.push(Scenario {
        name: "no unit",
        units: vec![None, Some(case.units[1].clone())],
        ..plain.clone()
    });
    all.push(Scenario {
        name: "not registered",
        unregistered: true,
        ..plain.clone()
    });
    let [first, beside] = [&case.operation, &case.beside];
    let disturbed = Scenario {
        budget,
        ..plain.clone()
    };
    all.push(Scenario {
        name: "signal",
        actors: vec![Actor {
            handler: Some(beside.clone()),
            ..actor(0, first)
        }],
        ..disturbed.clone()
    });
    all.push(Scenario {
        name: "one CPU",
        actors: vec![actor(0, first), actor(0, beside)],
        ..disturbed.clone()
    });
    all.push(Scenario {
        name: "stepped by a debugger",
        storm: true,
        stepped: true,
        ..plain.clone()
    });
    all.push(Scenario {
        name: "aborted without end",
        storm: true,
        ..plain.clone()
    });
    if case.seen.is_some() {
        all.push(Scenario {
            name: "seen by another CPU",
            reads: case.seen,
            budget: 1,
            ..plain.clone()
        });
    }
    all.push(Scenario {
        name: "two CPUs, one goes offline",
        actors: vec![actor(0, first), actor(1, beside)],
        offline: true,
        ..disturbed.clone()
    });
    all.push(Scenario {
        name: "concurrency ids",
        actors: vec![actor(0, first), actor(1, beside)],
        cids: true,
        ..disturbed.clone()
    });
    all.push(Scenario {
        name: "stop, fence, take, resume",
        takes: true,
        budget: budget.saturating_sub(1).max(1),
        ..plain.clone()
    });
    if thorough {
        // Two threads must not put the same item on lists.
        let third = if name == "list_push" { beside } else { first };
        all.push(Scenario {
            name: "three threads",
            actors: vec![actor(0, first), actor(0, beside), actor(1, third)],
            ..disturbed.clone()
        });
    }
    all
}
