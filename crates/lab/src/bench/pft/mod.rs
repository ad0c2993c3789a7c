//! `pinfold bench pft`: the page-fault test of Lee Schermerhorn, who showed with it in 2008 what
//! reference counts of memory policies cost the kernel's page allocation. It measures the kernel
//! and Pinfold's pages.

mod amount;
mod crew;
mod measure;
mod report;
mod subjects;

use crate::Machine;
use crate::cpus;
use crate::figures::{Output, Progress, Sheet};
use crate::machine::settle_index;
use amount::Amount;
use anyhow::{Result, bail, ensure};
use serde::Serialize;
use subjects::{REGIONS, SubjectName};

/// Measure page faults per second for 1 to N threads, with and without reference counts on memory
/// policies
///
/// Prints four tables. A region is divided among N threads. Each thread writes one cache line in
/// every page of its part. No page of the region exists before. The threads wait for a common start
/// and run where the scheduler puts them. CPU time is the sum of the threads' own times. Wall-clock
/// time is from the earliest start to the latest end. Each table is for a kind of memory, anonymous
/// or shared, and for a policy, the system's default or one of the region's own. Both policies mean
/// a page of the node that asks.
///
/// Subjects: kernel (faults on a fresh private or shared mapping; mbind sets the region's policy);
/// counted (Pages::alloc_zeroed for each page, noted in an array of pointers, but each allocation
/// looks its policy up as kernels before 2008 did: all threads take and drop a reference count on
/// it, and for shared memory a spinlock protects the 16 ranges); shared-counted (the same as
/// kernels since 2008 do it: only shared memory's policies are counted); pinfold (the same pages,
/// and Pages::set_policy sets the region's policy, as one range for anonymous memory and as 16 for
/// shared memory; nothing is counted).
///
/// Some subjects run the same code in some tables. Their ratio is printed as a control, since it
/// shows only how far runs vary. In JSON, same_code_as names the other subject. The kernel's column
/// is no rival: a page fault enters the kernel and edits page tables, and the other subjects pop a
/// page off a list.
///
/// The pages of all subjects but the kernel are brought into memory before the measured time and
/// zeroed within it, as the kernel zeroes its pages. No subject uses huge pages. The plot shows the
/// faults per wall-clock second against the number of threads, a panel for each table.
#[derive(clap::Args)]
pub struct Args {
    /// The largest N; by default the number of CPUs that this process may use
    #[arg(long, allow_negative_numbers = true, value_parser = threads, value_name = "MAX")]
    threads: Option<u32>,

    /// Size of the region in bytes, or with K, M, G or T; by default 64M, or less on small
    /// machines. The test needs twice as much memory
    #[arg(long, allow_negative_numbers = true, value_name = "SIZE")]
    memory: Option<Amount>,

    /// Number of times each region is filled, subjects interleaved; figures are medians. Before
    /// that, each region is filled once without being measured
    #[arg(long, default_value_t = 10, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Whether the other subjects' pages are zeroed before they are written, as the kernel's are.
    /// Zeroing a region larger than the processor's caches is limited by the memory's bandwidth,
    /// which all threads share. With "no", the test measures allocation alone
    #[arg(long, value_name = "yes|no", default_value = "yes", value_parser = yes_or_no, action = clap::ArgAction::Set)]
    zero: bool,

    #[command(flatten)]
    output: Output,
}

/// The kind of memory that the region is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Memory {
    Anon,
    Shmem,
}

/// The policy of the region: the system's default, or its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Policy {
    System,
    Range,
}

/// A table's kind.
type Kind = (Memory, Policy);
/// All kinds, in the order of the tables.
const KINDS: [Kind; 4] = [
    (Memory::Anon, Policy::System),
    (Memory::Anon, Policy::Range),
    (Memory::Shmem, Policy::System),
    (Memory::Shmem, Policy::Range),
];

/// Returns the title that the tables of 2008 had.
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
    /// The subject that runs the same code in this table. The two rows differ by chance only.
    same_code_as: Option<SubjectName>,
    /// Pages divided by the CPU time of all threads: the median of the rounds.
    faults_per_cpu_second: f64,
    /// Pages divided by the time from the first start to the last end: the median of the rounds.
    faults_per_wall_second: f64,
}

impl Row {
    fn kind(&self) -> Kind {
        (self.memory, self.policy)
    }

    /// Returns whether both rows, which are of one table, come from the same code.
    fn runs_the_code_of(&self, other: &Row) -> bool {
        let first = |row: &Row| row.same_code_as.unwrap_or(row.subject);
        first(self) == first(other)
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

/// The parameters of a run.
struct Plan {
    threads: usize,
    pages: usize,
    rounds: u32,
    zero: bool,
}

pub fn main(args: &Args) -> Result<()> {
    Sheet::deliver("pft", &args.output, |progress| sheet(args, progress))
}

/// Measures what the arguments ask for. Prints and writes nothing but the progress.
pub fn sheet(args: &Args, progress: &Progress) -> Result<Sheet> {
    let plan = plan(args)?;
    without_huge_pages();
    settle_index();
    let measured = measure::measure(&plan, progress)?;
    let (rows, text) = (&measured.rows, report::text(&plan, &measured));
    Sheet::new("pft", &Machine::read(), rows, &text, report::plot(rows))
}

fn plan(args: &Args) -> Result<Plan> {
    let threads = match args.threads {
        Some(threads) => threads as usize,
        None => cpus::allowed()?.len(),
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

/// Switches huge pages off for this process. Which subject would get them, and for which part of
/// its memory, would be chance.
fn without_huge_pages() {
    // The result is ignored: a kernel without huge pages refuses.
    // SAFETY: this prctl takes integers only. It affects memory that is mapped afterwards.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
}

/// Fails if there is not enough memory. Otherwise the kernel might kill the process in the middle.
fn check_available(memory: Amount) -> Result<()> {
    let needed = Amount(memory.0.saturating_mul(REGIONS));
    match amount::available() {
        Some(available) if needed > available => bail!(
            "--memory {memory} needs {} for two regions, the kernel's and Pinfold's, but only {} are available; give {} or less",
            needed.about(),
            available.about(),
            Amount(available.0 / REGIONS).about()
        ),
        _ => Ok(()),
    }
}
