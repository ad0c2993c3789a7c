//! The documents' figures beside this machine's: a table or more for each, a plot, and a sentence.

use super::rows::{Rows, figure};
use super::seeds::{DOCUMENTS, Faults, PASSES, Slab};
use crate::figures::{Bars, Panels, Plot, Series};
use crate::output::Table;
use anyhow::Result;
use serde_json::Value;

/// A document's figures beside this machine's.
pub struct Comparison {
    /// The tables with their captions.
    pub tables: Vec<(String, Table)>,
    /// What a reader should take from them.
    pub meaning: String,
    /// A plot of both as SVG, where one picture can hold both.
    pub picture: Option<Result<String>>,
}

/// Compares the figures of the benchmark with that name.
pub fn compare(bench: &str, rows: &Rows) -> Comparison {
    match bench {
        "vmstat" => vmstat(rows),
        "slab" => slab(rows),
        "jitter" => jitter(rows),
        "counter" => counter(rows),
        _ => pft(rows),
    }
}

/// The subjects of `pinfold bench vmstat` that stand for the ways of 2007, and Pinfold's own.
const WAYS: [(&str, Option<usize>); 6] = [
    ("unprotected", None),
    ("masked-signals", Some(0)),
    ("rseq-cmpxchg", Some(1)),
    ("rseq-inc-check", Some(2)),
    ("cmpxchg", None),
    ("rseq", None),
];

fn vmstat(rows: &Rows) -> Comparison {
    let of = |subject: &str, op: &str| {
        let keys = [
            ("subject", subject.into()),
            ("op", op.into()),
            ("signals", false.into()),
            ("items", 1.into()),
        ];
        rows.number(&keys, "cycles")
    };
    let mut table = Table::new([
        "here",
        "inc_zone",
        "dec_zone",
        "count_vm_event",
        "2007",
        "inc_zone (2007)",
        "dec_zone (2007)",
        "count_vm_event (2007)",
    ]);
    for (subject, way) in WAYS {
        let [inc, dec, event] = ["inc", "dec", "event"].map(|op| figure(of(subject, op), 1));
        let (name, then) = match way.map(|way| &DOCUMENTS.increments[way]) {
            Some((name, then)) => (name.clone(), then.map(|cycles| cycles.to_string())),
            None => ("-".to_owned(), ["-"; 3].map(str::to_owned)),
        };
        let [then_inc, then_dec, then_event] = then;
        let here = subject.to_owned();
        table.row([here, inc, dec, event, name, then_inc, then_dec, then_event]);
    }
    let shown: Vec<_> = WAYS
        .iter()
        .filter_map(|&(name, way)| Some((name, way?)))
        .collect();
    let bars = |name: &str, height: &dyn Fn(&str, usize) -> Option<f64>| Series {
        name: name.to_owned(),
        points: (shown.iter().enumerate())
            .filter_map(|(at, &(subject, way))| Some((at as f64, height(subject, way)?)))
            .collect(),
    };
    let picture = Bars {
        title: "An increment of a zone item, in 2007 and here",
        y: "cycles per call",
        log_y: true,
        keys: shown
            .iter()
            .map(|&(name, way)| format!("{} | {name}", DOCUMENTS.increments[way].0))
            .collect(),
        series: vec![
            bars("2007", &|_, way| {
                Some(f64::from(DOCUMENTS.increments[way].1[0]))
            }),
            bars("here", &|subject, _| of(subject, "inc")),
        ],
    };
    let meaning = format!(
        "In 2007, disabling interrupts took 48 of 60 cycles. Here an increment takes {} cycles with \
         masked signals, {} as a restartable sequence (rseq), and {} without protection.",
        figure(of("masked-signals", "inc"), 1),
        figure(of("rseq", "inc"), 1),
        figure(of("unprotected", "inc"), 1),
    );
    let caption = "Cycles per call. In 2007, only inc_zone disabled interrupts: dec_zone was \
                   __dec_zone_page_state, and count_vm_event disabled preemption";
    Comparison {
        tables: vec![(caption.to_owned(), table)],
        meaning,
        picture: Some(picture.svg()),
    }
}

