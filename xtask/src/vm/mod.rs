//! `cargo xtask vm`: a test machine, which runs this project's tests on one of Debian's kernels
//! under the emulator qemu. See vm/README.md.

mod arch;
mod binaries;
mod boot;
mod image;
mod machines;
mod packages;
mod plan;

use anyhow::{Context, Result, bail};
use arch::Arch;
use boot::{End, Verdict};
use image::Root;
use machines::{MACHINES, Machine};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The options of the command line.
struct Wish {
    arch: Arch,
    machines: Vec<&'static Machine>,
    kernel_args: String,
    shell: Option<String>,
    /// Whether to only download and install what the machine needs.
    prepare: bool,
    filters: Vec<String>,
    limit: Duration,
}

pub fn main(options: &[&str]) -> Result<()> {
    if options == ["--list"] {
        for machine in MACHINES {
            println!("{:<12}{}", machine.name, machine.about);
        }
        return Ok(());
    }
    let wish = parse(options)?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let cache = target.join("vm").join(wish.arch.debian());
    fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
    let cache = cache.canonicalize()?;
    let (emulator, package) = wish.arch.emulator();
    packages::tool(emulator, package)?;
    packages::tool("cpio", "cpio")?;
    let busybox = wish.arch.prepare(&cache)?;
    let kernel = packages::kernel(&cache, wish.arch)?;
    if wish.prepare {
        println!("ready: {emulator} and {}", kernel.display());
        return Ok(());
    }
    let mut failed = 0;
    let machine = TestMachine::build(wish.arch, &target, cache, kernel, &busybox)?;
    for one in &wish.machines {
        failed += usize::from(!machine.run(&wish, one)?);
    }
    match failed {
        0 => Ok(()),
        _ => bail!("{failed} of {} machines failed", wish.machines.len()),
    }
}

fn parse(options: &[&str]) -> Result<Wish> {
    let mut wish = Wish {
        arch: Arch::X86,
        machines: Vec::new(),
        kernel_args: String::new(),
        shell: None,
        prepare: false,
        filters: Vec::new(),
        limit: Duration::from_secs(900),
    };
    let mut options = options.iter().copied();
    while let Some(option) = options.next() {
        let mut value = || {
            options
                .next()
                .with_context(|| format!("{option} needs a value"))
        };
        match option {
            "--" => wish.filters.extend(options.by_ref().map(str::to_owned)),
            "--prepare" => wish.prepare = true,
            "--arch" => {
                let name = value()?;
                wish.arch = Arch::named(name)
                    .with_context(|| format!("unknown processor {name}; give x86_64 or aarch64"))?;
            }
            "--machine" => {
                let name = value()?;
                let known = Machine::named(name);
                wish.machines.push(known.with_context(|| {
                    format!("unknown machine {name}; cargo xtask vm --list lists the machines")
                })?);
            }
            "--kernel-args" => wish.kernel_args = value()?.to_owned(),
            "--shell" => wish.shell = Some(value()?.to_owned()),
            "--seconds" => {
                let seconds = value()?.parse().context("--seconds needs a number")?;
                wish.limit = Duration::from_secs(seconds);
            }
            other => bail!("unknown option {other}; cargo xtask lists the options of `vm`"),
        }
    }
    if wish.machines.is_empty() {
        wish.machines
            .extend(Machine::named(wish.arch.default_machine()));
    }
    if let Some(machine) = wish
        .machines
        .iter()
        .find(|machine| !wish.arch.can_be(machine))
    {
        bail!(
            "qemu cannot emulate {} for this processor: it cannot leave out single CPUs",
            machine.name
        );
    }
    Ok(wish)
}

/// What all machines of one call share.
struct TestMachine {
    kernel: PathBuf,
    cache: PathBuf,
    binaries: Vec<binaries::Binary>,
    root: Root,
}

impl TestMachine {
    fn build(
        arch: Arch,
        target: &Path,
        cache: PathBuf,
        kernel: PathBuf,
        busybox: &Path,
    ) -> Result<TestMachine> {
        let build = arch.build();
        let binaries = build.tests()?;
        let [command, library] = build.command(target)?;
        let mut root = Root::new(cache.join("root"), busybox, arch)?;
        for binary in &binaries {
            root.program(&binary.path, &format!("tests/{}", binary.name))?;
        }
        root.program(&command, "bin/pinfold")?;
        root.program(&library, "lib/libpinfold.so")?;
        if arch == Arch::X86
            && let Err(error) = root.python(&cache)
        {
            println!("left out: python on the machine: {error:#}");
        }
        Ok(TestMachine {
            kernel,
            cache,
            binaries,
            root,
        })
    }

    /// Boots one machine. Returns whether all its tests passed and it ended correctly.
    fn run(&self, wish: &Wish, machine: &Machine) -> Result<bool> {
        let runs = match wish.shell {
            Some(_) => Vec::new(),
            None => plan::runs(&self.binaries, &wish.filters),
        };
        if runs.is_empty() && wish.shell.is_none() {
            bail!("no test's name contains any of {:?}", wish.filters);
        }
        let environment = [
            ("PINFOLD_MACHINE", machine.expected()),
            ("RUST_BACKTRACE", "1".to_owned()),
        ];
        let script = plan::script(&runs, &environment, wish.shell.as_deref());
        self.root.write("vm/list", &script)?;
        let image = self.cache.join("image.cpio");
        self.root.pack(&image)?;
        println!("== {} on {:?}: {}", machine.name, wish.arch, machine.about);
        let begin = Instant::now();
        let shell = wish.shell.iter().map(|_| "shell".to_owned());
        let mut verdict = Verdict::new(runs.iter().map(|run| run.name.clone()).chain(shell));
        let emulator = boot::emulator(wish.arch, machine, &self.kernel, &image, &wish.kernel_args);
        let end = boot::run(emulator, &mut verdict, wish.limit)?;
        Ok(report(machine, &verdict, &end, begin.elapsed()))
    }
}

fn report(machine: &Machine, verdict: &Verdict, end: &End, time: Duration) -> bool {
    let how = match end {
        End::Done => "ended correctly".to_owned(),
        End::Stopped => "stopped without reporting its end".to_owned(),
        End::Hung => "took too long and was killed".to_owned(),
        End::Panicked(words) => format!("panicked: {words}"),
    };
    println!(
        "== {}: {} passed, {} failed; the machine {how} after {:.0} s",
        machine.name,
        verdict.passed,
        verdict.failed.len(),
        time.as_secs_f64()
    );
    for (name, what) in &verdict.failed {
        println!("   {name}: {what}");
    }
    *end == End::Done && verdict.failed.is_empty()
}
