//! What a running program can be asked to do: `pinfold trim` and `pinfold set`.
//!
//! The programs are this test itself, run by `pinfold run` in a role that an environment variable
//! names.

mod filter;
mod program;
mod shown;
mod texts;

use filter::install;
use pinfold::internal::segment::{Answer, Code, HEAP_START, Mailbox, Request};
use program::{Program, ROLE, RUN, eventually, fork_child, in_role};
use serde_json::{Value, json};
use shown::pinfold as run;
use std::fs;
use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};
use texts::assert_has;

/// How long a program in a role lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(180);
/// How long after its fork a child enters its sandbox. A request is open for longer.
const LATE: Duration = Duration::from_millis(700);

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let mut blocks: Vec<Vec<u8>> = (0..20_000).map(|_| black_box(vec![1; 3000])).collect();
    // The library starts its thread when the program has two. It lives for the whole role.
    let rests = || std::thread::spawn(|| sleep(LIFE));
    let thread = (role == "frees on demand").then(rests);
    if role == "forks" {
        fork_working("child", || {});
        fork_working("filtered", || install(&filter_of_new_calls(), 0).unwrap());
        fork_working("limited", forbid_large_files);
    }
    if role == "forks into a late sandbox" {
        fork_working("child", || {
            // The child does not look in this time, because it does not allocate.
            let filter = filter_of_new_calls();
            sleep(LATE);
            install(&filter, 0).unwrap();
        });
    }
    println!("ready");
    match role.as_str() {
        "frees on demand" => {
            std::io::stdin().read_line(&mut String::new()).unwrap();
            blocks.truncate(10_000);
            println!("freed");
            drop(black_box(thread));
            sleep(LIFE);
        }
        "works" => work(),
        "is being cancelled" => be_cancelled(),
        _ if role.starts_with("forks") => work(),
        "sleeps" => sleep(LIFE),
        _ => panic!("there is no role {role}"),
    }
    drop(black_box(blocks));
}

/// Starts a child that first calls `prepare` and then allocates all the time.
fn fork_working(word: &str, prepare: fn()) {
    fork_child(word, || {
        prepare();
        work();
    });
}

/// Allocates and frees, with pauses. Frees a block of 2 MiB each time.
fn work() {
    let end = Instant::now() + LIFE;
    while Instant::now() < end {
        let blocks: Vec<Vec<u8>> = (0..3000).map(|_| black_box(vec![1; 200])).collect();
        drop(black_box((blocks, vec![1u8; 2 << 20])));
        sleep(Duration::from_millis(5));
    }
}

/// Allocates and frees in a thread that ends at the next cancellation point.
fn be_cancelled() {
    // SAFETY: the calls have no preconditions.
    unsafe { libc::pthread_cancel(libc::pthread_self()) };
    let end = Instant::now() + LIFE;
    while Instant::now() < end {
        let blocks: Vec<Vec<u8>> = (0..3000).map(|_| black_box(vec![1; 200])).collect();
        drop(black_box(blocks));
    }
}

/// Has the kernel send a signal to this process if it makes a file larger than a page.
fn forbid_large_files() {
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    // SAFETY: `limit` is readable.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
    assert_eq!(set, 0);
}

/// Returns a filter that has the kernel end a process at system calls that malloc does not make.
fn filter_of_new_calls() -> Vec<libc::sock_filter> {
    let calls = [
        libc::SYS_memfd_create,
        libc::SYS_getpid,
        libc::SYS_sysinfo,
        libc::SYS_membarrier,
    ];
    filter::filter(&calls, libc::SECCOMP_RET_KILL_PROCESS)
}

/// Starts a program in a role.
fn start(role: &str) -> Program {
    // Without a shepherd, only a program that allocates looks for requests.
    let shepherd = match role {
        "sleeps" | "is being cancelled" => "off",
        _ => "auto",
    };
    Program::start(in_role(&RUN, role).env("PINFOLD_SHEPHERD", shepherd))
}

/// Runs the command, with patience for a loaded machine.
fn ask(words: &[&str]) -> Value {
    let words = [words, &["--json", "--timeout", "60"]].concat();
    let (out, error, code) = run(&words);
    assert_eq!(code, Some(0), "{words:?}: {error}");
    serde_json::from_str(&out).unwrap()
}

/// Returns a setting's present value.
fn value(pid: &str, name: &str) -> Value {
    ask(&["set", pid])["settings"][name].clone()
}

