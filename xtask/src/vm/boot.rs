//! Runs the emulator and reads the machine's output.

use super::arch::Arch;
use super::machines::Machine;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How the machine's run ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The machine reported its end.
    Done,
    /// The emulator ended without that report.
    Stopped,
    /// The machine took longer than its limit.
    Hung,
    /// A CPU of the machine stood still.
    StoodStill,
    /// The kernel panicked. Holds its message.
    Panicked(String),
}

/// What the machine's output says about the tests.
#[derive(Default)]
pub struct Verdict {
    /// Number of tests that passed.
    pub passed: usize,
    /// Tests that did not pass, each with what happened.
    pub failed: Vec<(String, String)>,
    /// The exit status of each test that ended.
    pub statuses: BTreeMap<String, String>,
    /// Whether a test began.
    has_begun: bool,
    /// When the first test began.
    pub began: Option<Instant>,
    /// The test that is running.
    running: Option<String>,
    /// When the machine must have ended that test, unless the machine itself stands still.
    due: Option<Instant>,
    waiting: BTreeSet<String>,
    done: bool,
    panic: Option<String>,
    stands_still: bool,
}

impl Verdict {
    /// Makes a verdict that expects these tests.
    pub fn new(names: impl Iterator<Item = String>) -> Self {
        Verdict {
            waiting: names.collect(),
            ..Default::default()
        }
    }

    /// Reads a line of output. Returns the text to show for it.
    pub fn line(&mut self, line: &str) -> Option<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["@vm", "begin", name, limit] => {
                self.has_begun = true;
                self.began.get_or_insert_with(Instant::now);
                self.running = Some((*name).to_owned());
                let limit = limit.parse().map(Duration::from_secs).ok();
                self.due = limit.map(|limit| Instant::now() + limit + LATE);
                Some(format!("-- {name}"))
            }
            ["@vm", "end", name, status, begin, end] => {
                (self.running, self.due) = (None, None);
                Some(self.ended(name, status, seconds(begin, end)))
            }
            ["@vm", "done", _] => {
                self.done = true;
                None
            }
            _ => {
                if self.panic.is_none() && line.contains("Kernel panic - ") {
                    self.panic = Some(line.to_owned());
                }
                self.stands_still |= stuck_for(line).is_some_and(|stuck| stuck >= STILL);
                Some(line.to_owned())
            }
        }
    }

    fn ended(&mut self, name: &str, status: &str, seconds: f64) -> String {
        let expected = self.waiting.remove(name);
        self.statuses.insert(name.to_owned(), status.to_owned());
        let what = match (expected, status) {
            (false, _) => "was not requested".to_owned(),
            (true, "0") => {
                self.passed += 1;
                return format!("-- {name}: passed, {seconds:.1} s");
            }
            (true, "137") => {
                format!("killed after {seconds:.0} s: it hangs, or the machine is out of memory")
            }
            (true, _) => format!("failed with status {status}"),
        };
        self.failed.push((name.to_owned(), what.clone()));
        format!("-- {name}: {what}")
    }

    /// Returns the names of the tests that ended, for vm/init, which leaves them out.
    fn ended_tests(&self) -> String {
        self.statuses
            .keys()
            .map(|name| format!("{name},"))
            .collect()
    }

    /// Adds the tests that did not end.
    fn finish(&mut self) {
        let running = self.running.take();
        for name in std::mem::take(&mut self.waiting) {
            let what = if running.as_ref() == Some(&name) {
                "was running when the machine ended"
            } else {
                "did not run"
            };
            self.failed.push((name, what.to_owned()));
        }
    }
}

fn seconds(begin: &str, end: &str) -> f64 {
    let number = |text: &str| text.parse::<f64>().unwrap_or(0.0);
    number(end) - number(begin)
}

/// How often a machine is booted whose kernel does not reach the first test. On a busy host, the
/// emulator's timers come late, and the kernel's start may hang or panic.
const BOOTS: usize = 3;
/// How long a kernel may take to reach the first test.
const START: Duration = Duration::from_secs(120);
/// How much longer it may take for each CPU.
const START_OF_CPU: Duration = Duration::from_secs(2);

