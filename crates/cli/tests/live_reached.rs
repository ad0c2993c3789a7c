//! Which processes the commands reach, and what a forked child inherits.
//!
//! The programs are this test itself, run by `pinfold run` in a role that an environment variable
//! names. Some tests need the right to open the memory of another process
//! (`PTRACE_MODE_ATTACH`), and return early without it.

mod program;
mod shown;

use pinfold::internal::segment::{Mailbox, Request, SET};
use pinfold_malloc::changeable;
use pinfold_rseq::Backend;
use program::{Program, ROLE, RUN, eventually, fork_child, in_role};
use serde_json::Value;
use shown::pinfold as run;
use std::fs::{self, File};
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a program in a role lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(120);
/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// A user without rights: `nobody`.
const NOBODY: u32 = 65534;

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    // Blocks of a size that nothing else has.
    let kept: Vec<Vec<u8>> = (0..1000).map(|_| black_box(vec![1; 3000])).collect();
    let end = Instant::now() + LIFE;
    match role.as_str() {
        "sleeps" => ready(),
        "has idle children" => {
            fork_waiting("closed", || {
                // SAFETY: nothing uses a descriptor from 3 on afterwards.
                unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
            });
            fork_waiting("strict", || {
                // SAFETY: from here on, this process only reads the pipe of its standard input.
                unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
            });
            let parent = fork_waiting("parent", || {
                fork_waiting("orphan", || {});
                // SAFETY: ends this process without its exit handlers.
                unsafe { libc::_exit(0) };
            });
            // SAFETY: the child is this process's own.
            unsafe { libc::waitpid(parent, null_mut(), 0) };
            ready();
        }
        "spins" => {
            ready();
            while Instant::now() < end {
                for _ in 0..1_000_000 {
                    drop(black_box(Vec::<u8>::with_capacity(black_box(100))));
                }
            }
        }
        "calls seldom" => {
            ready();
            while Instant::now() < end {
                drop(black_box(Vec::<u8>::with_capacity(black_box(100))));
                sleep(Duration::from_millis(1));
            }
        }
        "has a child without rights" => {
            let parent = std::process::id();
            let inherited = Inherited::find();
            fork_waiting("child", move || {
                drop_rights();
                println!("reached {}", inherited.ask(parent));
                ready();
            });
            while Instant::now() < end {
                let blocks: Vec<Vec<u8>> = (0..3000).map(|_| black_box(vec![1; 200])).collect();
                drop(black_box(blocks));
                sleep(Duration::from_millis(5));
            }
        }
        other => panic!("there is no role {other}"),
    }
    wait();
    drop(black_box(kept));
}

fn ready() {
    println!("ready");
}

/// Waits in a read of the standard input, which ends with the test.
fn wait() {
    let mut byte = 0u8;
    // SAFETY: `byte` is writable.
    while unsafe { libc::read(0, (&raw mut byte).cast(), 1) } > 0 {}
    // SAFETY: the system call ends this thread, the only one. A strict filter permits it.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

/// Starts a child that calls `prepare` and then waits. Prints and returns its number.
fn fork_waiting(word: &str, prepare: impl FnOnce()) -> libc::pid_t {
    fork_child(word, || {
        prepare();
        wait();
    })
}

/// What a child inherits of its parent's mailbox.
struct Inherited {
    /// Where the mailbox is mapped.
    pages: Vec<usize>,
    /// The descriptors of Pinfold's files.
    descriptors: Vec<i32>,
}

impl Inherited {
    fn find() -> Inherited {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let is_mailbox = |line: &&str| line.contains("pinfold-mailbox");
        let start = |line: &str| usize::from_str_radix(line.split_once('-').unwrap().0, 16);
        let pages = maps.lines().filter(is_mailbox);
        let entries = fs::read_dir("/proc/self/fd").unwrap();
        let is_ours = |path: &std::path::Path| {
            fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("memfd:pinfold"))
        };
        let paths = entries.map(|entry| entry.unwrap().path());
        Inherited {
            pages: pages.map(|line| start(line).unwrap()).collect(),
            descriptors: paths
                .filter(|path| is_ours(path))
                .map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap())
                .collect(),
        }
    }

    /// Asks the parent for a change in each way. Returns how many descriptors let this process map
    /// or open a file for writing.
    fn ask(&self, parent: u32) -> usize {
        let (decay, _) = changeable::find("decay").unwrap();
        let post = |at: *mut libc::c_void| {
            // SAFETY: a mailbox is mapped here, and all its fields are atomics.
            let mailbox: &Mailbox = unsafe { &*at.cast() };
            let request = Request::new(parent, SET + decay as u32, 60_000);
            mailbox.post(request, 77_777);
        };
        assert!(!self.pages.is_empty() && self.descriptors.len() >= 2);
        for &page in &self.pages {
            post(page as *mut libc::c_void);
        }
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: the kernel chooses the place.
        let map = |fd| unsafe { libc::mmap(null_mut(), 4096, protection, flags, fd, 0) };
        let mut reached = 0;
        for &fd in &self.descriptors {
            let path = format!("/proc/self/fd/{fd}");
            let opened = File::options().read(true).write(true).open(path);
            let fds = [Some(fd), opened.as_ref().ok().map(AsRawFd::as_raw_fd)];
            for at in fds.into_iter().flatten().map(map) {
                if at != libc::MAP_FAILED {
                    reached += 1;
                    post(at);
                }
            }
        }
        reached
    }
}

