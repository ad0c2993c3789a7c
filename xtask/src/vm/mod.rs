//! `cargo xtask vm`: a test machine, which runs this project's tests on one of Debian's kernels
//! under the emulator qemu. See vm/README.md.

mod arch;
mod binaries;
mod boot;
pub mod chroot;
mod image;
mod machines;
pub mod many;
mod packages;
mod plan;
pub mod policy_tests;
mod suites;

use anyhow::{Context, Result, bail};
use arch::Arch;
use boot::{End, Verdict};
use clap::error::ErrorKind;
use image::Root;
use machines::{MACHINES, Machine};
use packages::Kernel;
use plan::Backend;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use suites::Libc;

/// Runs tests on emulated machines.
///
/// vm/README.md describes the machines.
#[derive(clap::Args)]
pub struct Args {
    /// Lists the machines.
    #[arg(long, exclusive = true)]
    list: bool,
    /// The processor to emulate.
    #[arg(long, value_enum, default_value_t = Arch::X86)]
    arch: Arch,
    /// A machine to emulate. The default for aarch64 is nodes2.
    #[arg(
        long = "machine",
        value_name = "NAME",
        value_parser = Machine::named,
        default_value = "nodes4",
        default_value_if("arch", "aarch64", "nodes2"),
    )]
    machines: Vec<&'static Machine>,
    /// The version of Debian's kernel to boot, such as 7.3. The newest that begins with it is used.
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,
    /// The version of Debian's C library on the machine, such as 2.43. The default is this
    /// machine's.
    #[arg(long, value_name = "VERSION")]
    libc: Option<String>,
    /// Runs each test on this backend, instead of those that the plan of tests names.
    #[arg(long = "backend", value_name = "NAME", value_enum)]
    backends: Vec<Backend>,
    /// Makes the kernel check the fields that it shares with restartable sequences.
    #[arg(long)]
    rseq_debug: bool,
    /// Copies FILE to the emulated machine's /bin, and its libraries to the paths that they have
    /// here.
    #[arg(long = "add", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Words to add to the kernel's command line.
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true
    )]
    kernel_args: String,
    /// Runs this command on the machine instead of tests.
    #[arg(long, value_name = "COMMAND")]
    shell: Option<String>,
    /// Only downloads and installs what the machine needs. Fails if that is impossible.
    #[arg(long)]
    prepare: bool,
    /// Limits the machine's run time.
    #[arg(long, value_name = "N", default_value_t = 900)]
    seconds: u64,
    /// Runs only the tests whose names contain one of these words. =NAME is an exact name.
    #[arg(last = true)]
    tests: Vec<String>,
}

impl Args {
    /// # Errors
    ///
    /// If qemu cannot emulate one of the machines for the processor, or if a version is chosen for
    /// aarch64.
    fn check(&self) -> Result<(), clap::Error> {
        if self.arch != Arch::X86 && (self.kernel.is_some() || self.libc.is_some()) {
            let what = "--kernel and --libc choose packages for x86_64 only\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, what));
        }
        let cannot = |machine: &&&Machine| !self.arch.can_be(machine);
        match self.machines.iter().find(cannot) {
            None => Ok(()),
            Some(machine) => Err(clap::Error::raw(
                ErrorKind::ArgumentConflict,
                format!(
                    "qemu cannot emulate {} for this processor: it cannot leave out single CPUs\n",
                    machine.name
                ),
            )),
        }
    }
}

pub fn main(args: Args) -> Result<()> {
    if args.list {
        for machine in MACHINES {
            println!("{:<12}{}", machine.name, machine.about);
        }
        return Ok(());
    }
    args.check().unwrap_or_else(|error| error.exit());
    let prepared = Prepared::new(args.arch, args.kernel.as_deref(), args.libc.as_deref())?;
    if args.prepare {
        let (emulator, _) = args.arch.emulator();
        println!("ready: {emulator} and {}", prepared.kernel.image.display());
        return Ok(());
    }
    let mut failed = 0;
    let machine = TestMachine::build(prepared, &args.files)?;
    for one in &args.machines {
        failed += usize::from(!machine.run(&args, one)?);
    }
    match failed {
        0 => Ok(()),
        _ => bail!("{failed} of {} machines failed", args.machines.len()),
    }
}

/// What every machine of an architecture needs.
struct Prepared {
    arch: Arch,
    target: PathBuf,
    cache: PathBuf,
    kernel: Kernel,
    /// The C library, unless it is this machine's.
    libc: Option<Libc>,
    busybox: PathBuf,
}

/// What a machine does after it has started.
struct Boot<'a> {
    /// The list that vm/init executes.
    script: String,
    /// The runs that the list names.
    names: Vec<String>,
    kernel_args: &'a str,
    /// More arguments of the emulator.
    emulator_args: &'a [String],
    limit: Duration,
}

impl Prepared {
    /// Downloads and installs what is missing.
    fn new(arch: Arch, kernel: Option<&str>, libc: Option<&str>) -> Result<Prepared> {
        let target = crate::target();
        let cache = target.join("vm").join(arch.debian());
        fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
        let cache = cache.canonicalize()?;
        let (emulator, package) = arch.emulator();
        packages::tool(emulator, package)?;
        packages::tool("cpio", "cpio")?;
        Ok(Prepared {
            arch,
            target,
            busybox: arch.prepare(&cache)?,
            kernel: match kernel {
                Some(version) => suites::kernel(&cache, version)?,
                None => packages::kernel(&cache, arch)?,
            },
            libc: libc
                .map(|version| suites::libc(&cache, version))
                .transpose()?,
            cache,
        })
    }

