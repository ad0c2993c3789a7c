//! Whether the commands tell a process from others that have its files or its number.
//!
//! The programs are this test itself, run by `pinfold run` in a role that an environment variable
//! names.

mod program;
mod shown;
mod texts;

use program::{Program, ROLE, RUN, in_role, work};
use shown::pinfold as run;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;
use texts::assert_has;

/// How long a program in a role lives, if no test ends it.
const LIFE: Duration = Duration::from_secs(60);

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    match std::env::var(ROLE).as_deref() {
        Err(_) => {}
        Ok("executes") => {
            println!("ready");
            std::io::stdin().read_line(&mut String::new()).unwrap();
            panic!("{}", Command::new("sleep").arg("60").exec());
        }
        Ok("nests") => {
            // SAFETY: the calls use no memory. The child uses nothing that another thread of the
            // parent may have locked: Pinfold's malloc takes its locks for a fork.
            unsafe {
                assert_eq!(libc::unshare(libc::CLONE_NEWPID), 0);
                libc::fork();
            }
            assert_eq!(std::process::id(), 1);
            println!("ready");
            work(LIFE);
        }
        Ok(other) => panic!("there is no role {other}"),
    }
}

/// Returns `pinfold run` in a role, with the words `before` in front of it.
fn running(before: &[&str], role: &str) -> Program {
    let words = [before, &RUN].concat();
    Program::of(in_role(&words, role).env("PINFOLD_HEAP", "on"))
}

/// Returns the only child of a process.
fn child_of(pid: u32) -> u32 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children =
        threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("children")));
    let children: String = children.map(Result::unwrap).collect();
    children.trim().parse().unwrap()
}

#[test]
fn a_program_that_starts_another_one_is_not_shown_for_it() {
    let mut program = running(&[], "executes");
    assert!(program.says("ready"));
    let pid = program.pid();
    let mut stat = Program::of(shown::command(&["stat", &pid, "0.1"]).stderr(Stdio::piped()));
    assert!(stat.says("held"));
    drop(program.process.stdin.take());
    let error = std::io::read_to_string(stat.process.stderr.take().unwrap()).unwrap();
    assert_eq!(stat.process.wait().unwrap().code(), Some(2));
    assert_has(&error, &[&pid, "another program"]);
}

#[test]
fn a_child_with_its_parents_number_is_asked_and_shown_for_itself() {
    // Only root may make a namespace. `unshare` then ends with status 1 before the program starts.
    let unshare = ["unshare", "--kill-child", "-p", "-f"];
    let mut program = running(&unshare, "nests");
    if !program.says("ready") {
        return println!("skipped: this user cannot make a PID namespace");
    }
    assert!(program.says("ready"));
    let parent = child_of(program.id());
    let child = child_of(parent);
    let (parent, child) = (parent.to_string(), child.to_string());
    let set = |pid: &str, change: &str| {
        let (out, error, code) = run(&["set", pid, change, "--timeout", "60"]);
        assert_eq!(code, Some(0), "{out}{error}");
    };
    set(&parent, "decay=700");
    set(&child, "decay=900");
    let value = |pid: &str| run(&["set", pid]).0;
    for (pid, own, others) in [(&parent, "700 ms", "900 ms"), (&child, "900 ms", "700 ms")] {
        let value = value(pid);
        assert!(value.contains(own) && !value.contains(others), "{value}");
    }
    // Only the child's profile ends.
    let (_, error, code) = run(&["heap", "stop", &child, "--timeout", "60"]);
    assert_eq!(code, Some(0), "{error}");
    let (out, error, _) = run(&["list"]);
    for pid in [&parent, &child] {
        assert_eq!(run(&["trim", pid, "--timeout", "60"]).2, Some(0));
        assert_eq!(run(&["stat", pid]).2, Some(0));
        assert_eq!(run(&["heap", "dump", pid]).2, Some(0));
        assert!(out.contains(&format!(" {pid} ")), "{out}{error}");
    }
}
