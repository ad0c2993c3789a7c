//! Heap profiles by the command: `pinfold heap`, `pinfold run --heap`, `pinfold serve`.
//!
//! The programs are this test itself, run by `pinfold run` in a role that an environment variable
//! names.

mod program;
mod served;
mod texts;

use program::{Program, ROLE, RUN, eventually, in_role};
use serde_json::Value;
use served::Server;
use std::cell::Cell;
use std::fs;
use std::hint::black_box;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};
use texts::assert_has;

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// Blocks of a size, of which one in four is kept.
const BLOCKS: usize = 4000;
const SIZES: [usize; 5] = [40, 300, 3000, 20_000, 100_000];

/// Keeps a quarter of the blocks that it allocates.
#[inline(never)]
fn keeps_a_quarter(size: usize) -> Vec<Vec<u8>> {
    let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| black_box(vec![1; size])).collect();
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 4 == 0
    });
    blocks
}

/// The KiB that [`leaks`] does not free.
const LEAKED: u64 = 2052;

/// Leaks blocks of two sizes, and frees others.
#[inline(never)]
fn leaks() {
    for _ in 0..16 * 1024 {
        std::mem::forget(black_box(vec![1u8; 32]));
        drop(black_box(vec![1u8; 500]));
    }
    for _ in 0..1536 {
        std::mem::forget(black_box(vec![1u8; 1024]));
    }
    for _ in 0..1024 {
        std::mem::forget(black_box(vec![1u8; 1]));
        let mut grown = black_box(vec![1u8; 1]);
        grown.reserve_exact(2);
        std::mem::forget(black_box(grown));
    }
}

/// Where [`reaches_and_loses`] keeps what it can still reach.
static REACHED: Mutex<Option<Chain>> = Mutex::new(None);
static INSIDE: AtomicPtr<u8> = AtomicPtr::new(null_mut());
thread_local! {
    static OF_THREAD: Cell<*mut u8> = const { Cell::new(null_mut()) };
}

/// A list of blocks, each of which has the only pointer to the next.
struct Chain {
    _next: Option<Box<Chain>>,
    _content: [u8; 1000],
}

/// Returns a list of `length` blocks of 1,008 bytes, and a block.
#[inline(never)]
fn chain(length: usize) -> Chain {
    let mut first = Chain {
        _next: None,
        _content: [1; 1000],
    };
    for _ in 0..length {
        first = Chain {
            _next: Some(black_box(Box::new(first))),
            _content: [1; 1000],
        };
    }
    first
}

#[inline(never)]
fn reaches() {
    *REACHED.lock().unwrap() = Some(chain(100));
    // A pointer into a block, and one in thread-local data.
    let block = Box::leak(black_box(vec![1_u8; 7000]).into_boxed_slice());
    black_box(&INSIDE).store(&raw mut block[3000], Relaxed);
    let block = Box::leak(black_box(vec![1_u8; 9000]).into_boxed_slice());
    OF_THREAD.with(|of_thread| black_box(of_thread).set(block.as_mut_ptr()));
}

#[inline(never)]
fn loses() {
    std::mem::forget(black_box(chain(50)));
    // A mapping of its own.
    std::mem::forget(black_box(vec![1_u8; 64 << 20]));
    // Two blocks that lead to each other, and to nothing else.
    for _ in 0..20 {
        let both = [0, 1].map(|_| Box::leak(black_box(Box::new([null_mut::<u8>(); 500]))));
        let [one, other] = both;
        one[7] = (&raw mut *other).cast();
        other[9] = (&raw mut *one).cast();
    }
}

/// Overwrites what calls before have left on the stack.
#[inline(never)]
fn clear_stack() {
    black_box([0_u8; 64 << 10]);
}

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    if role == "leaks" {
        return leaks();
    }
    if role == "reaches and loses" {
        reaches();
        loses();
        clear_stack();
        // SAFETY: no other thread of this process uses what `exit` ends.
        unsafe { libc::exit(0) };
    }
    if role == "leaks and aborts" {
        leaks();
        std::process::abort();
    }
    if role == "leaks and waits" {
        leaks();
        println!("ready");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        // SAFETY: the process ends. `_exit` runs nothing that writes a profile.
        unsafe { libc::_exit(0) };
    }
    let all: Vec<_> = SIZES.into_iter().map(keeps_a_quarter).collect();
    if role == "stays" {
        println!("ready");
        let begin = Instant::now();
        let mut kept = Vec::new();
        // Allocates on slow paths, where a process looks for requests.
        while begin.elapsed() < PATIENCE {
            kept.push(keeps_a_quarter(1000));
            kept.truncate(20);
            sleep(Duration::from_millis(10));
        }
    }
    if role == "forks" {
        fork_and_wait();
    }
    std::mem::forget(black_box(all));
}