/// How often a machine is booted of which a CPU stands still.
pub const BOOTS_OF_STILL: usize = 3;
/// How long after a test's limit the machine must have killed the test. A machine that has not done
/// so stands still as a whole.
const LATE: Duration = Duration::from_secs(60);

/// For how many seconds of its own time a CPU of the machine stands still before the machine counts
/// as dead. A CPU that the host does not run also seems to stand still, but not for so long.
const STILL: u32 = 100;

/// Returns for how many seconds a CPU stood still, if `line` is the kernel's message of that.
fn stuck_for(line: &str) -> Option<u32> {
    let (_, time) = line
        .split_once("soft lockup - CPU#")?
        .1
        .split_once(" stuck for ")?;
    time.split_once("s!")?.0.parse().ok()
}

/// Boots a machine, shows its output, and waits until it ends, for at most `limit` each time that
/// it boots. `emulator` returns the emulator's command line. It gets the names of the tests that
/// must not run again.
///
/// The emulator sometimes loses an interrupt between its CPUs. Then a CPU of the machine waits in
/// the kernel for another CPU, without end. No program can bring a CPU into this state, so the
/// machine is booted again, at most [`BOOTS_OF_STILL`] times, for the tests that had not ended.
pub fn run(
    emulator: impl Fn(&str) -> Command,
    verdict: &mut Verdict,
    limit: Duration,
    cpus: u32,
) -> Result<End> {
    let start = START + START_OF_CPU * cpus;
    let (mut boots, mut still) = (0, 0);
    let end = loop {
        boots += 1;
        let mut command = emulator(&verdict.ended_tests());
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = child.with_context(|| format!("cannot start {name}"))?;
        let lines = lines(child.stdout.take().context("the emulator has no output")?);
        let end = follow(&lines, verdict, Instant::now(), [start.min(limit), limit]);
        stop(&mut child, end == End::Done)?;
        still += usize::from(end == End::StoodStill);
        if end == End::StoodStill && still < BOOTS_OF_STILL {
            let running = verdict.running.take();
            println!("== a CPU of the machine stood still in {running:?}; booting again");
            (verdict.stands_still, verdict.has_begun) = (false, false);
            verdict.due = None;
            continue;
        }
        if verdict.has_begun || end == End::Done || boots == BOOTS {
            break end;
        }
        println!("== the kernel did not reach a test ({end:?}); booting again");
    };
    verdict.finish();
    Ok(end)
}

/// Starts a thread that reads `output`. Returns the receiver of its lines.
fn lines(output: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while output
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if sender.send(text).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Reads lines until the machine ends, for at most `limit` after `begin`, or for `start` until the
/// first test.
fn follow(
    lines: &Receiver<String>,
    verdict: &mut Verdict,
    begin: Instant,
    [start, limit]: [Duration; 2],
) -> End {
    loop {
        let most = if verdict.has_begun { limit } else { start };
        let end = begin + most;
        let until = verdict.due.map_or(end, |due| due.min(end));
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if let Some(shown) = verdict.line(&line) {
                    let _ = writeln!(std::io::stdout(), "{shown}");
                }
                if verdict.stands_still {
                    return End::StoodStill;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                return match verdict.due.is_some_and(|due| due <= Instant::now()) {
                    true => End::StoodStill,
                    false => End::Hung,
                };
            }
            Err(RecvTimeoutError::Disconnected) => {
                return match (verdict.panic.take(), verdict.done) {
                    (Some(words), _) => End::Panicked(words),
                    (None, true) => End::Done,
                    (None, false) => End::Stopped,
                };
            }
        }
    }
}

/// Waits for the emulator, which has closed its output. Kills it first if it has not ended.
fn stop(child: &mut Child, ended: bool) -> Result<()> {
    if !ended {
        let _ = child.kill();
    }
    child.wait()?;
    Ok(())
}

