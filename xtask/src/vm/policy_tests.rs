//! `cargo xtask policy-tests`: numactl's and LTP's tests of memory policies on the machine
//! `nodes4`, each without Pinfold and with Pinfold preloaded.
//!
//! This project holds none of their code. The command downloads their sources, compiles the tests
//! and copies them onto the machine.

use super::arch::Arch;
use super::boot::End;
use super::image::Root;
use super::machines::Machine;
use super::packages::{file, source, tool, unpacked};
use super::plan::{self, Run};
use super::{Boot, Prepared};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs numactl's and LTP's tests of memory policies on the test machine, with and without Pinfold.
///
/// Prints a table. Fails if a test passes without Pinfold and does not pass with Pinfold preloaded.
/// vm/policy-tests.md has the results.
#[derive(clap::Args)]
pub struct Args {
    /// A checkout of LTP to build and use, instead of cloning LTP from GitHub.
    #[arg(long, value_name = "FOLDER")]
    ltp: Option<PathBuf>,
    /// Limits the machine's run time.
    #[arg(long, value_name = "N", default_value_t = 3600)]
    seconds: u64,
    /// Runs only the tests whose names contain one of these words, as in `ltp/mbind`.
    tests: Vec<String>,
}

/// Seconds after which a single test counts as hanging.
const LIMIT: u32 = 600;
/// The lines of each test's output that are shown.
const LINES: u32 = 30;
const LTP: &str = "https://github.com/linux-test-project/ltp";
const LTP_VERSION: &str = "20260529";
/// The folders of LTP whose tests run.
const LTP_FOLDERS: [&str; 5] = [
    "get_mempolicy",
    "mbind",
    "migrate_pages",
    "move_pages",
    "set_mempolicy",
];
/// numactl's scripts that are tests. Its other scripts call these, or need a disk.
const SCRIPTS: [&str; 5] = [
    "bind_range",
    "checkaffinity",
    "checktopology",
    "regress",
    "shmtest",
];
/// numactl's programs that only print something for its scripts.
const HELPERS: [&str; 2] = ["ftok", "pagesize"];
/// Where numactl and its tests lie on the machine.
const NUMACTL: &str = "/policy/numactl";

/// A test: its name, and the shell command that runs it.
struct Test {
    name: String,
    command: String,
}

pub fn main(args: &Args) -> Result<()> {
    let prepared = Prepared::new(Arch::X86, None, None)?;
    let mut root = prepared.root()?;
    // numactl's scripts need bash, and a grep that knows Perl's expressions.
    root.program(Path::new("/bin/bash"), "bin/bash")?;
    root.program(Path::new("/bin/grep"), "policy/bin/grep")?;
    let mut tests = Vec::new();
    for (name, found) in [
        ("numactl", numactl(&prepared.cache, &mut root)),
        ("LTP", ltp(args.ltp.as_deref(), &prepared.cache, &mut root)),
    ] {
        match found {
            Ok(found) => tests.extend(found),
            Err(error) => println!("left out: {name}: {error:#}"),
        }
    }
    tests.retain(|test| chosen(&test.name, &args.tests));
    if tests.is_empty() {
        bail!("there are no tests whose names contain {:?}", args.tests);
    }
    let runs: Vec<_> = tests.iter().flat_map(runs_of).collect();
    let Ok(machine) = Machine::named("nodes4") else {
        bail!("the table of machines has no nodes4");
    };
    let boot = Boot {
        script: plan::script(&runs, &[], None),
        names: runs.iter().map(|run| run.name.clone()).collect(),
        // shmtest and move_pages12 use huge pages.
        kernel_args: "hugepages=64",
        emulator_args: &[],
        limit: Duration::from_secs(args.seconds),
    };
    let (verdict, end, ..) = prepared.boot(&root, machine, &boot)?;
    let worse = table(&tests, &verdict.statuses);
    if end != End::Done {
        bail!("the machine did not end correctly: {end:?}");
    }
    if !worse.is_empty() {
        bail!("passes only without Pinfold: {}", worse.join(", "));
    }
    Ok(())
}

