//! Checks every critical section of `pinfold-rseq`, and that every mutant is found.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use clap::Parser;
use pinfold_prove::image::{Arch, Image};
use pinfold_prove::library::copies;
use pinfold_prove::machine::Rules;
use pinfold_prove::probe::{Built, build};
use pinfold_prove::report::{Verdict, check, count_mutants, subject};
use pinfold_prove::scenarios::{NAMES, scenarios};
use pinfold_prove::scene::Subject;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Checks the assembled critical sections against the kernel's rules.
#[derive(Parser)]
#[command(max_term_width = 100)]
struct Arguments {
    /// Checks only the sections with this name.
    #[arg(long, value_name = "NAME")]
    section: Vec<String>,
    /// The disturbances in each run: preemptions, moves to another CPU, signals.
    #[arg(long, value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4))]
    disturbances: u8,
    /// Adds the scenario with three threads.
    #[arg(long)]
    thorough: bool,
    /// Makes no mutants.
    #[arg(long)]
    no_mutants: bool,
    /// Prints the mutants that are no fault, and why.
    #[arg(long)]
    equivalent: bool,
    /// Only compares the sections that are inlined in this library with those that are checked.
    /// May be repeated.
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let begin = Instant::now();
    let mut subjects = Vec::new();
    for library in libraries()? {
        subjects.push(subject(&library)?);
    }
    for library in &arguments.libraries {
        compare(library, &subjects)?;
    }
    if !arguments.libraries.is_empty() {
        return Ok(());
    }
    let named = |name: &&&str| {
        arguments.section.is_empty() || arguments.section.iter().any(|section| section == **name)
    };
    let names: Vec<&str> = NAMES.iter().filter(named).copied().collect();
    let jobs: Vec<(&Subject, &str)> = subjects
        .iter()
        .flat_map(|subject| names.iter().map(move |name| (subject, *name)))
        .collect();
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(0));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((subject, name)) = jobs.get(next.fetch_add(1, Relaxed)) {
                    let (lines, wrong) = one(subject, name, &arguments);
                    let mut faults = faults.lock().expect("no worker panics");
                    println!("{}", lines.join("\n"));
                    *faults += wrong;
                }
            });
        }
    });
    let faults = faults.into_inner().expect("no worker panics");
    println!(
        "{} sections in {:.0} s",
        jobs.len(),
        begin.elapsed().as_secs_f64()
    );
    if faults > 0 {
        bail!("{faults} faults; see the lines above");
    }
    Ok(())
}

/// Returns the libraries to check.
fn libraries() -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for arch in [Arch::X86, Arch::Arm] {
        match build(arch)? {
            Built::Library(library) => libraries.push(library),
            Built::Missing(what) => {
                println!("LEFT OUT: the sections of {}: {what}", arch.name());
            }
        }
    }
    Ok(libraries)
}

/// Prints how often each section is in a library.
fn compare(library: &Path, subjects: &[Subject]) -> Result<()> {
    let name = library.display();
    let bytes = std::fs::read(library).with_context(|| name.to_string())?;
    let image = Image::parse(&bytes)?;
    let same = |subject: &&Subject| subject.image.arch == image.arch;
    let Some(subject) = subjects.iter().find(same) else {
        bail!(
            "the sections of {} are left out, so {name} cannot be compared",
            image.arch.name()
        );
    };
    let known: Vec<_> = NAMES.iter().map(|name| subject.program(name)).collect();
    let counts = copies(&image, &known)?;
    let all: usize = counts.values().sum();
    let each = counts
        .iter()
        .map(|(name, count)| format!("{} {count}", name.trim_start_matches("probe_")));
    println!(
        "{name}: {all} sections, all checked: {}",
        each.collect::<Vec<_>>().join(", ")
    );
    Ok(())
}

/// Checks a section under all rules. Returns lines to print, and the number of faults.
fn one(subject: &Subject, name: &str, arguments: &Arguments) -> (Vec<String>, usize) {
    let arch = subject.image.arch;
    let title = format!("{} {name}", arch.name());
    let all = scenarios(name, arguments.disturbances, arguments.thorough);
    let (mut lines, mut faults) = (Vec::new(), 0);
    for rules in [Rules::Version1, Rules::Version2, Rules::Arm619] {
        if rules == Rules::Arm619 && arch == Arch::X86 {
            continue;
        }
        let at = Instant::now();
        // The bug needs no more than one disturbance.
        let few = scenarios(name, 1, false);
        let scenarios = if rules == Rules::Arm619 { &few } else { &all };
        let Verdict { states, found } = check(subject, rules, scenarios, None);
        let seconds = at.elapsed().as_secs_f64();
        let line = format!("{title}, {rules:?}: {states} states in {seconds:.1} s");
        let is_expected = found.is_some() == (rules == Rules::Arm619);
        faults += usize::from(!is_expected);
        lines.push(match (found, is_expected) {
            (None, true) => format!("{line}, no violation"),
            (None, false) => format!("{line}, FAULT: the kernel's bug is not found"),
            (Some(found), true) => {
                format!("{line}, finds the kernel's bug in `{}`", found.scenario)
            }
            (Some(found), false) => format!(
                "{line}, FAULT in `{}`: {}\n    {:?}",
                found.scenario, found.violation, found.events
            ),
        });
    }
    if arguments.no_mutants {
        return (lines, faults);
    }
    let at = Instant::now();
    let tally = count_mutants(subject, name, arguments.disturbances.min(2));
    let size = subject.program(name).mutable().len();
    lines.push(format!(
        "{title}: {size} instructions, {} mutants: {} found, {} are no fault, in {:.1} s",
        tally.made(),
        tally.found,
        tally.equivalent.len(),
        at.elapsed().as_secs_f64()
    ));
    if arguments.equivalent {
        let equivalent = tally.equivalent.iter();
        lines.extend(equivalent.map(|(what, why)| format!("    {what}: {why}")));
    }
    lines.extend(
        tally
            .missed
            .iter()
            .map(|what| format!("    FAULT, not found: {what}")),
    );
    let wrong = tally.wrong.iter();
    lines.extend(
        wrong.map(|what| format!("    FAULT, found, but a rule calls it no fault: {what}")),
    );
    faults += usize::from(!tally.is_complete());
    (lines, faults)
}