/// Returns the emulator's command line. vm/init leaves the tests in `ended` out.
pub fn emulator(
    arch: Arch,
    machine: &Machine,
    kernel: &Path,
    image: &Path,
    kernel_args: &str,
    ended: &str,
) -> Command {
    let mut qemu = Command::new(arch.emulator().0);
    // `thread=multi` gives each emulated CPU a thread of its own.
    let options = "-accel tcg,thread=multi -display none -nodefaults -no-user-config -no-reboot \
                   -serial stdio -net none";
    qemu.args(arch.board()).args(options.split(' '));
    // A panic reboots at once, and `-no-reboot` makes a reboot end the emulator. Without
    // mitigations the emulator is twice as fast. The kernel moves no pages between nodes, so that
    // tests find their memory where it was allocated. The self-tests of the kernel's ciphers, and
    // on x86 its test of the timer, may fail at the emulator's speed.
    let line = format!(
        "console={} quiet panic=-1 mitigations=off nokaslr numa_balancing=disable cryptomgr.notests{} {} vm_ended={ended} {kernel_args}",
        arch.console(),
        if arch == Arch::X86 {
            " no_timer_check"
        } else {
            ""
        },
        machine.kernel
    );
    qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(image);
    qemu.arg("-append").arg(line.trim());
    processors(&mut qemu, arch, machine);
    nodes(&mut qemu, machine);
    qemu
}

/// Adds the CPUs. If the machine has absent nodes, only the first CPU and those of present nodes
/// are plugged in.
fn processors(qemu: &mut Command, arch: Arch, machine: &Machine) {
    let places = machine.places();
    let holes = machine.nodes.iter().any(|node| !node.there);
    let device = arch.cpu_device().filter(|_| holes);
    let Some(device) = device else {
        qemu.arg("-smp")
            .arg(format!("{places},sockets={places},cores=1,threads=1"));
        return;
    };
    qemu.arg("-smp").arg(format!(
        "1,maxcpus={places},sockets={places},cores=1,threads=1"
    ));
    for (_, first, node) in machine.numbered().filter(|(_, _, node)| node.there) {
        for cpu in (first..first + node.cpus).filter(|cpu| *cpu != 0) {
            qemu.arg("-device")
                .arg(format!("{device},socket-id={cpu},core-id=0,thread-id=0"));
        }
    }
}

