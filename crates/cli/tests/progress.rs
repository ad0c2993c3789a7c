//! The progress of measurements: on a terminal only, and never in what programs read.

mod texts;

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use texts::assert_has;

const SLAB: &str = "bench slab --rounds 3 --calls 100 --size 64";

/// Opens a terminal of 24 lines and 100 columns. Returns the end of the user and the end of the
/// program.
fn terminal() -> (File, OwnedFd) {
    let (mut user, mut program) = (-1, -1);
    let size = libc::winsize {
        ws_row: 24,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let null = std::ptr::null_mut();
    // SAFETY: the call writes the two descriptors, reads `size`, and takes null for the rest.
    let made =
        unsafe { libc::openpty(&mut user, &mut program, null, null.cast(), &raw const size) };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call takes numbers only.
    let set = unsafe { libc::fcntl(user, libc::F_SETFD, libc::FD_CLOEXEC) };
    assert_eq!(set, 0);
    // SAFETY: `openpty` has just opened both descriptors, and nothing else owns them.
    unsafe { (File::from_raw_fd(user), OwnedFd::from_raw_fd(program)) }
}

/// Runs the command with standard error on a terminal. Returns what the terminal and standard
/// output got.
fn on_a_terminal(line: &str, term: &str, more: &[(&str, &str)]) -> (String, String) {
    let (user, program) = terminal();
    let mut command = command(line, term, more);
    let child = command.stdout(Stdio::piped()).stderr(program).spawn();
    let (shown, output) = finish(child.unwrap(), user, command);
    assert!(output.status.success(), "{shown}");
    (shown, String::from_utf8(output.stdout).unwrap())
}

/// Runs the command with standard output and standard error on a terminal. Returns what the
/// terminal got, and the exit status.
fn all_on_a_terminal(line: &str, term: &str, more: &[(&str, &str)]) -> (String, Option<i32>) {
    let (user, program) = terminal();
    let mut command = command(line, term, more);
    let child = command.stdout(program.try_clone().unwrap()).stderr(program);
    let child = child.spawn().unwrap();
    let (shown, output) = finish(child, user, command);
    (shown, output.status.code())
}

fn command(line: &str, term: &str, more: &[(&str, &str)]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("pinfold"));
    command
        .args(line.split(' '))
        .env("TERM", term)
        .stdin(Stdio::null());
    // The help is styled on a dumb terminal too where `CI` is set.
    for variable in ["CI", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
        command.env_remove(variable);
    }
    command.envs(more.iter().copied());
    command
}

/// Waits for the end of the command. Returns what the terminal got.
fn finish(child: Child, mut user: File, command: Command) -> (String, Output) {
    // Closes this process's copy of the program's end, so that reading ends with the program.
    drop(command);
    let reading = std::thread::spawn(move || {
        let mut shown = Vec::new();
        // The last read fails with EIO, when the program has closed its end.
        let _ = user.read_to_end(&mut shown);
        String::from_utf8_lossy(&shown).into_owned()
    });
    let output = child.wait_with_output().unwrap();
    (reading.join().unwrap(), output)
}

/// Returns whether the text changes colours: `ESC [ … m` with a parameter from 30.
fn has_colours(text: &str) -> bool {
    text.split("\x1b[").skip(1).any(|rest| {
        let code = rest.trim_start_matches(|sign: char| sign.is_ascii_digit() || sign == ';');
        let numbers = &rest[..rest.len() - code.len()];
        let numbers = numbers.split(';').filter_map(|one| one.parse::<u32>().ok());
        code.starts_with('m') && numbers.into_iter().any(|number| number >= 30)
    })
}

#[test]
fn a_terminal_shows_how_far_a_measurement_is() {
    for more in [&[][..], &[("NO_COLOR", "1")]] {
        let (shown, out) = on_a_terminal(SLAB, "xterm-256color", more);
        assert!(shown.contains("slab  ["), "{shown:?}");
        assert!(shown.contains(" %, "), "{shown:?}");
        assert!(!has_colours(&shown), "{shown:?}");
        // The line disappears in the end.
        let end = shown.rsplit(" gone").next().unwrap();
        assert!(end.contains("\x1b[2K"), "{shown:?}");
        // Before the first step, nothing is known about the time that is left.
        let first = shown.split(" gone").nth(1).unwrap();
        assert!(!first.starts_with(", about"), "{shown:?}");
        assert!(out.contains("Single thread testing"), "{out}");
        assert!(!out.contains(" gone"), "{out}");
    }
}

#[test]
fn every_measurement_shows_how_far_it_is() {
    for (name, line) in [
        ("vmstat", "bench vmstat --rounds 1 --calls 100"),
        (
            "counter",
            "bench counter --threads 2 --rounds 1 --seconds 0.02",
        ),
        ("pft", "bench pft --threads 1 --rounds 1 --memory 256K"),
        ("jitter", "jitter --seconds 0.1"),
    ] {
        if name == "jitter" && std::thread::available_parallelism().unwrap().get() < 2 {
            continue;
        }
        let (shown, _) = on_a_terminal(line, "xterm", &[]);
        assert!(shown.contains(&format!("{name}  [")), "{name}: {shown:?}");
    }
}

#[test]
fn nothing_is_shown_to_programs() {
    let (shown, _) = on_a_terminal(SLAB, "dumb", &[]);
    assert_eq!(shown, "", "a terminal that cannot move its cursor");
    let (shown, out) = on_a_terminal(&format!("{SLAB} --json"), "xterm", &[]);
    assert_eq!(shown, "", "with --json");
    serde_json::from_str::<serde_json::Value>(&out).unwrap();
    let mut piped = Command::new(assert_cmd::cargo::cargo_bin("pinfold"));
    let piped = piped
        .args(SLAB.split(' '))
        .env("TERM", "xterm")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&piped.stderr), "", "with a pipe");
}

/// The user closes the window, or loses the connection. No signal tells `top`, because the terminal
/// does not control it.
#[test]
fn top_ends_with_its_terminal() {
    let (mut user, program) = terminal();
    let mut top = command("top --delay 100", "xterm", &[]);
    let side = || program.try_clone().unwrap();
    top.stdin(side()).stdout(side()).stderr(side());
    let mut child = top.spawn().unwrap();
    drop((top, program));
    // The first picture is complete when the last line has the keys.
    let (mut shown, mut part) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&shown).contains("? help") {
        let read = user.read(&mut part).unwrap();
        shown.extend(&part[..read]);
    }
    drop(user);
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed().as_secs() > 60 {
            child.kill().unwrap();
            panic!("top goes on without a terminal");
        }
        sleep(Duration::from_millis(20));
    };
    // Not by a panic.
    assert!(matches!(status.code(), Some(0 | 2)), "{status}");
}

#[test]
fn top_and_the_help_respect_what_the_terminal_can() {
    let (shown, status) = all_on_a_terminal("top", "dumb", &[]);
    assert_eq!(status, Some(2), "{shown:?}");
    assert_has(&shown, &["TERM", "--once"]);
    assert!(!shown.contains('\x1b'), "{shown:?}");
    for (term, more, styled) in [
        ("xterm", &[][..], true),
        ("dumb", &[], false),
        ("xterm", &[("NO_COLOR", "1")], false),
    ] {
        let (shown, status) = all_on_a_terminal("--help", term, more);
        assert_eq!(status, Some(0), "{shown:?}");
        assert_eq!(shown.contains('\x1b'), styled, "{term} {more:?}: {shown:?}");
    }
}
