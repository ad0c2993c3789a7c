//! Records a program, and runs it under the oracle.

use super::plan::{self, Style};
use super::recording::Recording;
use crate::whole::Settings;
use crate::whole::launch::{self, Sample};
use crate::whole::prepare::{self, Cache};
use crate::whole::programs::Program;
use crate::whole::redis;
use crate::whole::subjects::Subject;
use anyhow::{Context, Result, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const COMPILE: &str = "clang -O2 -std=gnu11 -fno-builtin -fPIC -shared -pthread";
/// The variable that tells the libraries their folder.
const FOLDER: &str = "PINFOLD_LIMIT";
/// An arena below this size has no huge page.
const HUGE_PAGE: u64 = 2 << 20;

/// The libraries for LD_PRELOAD. The paths of recorder and oracle have the same length.
pub struct Libraries {
    recorder: PathBuf,
    oracle: PathBuf,
    lists: PathBuf,
}

impl Libraries {
    pub fn prepare(cache: &Cache) -> Result<Libraries> {
        let compile = |name: &str| -> Result<PathBuf> {
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("limit");
            let output = cache.lib.join(format!("limit-{name}.so"));
            let mut arguments: Vec<String> = COMPILE.split(' ').map(str::to_owned).collect();
            // The headers are arguments, so that a change of a header compiles the library again.
            let headers = ["common.h", "names.h"]
                .iter()
                .take(if name == "lists" { 1 } else { 2 });
            for header in headers {
                arguments.push("-include".to_owned());
                arguments.push(sources.join(header).display().to_string());
            }
            arguments.push(sources.join(format!("{name}.c")).display().to_string());
            prepare::compile(&arguments, &output)?;
            Ok(output)
        };
        Ok(Libraries {
            recorder: compile("record")?,
            oracle: compile("oracle")?,
            lists: compile("lists")?,
        })
    }
}

/// What a recording says about a program, and the oracles that replay it.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Allocations and reallocations of all processes.
    pub allocations: u64,
    /// The peak of live bytes in the process with the highest one.
    pub peak_live: u64,
    pub oracles: Vec<Oracle>,
    /// Why there is no recording.
    pub note: Option<String>,
}

impl Recorded {
    /// Removes the plans.
    pub fn remove(&self) {
        for oracle in &self.oracles {
            let _ = fs::remove_dir_all(&oracle.folder);
        }
    }
}

/// An oracle: the one with a plan for each process of a program, or the allocator without
/// bookkeeping.
#[derive(Debug)]
pub struct Oracle {
    pub subject: Subject,
    /// `None` means lists.
    style: Option<Style>,
    pub huge: bool,
    folder: PathBuf,
}

/// What an oracle reports of one run.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// The share of the recorded allocations that glibc did not serve.
    pub share: f64,
    /// What the process with the highest peak had resident beside the heap.
    pub beside_heap: u64,
}

/// Makes an empty folder that processes of all users may write in. The names of all folders have
/// the same length.
fn folder(cache: &Cache, name: &str) -> Result<PathBuf> {
    let path = cache.work.join("limit").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o777))?;
    Ok(path)
}

fn subject(name: &str, library: &Path, folder: &Path) -> Subject {
    let variable = (FOLDER.to_owned(), folder.display().to_string());
    Subject {
        name: name.to_owned(),
        library: library.to_owned(),
        is_pinfold: false,
        // A program has at most five of these, and the process ends after the measurement.
        variables: Vec::leak(vec![variable]),
    }
}

/// Returns the files in `folder` whose names end with `extension`.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|its| its == extension) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Makes the oracles of a program.
pub fn record(
    cache: &Cache,
    libraries: &Libraries,
    program: &Program,
    settings: Settings,
) -> Result<Recorded> {
    let mut recorded = match plans(cache, libraries, program, settings) {
        Ok(recorded) => recorded,
        Err(error) => Recorded {
            note: Some(format!("{error:#}")),
            ..Recorded::default()
        },
    };
    for huge in [false, true] {
        let folder = folder(cache, if huge { "lists-huge" } else { "lists" })?;
        recorded.oracles.push(Oracle {
            subject: subject("oracle", &libraries.lists, &folder),
            style: None,
            huge,
            folder,
        });
    }
    Ok(recorded)
}

