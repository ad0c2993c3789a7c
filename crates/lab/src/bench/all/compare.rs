//! The documents' figures beside this machine's: a table or more for each, a plot, and a sentence.

use super::rows::Rows;
use super::seeds::{DOCUMENTS, Faults, PASSES, Slab};
use super::verdict::{Kind, beside};
use crate::figures::{Bars, Panels, Plot, Series};
use crate::output::{Table, figure};
use crate::stats::distinct;
use anyhow::Result;
use serde_json::json;

/// A document's figures beside this machine's.
pub struct Comparison {
    /// The tables with their captions.
    pub tables: Vec<(String, Table)>,
    /// What a reader should take from them. All that it says of this machine comes from the
    /// figures measured in this run.
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
const WAYS: [(&str, Option<usize>); 7] = [
    ("unprotected", None),
    ("locked", None),
    ("masked-signals", Some(0)),
    ("rseq-cmpxchg", Some(1)),
    ("rseq-inc-check", Some(2)),
    ("cmpxchg", None),
    ("rseq", None),
];

fn vmstat(rows: &Rows) -> Comparison {
    let of = |subject: &str, op: &str| {
        let keys = json!({"subject": subject, "op": op, "signals": false, "items": 1});
        rows.number(&keys, "cycles")
    };
    let here = |subject, op| figure(of(subject, op), 1);
    let then = |way: Option<usize>, at: usize| match way {
        Some(way) => DOCUMENTS.increments[way].1[at].to_string(),
        None => "-".to_owned(),
    };
    let table = Table::of(WAYS)
        .column("here", |(subject, _)| subject)
        .column("inc_zone", |(subject, _)| here(subject, "inc"))
        .column("dec_zone", |(subject, _)| here(subject, "dec"))
        .column("count_vm_event", |(subject, _)| here(subject, "event"))
        .column("2007", |(_, way)| {
            way.map_or("-", |way| &DOCUMENTS.increments[way].0)
        })
        .column("inc_zone (2007)", |(_, way)| then(way, 0))
        .column("dec_zone (2007)", |(_, way)| then(way, 1))
        .column("count_vm_event (2007)", |(_, way)| then(way, 2))
        .table();
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
    let rivals = WAYS.map(|(way, _)| (way, of(way, "inc")));
    let mut meaning = "In 2007, disabling interrupts took 48 of 60 cycles.".to_owned();
    let verdicts = beside(Kind::Time, of("rseq", "inc"), &rivals[..rivals.len() - 1]);
    if !verdicts.is_empty() {
        let ours = here("rseq", "inc");
        meaning += &format!(
            " Here an increment of Pinfold's item (rseq) takes {ours} cycles: {verdicts}."
        );
    }
    let caption = "Cycles per call. In 2007, only inc_zone disabled interrupts: dec_zone was \
                   __dec_zone_page_state, and count_vm_event disabled preemption";
    Comparison {
        tables: vec![(caption.to_owned(), table)],
        meaning,
        picture: Some(picture.svg()),
    }
}

/// The rivals of Pinfold's fast path in `pinfold bench slab`, the cheapest protection first.
const PROTECTIONS: [&str; 4] = ["unprotected", "locked", "tid", "masked-signals"];

/// Returns this machine's cycles of an alloc, a free and a pair with one thread.
fn slab_here(rows: &Rows, subject: &str, size: u32) -> [Option<f64>; 3] {
    let cells = [("single", "alloc"), ("single", "free"), ("pair", "pair")];
    cells.map(|(scenario, op)| {
        let keys = json!({"subject": subject, "scenario": scenario, "op": op, "size": size});
        rows.number(&keys, "cycles")
    })
}

fn slab(rows: &Rows) -> Comparison {
    let then = |cycles: [u32; 3]| cycles.map(|one| one.to_string()).join(" / ");
    let here = |subject, size| {
        slab_here(rows, subject, size)
            .map(|one| figure(one, 1))
            .join(" / ")
    };
    let table = Table::of(&DOCUMENTS.slab)
        .column("bytes", |line| line.size)
        .column("2015, before", |line| then(line.before))
        .column("2015, after", |line| then(line.after))
        .column("here, KmemCache", |line| here("pinfold-cache", line.size))
        .column("here, malloc and free", |line| {
            here("pinfold-malloc", line.size)
        })
        .table();
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
    let pair = |subject| slab_here(rows, subject, 64)[2];
    let mut meaning = "In 2015 the change took a pair of 64 bytes from 68 to 66 cycles.".to_owned();
    if let [Some(cache), Some(malloc)] = ["pinfold-cache", "pinfold-malloc"].map(pair) {
        meaning += &format!(
            " Here such a pair takes {cache:.1} cycles in a KmemCache, and {malloc:.1} by malloc \
             and free."
        );
    }
    let rivals = PROTECTIONS.map(|rival| (rival, pair(rival)));
    let verdicts = beside(Kind::Time, pair("rseq"), &rivals);
    if !verdicts.is_empty() {
        meaning += &format!(
            " Among the protections of the same fast path, Pinfold's own (rseq) takes {} cycles: \
             {verdicts}.",
            figure(pair("rseq"), 1)
        );
    }
    let caption = "Cycles: alloc / free / a pair of both. Before the change of 2015 and after it";
    Comparison {
        tables: vec![(caption.to_owned(), table)],
        meaning,
        picture: Some(picture.svg()),
    }
}

fn jitter(rows: &Rows) -> Comparison {
    let of = |subject: &str, field| rows.number(&json!({"subject": subject}), field);
    let field = |subject, field| figure(of(subject, field), 0);
    let setups = [
        ("none", "no one (none)", "about 700 (bare metal)"),
        (
            "local-worker",
            "a worker on the loop's CPU (local-worker)",
            "-",
        ),
        ("pinfold", "the shepherd, from another CPU (pinfold)", "-"),
        (
            "idle-local-worker",
            "a worker, but nothing to fold (idle-local-worker)",
            "about 200,000",
        ),
        (
            "idle-on-demand",
            "a worker on demand, nothing to fold (idle-on-demand)",
            "about 700",
        ),
        ("fifo", "the worker, loop with SCHED_FIFO (fifo)", "-"),
    ];
    let table = Table::of(setups)
        .column("who folds", |(_, name, _)| name)
        .column("longest pause (2013)", |(.., then)| then)
        .column("longest pause here", |(subject, ..)| {
            field(subject, "max_cycles")
        })
        .column("99.9 % here", |(subject, ..)| field(subject, "p999_cycles"))
        .column("context switches", |(subject, ..)| {
            field(subject, "context_switches")
        })
        .column("folds", |(subject, ..)| field(subject, "folds"))
        .table();
    let caption = "Pauses between two passes of the loop, in cycles".to_owned();
    Comparison {
        tables: vec![(caption, table)],
        meaning: folds_cost(rows),
        picture: None,
    }
}

/// Says how often the loop lost its CPU, and how many of these times come with the folds.
fn folds_cost(rows: &Rows) -> String {
    let of = |subject: &str, field| rows.number(&json!({"subject": subject}), field);
    let lost = |subject| of(subject, "context_switches");
    let (Some(alone), Some(worker), Some(shepherd)) =
        (lost("none"), lost("local-worker"), lost("pinfold"))
    else {
        return String::new();
    };
    let mut text = format!(
        "The loop lost its CPU {alone:.0} times without folds, {worker:.0} times with a worker on \
         its CPU, and {shepherd:.0} times with Pinfold's shepherd."
    );
    let folds = |subject| of(subject, "folds").filter(|folds| *folds > 0.0);
    if folds("local-worker").is_some_and(|folds| alone > folds) {
        return text
            + " Most of that is other load: the loop lost its CPU more often without folds than the \
               worker folded, so this machine was too busy for a comparison.";
    }
    for (who, subject, lost) in [
        ("worker", "local-worker", worker),
        ("shepherd", "pinfold", shepherd),
    ] {
        let Some(folds) = folds(subject) else {
            continue;
        };
        let each = (lost - alone) / folds;
        let sign = if each < 0.0 { "fewer" } else { "more" };
        text += &format!(
            " With the {who} and its {folds:.0} folds, that is {:.2} times {sign} for each fold.",
            each.abs()
        );
    }
    text
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
        let keys = json!({"subject": subject, "mmap": mmap, "summing": summing});
        rows.number(&keys, field)
    };
    let then = Table::of(&DOCUMENTS.loops)
        .column("2011", |(name, _)| name)
        .column("real s", |(_, [real, ..])| format!("{real:.1}"))
        .column("user s", |(_, [_, user, _])| format!("{user:.1}"))
        .column("sys s", |(_, [.., sys])| format!("{sys:.1}"))
        .column("real ns per pass", |(_, [real, ..])| {
            format!("{:.0}", real * 1e9 / PASSES)
        })
        .table();
    let pass = |design, field| figure(of(design, true, false, field), 1);
    let alone = |design| figure(of(design, false, false, "ns_per_op"), 1);
    let here = Table::of(DESIGNS)
        .column("here", |design| design)
        .column("real ns", |design| pass(design, "ns_per_op"))
        .column("user ns", |design| pass(design, "user_ns_per_op"))
        .column("sys ns", |design| pass(design, "sys_ns_per_op"))
        .column("real ns without mmap", alone)
        .column("while one sums", |design| {
            figure(of(design, false, true, "ns_per_op"), 1)
        })
        .column("largest error of a sum", |design| {
            figure(of(design, false, true, "sum_error_max"), 0)
        })
        .table();
    let mut meaning = "In 2011 the patch took a pass from 841 to 213 ns, because the processes no \
                       longer waited for the counter's lock."
        .to_owned();
    let time = |design, mmap| of(design, mmap, false, "ns_per_op");
    if let [Some(with), Some(without)] = [true, false].map(|mmap| time("spinlock-batch", mmap)) {
        meaning += &format!(
            " Here a pass takes {with:.1} ns with the spinlock, and {without:.1} ns without mmap and \
             munmap."
        );
    }
    let rivals = DESIGNS.map(|design| (design, time(design, false)));
    let ours = time("pinfold-shared", false);
    let verdicts = beside(Kind::Time, ours, &rivals[..DESIGNS.len() - 1]);
    if !verdicts.is_empty() {
        meaning += &format!(
            " Without them, an add and its subtraction take {} ns with Pinfold's shared counter: \
             {verdicts}.",
            figure(ours, 1)
        );
    }
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
    let keys = json!({
        "memory": of.memory, "policy": of.policy, "subject": subject, "threads": threads,
    });
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
    let mut meaning =
        "In 2008, private memory with a policy of its own gained nothing at 1 thread \
                       and 11 % at 7, once policies were no longer counted."
            .to_owned();
    for threads in distinct([1, most]) {
        let rate = |subject| faults_here(rows, ranges, subject, threads, false);
        let ours = rate("pinfold").map(|rate| rate / 1e6);
        let counted = rate("counted").map(|rate| rate / 1e6);
        let verdict = beside(Kind::Rate, ours, &[("one that counts", counted)]);
        if !verdict.is_empty() {
            let threads = match threads {
                1 => "1 thread".to_owned(),
                more => format!("{more} threads"),
            };
            meaning += &format!(
                " Here, at {threads}, an allocation that counts nothing (pinfold) makes {} million \
                 pages per CPU second: {verdict}.",
                figure(ours, 1)
            );
        }
    }
    meaning += " Only the columns of 2008 and the kernel's are page faults: the other subjects pop a \
                page off a list in the program, so compare them with each other.";
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
    let then = |threads: usize, at: usize| match faults.lines.get(threads - 1) {
        Some(line) => format!("{} / {}", line[at], line[at + 1]),
        None => "-".to_owned(),
    };
    let here = |subject, threads| match [false, true]
        .map(|wall| faults_here(rows, faults, subject, threads, wall))
    {
        [None, None] => "-".to_owned(),
        both => both.map(|one| figure(one, 0)).join(" / "),
    };
    let mut table = Table::of(1..=most.max(faults.lines.len()))
        .column("N", |threads| threads)
        .column("2008, no patches", |threads| then(threads, 0))
        .column("2008, mpol rework", |threads| then(threads, 2));
    for subject in FAULTING {
        table = table.column(format_args!("here, {subject}"), |threads| {
            here(subject, threads)
        });
    }
    table.table()
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Returns what the report says of made-up figures.
    fn meaning(bench: &str, rows: &Value) -> String {
        compare(bench, &Rows::parse(&json!({ "rows": rows }).to_string())).meaning
    }