/// Gives up root's rights. The process may still look at its own `/proc/self`.
fn drop_rights() {
    // SAFETY: the calls use no memory of this process.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
    }
}

/// Starts a program in a role.
fn start(role: &str) -> Program {
    Program::start(in_role(&RUN, role).env("PINFOLD_SHEPHERD", "off"))
}

/// Returns whether this test may open the program's memory.
fn is_traceable(program: &Program) -> bool {
    File::open(format!("/proc/{}/mem", program.pid())).is_ok()
}

/// Runs a command that must succeed, with `--json`.
fn json(words: &[&str]) -> Value {
    let (out, error, code) = run(&[words, &["--json"]].concat());
    assert_eq!(code, Some(0), "{words:?}: {error}");
    serde_json::from_str(&out).unwrap()
}

fn decay(pid: &str) -> Value {
    json(&["set", pid])["settings"]["decay_seconds"].clone()
}

/// Idle children of servers: with closed descriptors, in a sandbox that forbids almost all calls,
/// and one whose parent has ended.
#[test]
fn idle_children_are_shown_at_the_first_look() {
    let program = start("has idle children");
    let children = ["closed", "strict", "orphan"].map(|word| program.number(word));
    let list = json(&["list"]);
    let (_, said, _) = run(&["list"]);
    for pid in children {
        let rows = list["processes"].as_array().unwrap();
        let row = rows.iter().find(|row| row["pid"] == pid);
        if is_traceable(&program) {
            let row = row.unwrap_or_else(|| panic!("{pid} is not shown: {said}"));
            assert!(row["held_bytes"].as_u64() >= Some(3_000_000), "{row}");
        } else {
            assert!(said.contains("kernel.yama.ptrace_scope"), "{said}");
        }
    }
    for (pid, filter) in children.into_iter().zip([0, 1, 0]) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let is_so = |line: String| status.lines().any(|own| own.starts_with(&line));
        assert!(
            is_so("State:\tS".into()) && is_so(format!("Seccomp:\t{filter}")),
            "{status}"
        );
    }
}

/// The fast path of malloc looks for no requests, and a program with one thread has no shepherd.
/// Without restartable sequences there is no path to close.
#[test]
fn programs_of_fast_calls_are_profiled_and_stopped() {
    if pinfold_rseq::backend() == Backend::Atomic {
        return;
    }
    for role in ["spins", "calls seldom"] {
        let program = start(role);
        if !is_traceable(&program) {
            return;
        }
        let pid = program.pid();
        let done = |words: &[&str]| {
            let (_, error, code) = run(&[words, &["--timeout", "60"]].concat());
            assert_eq!(code, Some(0), "{role}: {words:?}: {error}");
        };
        done(&["heap", "start", &pid, "--interval", "32k"]);
        eventually(&format!("{role}: no samples"), || {
            json(&["heap", "dump", &pid])["samples"].as_u64() != Some(0)
        });
        // With a sample for each GiB, only the closed path has the program look.
        done(&["heap", "start", &pid, "--interval", "1g"]);
        done(&["heap", "stop", &pid]);
        done(&["trim", &pid]);
    }
}

/// `pinfold set PID` needs no answer, and `trim` says what would help.
#[test]
fn an_idle_process_shows_its_settings_and_cannot_be_asked() {
    let program = start("sleeps");
    let begin = Instant::now();
    assert!(decay(&program.pid()).as_f64() > Some(0.0));
    assert!(begin.elapsed() < PATIENCE);
    let (out, error, code) = run(&["trim", &program.pid(), "--timeout", "0.3"]);
    assert_eq!((out.as_str(), code), ("", Some(2)));
    assert!(error.contains("pinfold run --shepherd"), "{error}");
}

/// A worker that has dropped root's rights must not command the root parent.
#[test]
fn a_child_commands_its_parent_by_nothing_that_it_inherits() {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let program = start("has a child without rights");
    assert_eq!(program.number("reached"), 0);
    sleep(Duration::from_millis(500));
    assert_ne!(decay(&program.pid()), 77.777);
    // The parent does look for requests.
    let (_, error, code) = run(&["set", &program.pid(), "decay=88888", "--timeout", "60"]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(decay(&program.pid()), 88.888);
}