#[inline(never)]
fn child_keeps() {
    let kept: Vec<Vec<u8>> = (0..BLOCKS).map(|_| black_box(vec![1; 1000])).collect();
    std::mem::forget(black_box(kept));
}

/// Forks a child that keeps memory of its own, and waits for its end.
fn fork_and_wait() {
    // SAFETY: the child uses nothing that another thread of the parent may have locked: Pinfold's
    // malloc takes its locks for a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        child_keeps();
        // SAFETY: the process ends. `exit` runs the destructor that writes the profile.
        unsafe { libc::exit(0) };
    }
    let mut status = 1;
    // SAFETY: `status` is writable.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

fn pinfold() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pinfold"))
}

/// Returns `pinfold run` with these options, for this test in a role.
fn run(options: &[&str], role: &str) -> Command {
    let words = [&RUN[..2], options, &["--"]].concat();
    in_role(&words, role)
}

#[track_caller]
fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Runs `pinfold heap` and returns what it printed.
#[track_caller]
fn heap(arguments: &[&str]) -> String {
    let output = output(pinfold().arg("heap").args(arguments));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn heap_json(arguments: &[&str]) -> Value {
    let text = heap(&[arguments, &["--json"]].concat());
    serde_json::from_str(&text).unwrap()
}

/// Runs `pinfold heap` with arguments that it refuses, and returns what it said.
#[track_caller]
fn refused(arguments: &[&str]) -> String {
    let output = pinfold().arg("heap").args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

/// The profile of the role that ends, sampled once in 16 KiB.
fn profile_of_role(folder: &Path) -> String {
    let file = folder.join("profile");
    let options = ["--heap=16k", "--heap-file", file.to_str().unwrap()];
    output(&mut run(&options, "ends"));
    let left = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let found = left.into_iter().find(|path| path.extension().is_some());
    found.expect("a profile").to_str().unwrap().to_owned()
}

#[test]
fn a_program_leaves_a_profile_whose_first_function_holds_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let file = profile_of_role(folder.path());
    let profile = heap_json(&["dump", &file]);
    let (kept, all) = (BLOCKS / 4, BLOCKS);
    let exact = |blocks: usize| SIZES.iter().map(|size| size * blocks).sum::<usize>() as f64;
    // Six standard deviations, and what the test's harness allocates.
    let near = |field: &str, exact: f64| {
        let estimate = profile["totals"][field].as_f64().unwrap();
        let deviation = 6.0 * (exact * 100_000.0).sqrt() + 5e6;
        assert!(
            (estimate - exact).abs() < deviation,
            "{field}: {estimate} for {exact}"
        );
    };
    near("inuse_bytes", exact(kept));
    near("alloc_bytes", exact(all));
    let first = &profile["stacks"][0]["functions"];
    let functions: Vec<&str> = first
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert!(
        functions
            .iter()
            .any(|name| name.contains("keeps_a_quarter")),
        "{functions:?}"
    );
    // The allocator's own frames are left out.
    assert!(
        !functions[0].contains("pinfold") && !functions[0].contains("malloc"),
        "{functions:?}"
    );

    let text = heap(&["dump", &file, "--top", "5"]);
    assert_has(&text, &["estimated from", "FLAT%"]);
    assert!(heap(&["dump", &file, "--stacks", "1"]).contains("keeps_a_quarter"));
}

#[test]
fn profiles_are_written_for_other_tools_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let file = profile_of_role(folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (packed, flame) = (path("heap.pb.gz"), path("heap.svg"));
    heap(&["dump", &file, "-o", &packed, "--flame", &flame]);
    assert!(fs::read(&packed).unwrap().starts_with(&[0x1f, 0x8b]));
    let picture = fs::read_to_string(&flame).unwrap();
    assert!(picture.contains("<svg") && picture.contains("keeps_a_quarter"));
    // Long names keep their beginning, and the colours are those of memory: green and blue.
    assert!(picture.contains("truncate_text_right = true"), "{picture}");
    assert!(picture.contains(" UTC</text>"), "{picture}");
    let colours = colours(&picture);
    let is_of_memory = |[red, green, _]: &[u8; 3]| *red == 0 && *green >= 190;
    assert!(colours.iter().all(is_of_memory), "{colours:?}");
    // A file of another tool's format says the same as the process's own file.
    let (first, second) = (heap_json(&["dump", &file]), heap_json(&["dump", &packed]));
    assert_eq!(
        first["stacks"][0]["functions"],
        second["stacks"][0]["functions"]
    );
    assert_eq!(first["samples_in_use"], second["samples_in_use"]);
    for field in [
        "inuse_bytes",
        "inuse_objects",
        "alloc_bytes",
        "alloc_objects",
    ] {
        let [one, other] = [&first, &second].map(|side| side["totals"][field].as_f64().unwrap());
        // The other format rounds the numbers of each call stack.
        assert!((one - other).abs() < 1000.0, "{field}: {one}, {other}");
    }
    // With `--alloc`, the call stacks have all that was allocated, also what was freed since.
    let all = heap_json(&["dump", &file, "--alloc"]);
    let stacks = all["stacks"].as_array().unwrap();
    let allocated = |stack: &Value| stack["values"]["alloc_bytes"].as_f64().unwrap();
    let sum: f64 = stacks.iter().map(allocated).sum();
    let total = all["totals"]["alloc_bytes"].as_f64().unwrap();
    assert!((sum - total).abs() < 1000.0, "{sum} of {total}");
    let in_use = first["totals"]["inuse_bytes"].as_f64().unwrap();
    assert!(total > 2.0 * in_use, "{total}, of which {in_use} in use");
    for old in [&file, &packed] {
        let difference = heap_json(&["dump", &file, "--diff", old]);
        for field in ["inuse_bytes", "alloc_objects"] {
            assert!(
                difference["totals"][field].as_f64().unwrap().abs() < 1000.0,
                "{difference}"
            );
        }
        assert_eq!(difference["stacks"].as_array().unwrap().len(), 0);
    }
    let said = refused(&["dump", &file, "--diff", &packed, "--flame", &flame]);
    let unchanged = format!("no call stack holds more or less memory than in {packed}, ");
    assert!(said.contains(&unchanged), "{said}");
}

/// Returns the colours of the frames of a flame graph.
fn colours(picture: &str) -> Vec<[u8; 3]> {
    let frames = picture.rsplit("id=\"frames\"").next().unwrap();
    let colours = frames.split("fill=\"rgb(").skip(1);
    let colours = colours.map(|rest| {
        let numbers = rest.split(')').next().unwrap().split(',');
        let numbers: Vec<u8> = numbers.map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    });
    colours.collect()
}

#[test]
fn a_difference_says_what_grew_and_what_is_odd_about_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (older, newer) = (path("older"), path("newer"));
    let running = Program::start(&mut run(&["--heap=16k"], "stays"));
    heap(&["dump", &running.pid(), "-o", &older]);
    let begin = Instant::now();
    // The program goes on to keep memory.
    let grows = |text: &str| text.contains(": +") && text.contains(" in use since ");
    let mut text = String::new();
    while !grows(&text) {
        assert!(begin.elapsed() < PATIENCE, "{text}");
        sleep(Duration::from_millis(100));
        text = heap(&["dump", &running.pid(), "--diff", &older]);
    }
    heap(&["dump", &running.pid(), "-o", &newer]);
    let dump = |old: &str, words: &[&str]| {
        let said = output(
            pinfold()
                .args(["heap", "dump"])
                .args(words)
                .args(["--diff", old]),
        );
        String::from_utf8(said.stderr).unwrap()
    };
    assert!(dump(&newer, &[&older]).contains("is newer than this profile"));
    // A flame graph of growth is red, one of the same the other way round is blue, and both name
    // two times.
    for (first, second, chosen) in [(&newer, &older, 0), (&older, &newer, 2)] {
        let file = path("difference.svg");
        heap(&["dump", first, "--diff", second, "--flame", &file]);
        let picture = fs::read_to_string(file).unwrap();
        assert_eq!(picture.matches(" UTC").count(), 2, "{picture}");
        assert_has(&picture, &["change of the bytes in use", "red has grown"]);
        let is_chosen = |colour: &&[u8; 3]| colour[chosen] == 255 && colour[2 - chosen] < 250;
        let colours = colours(&picture);
        let count = colours.iter().filter(is_chosen).count();
        assert!(count > 0, "{chosen}: {colours:?}");
    }
    assert_eq!(dump(&older, &[&newer]), "");
    let other = path("other");
    let options = ["run", "--heap=1", "--heap-file", &other, "--"];
    output(pinfold().args(options).args(["sort", "/dev/null"]));
    let left = fs::read_dir(folder.path()).unwrap();
    let other = left.map(|entry| entry.unwrap().path()).find(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("other.")
    });
    let said = dump(other.unwrap().to_str().unwrap(), &[&newer]);
    assert!(said.contains("is a profile of"), "{said}");
}