    /// A reader must learn that Pinfold lost, and against which rival.
    #[test]
    fn losses_are_called_losses() {
        let item = |subject, cycles| json!({"subject": subject, "op": "inc", "signals": false, "items": 1, "cycles": cycles});
        let rows = json!([
            item("unprotected", 3.0),
            item("locked", 6.0),
            item("rseq", 9.0)
        ]);
        let text = meaning("vmstat", &rows);
        assert!(text.contains("(rseq) takes 9.0 cycles"), "{text}");
        assert!(text.contains("slower by 50 % than locked (6.0)"), "{text}");

        let pair = |subject, cycles| json!({"subject": subject, "scenario": "pair", "op": "pair", "size": 64, "cycles": cycles});
        let rows = json!([pair("rseq", 12.0), pair("tid", 10.0), pair("locked", 8.0)]);
        let text = meaning("slab", &rows);
        assert!(text.contains("slower by 50 % than locked (8.0)"), "{text}");
        assert!(text.contains("slower by 20 % than tid (10.0)"), "{text}");

        let add = |subject, ns| json!({"subject": subject, "mmap": false, "summing": false, "ns_per_op": ns});
        let rows = json!([
            add("spinlock-batch", 4.0),
            add("atomic", 5.0),
            add("pinfold-shared", 6.0)
        ]);
        let text = meaning("counter", &rows);
        assert!(
            text.contains("slower by 50 % than spinlock-batch (4.0)"),
            "{text}"
        );
        assert!(text.contains("slower by 20 % than atomic (5.0)"), "{text}");

        let ranges = &DOCUMENTS.faults[1];
        let pages = |subject, rate| {
            json!({"memory": ranges.memory, "policy": ranges.policy, "subject": subject,
                   "threads": 1, "faults_per_cpu_second": rate})
        };
        let rows = json!([pages("counted", 40e6), pages("pinfold", 30e6)]);
        let text = meaning("pft", &rows);
        assert!(
            text.contains("slower by 25 % than one that counts (40.0)"),
            "{text}"
        );

        let switches = |subject, lost, folds| json!({"subject": subject, "context_switches": lost, "folds": folds});
        let rows = json!([
            switches("none", 10, 0),
            switches("local-worker", 5, 100),
            switches("pinfold", 210, 100),
        ]);
        let text = meaning("jitter", &rows);
        assert!(
            text.contains("worker and its 100 folds, that is 0.05 times fewer"),
            "{text}"
        );
        assert!(
            text.contains("shepherd and its 100 folds, that is 2.00 times more"),
            "{text}"
        );
    }

    #[test]
    fn what_was_not_measured_is_not_said() {
        for bench in ["vmstat", "slab", "jitter", "counter", "pft"] {
            let text = meaning(bench, &json!([]));
            assert!(!text.contains("aster") && !text.contains("lower"), "{text}");
            assert!(!text.contains(" - "), "{text}");
        }
    }
}
