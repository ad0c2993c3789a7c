//! `pinfold bench slab`: the tables of slab_test. With them Joonsoo Kim and Jesper Dangaard Brouer
//! argued in 2015 that the kernel's slab allocator should not disable preemption.

mod bulk;
mod measure;
mod plot;
mod report;
mod rows;
mod subjects;

use crate::Machine;
use crate::figures::{Output, Progress, Sheet};
use crate::{Scenario, cpus};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use subjects::SubjectName;

pub use plot::draw;
pub use report::{side_by_side, slab_test};
pub use rows::{Row, Rows};

/// The sizes of slab_test.
const SIZES: [usize; 12] = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
/// The largest size of slab_test with more than one thread.
const SIZE_MOST_OF_MANY: usize = 4096;

/// Measure cycles per allocation and free: slab_test's six scenarios, and bulk calls
///
/// Subjects: pinfold-cache (a KmemCache of that size, inlined), pinfold-malloc (pinfold_malloc and
/// pinfold_free, called as C functions), pinfold-hardened (a hardened KmemCache). Five more
/// subjects have the same fast path, and protect it in different ways: unprotected (arrays per CPU,
/// used by plain loads and stores, only in the scenarios with one thread; what the others take
/// beyond it is the cost of their protection), rseq (a KmemCache), tid (a list per CPU, committed
/// by a double-word compare-exchange of its head and a transaction id, as in SLUB), locked (arrays
/// per CPU behind a lock of the CPU, without contention: one locked exchange, which stands for
/// disabled preemption), masked-signals (such arrays, with pthread_sigmask around them too; to a
/// thread, masked signals are what disabled interrupts are to a CPU). The slow path of all is that
/// of a KmemCache: a CPU has a spare array, and exchanges a full or an empty one at a depot that
/// all CPUs share. Threads are pinned, one to each CPU that this process may use. The plot shows
/// cycles against sizes: those of the first two scenarios, or of the others if only those are
/// measured.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Number of times each loop is measured, subjects interleaved; figures are medians
    #[arg(long, default_value_t = 21, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Number of objects that each thread allocates in a loop
    #[arg(long, default_value_t = 10_000, allow_negative_numbers = true, value_parser = calls)]
    calls: u32,

    /// Measure only these scenarios, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SCENARIO")]
    scenario: Vec<Test>,

    /// Measure only these subjects, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SUBJECT")]
    subject: Vec<SubjectName>,

    /// Measure only objects of these sizes, separated by commas; by default slab_test's: 8 to 16384
    /// bytes with one thread, 8 to 4096 with several. The bulk test always uses 256
    #[arg(long, allow_negative_numbers = true, value_delimiter = ',', value_parser = size, value_name = "BYTES")]
    size: Vec<usize>,

    #[command(flatten)]
    output: Output,
}

/// What is measured. The command line and the rows call it a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// A scenario of slab_test.
    Of(Scenario),
    /// One thread allocates and frees several objects per call.
    Bulk,
}

impl Test {
    const ALL: [Test; 7] = [
        Test::Of(Scenario::Single),
        Test::Of(Scenario::Pair),
        Test::Of(Scenario::Concurrent),
        Test::Of(Scenario::ConcurrentPair),
        Test::Of(Scenario::Remote),
        Test::Of(Scenario::OneToN),
        Test::Bulk,
    ];

    /// Returns the printed name.
    pub fn name(self) -> &'static str {
        match self {
            Test::Of(scenario) => scenario.name(),
            Test::Bulk => "bulk",
        }
    }

    /// Returns the fewest threads that the test needs.
    pub fn least_threads(self) -> usize {
        match self {
            Test::Of(scenario) => scenario.least_threads(),
            Test::Bulk => 1,
        }
    }
}

