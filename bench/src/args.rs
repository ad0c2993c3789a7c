//! The command line.

use crate::counter::subjects::Name as CounterName;
use crate::memory::Variant;
use crate::results::Output;
use crate::subjects::{Group, SubjectName};
use clap::{Args as ClapArgs, Parser, Subcommand};
use pinfold_lab::Scenario;
use std::path::PathBuf;

/// Measures Pinfold and other allocators and counters side by side.
#[derive(Debug, Parser)]
#[command(name = "pinfold-bench", version)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Slab(SlabArgs),
    Memory(MemoryArgs),
    Counter(CounterArgs),
    Percpu(PercpuArgs),
    Whole(WholeArgs),
    Limit(LimitArgs),
    Latency(LatencyArgs),
    Musl(MuslArgs),
    Plot(PlotArgs),
    #[command(hide = true)]
    SlabChild(SlabChildArgs),
    #[command(hide = true)]
    MemoryChild(MemoryChildArgs),
    #[command(hide = true)]
    CounterMemoryChild(CounterMemoryChildArgs),
}

/// Cycles per allocation and free, in the scenarios of slab_test.
#[derive(Debug, ClapArgs)]
pub struct SlabArgs {
    /// Object sizes in bytes, separated by commas, at most 32 MiB. Objects above 64 KiB are only
    /// measured in pairs, and not in a `KmemCache`.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "BYTES",
        default_value = "8,16,32,64,128,256,512,1024,2048,4096,8192,16384",
        value_parser = clap::value_parser!(u32).range(1..=32 << 20)
    )]
    pub sizes: Vec<u32>,
    /// Scenarios, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = Scenario::ALL)]
    pub scenario: Vec<Scenario>,
    /// Number of times each cell is measured; the result is the median.
    #[arg(long, default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Subjects, separated by commas; `allocators` and `pools` stand for several. Pools are only
    /// measured at 64, 256 and 1024 bytes.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME",
        default_value = "allocators"
    )]
    pub subjects: Vec<Group>,
    #[command(flatten)]
    pub setup: Setup,
    #[command(flatten)]
    pub output: Output,
}

/// The parameters of measuring cells, which must be the same in every process.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct Setup {
    /// Untimed passes before each timed one, the same for every subject.
    #[arg(long, default_value_t = 1)]
    pub warmup: u32,
    /// Use at most this many CPUs (default: all that the process may run on).
    #[arg(long, value_name = "CPUS", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
}

/// Time and memory of static programs for musl, built with Pinfold, musl's malloc and mimalloc.
#[derive(Debug, ClapArgs)]
pub struct MuslArgs {
    /// Number of times each program runs; the result is the median.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    #[command(flatten)]
    pub output: Output,
}

/// Draws a file that `--save` or `--json` of `slab`, `whole` or `limit` wrote, as SVG: the
/// single-threaded figures of `slab`, or time against memory.
#[derive(Debug, ClapArgs)]
pub struct PlotArgs {
    /// The saved file.
    pub run: PathBuf,
    /// The SVG file to write.
    pub picture: PathBuf,
}

/// Measures the cells that standard input names; started by `slab`.
#[derive(Debug, ClapArgs)]
pub struct SlabChildArgs {
    /// The subject to measure.
    #[arg(long)]
    pub subject: SubjectName,
    #[command(flatten)]
    pub setup: Setup,
}

/// Resident memory that 1,000 sleeping threads leave after each has allocated and freed 1 MiB.
#[derive(Debug, ClapArgs)]
pub struct MemoryArgs {
    /// Subjects, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = SubjectName::ALLOCATORS[1..].to_vec())]
    pub subjects: Vec<SubjectName>,
    /// Variants, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = Variant::ALL)]
    pub variant: Vec<Variant>,
    #[command(flatten)]
    pub setup: MemorySetup,
    /// Seconds that a subject may take before it is left out.
    #[arg(long, default_value_t = 30)]
    pub limit: u32,
    #[command(flatten)]
    pub output: Output,
}

/// The parameters of `memory`, which must be the same in every process.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct MemorySetup {
    /// Number of threads.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: u32,
    /// Seconds until the resident memory is read for the second time.
    #[arg(long, default_value_t = 3)]
    pub settle: u32,
}

/// Measures one subject and variant; started by `memory`.
#[derive(Debug, ClapArgs)]
pub struct MemoryChildArgs {
    /// The subject to measure.
    #[arg(long)]
    pub subject: SubjectName,
    /// How the threads take turns.
    #[arg(long)]
    pub variant: Variant,
    #[command(flatten)]
    pub setup: MemorySetup,
}