    /// Makes the machine's root file system, with Pinfold's command and library.
    fn root(&self) -> Result<Root> {
        let [command, library] = self.arch.build().command(&self.target)?;
        let libc = self.libc.as_ref().map(|libc| libc.folder.clone());
        let mut root = Root::new(self.cache.join("root"), &self.busybox, libc, self.arch)?;
        root.program(&command, "bin/pinfold")?;
        root.program(&library, "lib/libpinfold.so.0")?;
        Ok(root)
    }

    /// Boots a machine and waits until it ends. Returns what it reported, how it ended, and how
    /// long it booted and ran.
    fn boot(
        &self,
        root: &Root,
        machine: &Machine,
        boot: &Boot,
    ) -> Result<(Verdict, End, [Duration; 2])> {
        root.write("vm/list", &boot.script)?;
        let image = self.cache.join("image.cpio");
        root.pack(&image)?;
        let libc = self.libc.as_ref().map(|libc| &*libc.version);
        println!(
            "== {} on {:?}: {}; kernel {}, C library {}",
            machine.name,
            self.arch,
            machine.about,
            self.kernel.release,
            libc.unwrap_or("of this machine")
        );
        let begin = Instant::now();
        let mut verdict = Verdict::new(boot.names.iter().cloned());
        let emulator = |ended: &str| {
            let kernel = &self.kernel.image;
            let mut emulator =
                boot::emulator(self.arch, machine, kernel, &image, boot.kernel_args, ended);
            emulator.args(boot.emulator_args);
            emulator
        };
        let end = boot::run(emulator, &mut verdict, boot.limit, machine.places())?;
        let began = verdict.began.unwrap_or_else(Instant::now);
        let times = [began.duration_since(begin), began.elapsed()];
        Ok((verdict, end, times))
    }
}

/// What all machines of one call share.
struct TestMachine {
    prepared: Prepared,
    binaries: Vec<binaries::Binary>,
    root: Root,
}

impl TestMachine {
    fn build(prepared: Prepared, files: &[PathBuf]) -> Result<TestMachine> {
        let binaries = prepared.arch.build().tests()?;
        let mut root = prepared.root()?;
        for file in files {
            let name = file.file_name().context("--add needs a file")?;
            root.program(file, &format!("bin/{}", name.to_string_lossy()))?;
        }
        for binary in &binaries {
            root.program(&binary.path, &format!("tests/{}", binary.name))?;
        }
        if prepared.arch == Arch::X86
            && let Err(error) = root.python(&prepared.cache)
        {
            println!("left out: python on the machine: {error:#}");
        }
        Ok(TestMachine {
            prepared,
            binaries,
            root,
        })
    }

    /// Boots one machine. Returns whether all its tests passed and it ended correctly.
    fn run(&self, args: &Args, machine: &Machine) -> Result<bool> {
        let choice = plan::Choice {
            filters: &args.tests,
            backends: &args.backends,
            ids: self.prepared.kernel.has_ids(),
        };
        let mut runs = match args.shell {
            Some(_) => Vec::new(),
            None => plan::runs(&self.binaries, &choice),
        };
        if runs.is_empty() && args.shell.is_none() {
            bail!("no test's name contains any of {:?}", args.tests);
        }
        if args.rseq_debug {
            runs.insert(0, plan::rseq_debug());
        }
        let environment = [
            ("PINFOLD_MACHINE", machine.expected()),
            ("RUST_BACKTRACE", "1".to_owned()),
        ];
        let shell = args.shell.iter().map(|_| "shell".to_owned());
        let boot = Boot {
            script: plan::script(&runs, &environment, args.shell.as_deref()),
            names: runs
                .iter()
                .map(|run| run.name.clone())
                .chain(shell)
                .collect(),
            kernel_args: &args.kernel_args,
            emulator_args: &[],
            limit: Duration::from_secs(args.seconds),
        };
        let (verdict, end, times) = self.prepared.boot(&self.root, machine, &boot)?;
        Ok(report(machine, &verdict, &end, times))
    }
}

fn report(machine: &Machine, verdict: &Verdict, end: &End, [boot, run]: [Duration; 2]) -> bool {
    let how = match end {
        End::Done => "ended correctly".to_owned(),
        End::Stopped => "stopped without reporting its end".to_owned(),
        End::Hung => "took too long and was killed".to_owned(),
        End::StoodStill => {
            format!("stood still {} times and was killed", boot::BOOTS_OF_STILL)
        }
        End::Panicked(words) => format!("panicked: {words}"),
    };
    println!(
        "== {}: {} passed, {} failed; the machine {how}; boot {:.0} s, run {:.0} s",
        machine.name,
        verdict.passed,
        verdict.failed.len(),
        boot.as_secs_f64(),
        run.as_secs_f64()
    );
    for (name, what) in &verdict.failed {
        println!("   {name}: {what}");
    }
    *end == End::Done && verdict.failed.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args as _, Command, FromArgMatches};

    fn parse(line: &str) -> Args {
        let matches = Args::augment_args(Command::new("vm")).get_matches_from(line.split(' '));
        Args::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn each_processor_has_a_default_machine_and_some_that_it_cannot_be() {
        let names = |line| -> Vec<_> { parse(line).machines.iter().map(|one| one.name).collect() };
        assert_eq!(names("vm"), ["nodes4"]);
        assert_eq!(names("vm --arch aarch64 -- slab"), ["nodes2"]);
        assert_eq!(
            names("vm --machine sparse --machine cpus16"),
            ["sparse", "cpus16"]
        );
        assert!(parse("vm --machine sparse").check().is_ok());
        let error = parse("vm --arch aarch64 --machine sparse").check();
        assert_eq!(error.unwrap_err().exit_code(), 2);
    }

    #[test]
    fn words_behind_the_dashes_choose_tests() {
        assert_eq!(parse("vm --prepare -- slab =x").tests, ["slab", "=x"]);
    }
}