/// Returns whether `name` contains one of `words`. Without words, all names are chosen.
fn chosen(name: &str, words: &[String]) -> bool {
    words.is_empty() || words.iter().any(|word| name.contains(word.as_str()))
}

/// Returns the test's two runs: without Pinfold, and with Pinfold.
fn runs_of(test: &Test) -> [Run; 2] {
    ["without", "with"].map(|how| {
        let mut words = vec![
            "PATH=/policy/bin:/bin:/usr/bin".to_owned(),
            format!("srcdir={NUMACTL}"),
            format!("builddir={NUMACTL}"),
            // The emulated machine is slow.
            "LTP_TIMEOUT_MUL=10".to_owned(),
        ];
        if how == "with" {
            words.push("LD_PRELOAD=/lib/libpinfold.so.0".to_owned());
        }
        // The console is slow, and a test's last lines say why it fails.
        let command = format!(
            "({}) >said 2>&1; s=$?; tail -n {LINES} said; exit $s",
            test.command
        );
        words.extend(["sh", "-c", &command].map(str::to_owned));
        Run {
            name: format!("{}:{how}", test.name),
            limit: LIMIT,
            words,
        }
    })
}

/// Prints the results. Returns the tests that pass only without Pinfold.
fn table<'t>(tests: &'t [Test], statuses: &BTreeMap<String, String>) -> Vec<&'t str> {
    let result = |test: &Test, how: &str| {
        let status = statuses.get(&format!("{}:{how}", test.name));
        match status.map(String::as_str) {
            None => "did not end".to_owned(),
            Some("0") => "passes".to_owned(),
            // The statuses of skipped tests: LTP's and numactl's.
            Some("32" | "77") => "skipped".to_owned(),
            Some("137") => "hangs".to_owned(),
            Some(status) => format!("fails ({status})"),
        }
    };
    println!("\n| test | without | with |\n|---|---|---|");
    let mut worse = Vec::new();
    for test in tests {
        let [without, with] = ["without", "with"].map(|how| result(test, how));
        println!("| `{}` | {without} | {with} |", test.name);
        if without == "passes" && with != "passes" {
            worse.push(test.name.as_str());
        }
    }
    worse
}

/// Compiles numactl's tests and adds them to the machine, with the programs that they call.
fn numactl(cache: &Path, root: &mut Root) -> Result<Vec<Test>> {
    let folder = source(&cache.join("numactl-source"), "numactl")?;
    file(Path::new("/usr/include/numa.h"), "libnuma-dev")?;
    let tools = unpacked(&cache.join("numactl"), &["numactl".to_owned()])?;
    for program in ["numactl", "numastat", "memhog"] {
        let inside = format!("{NUMACTL}/{program}");
        root.program(&tools.join("usr/bin").join(program), &inside[1..])?;
    }
    let mut names: Vec<_> = sources(&folder.join("test"))?;
    names.retain(|name| match compile(&folder, name) {
        Ok(()) => true,
        Err(error) => {
            println!("left out: numactl's {name}: {error:#}");
            false
        }
    });
    for name in &names {
        root.program(&folder.join(name), &format!("{NUMACTL}/test/{name}")[1..])?;
    }
    for script in SCRIPTS.into_iter().chain(["printcpu"]) {
        let inside = format!("{NUMACTL}/test/{script}");
        root.copy(&folder.join("test").join(script), &inside[1..])?;
    }
    names.retain(|name| !HELPERS.contains(&name.as_str()));
    names.extend(SCRIPTS.map(str::to_owned));
    names.sort();
    let test = |name: String| Test {
        command: match name.as_str() {
            // Sets random policies until an alarm kills it: for 20 seconds, with a seed.
            "randmap" => format!("{NUMACTL}/test/randmap 20 1; test $? = 142"),
            _ => format!("cd {NUMACTL}/test && ./{name}"),
        },
        name: format!("numactl/{name}"),
    };
    Ok(names.into_iter().map(test).collect())
}