/// Cycles per add and per sum of counters, and what they cost in memory.
#[derive(Debug, ClapArgs)]
pub struct CounterArgs {
    /// Subjects, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = CounterName::ALL)]
    pub subjects: Vec<CounterName>,
    /// Numbers of threads that add, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,16", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Adds of each thread in each round.
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub adds: u32,
    /// Seconds to measure in all; each figure is measured at least five times, however long that
    /// takes.
    #[arg(long, default_value_t = 20)]
    pub seconds: u32,
    /// Number of counters made to measure their memory.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub counters: u32,
    #[command(flatten)]
    pub output: Output,
}

/// Measures the memory of one subject's counters; started by `counter`.
#[derive(Debug, ClapArgs)]
pub struct CounterMemoryChildArgs {
    /// The subject to measure.
    #[arg(long)]
    pub subject: CounterName,
    /// Number of counters.
    #[arg(long)]
    pub counters: u32,
}

/// Cycles per operation on per-CPU words, pairs, lists and rings.
#[derive(Debug, ClapArgs)]
pub struct PercpuArgs {
    /// Number of times each operation is measured; the result is the median.
    #[arg(long, default_value_t = 51, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    #[command(flatten)]
    pub output: Output,
}

/// The allocators that programs are started with.
#[derive(Debug, ClapArgs)]
pub struct Preloaded {
    /// Subjects, separated by commas; NAME=PATH is a shared library of your own. A name that begins
    /// with `pinfold` marks a build of Pinfold.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME[=PATH]",
        default_value = "pinfold-malloc,glibc,mimalloc,mimalloc2,jemalloc,tcmalloc,snmalloc,rpmalloc"
    )]
    pub subjects: Vec<String>,
    /// The shared library for `pinfold-malloc` (default: built from this workspace).
    #[arg(long, value_name = "PATH")]
    pub pinfold: Option<PathBuf>,
    /// Folder for libraries, loads and input (default: target/whole).
    #[arg(long, value_name = "FOLDER")]
    pub cache: Option<PathBuf>,
}

/// Time and memory of whole programs that run on each allocator by LD_PRELOAD.
#[derive(Debug, ClapArgs)]
pub struct WholeArgs {
    /// Programs, separated by commas; `all`, `loads`, `real` and `attacks` stand for several.
    #[arg(long, value_delimiter = ',', default_value = "all")]
    pub programs: Vec<String>,
    /// Seconds after a load's work until its settled memory is read, in the first round; 0 to leave
    /// this out.
    #[arg(long, default_value_t = 2.0, value_parser = settle)]
    pub settle: f64,
    #[command(flatten)]
    pub setup: WholeSetup,
    /// Only prepare the subjects, and print the name and the shared library of each.
    #[arg(long)]
    pub libraries: bool,
    #[command(flatten)]
    pub output: Output,
}

/// Time and memory of whole programs, divided by the least that an allocator could reach: time
/// under an allocator that knows the program's calls in advance, and live bytes.
#[derive(Debug, ClapArgs)]
pub struct LimitArgs {
    /// Programs, separated by commas; `all`, `loads`, `real` and `attacks` stand for several.
    #[arg(long, value_delimiter = ',', default_value = "all,robson,ladder")]
    pub programs: Vec<String>,
    #[command(flatten)]
    pub setup: WholeSetup,
    #[command(flatten)]
    pub output: Output,
}

/// How whole programs run.
#[derive(Debug, ClapArgs)]
pub struct WholeSetup {
    #[command(flatten)]
    pub preloaded: Preloaded,
    /// Number of times each program runs under each subject; the result is the median.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Threads of programs that have several (default: number of CPUs that this process may use).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Seconds that a program may take before it is killed.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
}

/// Times of single calls of malloc and free, from the median to the longest, by LD_PRELOAD.
#[derive(Debug, ClapArgs)]
pub struct LatencyArgs {
    #[command(flatten)]
    pub preloaded: Preloaded,
    /// Seconds that the load runs in each round.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Number of times that the load runs under each subject; the figures are medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Also measure under memory pressure: the kernel must reclaim memory before it gives any out.
    #[arg(long)]
    pub pressure: bool,
    /// Threads for each CPU, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,4",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub threads_per_cpu: Vec<u32>,
    #[command(flatten)]
    pub output: Output,
}

fn settle(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds from 0 to 60".to_owned()),
    }
}