fn nodes(qemu: &mut Command, machine: &Machine) {
    let memory: u32 = machine.nodes.iter().map(|node| node.mebibytes).sum();
    qemu.arg("-m").arg(format!("{memory}M"));
    for (id, first, node) in machine.numbered() {
        let mut words = format!("node,nodeid={id}");
        if node.cpus > 0 {
            words += &format!(",cpus={first}-{}", first + node.cpus - 1);
        }
        if node.mebibytes > 0 {
            let backend = format!("memory-backend-ram,id=m{id},size={}M", node.mebibytes);
            qemu.args(["-object", &backend]);
            words += &format!(",memdev=m{id}");
        }
        qemu.args(["-numa", &words]);
    }
    let pairs = (0..machine.distances.len())
        .flat_map(|from| (0..machine.distances.len()).map(move |to| (from, to)));
    for (from, to) in pairs {
        let value = machine.distance(from, to);
        qemu.args(["-numa", &format!("dist,src={from},dst={to},val={value}")]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(lines: &[&str]) -> (Verdict, End) {
        let mut verdict = Verdict::new(["one", "two"].map(str::to_owned).into_iter());
        let (sender, receiver) = channel();
        lines
            .iter()
            .for_each(|&line| sender.send(line.to_owned()).unwrap());
        drop(sender);
        let limit = Duration::from_secs(5);
        let end = follow(&receiver, &mut verdict, Instant::now(), [limit; 2]);
        verdict.finish();
        (verdict, end)
    }

    #[test]
    fn tests_must_pass_and_the_machine_must_report_its_end() {
        let good = ["@vm begin one 9", "x", "@vm end one 0 1.0 2.5"];
        let (found, end) = verdict(
            &[
                &good[..],
                &["@vm begin two 9", "@vm end two 0 2 3", "@vm done 0"],
            ]
            .concat(),
        );
        assert_eq!((found.passed, found.failed, end), (2, vec![], End::Done));
        let (found, end) = verdict(&[&good[..], &["@vm begin two 9"]].concat());
        assert_eq!((found.passed, end), (1, End::Stopped));
        assert_eq!(found.failed[0].1, "was running when the machine ended");
        let (found, end) = verdict(&[&good[..], &["@vm done 0"]].concat());
        assert_eq!(
            (found.failed[0].1.as_str(), end),
            ("did not run", End::Done)
        );
        let (found, _) = verdict(&["@vm end one 101 1 2", "@vm end two 137 1 121"]);
        assert_eq!(found.failed.len(), 2);
        let panic = "[    1.0] Kernel panic - not syncing: No working init found.";
        assert_eq!(verdict(&[panic]).1, End::Panicked(panic.to_owned()));
    }

    #[test]
    fn a_machine_that_does_not_end_a_test_after_its_limit_stands_still() {
        let mut verdict = Verdict::new(["one"].map(str::to_owned).into_iter());
        let (sender, receiver) = channel();
        sender.send("@vm begin one 0".to_owned()).unwrap();
        let begin = Instant::now();
        verdict.line(&receiver.recv().unwrap());
        assert!(verdict.due.unwrap() >= begin + LATE);
        verdict.due = Some(begin);
        let limit = Duration::from_secs(5);
        let end = follow(&receiver, &mut verdict, begin, [limit; 2]);
        assert_eq!(end, End::StoodStill);
        sender.send("@vm end one 0 1 2".to_owned()).unwrap();
        verdict.line(&receiver.recv().unwrap());
        let end = follow(&receiver, &mut verdict, begin, [Duration::ZERO; 2]);
        assert_eq!(end, End::Hung);
    }

    /// Runs a machine that is a shell script. The script gets the path of a file that does not
    /// exist at the first boot, and the names of the tests that ended.
    fn run_script(script: &str) -> (Verdict, End) {
        let mark = std::env::temp_dir().join(format!(
            "xtask-boot-{}-{}",
            std::process::id(),
            script.len()
        ));
        let _ = std::fs::remove_file(&mark);
        let emulator = |ended: &str| {
            let mut emulator = Command::new("sh");
            emulator.args(["-c", script]).arg(&mark).arg(ended);
            emulator
        };
        let mut verdict = Verdict::new(["one", "two"].map(str::to_owned).into_iter());
        let end = run(emulator, &mut verdict, Duration::from_secs(20), 1).unwrap();
        std::fs::remove_file(&mark).unwrap();
        (verdict, end)
    }

    #[test]
    fn a_machine_that_reaches_no_test_is_booted_again() {
        let (verdict, end) = run_script(
            "[ -e \"$0\" ] && printf '@vm begin one 9\n@vm end one 0 1 2\n@vm done 0\n'; touch \"$0\"",
        );
        assert_eq!((verdict.passed, end), (1, End::Done));
    }

    #[test]
    fn a_machine_that_stands_still_is_booted_again_for_the_other_tests() {
        const STILL: &str = "[ 1.0] watchdog: BUG: soft lockup - CPU#1 stuck for 105s! [two:9]";
        assert_eq!(
            (stuck_for(STILL), stuck_for("CPU#1 stuck for 105s!")),
            (Some(105), None)
        );
        let first = format!(
            "printf '@vm begin one 9\n@vm end one 0 1 2\n@vm begin two 9\n{STILL}\n'; exec sleep 20"
        );
        let second =
            "[ \"$1\" = one, ] && printf '@vm begin two 9\n@vm end two 0 1 2\n@vm done 0\n'";
        let (verdict, end) = run_script(&format!(
            "if [ ! -e \"$0\" ]; then touch \"$0\"; {first}; fi; {second}"
        ));
        assert_eq!(
            (verdict.passed, end, verdict.failed),
            (2, End::Done, vec![])
        );
        let again = format!("touch \"$0\"; printf '@vm begin two 9\n{STILL}\n'; exec sleep 20");
        let (verdict, end) = run_script(&again);
        let what = ["did not run", "was running when the machine ended"];
        let what = ["one", "two"]
            .map(str::to_owned)
            .into_iter()
            .zip(what.map(str::to_owned));
        assert_eq!((verdict.failed, end), (what.collect(), End::StoodStill));
    }
}