#[test]
fn every_call_is_counted_while_every_block_is_sampled() {
    let output = output(&mut run(&["--stats", "--heap=1"], "ends"));
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    let counted = report.lines().find_map(|line| {
        let (count, rest) = line
            .trim_start()
            .strip_prefix("calls")?
            .split_once(" allocations")?;
        let freed = rest.strip_prefix(", ")?.split_once(" frees")?.0;
        let number = |text: &str| text.trim().replace(',', "").parse::<usize>().ok();
        Some((number(count)?, number(freed)?))
    });
    let (allocated, freed) = counted.expect(&report);
    let blocks = SIZES.len() * BLOCKS;
    assert!(allocated >= blocks && freed >= blocks * 3 / 4, "{report}");
    assert!(freed <= allocated - blocks / 4, "{report}");
}

#[test]
fn leaks_are_reported_at_the_end() {
    // The option turns the profile on, unless the environment has.
    for options in [&["--heap=16k", "--leaks"][..], &["--leaks"]] {
        let mut command = run(options, "ends");
        let report = output(command.env("PINFOLD_HEAP", "16k")).stderr;
        let report = String::from_utf8(report).unwrap();
        assert_has(&report, &["in use, in about", "keeps_a_quarter"]);
    }
}

#[test]
fn leaks_are_exact_on_request_and_near_otherwise() {
    let report = |option: &str| {
        let mut command = run(&[option], "leaks");
        let report = output(command.env_remove("PINFOLD_HEAP")).stderr;
        String::from_utf8(report).unwrap()
    };
    let exact = report("--leaks=exact");
    assert_has(
        &exact,
        &["exact: each allocation since the profile's start was recorded"],
    );
    assert_eq!(leaked(&exact), LEAKED, "{exact}");
    assert!(!exact.contains("about"), "{exact}");
    let sampled = report("--leaks");
    assert_has(&sampled, &["estimated from", "one in 1.0 KiB"]);
    let ratio = leaked(&sampled) as f64 / LEAKED as f64;
    // The standard deviation is about 2 %.
    assert!((0.75..1.25).contains(&ratio), "{ratio} {sampled}");
}

