//! The musl command: two programs of `bench/musl`, built for musl with each allocator, as static
//! programs.

use crate::args::MuslArgs;
use crate::machine::Machine;
use anyhow::{Context, Result, ensure};
use pinfold_lab::output::Table;
use pinfold_lab::stats::{marked, median, turns};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-musl";
/// The allocators, each with the features that choose it.
const SUBJECTS: [(&str, &str); 4] = [
    ("pinfold-malloc", "pinfold-malloc"),
    ("pinfold-shepherd", "pinfold-malloc,shepherd"),
    ("musl", ""),
    ("mimalloc", "mimalloc"),
];
const PROGRAMS: [(&str, &str); 2] = [
    (
        "readme",
        "the allocation and the add of README.md's program, 2 million times in each of 4 threads",
    ),
    (
        "service",
        "a service on tokio with 2 workers: 64 clients store 409,600 values and read them, by TCP",
    ),
];

/// What a program prints.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Run {
    seconds: f64,
    peak_rss_bytes: f64,
    /// After 3 s without work.
    idle_rss_bytes: f64,
    /// After 10 s without work.
    settled_rss_bytes: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    subject: &'static str,
    program: &'static str,
    /// The medians.
    #[serde(flatten)]
    run: Run,
    rounds: Vec<Run>,
}

/// Measures as `args` say, and delivers the results.
pub fn run(args: &MuslArgs) -> Result<()> {
    let built = SUBJECTS.map(|(subject, features)| build(subject, features));
    let built = built.into_iter().collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for (program, _) in PROGRAMS {
        let mut rounds = vec![Vec::new(); SUBJECTS.len()];
        for round in 0..args.rounds as usize {
            for subject in turns(SUBJECTS.len(), round) {
                rounds[subject].push(start(&built[subject], program)?);
            }
        }
        let subjects = SUBJECTS.iter().map(|(subject, _)| *subject);
        rows.extend(subjects.zip(rounds).map(|(subject, rounds)| Row {
            subject,
            program,
            run: medians(&rounds),
            rounds,
        }));
    }
    (args.output).deliver("musl", &Machine::read(), &rows, || text(&rows))
}

/// Builds the programs with the allocator that `features` choose, and returns the built file.
fn build(subject: &str, features: &str) -> Result<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("musl");
    let target = package.join("../../target/musl-bench").join(subject);
    eprintln!("building for {subject}");
    let status = Command::new("cargo")
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "--target",
            TARGET,
        ])
        .args(["--features", features, "--target-dir"])
        .arg(&target)
        .current_dir(&package)
        // mimalloc is written in C.
        .env("CC_x86_64_unknown_linux_musl", "musl-gcc")
        .status()
        .context("cannot start cargo")?;
    ensure!(
        status.success(),
        "cannot build {} for {subject}; this needs `rustup target add {TARGET}` and musl-gcc",
        package.display()
    );
    Ok(target.join(TARGET).join("release/pinfold-musl"))
}

fn start(file: &Path, program: &str) -> Result<Run> {
    let output = Command::new(file).arg(program).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{} {program} failed: {said}",
        file.display()
    );
    serde_json::from_slice(&output.stdout).context("a program printed no result")
}

fn medians(rounds: &[Run]) -> Run {
    let of = |figure: fn(&Run) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
    Run {
        seconds: of(|run| run.seconds),
        peak_rss_bytes: of(|run| run.peak_rss_bytes),
        idle_rss_bytes: of(|run| run.idle_rss_bytes),
        settled_rss_bytes: of(|run| run.settled_rss_bytes),
    }
}

fn text(rows: &[Row]) -> String {
    let mut text = String::new();
    for (program, about) in PROGRAMS {
        let mebibytes = |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 20));
        let table = Table::of(rows.iter().filter(|row| row.program == program))
            .column("subject", |row| row.subject)
            .column("seconds", |row| {
                let rounds: Vec<_> = row.rounds.iter().map(|run| run.seconds).collect();
                marked(row.run.seconds, 3, &rounds)
            })
            .column("peak MiB", |row| mebibytes(row.run.peak_rss_bytes))
            .column("after 3 s", |row| mebibytes(row.run.idle_rss_bytes))
            .column("after 10 s", |row| mebibytes(row.run.settled_rss_bytes))
            .table();
        text += &format!("\n{program}: {about}\n{table}");
    }
    text
}