/// Returns this machine's cycles of an alloc, a free and a pair with one thread.
fn slab_here(rows: &Rows, subject: &str, size: u32) -> [Option<f64>; 3] {
    let cells = [("single", "alloc"), ("single", "free"), ("pair", "pair")];
    cells.map(|(scenario, op)| {
        let keys = [
            ("subject", subject.into()),
            ("scenario", scenario.into()),
            ("op", op.into()),
            ("size", size.into()),
        ];
        rows.number(&keys, "cycles")
    })
}

fn slab(rows: &Rows) -> Comparison {
    let mut table = Table::new([
        "bytes",
        "2015, before",
        "2015, after",
        "here, KmemCache",
        "here, malloc and free",
    ]);
    let then = |cycles: [u32; 3]| cycles.map(|one| one.to_string()).join(" / ");
    let here = |cycles: [Option<f64>; 3]| cycles.map(|one| figure(one, 1)).join(" / ");
    for line in &DOCUMENTS.slab {
        table.row([
            line.size.to_string(),
            then(line.before),
            then(line.after),
            here(slab_here(rows, "pinfold-cache", line.size)),
            here(slab_here(rows, "pinfold-malloc", line.size)),
        ]);
    }
    let line = |name: String, cycles: &dyn Fn(&Slab) -> Option<f64>| Series {
        name,
        points: (DOCUMENTS.slab.iter())
            .filter_map(|line| Some((f64::from(line.size), cycles(line)?)))
            .collect(),
    };
    let mut series = Vec::new();
    for (at, op) in ["alloc", "free", "pair"].into_iter().enumerate() {
        let after = |line: &Slab| Some(f64::from(line.after[at]));
        series.push(line(format!("2015, {op}"), &after));
        for subject in ["pinfold-cache", "pinfold-malloc"] {
            let here = |line: &Slab| slab_here(rows, subject, line.size)[at];
            series.push(line(format!("here, {subject}, {op}"), &here));
        }
    }
    let picture = Plot {
        title: "slab_test with one thread, in 2015 (after the change) and here",
        x: "bytes",
        y: "cycles per operation",
        log_x: true,
        log_y: true,
        series,
    };
    let pair = |subject| figure(slab_here(rows, subject, 64)[2], 1);
    let meaning = format!(
        "In 2015 the change took a pair of 64 bytes from 68 to 66 cycles. Here such a pair takes {} \
         cycles in a KmemCache and {} by malloc and free. No lock and no transaction id is left in \
         the fast path: a restartable sequence takes {} cycles, and the same path with an id {}.",
        pair("pinfold-cache"),
        pair("pinfold-malloc"),
        pair("rseq"),
        pair("tid"),
    );
    let caption = "Cycles: alloc / free / a pair of both. Before the change of 2015 and after it";
    Comparison {
        tables: vec![(caption.to_owned(), table)],
        meaning,
        picture: Some(picture.svg()),
    }
}