/// Returns the bytes and the blocks of each stack in a report of leaks that is of this kind and has
/// this function.
fn stacks_of(report: &str, kind: &str, function: &str) -> Vec<(f64, u64)> {
    let stacks = report.split("from:\n    ").collect::<Vec<_>>();
    let heads = stacks.windows(2).filter(|pair| {
        let frames = pair[1].lines().take_while(|line| !line.ends_with(", "));
        pair[0].ends_with(&format!("{kind}, "))
            && frames.into_iter().any(|line| line.contains(function))
    });
    let heads = heads.map(|pair| pair[0].lines().last().unwrap());
    let sizes = heads.map(|head| {
        let words: Vec<&str> = head.split(' ').collect();
        let unit = if words[1] == "KiB" { 1024.0 } else { 1.0 };
        (
            words[0].parse::<f64>().unwrap() * unit,
            words[3].parse().unwrap(),
        )
    });
    sizes.collect()
}

#[test]
fn lost_blocks_are_told_from_those_that_pointers_lead_to() {
    let mut command = run(&["--leaks=exact"], "reaches and loses");
    let report = output(command.env_remove("PINFOLD_HEAP")).stderr;
    let report = String::from_utf8(report).unwrap();
    let blocks = |kind, function| -> u64 {
        stacks_of(&report, kind, function)
            .iter()
            .map(|(_, blocks)| blocks)
            .sum()
    };
    assert_eq!(blocks("reachable", "reaches"), 102, "{report}");
    assert_eq!(blocks("lost", "reaches"), 0, "{report}");
    assert_eq!(blocks("lost", "loses"), 91, "{report}");
    assert_eq!(blocks("reachable", "loses"), 0, "{report}");
}