impl ValueEnum for Test {
    fn value_variants<'a>() -> &'a [Test] {
        &Test::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Test::Of(scenario) => scenario.to_possible_value(),
            Test::Bulk => Some(
                PossibleValue::new("bulk")
                    .help("One thread allocates and frees several objects per call"),
            ),
        }
    }
}

impl Serialize for Test {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Test {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Test, D::Error> {
        let name = String::deserialize(deserializer)?;
        Test::from_str(&name, false).map_err(D::Error::custom)
    }
}

/// What is measured, and notes about what is left out and why.
struct Plan {
    rounds: u32,
    calls: usize,
    tests: Vec<Test>,
    subjects: Vec<SubjectName>,
    sizes: Vec<usize>,
    notes: Vec<String>,
}

fn calls(text: &str) -> Result<u32, String> {
    super::count(text, 100_000)
}

fn size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size) if (8..=SIZES[11]).contains(&size) && size % 8 == 0 => Ok(size),
        _ => Err("give a multiple of 8 from 8 to 16384".to_owned()),
    }
}

pub(super) fn main(args: &Args) -> Result<()> {
    Sheet::deliver("slab", &args.output, |progress| sheet(args, progress))
}

/// Measures what the arguments ask for. Prints and writes nothing but the progress.
pub(super) fn sheet(args: &Args, progress: &Progress) -> Result<Sheet> {
    let measured = measure::measure(plan(args)?, progress)?;
    let (rows, text) = (&measured.rows.0, report::text(&measured));
    Sheet::new("slab", &Machine::read(), rows, &text, draw(&measured.rows))
}

fn plan(args: &Args) -> Result<Plan> {
    fn chosen<T: Copy + PartialEq>(all: &[T], asked: &[T]) -> Vec<T> {
        let wanted = |one: &&T| asked.is_empty() || asked.contains(one);
        all.iter().filter(wanted).copied().collect()
    }
    let mut plan = Plan {
        rounds: args.rounds,
        calls: args.calls as usize,
        tests: chosen(&Test::ALL, &args.scenario),
        subjects: chosen(&SubjectName::ALL, &args.subject),
        sizes: args.size.clone(),
        notes: Vec::new(),
    };
    plan.sizes.sort_unstable();
    plan.sizes.dedup();
    plan.leave_out_subjects();
    plan.leave_out_tests(cpus::allowed()?.len());
    ensure!(
        !plan.tests.is_empty(),
        "nothing can be measured: only pinfold-cache takes part in bulk; choose other scenarios or \
         subjects. {}",
        plan.notes.join(" ")
    );
    Ok(plan)
}

impl Plan {
    fn leave_out_subjects(&mut self) {
        let notes = &mut self.notes;
        self.subjects.retain(|subject| {
            let missing = subject.missing();
            let note = |why| format!("{} is left out: {why}.", subject.name());
            notes.extend(missing.map(note));
            missing.is_none()
        });
    }

    fn leave_out_tests(&mut self, threads: usize) {
        let (notes, subjects) = (&mut self.notes, &self.subjects);
        self.tests.retain(|&test| {
            let has_threads = threads >= test.least_threads();
            if !has_threads {
                let name = test.name();
                notes.push(format!("{name} is left out: it needs two CPUs."));
            }
            has_threads && subjects.iter().any(|subject| subject.takes_part(test))
        });
    }

    /// Returns the number of cells that are measured round by round. The bulk test's rounds are
    /// short, so they do not count.
    fn cells(&self) -> usize {
        let sizes = |test: &Test| match *test {
            Test::Of(scenario) => self.sizes(scenario).len(),
            Test::Bulk => 0,
        };
        self.tests.iter().map(sizes).sum()
    }

    fn sizes(&self, scenario: Scenario) -> Vec<usize> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let most = match scenario {
            Scenario::Single | Scenario::Pair => SIZES[SIZES.len() - 1],
            _ => SIZE_MOST_OF_MANY,
        };
        SIZES.into_iter().filter(|&size| size <= most).collect()
    }
}