fn jitter(rows: &Rows) -> Comparison {
    let of = |subject: &str, field| rows.number(&[("subject", subject.into())], field);
    let mut table = Table::new([
        "who folds",
        "longest pause (2013)",
        "longest pause here",
        "99.9 % here",
        "context switches",
        "folds",
    ]);
    for (subject, name, then) in [
        ("none", "no one (none)", "about 700 (bare metal)"),
        (
            "local-worker",
            "a worker on the loop's CPU (local-worker)",
            "about 200,000",
        ),
        (
            "pinfold",
            "the shepherd, from another CPU (pinfold)",
            "about 700",
        ),
        ("fifo", "the worker, loop with SCHED_FIFO (fifo)", "-"),
    ] {
        let field = |field| figure(of(subject, field), 0);
        table.row([
            name.to_owned(),
            then.to_owned(),
            field("max_cycles"),
            field("p999_cycles"),
            field("context_switches"),
            field("folds"),
        ]);
    }
    let switches = |subject| of(subject, "context_switches");
    let shown = |subject| figure(switches(subject), 0);
    let busy = switches("none").zip(of("local-worker", "folds"));
    let meaning = format!(
        "The loop lost its CPU {} times without folds, {} times with a worker on its CPU, and {} times \
         with Pinfold's shepherd. {}",
        shown("none"),
        shown("local-worker"),
        shown("pinfold"),
        match busy {
            Some((lost, folds)) if lost > folds =>
                "Most of that is other load: the loop lost its CPU more often without folds than the \
                 worker folded, so this machine was too busy for a comparison.",
            _ =>
                "Each fold by the worker takes the CPU away for a moment. A fold from another CPU \
                 does not.",
        }
    );
    let caption = "Pauses between two passes of the loop, in cycles".to_owned();
    Comparison {
        tables: vec![(caption, table)],
        meaning,
        picture: None,
    }
}

/// The designs that count for processes, the two of 2011 first.
const DESIGNS: [&str; 6] = [
    "spinlock-batch",
    "slowcount",
    "add-start",
    "add-start-percpu",
    "atomic",
    "pinfold-shared",
];

fn counter(rows: &Rows) -> Comparison {
    let of = |subject: &str, mmap: bool, summing: bool, field| {
        let keys = [
            ("subject", subject.into()),
            ("mmap", mmap.into()),
            ("summing", summing.into()),
        ];
        rows.number(&keys, field)
    };
    let mut then = Table::new(["2011", "real s", "user s", "sys s", "real ns per pass"]);
    for (name, [real, user, sys]) in &DOCUMENTS.loops {
        let ns = format!("{:.0}", real * 1e9 / PASSES);
        let [real, user, sys] = [real, user, sys].map(|seconds| format!("{seconds:.1}"));
        then.row([name.to_owned(), real, user, sys, ns]);
    }
    let mut here = Table::new([
        "here",
        "real ns",
        "user ns",
        "sys ns",
        "real ns without mmap",
        "while one sums",
        "largest error of a sum",
    ]);
    for design in DESIGNS {
        let pass = |field| figure(of(design, true, false, field), 1);
        here.row([
            design.to_owned(),
            pass("ns_per_op"),
            pass("user_ns_per_op"),
            pass("sys_ns_per_op"),
            figure(of(design, false, false, "ns_per_op"), 1),
            figure(of(design, false, true, "ns_per_op"), 1),
            figure(of(design, false, true, "sum_error_max"), 0),
        ]);
    }
    let spinlock = |mmap| figure(of("spinlock-batch", mmap, false, "ns_per_op"), 1);
    let alone = |design| figure(of(design, false, false, "ns_per_op"), 1);
    let meaning = format!(
        "In 2011 the patch took a pass from 841 to 213 ns, because the processes no longer waited for \
         the counter's lock. Here a pass takes {} ns with the spinlock, and {} ns of them without mmap \
         and munmap, which shows how much of a pass the counter is. Without them, an add and its \
         subtraction take {} ns with one atomic and {} ns with Pinfold's shared counter.",
        spinlock(true),
        spinlock(false),
        alone("atomic"),
        alone("pinfold-shared"),
    );
    Comparison {
        tables: vec![
            ("16 processes, 10,000,000 passes in each".to_owned(), then),
            (
                "16 processes on this machine: a pass with mmap and munmap of 128 MiB, and without. \
                 Errors are in pages"
                    .to_owned(),
                here,
            ),
        ],
        meaning,
        picture: None,
    }
}

/// The subjects of `pinfold bench pft`. Only the kernel's figures are page faults.
const FAULTING: [&str; 4] = ["kernel", "counted", "shared-counted", "pinfold"];