#[test]
fn leaks_above_a_threshold_give_an_exit_status() {
    let status = |options: &[&str], role: &str| {
        let options = [&["--leaks=exact"], options].concat();
        let mut command = run(&options, role);
        let output = command.env_remove("PINFOLD_HEAP").output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let code = "--leaks-exit-code=9";
    for (options, expected) in [
        (&[][..], 0),
        (&[code][..], 9),
        (&[code, "--leaks-above=1M"], 9),
        (&[code, "--leaks-above=1G"], 0),
    ] {
        let (status, report) = status(options, "leaks");
        assert_eq!(status, Some(expected), "{options:?}: {report}");
    }
    // A crash is worse than a leak.
    let (crashed, report) = status(&[code], "leaks and aborts");
    assert_eq!(crashed, Some(128 + libc::SIGABRT), "{report}");
}

/// Starts a program that leaks and waits, with a report of its leaks, in a process group of its
/// own. Waits until the command has opened the profiles of `processes` processes.
fn leaks_and_waits(words: &[&str], processes: usize) -> Program {
    let options = [&RUN[..2], &["--leaks=exact", "--"], words].concat();
    let mut command = in_role(&options, "leaks and waits");
    command.stderr(Stdio::piped()).process_group(0);
    // A shell has background jobs ignore SIGINT, and these tests may run in one.
    let heed = || {
        // SAFETY: SIG_DFL is a valid action.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: `heed` makes one call, which is safe after a fork.
    unsafe { command.pre_exec(heed) };
    let program = Program::start(command.env_remove("PINFOLD_HEAP"));
    let files = format!("/proc/{}/fd", program.pid());
    eventually("the command has not opened the profile", || {
        let files = fs::read_dir(&files).unwrap().flatten();
        let links = files.filter_map(|file| fs::read_link(file.path()).ok());
        let profile = "/memfd:pinfold-heap (deleted)";
        links.filter(|link| link.as_os_str() == profile).count() == processes
    });
    program
}

/// Sends a signal to a process, or to the group of a negative number.
fn send(to: i32, signal: i32) {
    // SAFETY: the call uses no memory of this process.
    assert_eq!(unsafe { libc::kill(to, signal) }, 0);
}

/// Waits for a program's end, and returns its report and its exit status.
fn end_of(program: &mut Program) -> (String, Option<i32>) {
    let mut report = String::new();
    let mut stderr = program.process.stderr.take().unwrap();
    stderr.read_to_string(&mut report).unwrap();
    (report, program.process.wait().unwrap().code())
}

/// A server is stopped by a signal. A terminal and `timeout` send it to the whole group, and `kill`
/// to the command alone, which passes it on.
#[test]
fn a_program_that_a_signal_or_underscore_exit_ends_is_reported_too() {
    const TO_GROUP: bool = true;
    for (signal, to_group) in [
        (libc::SIGTERM, TO_GROUP),
        (libc::SIGINT, TO_GROUP),
        (libc::SIGTERM, !TO_GROUP),
    ] {
        let mut program = leaks_and_waits(&[], 1);
        let pid = program.id() as i32;
        send(if to_group { -pid } else { pid }, signal);
        let (report, status) = end_of(&mut program);
        assert_eq!(status, Some(128 + signal), "{report}");
        assert_has(&report, &["exact: ", "a signal or _exit ended it"]);
        assert_eq!(leaked(&report), LEAKED, "{report}");
    }
    // As `timeout` does: to the command, and then to the group. The program may end in between.
    let mut program = leaks_and_waits(&[], 1);
    let pid = program.id() as i32;
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    send(pid, libc::SIGTERM);
    let child = Path::new("/proc").join(children.trim());
    eventually("the program has not ended", || !child.exists());
    send(-pid, libc::SIGTERM);
    let (report, status) = end_of(&mut program);
    assert_eq!(status, Some(128 + libc::SIGTERM), "{report}");
    assert_eq!(leaked(&report), LEAKED, "{report}");
    let mut program = leaks_and_waits(&[], 1);
    drop(program.process.stdin.take());
    let (report, status) = end_of(&mut program);
    assert_eq!((leaked(&report), status), (LEAKED, Some(0)), "{report}");
}

/// A script starts the program, and is the first of the group to end.
#[test]
fn descendants_that_the_same_signal_ends_are_reported() {
    let mut program = leaks_and_waits(&["sh", "-c", "\"$0\" \"$@\"; true"], 2);
    send(-(program.id() as i32), libc::SIGTERM);
    let (report, status) = end_of(&mut program);
    assert_eq!(status, Some(128 + libc::SIGTERM), "{report}");
    assert_eq!(leaked(&report), LEAKED, "{report}");
}

/// Returns the KiB of all stacks in a report of leaks that have the function `leaks`.
fn leaked(report: &str) -> u64 {
    let mut sum = 0.0;
    let mut head = 0.0;
    for line in report.lines() {
        if let Some((size, _)) = line.split_once(" in ").filter(|_| line.ends_with("from:")) {
            let (number, unit) = size.split_once(' ').unwrap();
            let unit = match unit {
                "B" => 1.0 / 1024.0,
                "KiB" => 1.0,
                _ => 1024.0,
            };
            head = number.parse::<f64>().unwrap() * unit;
        }
        // Debug information without types leaves the crate out.
        let function = line.trim_start();
        if function.starts_with("heap::leaks") || function.starts_with("leaks (") {
            sum += head;
        }
    }
    sum.round() as u64
}

#[test]
fn a_forked_child_has_a_profile_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile");
    output(&mut run(
        &["--heap=16k", "--heap-file", file.to_str().unwrap()],
        "forks",
    ));
    let paths = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut stacks: Vec<String> = paths
        .map(|path| heap(&["dump", path.to_str().unwrap(), "--stacks", "1000"]))
        .collect();
    stacks.sort_by_key(|text| text.contains("child_keeps"));
    let [parent, child] = &stacks[..] else {
        panic!("{} profiles instead of 2", stacks.len());
    };
    assert!(parent.contains("keeps_a_quarter") && !parent.contains("child_keeps"));
    // What the parent had at the fork is the child's too.
    assert!(child.contains("keeps_a_quarter") && child.contains("child_keeps"));
}

#[test]
fn a_running_process_is_profiled_from_outside() {
    let running = Program::start(&mut run(&[], "stays"));
    let pid = running.pid();
    let without = refused(&["dump", &pid]);
    assert_has(&without, &["no heap profile", "heap start"]);
    assert!(refused(&["stop", &pid]).contains("no heap profile that is on"));

    let started = heap(&["start", &pid, "--interval", "32k", "--timeout", "50"]);
    assert!(started.contains("a sample for each 32.0 KiB"), "{started}");
    eventually("no samples for a minute", || {
        heap_json(&["dump", &pid])["samples_in_use"].as_u64() >= Some(10)
    });
    assert!(heap(&["dump", &pid, "--stacks", "3"]).contains("keeps_a_quarter"));

    let server = Server::start(1000, &[&pid]);
    let page = server.get("/debug/pprof/heap");
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    assert_has(&page, &["heap.pb.gz"]);
    let picture = server.get(&format!("/heap.svg?pid={pid}"));
    assert!(picture.starts_with("HTTP/1.1 200"), "{picture}");
    let headers = [
        "Content-Type: image/svg+xml\r\n",
        "Content-Disposition: attachment; filename=heap.svg\r\n",
    ];
    assert_has(&picture, &headers);
    assert_has(&picture, &["</svg>", "keeps_a_quarter"]);
    let other = server.get("/heap.svg?pid=1");
    assert!(other.starts_with("HTTP/1.1 404"), "{other}");
    assert_has(&other, &["/heap.svg?pid=PID"]);
    assert!(heap(&["stop", &pid, "--timeout", "50"]).contains("samples no more"));
    // What was sampled stays known.
    heap(&["dump", &pid]);
}

#[test]
fn bad_input_is_refused_with_the_remedy() {
    let mut no_folder = run(&["--heap", "--heap-file", "/no/such/folder/heap"], "ends");
    let no_folder = no_folder.output().unwrap();
    assert_eq!(no_folder.status.code(), Some(2));
    let said = String::from_utf8_lossy(&no_folder.stderr).into_owned();
    assert!(said.contains("a folder that exists"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "no profile").unwrap();
    let text = text.to_str().unwrap();
    assert!(refused(&["dump", text]).contains("not a heap profile"));
    assert!(refused(&["dump", "/no/such/file"]).contains("/no/such/file"));
    assert!(refused(&["start", "1", "--interval", "0"]).contains("give bytes from 1"));
    let own = std::process::id().to_string();
    assert!(refused(&["start", &own]).contains(&own));
    let output = pinfold()
        .args(["run", "--heap=lots", "--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
