//! One run of one program under one subject.

use super::Settings;
use super::prepare::{self, Cache};
use super::programs::{Call, Program, installed};
use super::redis;
use super::subjects::Subject;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::process::{Command, Stdio};

/// The cost of one run.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Sample {
    /// From start to end.
    pub seconds: f64,
    /// CPU time of all threads and processes, in the kernel too.
    pub cpu_seconds: f64,
    /// The peak of resident memory of the largest process.
    pub peak_rss_bytes: u64,
    /// Resident memory some time after the work. Only for loads, and only in rounds that wait for
    /// it.
    #[serde(skip_deserializing)]
    pub settled_rss_bytes: Option<u64>,
    /// Page faults.
    pub faults: u64,
    /// A hash of the program's output, which must not depend on the subject.
    #[serde(skip)]
    pub output: u64,
}

/// The launcher's report.
#[derive(Debug, Deserialize)]
struct Report {
    #[serde(flatten)]
    sample: Sample,
    exit: i32,
    signal: i32,
    timed_out: bool,
}

pub fn once(
    cache: &Cache,
    program: &Program,
    subject: &Subject,
    settings: Settings,
) -> Result<Sample> {
    let threads = program.threads(settings.threads);
    if program.source.is_some() {
        let call = Call {
            program: cache.bin.join(program.name),
            arguments: vec![threads.to_string(), settings.settle.to_string()],
            ..Call::default()
        };
        let (sample, output) = start(cache, &call, subject, settings)?;
        return of_load(sample, &output);
    }
    let call = program.call(cache, threads)?;
    if program.name == redis::NAME {
        return redis::once(cache, &call, subject, settings);
    }
    program.before(cache)?;
    let (sample, output) = start(cache, &call, subject, settings)?;
    let output = hash(&output);
    Ok(Sample { output, ..sample })
}

/// Makes the sample of a load, without the time that it spent settling, which its last line tells.
fn of_load(mut sample: Sample, output: &[u8]) -> Result<Sample> {
    let output = std::str::from_utf8(output)?;
    ensure!(
        output.starts_with("result "),
        "the load wrote no result line; please report this"
    );
    let (results, settled): (Vec<_>, Vec<_>) = output
        .lines()
        .partition(|line| !line.starts_with("settled "));
    sample.output = hash(results.join("\n").as_bytes());
    if let Some(line) = settled.first() {
        let mut words = line.split_whitespace().skip(1);
        let mut next = || {
            words
                .next()
                .context("its last line is incomplete; please report this")
        };
        sample.settled_rss_bytes = Some(next()?.parse()?);
        sample.seconds -= next()?.parse::<f64>()?;
        sample.cpu_seconds -= next()?.parse::<f64>()?;
        sample.faults = sample.faults.saturating_sub(next()?.parse()?);
    }
    Ok(sample)
}

/// Returns a hash that is the same in every run of this program.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Returns the launcher, with everything that `call` needs to run under `subject`. The launcher
/// writes a report file, and redirects what the program prints to the files `output` and `errors`.
pub fn launcher(
    cache: &Cache,
    call: &Call,
    subject: &Subject,
    settings: Settings,
) -> Result<Command> {
    let launch = prepare::compile_load(cache, "launch", "launch.c", &[])?;
    let _ = fs::remove_file(cache.work.join("report"));
    let mut command = Command::new(launch);
    command
        .arg(cache.work.join("report"))
        .arg(settings.limit.to_string())
        .arg(&subject.library)
        .arg(call.user.map_or("-".to_owned(), |user| user.to_string()))
        .arg("--")
        .arg(&call.program)
        .args(&call.arguments)
        .env_remove("LD_PRELOAD")
        .env("LC_ALL", "C")
        .env("TZ", "UTC")
        .envs(call.environment.iter().copied())
        .envs(subject.variables.iter().cloned())
        .current_dir(&cache.work)
        .stdin(match &call.input {
            Some(path) => Stdio::from(
                File::open(path).with_context(|| format!("cannot read {}", path.display()))?,
            ),
            None => Stdio::null(),
        })
        .stdout(File::create(cache.work.join("output"))?)
        .stderr(File::create(cache.work.join("errors"))?);
    Ok(command)
}

