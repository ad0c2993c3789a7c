//! `cargo xtask many`: how many cache lines move between the CPUs of an emulated machine, for each
//! operation of an allocator, and why. vm/README.md, "What does not scale", describes it.

mod counts;
mod model;
mod symbols;
mod table;

use super::arch::Arch;
use super::boot::End;
use super::image::Root;
use super::machines::Machine;
use super::packages::tool;
use super::plan::{self, Run};
use super::{Boot, Prepared};
use anyhow::{Context, Result, bail};
use counts::{Report, Row};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Counts the transfers of cache lines between emulated CPUs, and what causes them.
///
/// Runs loads under Pinfold and its peers on emulated machines with 2 to 240 CPUs. vm/README.md
/// says how it counts.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of CPUs, separated by commas.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = ["2", "8", "64", "240"],
        default_value = "2,8,64,240"
    )]
    cpus: Vec<String>,
    /// Allocators, separated by commas: `pinfold-cache`, and those of `pinfold-bench whole`.
    #[arg(
        long,
        value_name = "NAME[=PATH]",
        value_delimiter = ',',
        default_value = "pinfold-cache,pinfold-malloc,glibc,mimalloc,jemalloc,snmalloc,rpmalloc,\
                         tcmalloc"
    )]
    subjects: Vec<String>,
    /// Loads, separated by commas.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = LOADS.map(|load| load.0),
        default_values_t = LOADS.map(|load| load.0.to_owned())
    )]
    loads: Vec<String>,
    /// Object sizes of slab_test's scenarios in bytes, separated by commas.
    #[arg(
        long,
        value_name = "BYTES",
        value_delimiter = ',',
        default_value = "64,1024"
    )]
    sizes: Vec<u32>,
    /// Objects of a thread in slab_test's scenarios, a multiple of 100.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    objects: u32,
    /// The version of Debian's kernel to boot, such as 7.3.
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,
    /// Seconds after which a load is killed.
    #[arg(long, value_name = "N", default_value_t = 300)]
    limit: u32,
    /// Compares the counts on 2 CPUs with the time of the same loads on this machine.
    #[arg(long)]
    clock: bool,
    /// Only checks that the plugin counts what an allocator of known behaviour does.
    #[arg(long, exclusive = true)]
    check: bool,
    /// Writes the counts below bench/runs/.
    #[arg(long)]
    save: bool,
}

/// The subject that is Pinfold's object cache, and the one whose library it is.
const CACHE: (&str, &str) = ("pinfold-cache", "pinfold-malloc");

/// The loads: the name, and the source in bench/loads of those that are programs of their own.
/// `many.c` has the scenarios of slab_test.
const LOADS: [(&str, Option<&str>); 10] = [
    ("single", None),
    ("pair", None),
    ("concurrent", None),
    ("concurrent_pair", None),
    ("remote", None),
    ("one_to_n", None),
    ("larson", Some("larson.cc")),
    ("xmalloc", Some("xmalloc.c")),
    ("mstress", Some("mstress.c")),
    ("rptest", Some("rptest.c")),
];

/// One run of a load under a subject.
struct Cell {
    load: &'static str,
    subject: String,
    /// The size of the objects, in slab_test's scenarios.
    size: Option<u32>,
}

/// A subject and its library.
struct Subject {
    name: String,
    library: PathBuf,
}

impl Subject {
    /// Returns the library's path on the emulated machine.
    fn inside(&self) -> String {
        let name = self.library.file_name().unwrap_or_default();
        format!("many/{}", name.display())
    }
}

pub fn main(args: &Args) -> Result<()> {
    tool("clang", "clang")?;
    let prepared = Prepared::new(Arch::X86, args.kernel.as_deref(), None)?;
    let folder = prepared.cache.join("many");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let lock = File::create(folder.join("lock"))?;
    if lock.try_lock().is_err() {
        bail!(
            "another run of this command uses {}; wait for its end",
            folder.display()
        );
    }
    let plugin = folder.join("plugin.so");
    compile(
        Path::new("vm/many/plugin.c"),
        &plugin,
        &["-shared", "-fPIC"],
    )?;
    let programs = programs(&folder, &args.loads)?;
    if args.check {
        return check(args, &prepared, (&plugin, &programs));
    }
    let subjects = subjects(args)?;
    let cells = cells(args);
    let mut rows = Vec::new();
    for cpus in &args.cpus {
        rows.extend(count(
            args,
            &prepared,
            (&plugin, &programs),
            (&subjects, &cells),
            cpus,
        )?);
    }
    if rows.is_empty() {
        bail!("no load ended; the machine's output is above");
    }
    symbols::name(&mut rows, &subjects)?;
    print!("{}", table::text(&rows));
    let mut error = None;
    if args.clock {
        let programs = folder.join("many");
        let said = model::predict(&mut rows, &subjects, &programs, args.objects)?;
        print!("{}", model::text(&rows, &said));
        error = said.error;
    }
    if args.save {
        println!("saved: {}", counts::save(&rows, error)?.display());
    }
    Ok(())
}