/// Runs a program under the recorder, and writes its plans.
fn plans(
    cache: &Cache,
    libraries: &Libraries,
    program: &Program,
    settings: Settings,
) -> Result<Recorded> {
    let records = folder(cache, "record")?;
    let recorder = subject("recorder", &libraries.recorder, &records);
    // Recording is many times slower than the program.
    let slow = Settings {
        limit: settings.limit * 10,
        ..settings
    };
    launch::once(cache, program, &recorder, slow).context("it failed under the recorder")?;
    let mut recordings: Vec<Recording> = Vec::new();
    let mut recorded = Recorded::default();
    for path in files(&records, "rec")? {
        let recording = Recording::read(&path)?;
        fs::remove_file(path)?;
        recorded.allocations += recording.allocations();
        recorded.peak_live = recorded.peak_live.max(recording.peak_live());
        // Of processes with the same command line, the one with the most calls has a plan.
        let same = |other: &&mut Recording| other.process == recording.process;
        match recordings.iter_mut().find(same) {
            Some(other) if other.events.len() >= recording.events.len() => {}
            Some(other) => *other = recording,
            None => recordings.push(recording),
        }
    }
    fs::remove_dir_all(records)?;
    ensure!(!recordings.is_empty(), "no process of it was recorded");
    let is_single = |recording| plan::single(recording).is_some();
    let mut styles = vec![Style::Recent];
    if recordings.iter().any(is_single) {
        styles.push(Style::Packed);
    }
    for style in styles {
        let mut plans = Vec::new();
        for recording in &recordings {
            let style = if is_single(recording) {
                style
            } else {
                Style::Recent
            };
            plans.push(plan::plan(recording, style)?);
        }
        let has_huge = plans.iter().any(|plan| plan.bytes >= HUGE_PAGE);
        for huge in [false, true].into_iter().filter(|huge| has_huge || !huge) {
            let folder = folder(cache, &format!("plan-{}", recorded.oracles.len()))?;
            for plan in &plans {
                plan.write(&folder, huge)?;
            }
            recorded.oracles.push(Oracle {
                subject: subject("oracle", &libraries.oracle, &folder),
                style: Some(style),
                huge,
                folder,
            });
        }
    }
    Ok(recorded)
}

impl Oracle {
    /// Returns what is special about the plan.
    pub fn name(&self) -> &'static str {
        match (self.style, self.huge) {
            (Some(Style::Packed), false) => "packed",
            (Some(Style::Packed), true) => "packed, huge pages",
            (Some(Style::Recent), false) => "recent",
            (Some(Style::Recent), true) => "recent, huge pages",
            (None, false) => "lists",
            (None, true) => "lists, huge pages",
        }
    }

    /// Runs a program once. `allocations` is how many the recording has. The time to map the plan
    /// and to write the report is subtracted, because no allocator needs it.
    pub fn once(
        &self,
        cache: &Cache,
        program: &Program,
        settings: Settings,
        allocations: u64,
    ) -> Result<(Sample, Served)> {
        for path in files(&self.folder, "out")? {
            fs::remove_file(path)?;
        }
        let mut sample = launch::once(cache, program, &self.subject, settings)?;
        let (mut unplanned, mut setup_ns, mut largest) = (0, 0, (0, 0));
        for path in files(&self.folder, "out")? {
            let [missed, own, peak, setup] = numbers(&fs::read_to_string(&path)?)
                .with_context(|| format!("{} is incomplete", path.display()))?;
            unplanned += missed;
            setup_ns += setup;
            largest = largest.max((peak, own));
        }
        ensure!(
            largest.0 > 0,
            "the oracle wrote no report, because the program did not exit"
        );
        // The requests to redis begin after the setup.
        if program.name != redis::NAME {
            sample.seconds -= setup_ns as f64 / 1e9;
        }
        let missed = unplanned as f64 / allocations.max(1) as f64;
        let served = Served {
            share: (1.0 - missed).max(0.0),
            beside_heap: largest.0.saturating_sub(largest.1),
        };
        Ok((sample, served))
    }
}

fn numbers(text: &str) -> Option<[u64; 4]> {
    let numbers: Option<Vec<u64>> = text
        .split_whitespace()
        .map(|word| word.parse().ok())
        .collect();
    numbers?.try_into().ok()
}