/// Runs `call` to its end. Returns its cost and what the program wrote.
pub fn start(
    cache: &Cache,
    call: &Call,
    subject: &Subject,
    settings: Settings,
) -> Result<(Sample, Vec<u8>)> {
    launcher(cache, call, subject, settings)?.status()?;
    let sample = report(cache, settings)?;
    Ok((sample, fs::read(cache.work.join("output"))?))
}

/// Reads the launcher's report. Fails if the program did not end successfully.
pub fn report(cache: &Cache, settings: Settings) -> Result<Sample> {
    let errors = fs::read(cache.work.join("errors")).unwrap_or_default();
    let errors = String::from_utf8_lossy(&errors);
    let last = errors
        .trim()
        .lines()
        .last()
        .unwrap_or("the program printed no error");
    let text = fs::read_to_string(cache.work.join("report"))
        .with_context(|| format!("the launcher failed: {last}"))?;
    let report: Report = serde_json::from_str(&text)?;
    if report.timed_out {
        bail!(
            "the program did not end within {} s; raise --limit",
            settings.limit
        );
    } else if report.signal != 0 {
        bail!("signal {} ended the program: {last}", report.signal);
    } else if report.exit != 0 {
        bail!("the program ended with status {}: {last}", report.exit);
    }
    Ok(report.sample)
}

/// Runs a helper program to its end, without a subject. Returns what the helper wrote.
pub fn helper<S: AsRef<OsStr>>(tool: &str, arguments: &[S]) -> Result<Vec<u8>> {
    let output = Command::new(installed(tool)?)
        .args(arguments)
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .output()?;
    ensure!(
        output.status.success(),
        "{tool} failed: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn sample() -> Sample {
        let report = r#"{"seconds":3.5,"cpu_seconds":2.5,"peak_rss_bytes":4096,"faults":10}"#;
        serde_json::from_str(report).unwrap()
    }

    /// Runs a shell command under the C library, from a process with 64 MiB of resident memory.
    fn shell(script: &str, limit: u32) -> Result<(Sample, Vec<u8>)> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pinfold-whole-launch-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let cache = Cache::open(Some(&root))?;
        let large = std::hint::black_box(vec![1_u8; 64 << 20]);
        let call = Call {
            program: installed("sh")?,
            arguments: vec!["-c".to_owned(), script.to_owned()],
            ..Call::default()
        };
        let subject = Subject {
            name: "none".to_owned(),
            library: "-".into(),
            is_pinfold: false,
            variables: &[],
        };
        let settings = Settings {
            threads: 1,
            limit,
            settle: 0.0,
        };
        let result = start(&cache, &call, &subject, settings);
        drop(large);
        fs::remove_dir_all(root)?;
        result
    }

    #[test]
    fn a_program_is_not_charged_for_the_memory_of_its_parents() {
        let (sample, output) = shell("echo done", 10).unwrap();
        assert_eq!(output, b"done\n");
        assert!(sample.peak_rss_bytes < 16 << 20, "{sample:?}");
        assert!(sample.peak_rss_bytes > 100 << 10, "{sample:?}");
    }

    #[test]
    fn a_failed_program_is_an_error_that_says_how_it_ended() {
        for (script, said) in [
            ("echo no such thing >&2; exit 3", "status 3: no such thing"),
            ("kill -SEGV $$", "signal 11"),
            ("sleep 10", "within 1 s"),
        ] {
            let error = shell(script, 1).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_load_is_not_charged_for_its_settling() {
        let sample = of_load(sample(), b"result 1f\nsettled 8192 2.0 0.5 3\n").unwrap();
        assert_eq!((sample.seconds, sample.cpu_seconds), (1.5, 2.0));
        assert_eq!((sample.faults, sample.settled_rss_bytes), (7, Some(8192)));
    }

    #[test]
    fn the_settled_memory_is_not_part_of_the_output() {
        let one = of_load(sample(), b"result 1f\nsettled 8192 2.0 0.5 3\n").unwrap();
        let without = of_load(sample(), b"result 1f\n").unwrap();
        let other = of_load(sample(), b"result 20\n").unwrap();
        assert_eq!(one.output, without.output);
        assert_ne!(one.output, other.output);
        assert_eq!(without.settled_rss_bytes, None);
    }

    #[test]
    fn a_load_without_result_is_an_error() {
        assert!(of_load(sample(), b"").is_err());
        assert!(of_load(sample(), b"result 1\nsettled 8192 2.0\n").is_err());
    }
}
