//! `pinfold bench pft`: the page-fault test with which Lee Schermerhorn showed in 2008 what reference counts of memory policies
//! cost the kernel's page allocation; for the kernel and for Pinfold's pages on this machine.

mod amount;
mod crew;
mod measure;
mod report;
mod subjects;

use crate::figures;
use amount::Amount;
use anyhow::{Result, bail, ensure};
use serde::Serialize;
use std::path::PathBuf;
use subjects::{Contenders, SubjectName};

/// Page faults per CPU second and per wall-clock second, by the number of threads: four tables
///
/// A region is divided among N threads, and each writes one cache line in every page of its part, none of which is there yet. Threads wait
/// for a go flag, and run where the scheduler puts them. CPU time is each thread's own; wall time is from the earliest
/// start to the latest end. Each table is for a kind of memory, anonymous or shared, and a policy, the system's default or one
/// of the region's own; both mean a page of the node that asks.
///
/// Subjects: kernel (faults on a fresh mapping, private or shared; the region's policy is set by mbind); pinfold
/// (Pages::alloc_zeroed for each page, noted in an array of pointers; the region's policy is set by Pages::set_policy, as one
/// range for anonymous memory and 16 for shared); counted (the same pages, but the policy is found and used as before 2008: an object
/// with a reference count that all threads take and drop around each allocation, and for shared memory a spinlock around
/// the 16 ranges). Without a policy pinfold and counted do the same, and shared memory is as anonymous.
///
/// Their pages are brought into memory before the measured time, and zeroed in it, as the kernel's are. Nobody has huge pages.
#[derive(clap::Args)]
pub struct Args {
    /// N goes from 1 to this; by default to the number of CPUs that this process may use
    #[arg(long, allow_negative_numbers = true, value_parser = threads, value_name = "MAX")]
    threads: Option<u32>,

    /// Bytes of the region, with K, M, G or T; by default 64M, or less on small machines. Twice as much is used
    #[arg(long, allow_negative_numbers = true, value_name = "SIZE")]
    memory: Option<Amount>,

    /// How often each region is filled, all subjects taking turns; figures are medians. Before, each is filled once without
    /// being measured
    #[arg(long, default_value_t = 10, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Whether the arenas' pages are zeroed before they are written to, as the kernel's are. Zeroing a region larger than the
    /// processor's caches is limited by the memory's bandwidth, which all threads share; without it allocation alone is measured
    #[arg(long, value_name = "yes|no", default_value = "yes", value_parser = yes_or_no, action = clap::ArgAction::Set)]
    zero: bool,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,

    /// Draw the faults per wall-clock second over the threads into this SVG file, a panel for each table
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// What the region is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Memory {
    Anon,
    Shmem,
}

/// Whose policy it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Policy {
    System,
    Range,
}

/// A table's kind, in the order of the tables.
type Kind = (Memory, Policy);
const KINDS: [Kind; 4] = [
    (Memory::Anon, Policy::System),
    (Memory::Anon, Policy::Range),
    (Memory::Shmem, Policy::System),
    (Memory::Shmem, Policy::Range),
];

/// What the tables of 2008 were called.
fn title((memory, policy): Kind) -> String {
    let memory = match memory {
        Memory::Anon => "anon",
        Memory::Shmem => "shmem",
    };
    let policy = match policy {
        Policy::System => "sys-default",
        Policy::Range => "vma-policy",
    };
    format!("{memory}+{policy}")
}

#[derive(Clone, Serialize)]
struct Row {
    memory: Memory,
    policy: Policy,
    threads: usize,
    subject: SubjectName,
    /// By the CPU time of all threads: the median of the rounds.
    faults_per_cpu_second: f64,
    /// By the time from the first start to the last end.
    faults_per_wall_second: f64,
}

impl Row {
    fn kind(&self) -> Kind {
        (self.memory, self.policy)
    }
}

fn threads(text: &str) -> Result<u32, String> {
    super::count(text, 4096)
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("say yes or no".to_owned()),
    }
}

/// What is measured.
struct Plan {
    threads: usize,
    pages: usize,
    rounds: u32,
    zero: bool,
}

pub fn main(args: &Args) -> Result<()> {
    let plan = plan(args)?;
    if let Some(file) = &args.plot {
        figures::check_writable(file)?;
    }
    without_huge_pages();
    super::settle_index();
    let measured = measure::measure(&plan)?;
    if args.json {
        figures::json("pft", &measured.rows)?;
    } else {
        figures::print(&report::text(&plan, &measured))?;
    }
    match &args.plot {
        Some(file) => report::plot(&measured.rows, file),
        None => Ok(()),
    }
}

fn plan(args: &Args) -> Result<Plan> {
    let threads = match args.threads {
        Some(threads) => threads as usize,
        None => super::cpus::allowed()?.len(),
    };
    let memory = args.memory.unwrap_or_else(amount::default_region);
    let page = subjects::page_size();
    let least = Amount(threads * page);
    ensure!(
        memory.0 >= least.0,
        "--memory {memory} is less than a page of {page} bytes for each of {threads} threads; give {least} or more, or fewer --threads"
    );
    check_available(memory)?;
    Ok(Plan {
        threads,
        pages: memory.0 / page,
        rounds: args.rounds,
        zero: args.zero,
    })
}

/// Of whose memory a part would be huge pages, and which one's, is chance.
fn without_huge_pages() {
    // Kernels without huge pages refuse, and need not be told.
    // SAFETY: no preconditions; concerns memory that is mapped from now on, and what was there stays as it is.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
}

/// Better refused than killed for want of memory in the middle.
fn check_available(memory: Amount) -> Result<()> {
    let needed = Amount(memory.0.saturating_mul(Contenders::REGIONS));
    match amount::available() {
        Some(available) if needed > available => bail!(
            "--memory {memory} needs {}, the kernel's region and an arena's, and {} are available; give {} or less",
            needed.about(),
            available.about(),
            Amount(available.0 / Contenders::REGIONS).about()
        ),
        _ => Ok(()),
    }
}