/// Returns the names of the C programs in `folder`, without `.c`.
fn sources(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        names.extend(name.strip_suffix(".c").map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Compiles numactl's `test/NAME.c` to `NAME`.
fn compile(folder: &Path, name: &str) -> Result<()> {
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-w", "-I.", "-o", name])
        .args([&format!("test/{name}.c"), "util.c", "-lnuma"]);
    crate::run(cc.current_dir(folder).stderr(Stdio::null()))
}

/// Builds LTP's tests of policies and adds them to the machine.
fn ltp(given: Option<&Path>, cache: &Path, root: &mut Root) -> Result<Vec<Test>> {
    tool("automake", "automake")?;
    let folder = match given {
        Some(folder) => folder.to_path_buf(),
        None => clone_ltp(cache)?,
    };
    if !folder.join("configure").is_file() {
        build(&folder, "make", &["autotools"])?;
    }
    if !folder.join("include/config.h").is_file() {
        build(&folder, "./configure", &[])?;
    }
    let mut tests = Vec::new();
    for part in LTP_FOLDERS {
        let inside = format!("testcases/kernel/syscalls/{part}");
        build(&folder, "make", &["-C", &inside])?;
        for name in sources(&folder.join(&inside))? {
            let program = folder.join(&inside).join(&name);
            let runs = fs::metadata(&program)
                .is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o100 != 0);
            if runs {
                root.program(&program, &format!("policy/ltp/{name}"))?;
                tests.push(Test {
                    command: format!("/policy/ltp/{name}"),
                    name: format!("ltp/{name}"),
                });
            }
        }
    }
    Ok(tests)
}

/// Clones LTP below `cache`, unless that was done before. Returns its folder.
fn clone_ltp(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("ltp");
    if folder.is_dir() {
        return Ok(folder);
    }
    let name = folder.display().to_string();
    // git removes the folder of a clone that failed.
    let mut git = Command::new("git");
    git.args(["clone", "--quiet", "--depth", "1", "--branch", LTP_VERSION]);
    let cloned = crate::run(git.args([LTP, &name]).stderr(Stdio::null()));
    cloned.context("cannot clone LTP; give a checkout with --ltp FOLDER")?;
    Ok(folder)
}

/// Runs a step of a build in `folder`. Shows its output only if the step fails.
fn build(folder: &Path, program: &str, words: &[&str]) -> Result<()> {
    let said = Command::new(program)
        .args(words)
        .current_dir(folder)
        .output()
        .with_context(|| format!("cannot start {program} in {}", folder.display()))?;
    if !said.status.success() {
        let why = String::from_utf8_lossy(&said.stderr);
        bail!("{program} {} failed: {}", words.join(" "), why.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_passes_only_without_pinfold_is_named() {
        let test = |name: &str| Test {
            name: name.to_owned(),
            command: String::new(),
        };
        let tests = ["same", "worse", "better", "lost", "skipped"].map(test);
        let statuses = [
            ("same:without", "1"),
            ("same:with", "1"),
            ("worse:without", "0"),
            ("worse:with", "2"),
            ("better:without", "1"),
            ("better:with", "0"),
            ("lost:without", "0"),
            ("skipped:without", "32"),
            ("skipped:with", "77"),
        ];
        let statuses = statuses.map(|(name, status)| (name.to_owned(), status.to_owned()));
        assert_eq!(table(&tests, &statuses.into()), ["worse", "lost"]);
    }

    #[test]
    fn words_choose_tests() {
        let words = ["mbind", "ltp/move"].map(str::to_owned);
        let names = [
            "numactl/mbind_mig_pages",
            "ltp/move_pages01",
            "numactl/move_pages",
        ];
        assert_eq!(names.map(|name| chosen(name, &words)), [true, true, false]);
        assert_eq!(names.map(|name| chosen(name, &[])), [true; 3]);
    }

    #[test]
    fn only_the_second_run_is_preloaded() {
        let test = Test {
            name: "x/y".to_owned(),
            command: "true".to_owned(),
        };
        let preloaded = |run: &Run| run.words.iter().any(|word| word.contains("LD_PRELOAD"));
        let runs = runs_of(&test);
        assert_eq!(runs.each_ref().map(preloaded), [false, true]);
        assert_eq!(runs.map(|run| run.name), ["x/y:without", "x/y:with"]);
    }
}