fn faults_here(rows: &Rows, of: &Faults, subject: &str, threads: usize, wall: bool) -> Option<f64> {
    let keys: [(&str, Value); 4] = [
        ("memory", of.memory.as_str().into()),
        ("policy", of.policy.as_str().into()),
        ("subject", subject.into()),
        ("threads", threads.into()),
    ];
    let field = match wall {
        true => "faults_per_wall_second",
        false => "faults_per_cpu_second",
    };
    rows.number(&keys, field)
}

fn pft(rows: &Rows) -> Comparison {
    let most = rows.most("threads");
    let tables = DOCUMENTS.faults.iter().map(|faults| {
        let caption = format!(
            "{}: faults per CPU second / per wall-clock second",
            faults.title
        );
        (caption, faults_table(rows, faults, most))
    });
    let panels = DOCUMENTS.faults.iter().map(|faults| Plot {
        title: &faults.title,
        x: "threads",
        y: "faults per wall-clock second",
        log_x: false,
        log_y: true,
        series: faults_lines(rows, faults, most),
    });
    let ranges = &DOCUMENTS.faults[1];
    let gain = |subject, threads| {
        let of = |subject| faults_here(rows, ranges, subject, threads, false);
        let ratio = of(subject).zip(of("counted"));
        figure(ratio.map(|(after, before)| after / before), 2)
    };
    let meaning = format!(
        "In 2008, private memory with a policy of its own gained nothing at 1 thread and 11 % at 7, \
         once policies were no longer counted. Here an allocation that counts nothing (pinfold) \
         makes {} times the faults per CPU second of one that counts (counted) at 1 thread, and {} \
         times at {most}. Only the columns of 2008 and the kernel's are page faults: the other \
         subjects pop a page off a list in the program, so compare them with each other.",
        gain("pinfold", 1),
        gain("pinfold", most),
    );
    Comparison {
        tables: tables.collect(),
        meaning,
        picture: Some(
            Panels {
                columns: 2,
                plots: panels.collect(),
            }
            .svg(),
        ),
    }
}

fn faults_table(rows: &Rows, faults: &Faults, most: usize) -> Table {
    let mut table = Table::new([
        "N",
        "2008, no patches",
        "2008, mpol rework",
        "here, kernel",
        "here, counted",
        "here, shared-counted",
        "here, pinfold",
    ]);
    for threads in 1..=most.max(faults.lines.len()) {
        let line = faults.lines.get(threads - 1);
        let then = |at: usize| {
            line.map_or("-".to_owned(), |line| {
                format!("{} / {}", line[at], line[at + 1])
            })
        };
        let here = |subject| {
            let both = [false, true].map(|wall| faults_here(rows, faults, subject, threads, wall));
            match both {
                [None, None] => "-".to_owned(),
                both => both.map(|one| figure(one, 0)).join(" / "),
            }
        };
        let [kernel, counted, shared, pinfold] = FAULTING.map(here);
        table.row([
            threads.to_string(),
            then(0),
            then(2),
            kernel,
            counted,
            shared,
            pinfold,
        ]);
    }
    table
}

fn faults_lines(rows: &Rows, faults: &Faults, most: usize) -> Vec<Series> {
    let then = |(name, at): (&str, usize)| Series {
        name: name.to_owned(),
        points: (1..)
            .zip(&faults.lines)
            .map(|(n, line)| (f64::from(n), f64::from(line[at])))
            .collect(),
    };
    let here = |subject: &str| Series {
        name: format!("here, {subject}"),
        points: (1..=most)
            .filter_map(|n| Some((n as f64, faults_here(rows, faults, subject, n, true)?)))
            .collect(),
    };
    let both = [("2008, no patches", 1), ("2008, mpol rework", 3)];
    both.map(then)
        .into_iter()
        .chain(FAULTING.map(here))
        .collect()
}