fn is_alive(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

#[test]
fn trim_gives_memory_back_and_says_how_much() {
    let mut program = start("frees on demand");
    let pid = program.pid();
    // Free memory stays with the process until it is told otherwise.
    ask(&["set", &pid, "decay=86400000"]);
    writeln!(program.process.stdin.as_mut().unwrap(), "free").unwrap();
    assert!(program.says("freed"));
    let answer = ask(&["trim", &pid]);
    let bytes = answer["returned_bytes"].as_u64().unwrap();
    assert!(bytes >= 1 << 20, "{answer}");
    let (out, error, code) = run(&["trim", &pid, "--timeout", "60"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(out.contains(&pid) && out.contains("KiB back"), "{out}");
}

/// A shepherd that would sleep for a day answers at once: the program's own threads all sleep.
#[test]
fn a_process_with_a_long_interval_can_be_asked() {
    let program = start("frees on demand");
    let pid = program.pid();
    for interval in ["86400000", "20", "86400000", "own"] {
        ask(&["set", &pid, &format!("shepherd-interval={interval}")]);
    }
    assert_eq!(value(&pid, "shepherd_interval_seconds"), Value::Null);
}

#[test]
fn settings_change_in_a_running_process() {
    let program = start("works");
    let pid = program.pid();
    for (change, field, shown) in [
        ("decay=1500", "decay_seconds", json!(1.5)),
        (
            "memory-limit=64G",
            "memory_limit_bytes",
            json!(64_u64 << 30),
        ),
        (
            "PINFOLD_MEMORY_LIMIT=none",
            "memory_limit_bytes",
            json!(null),
        ),
        ("memory-limit=50%", "memory_limit_percent", json!(50)),
        ("thp=always", "thp", json!("always")),
        ("sheaf-budget=8M", "sheaf_budget_bytes", json!(8 << 20)),
        ("dirty-limit=2M", "dirty_limit_bytes", json!(2 << 20)),
        (
            "shepherd-interval=250",
            "shepherd_interval_seconds",
            json!(0.25),
        ),
        (
            "shepherd-interval=own",
            "shepherd_interval_seconds",
            json!(null),
        ),
    ] {
        let before = value(&pid, field);
        let answer = ask(&["set", &pid, change]);
        assert_eq!(answer["settings"].get(field), Some(&shown), "{answer}");
        assert_eq!(answer["before"].get(field), Some(&before), "{answer}");
    }
    assert_eq!(value(&pid, "decay_seconds"), 1.5);
    assert_eq!(value(&pid, "thp"), "always");
    let (out, _, code) = run(&["set", &pid, "--timeout", "60"]);
    assert_eq!(code, Some(0));
    assert!(out.contains("dirty-limit") && out.contains("2M"), "{out}");
}

#[test]
fn a_limit_on_free_memory_takes_effect_at_once() {
    let program = start("works");
    let pid = program.pid();
    let dirty = || {
        let (out, error, code) = run(&["stat", &pid, "--json"]);
        assert_eq!(code, Some(0), "{error}");
        let line: Value = serde_json::from_str(&out).unwrap();
        line["dirty_bytes"].as_u64().unwrap()
    };
    eventually("nothing is kept", || dirty() >= 1 << 20);
    ask(&["set", &pid, "dirty-limit=0"]);
    let mut little = 0;
    eventually("much is kept", || {
        little = if dirty() < 1 << 20 { little + 1 } else { 0 };
        little == 10
    });
}

#[test]
fn a_process_that_never_looks_is_named_with_what_would_help() {
    let program = start("sleeps");
    let (out, error, code) = run(&["trim", &program.pid(), "--timeout", "0.2"]);
    assert_eq!((out.as_str(), code), ("", Some(2)));
    assert_has(&error, &[&program.pid(), "--timeout"]);
}

#[test]
fn bad_words_are_refused_before_the_process_is_asked() {
    for (words, reason) in [
        (&["set", "4194305", "decay=soon"][..], "milliseconds"),
        (&["set", "4194305", "colour=red"], "memory-limit, thp"),
        (&["set", "4194305", "decay"], "NAME=VALUE"),
        (&["set", "4194305", "decay=1"], "no such process"),
        (&["set", "4194305", "dirty-limit=50%"], "bytes"),
        (&["set", "4194305", "shepherd-interval=0"], "milliseconds"),
        (&["trim", "4194305"], "no such process"),
        (&["trim", "0"], "process id"),
        (&["trim", "1", "--timeout", "61"], "seconds"),
    ] {
        let (out, error, code) = run(words);
        assert_eq!((out.as_str(), code), ("", Some(2)), "{words:?}");
        assert!(error.contains(reason), "{words:?}: {error}");
    }
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    let (_, error, code) = run(&["trim", &other.id().to_string()]);
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(code, Some(2));
    assert!(error.contains("does not run on Pinfold"), "{error}");
}

#[test]
fn sandboxed_children_do_what_they_may_and_live_on() {
    let program = start("forks");
    let [child, filtered, limited] = program.children()[..] else {
        panic!("{:?}", program.numbers);
    };
    for pid in [program.id(), child, filtered, limited] {
        let pid = pid.to_string();
        ask(&["trim", &pid]);
        ask(&["set", &pid, "decay=700"]);
        assert_eq!(value(&pid, "decay_seconds"), 0.7);
    }
    let (out, error, _) = run(&["list"]);
    for child in [child, filtered, limited] {
        assert!(out.contains(&format!(" {child} ")), "{out}{error}");
    }
    let changes = ["decay=800", "memory-limit=50%"];
    let (out, error, code) = run(&[&["set", &filtered.to_string()], &changes[..]].concat());
    assert!(code == Some(2) && error.contains("seccomp"), "{error}");
    assert!(out.contains("800 ms"), "{out}");
    sleep(Duration::from_millis(1500));
    assert!(is_alive(child) && is_alive(filtered) && is_alive(limited));
}

#[test]
fn a_child_that_enters_a_sandbox_after_it_was_asked_lives_on() {
    let program = start("forks into a late sandbox");
    let child = program.children()[0];
    let (out, ..) = run(&["list"]);
    assert!(out.contains(&format!(" {child} ")), "{out}");
    sleep(2 * LATE);
    assert!(is_alive(child));
    ask(&["trim", &child.to_string()]);
}

#[test]
fn a_process_makes_no_new_calls_without_the_consent_of_who_asked() {
    let program = start("works");
    let child = program.id();
    let mailbox = mailbox(&program.pid());
    let request = Request::new(child, HEAP_START, 60_000);
    let posted = mailbox.post(request, 1 << 19).unwrap();
    eventually("the child does not ask for consent", || {
        mailbox.wants_consent(posted)
    });
    eventually("the child waits without end", || {
        mailbox.answer_to(posted).map(Answer::code) == Some(Some(Code::NoConsent))
    });
    let (_, error, _) = run(&["heap", "dump", &child.to_string()]);
    assert!(error.contains("no heap profile"), "{error}");
}

#[test]
fn requests_are_no_cancellation_points() {
    let program = start("is being cancelled");
    let pid = program.pid();
    let (_, error, code) = run(&["heap", "start", &pid, "--timeout", "60"]);
    assert_eq!(code, Some(0), "{error}");
    ask(&["trim", &pid]);
    ask(&["set", &pid, "memory-limit=90%"]);
    assert!(is_alive(program.id()));
}

/// Maps a program's mailbox.
fn mailbox(pid: &str) -> &'static Mailbox {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    let path = paths.find(|path| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("pinfold-mailbox"))
    });
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path.unwrap())
        .unwrap();
    let (protection, size) = (libc::PROT_READ | libc::PROT_WRITE, size_of::<Mailbox>());
    let (flags, fd) = (libc::MAP_SHARED, file.as_raw_fd());
    // SAFETY: the kernel chooses the place.
    let at = unsafe { libc::mmap(null_mut(), size, protection, flags, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: the mapping has the mailbox's size and stays. All its fields are atomics.
    unsafe { &*at.cast() }
}

#[test]
fn a_hostile_writer_does_no_harm() {
    let program = start("works");
    let pid = program.pid();
    let mailbox = mailbox(&pid);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Requests of all kinds with any argument, and words that are none.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        let what = random() as u32 % 40;
        let request = Request::new(program.id(), what, 60_000);
        let argument = random() >> (random() % 64);
        // A limit of a few bytes would only make the program slow.
        let is_harmless = argument > 1 << 30;
        if is_harmless && mailbox.post(request, argument).is_none() {
            sleep(Duration::from_millis(20));
            let words = std::ptr::from_ref(mailbox).cast::<std::sync::atomic::AtomicU64>();
            for nth in 2..512 {
                // SAFETY: the mailbox has 512 words. All accesses are atomic.
                unsafe { (*words.add(nth)).store(random(), Relaxed) };
            }
        }
    }
    assert!(is_alive(program.id()));
    let words = std::ptr::from_ref(mailbox).cast::<std::sync::atomic::AtomicU64>();
    for nth in 2..512 {
        // SAFETY: as above, the mailbox has 512 words.
        unsafe { (*words.add(nth)).store(0, Relaxed) };
    }
    ask(&["trim", &pid]);
    ask(&["set", &pid, "decay=300"]);
}