/// Checks that the plugin counts a transfer and a hand-over for each operation of `check.c` if
/// several CPUs work, and none if one CPU works.
fn check(args: &Args, prepared: &Prepared, programs: (&Path, &[PathBuf])) -> Result<()> {
    let library = prepared.cache.join("many/check.so");
    compile(
        Path::new("vm/many/check.c"),
        &library,
        &["-shared", "-fPIC"],
    )?;
    let subject = Subject {
        name: "check".to_owned(),
        library,
    };
    let cells = ["single", "concurrent"].map(|load| Cell {
        load,
        subject: subject.name.clone(),
        size: Some(64),
    });
    let rows = count(args, prepared, programs, (&[subject], &cells), "8")?;
    let mut wrong = Vec::new();
    for cell in &cells {
        let row = rows.iter().find(|row| row.load == cell.load);
        let row = row.with_context(|| format!("{} did not end", cell.load))?;
        let expected = f64::from(u8::from(cell.load == "concurrent"));
        for (op, counts) in [("alloc", row.alloc), ("free", row.free)] {
            for (what, count, expected) in [
                ("transfers", counts.transfers(), expected),
                ("hand-overs", counts.handovers, expected),
                ("locked instructions", counts.locked, 1.0),
            ] {
                let each = counts.each(count);
                println!("{} {op}: {each:.3} {what}, expected {expected}", cell.load);
                // Another CPU may come before its turn when this one waits for an interrupt.
                if (each - expected).abs() > 0.05 {
                    wrong.push(format!("{} {op}", cell.load));
                }
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(()),
        false => bail!("wrong counts: {}; run again at rest", wrong.join(", ")),
    }
}

/// Prepares the libraries by `pinfold-bench`, which leaves out what it cannot get, with a note.
fn subjects(args: &Args) -> Result<Vec<Subject>> {
    let mut names: Vec<&str> = Vec::new();
    for name in &args.subjects {
        let name = if name == CACHE.0 { CACHE.1 } else { name };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let said = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--release", "-p", "pinfold-bench", "--"])
        .args(["whole", "--libraries", "--subjects", &names.join(",")])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !said.status.success() {
        bail!("pinfold-bench cannot prepare the libraries; its errors are above");
    }
    let text = String::from_utf8_lossy(&said.stdout);
    let subject = |line: &str| {
        let (name, library) = line.split_once(' ')?;
        Some(Subject {
            name: name.to_owned(),
            library: library.into(),
        })
    };
    Ok(text.lines().filter_map(subject).collect())
}

fn compile(source: &Path, output: &Path, flags: &[&str]) -> Result<()> {
    let cxx = source
        .extension()
        .is_some_and(|extension| extension == "cc");
    let mut compiler = Command::new(if cxx { "clang++" } else { "clang" });
    compiler
        .args(["-O2", "-DMANY", "-fno-builtin", "-pthread"])
        .args(flags);
    crate::run(compiler.arg(source).arg("-o").arg(output))
}

/// Compiles the loads' programs. Returns their paths.
fn programs(folder: &Path, loads: &[String]) -> Result<Vec<PathBuf>> {
    let own = LOADS
        .iter()
        .filter(|(name, _)| loads.iter().any(|load| load == name));
    let own = own.filter_map(|(name, source)| Some((*name, (*source)?)));
    let mut made = Vec::new();
    for (name, source) in [("many", "many.c")].into_iter().chain(own) {
        let output = folder.join(name);
        compile(&Path::new("bench/loads").join(source), &output, &[])?;
        made.push(output);
    }
    Ok(made)
}

fn cells(args: &Args) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (load, source) in LOADS
        .iter()
        .filter(|(name, _)| args.loads.iter().any(|l| l == name))
    {
        let sizes: Vec<_> = match source {
            None => args.sizes.iter().map(|&size| Some(size)).collect(),
            Some(_) => vec![None],
        };
        for size in sizes {
            // The loads call malloc, so they say nothing about the cache.
            let subjects = args
                .subjects
                .iter()
                .filter(|name| source.is_none() || *name != CACHE.0);
            cells.extend(subjects.map(|subject| Cell {
                load,
                subject: subject.split('=').next().unwrap_or_default().to_owned(),
                size,
            }));
        }
    }
    cells
}

/// Boots a machine with so many CPUs, runs all cells there and returns what the plugin counted.
fn count(
    args: &Args,
    prepared: &Prepared,
    (plugin, programs): (&Path, &[PathBuf]),
    (subjects, cells): (&[Subject], &[Cell]),
    cpus: &str,
) -> Result<Vec<Row>> {
    let folder = prepared.cache.join("root");
    let mut root = Root::new(folder, &prepared.busybox, None, prepared.arch)?;
    for subject in subjects {
        root.program(&subject.library, &subject.inside())?;
    }
    for program in programs {
        let name = program.file_name().unwrap_or_default();
        root.program(program, &format!("many/bin/{}", name.display()))?;
    }
    let run = |(number, cell): (usize, &Cell)| run(args, cell, number, subjects, cpus);
    let runs: Vec<_> = cells.iter().enumerate().filter_map(run).collect();
    let out = prepared.cache.join("many").join(format!("counts-{cpus}"));
    let _ = fs::remove_file(&out);
    let plugin = format!("{},out={}", plugin.display(), out.display());
    let boot = Boot {
        script: plan::script(&runs, &[], None),
        names: runs.iter().map(|run| run.name.clone()).collect(),
        kernel_args: "",
        emulator_args: &["-plugin".to_owned(), plugin],
        limit: Duration::from_secs(24 * 3600),
    };
    let machine = Machine::named(&format!("cpus{cpus}"))?;
    let (verdict, end, [boot, run]) = prepared.boot(&root, machine, &boot)?;
    println!(
        "== {cpus} CPUs: boot {:.0} s, run {:.0} s",
        boot.as_secs_f64(),
        run.as_secs_f64()
    );
    for (name, what) in &verdict.failed {
        println!("left out: {name} on {cpus} CPUs: {what}");
    }
    if end != End::Done {
        println!("note: the machine did not end correctly: {end:?}");
    }
    let text = fs::read_to_string(&out).with_context(|| out.display().to_string())?;
    let reports: Vec<Report> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let cpus = cpus.parse().context("a number of CPUs")?;
    let row = |report| Row::new(report, cells, cpus);
    Ok(reports.into_iter().filter_map(row).collect())
}

/// Returns how a cell runs on the machine, unless its subject has no library.
fn run(args: &Args, cell: &Cell, number: usize, subjects: &[Subject], cpus: &str) -> Option<Run> {
    let is_cache = cell.subject == CACHE.0;
    let library = if is_cache { CACHE.1 } else { &cell.subject };
    let subject = subjects.iter().find(|subject| subject.name == library)?;
    let mut words = vec![
        "LD_BIND_NOW=1".to_owned(),
        format!("LD_PRELOAD=/{}", subject.inside()),
    ];
    let size = cell.size.map(|size| format!(":{size}")).unwrap_or_default();
    match cell.size {
        Some(size) => words.extend([
            "/many/bin/many".to_owned(),
            cell.load.to_owned(),
            size.to_string(),
            args.objects.to_string(),
            cpus.to_owned(),
            number.to_string(),
        ]),
        None => {
            let cpus: u32 = cpus.parse().ok()?;
            // xmalloc starts two threads for each that it is told.
            let threads = if cell.load == "xmalloc" {
                cpus / 2
            } else {
                cpus
            };
            words.extend([format!("/many/bin/{}", cell.load), threads.to_string()]);
            words.extend(["0".to_owned(), number.to_string()]);
        }
    }
    words.extend(is_cache.then(|| "cache".to_owned()));
    Some(Run {
        name: format!("{}{size}:{}", cell.load, cell.subject),
        limit: args.limit,
        words,
    })
}
