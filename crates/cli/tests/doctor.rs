//! `pinfold doctor` on machines on which something is missing.

mod filter;
mod texts;

use assert_cmd::Command;
use std::fs;
use std::path::Path;
use texts::assert_has;

fn doctor() -> std::process::Command {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("pinfold"));
    command
        .args(["doctor", "--json"])
        .env_remove("PINFOLD_RSEQ")
        .env_remove("GLIBC_TUNABLES");
    command
}

/// Returns what `doctor` reports for `name`: how the check came out, what was found, and what
/// follows.
fn said(command: std::process::Command, name: &str) -> (String, String, String) {
    let output = Command::from_std(command).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = json["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == name).unwrap();
    let text = |field: &str| check[field].as_str().unwrap().to_owned();
    (text("state"), text("found"), text("follows"))
}

/// Returns whether rseq works here. Without it, these tests have nothing to take away.
fn works() -> bool {
    said(doctor(), "rseq").0 == "ok"
}

#[test]
fn the_one_who_registers_threads_is_named() {
    if !works() {
        return;
    }
    let without = || {
        let mut command = doctor();
        command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        command
    };
    let (state, found, _) = said(without(), "rseq");
    assert!(
        state == "ok" && found.starts_with("Pinfold itself"),
        "{found}"
    );
    let (state, found, _) = said(without(), "backend");
    assert!(
        state == "ok" && found.contains("restartable sequences"),
        "{found}"
    );
    // These lines name what the kernel offers, which does not depend on who registers.
    for check in ["concurrency ids", "membarrier"] {
        assert_eq!(said(without(), check), said(doctor(), check));
    }
}

#[test]
fn rseq_is_reported_as_working_while_pinfold_rseq_switches_it_off() {
    if !works() {
        return;
    }
    let off = || {
        let mut command = doctor();
        command.env("PINFOLD_RSEQ", "off");
        command
    };
    let (state, _, follows) = said(off(), "rseq");
    assert!(
        state == "ok" && follows.contains("PINFOLD_RSEQ=off"),
        "{follows}"
    );
    let (state, found, _) = said(off(), "backend");
    assert!(
        state == "note" && found.contains("PINFOLD_RSEQ=off"),
        "{found}"
    );
    let (_, _, follows) = said(off(), "membarrier");
    assert!(follows.contains("not needed"), "{follows}");
}

#[test]
fn a_seccomp_filter_is_named() {
    for backend in ["off", "cid"] {
        let (state, found, _) = said(filtered(libc::SYS_membarrier, backend), "membarrier");
        assert!(
            state != "ok" && found.contains("seccomp"),
            "{backend}: {found}"
        );
        let (state, found, _) = said(filtered(libc::SYS_rseq, backend), "rseq");
        assert!(
            state != "ok" && found.contains("seccomp"),
            "{backend}: {found}"
        );
    }
}

/// Returns a `doctor` below a seccomp filter that answers one system call with EPERM.
fn filtered(call: libc::c_long, backend: &str) -> std::process::Command {
    let mut command = doctor();
    command.env("PINFOLD_RSEQ", backend);
    filter::forbid(&mut command, &[call], libc::EPERM);
    command
}

fn on(root: &Path, name: &str) -> (String, String, String) {
    let mut command = doctor();
    command.arg("--root").arg(root);
    said(command, name)
}

#[test]
fn huge_pages_and_overcommit_are_read() {
    let root = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always madvise [never]\n",
    );
    write("proc/sys/vm/nr_hugepages", "12\n");
    let (state, found, _) = on(root.path(), "huge pages");
    assert_eq!(state, "note", "{found}");
    assert_has(&found, &["never", "12 reserved"]);
    for (text, expected, words) in [
        ("0\n", "ok", "costs nothing"),
        ("2\n", "note", "charged"),
        ("\u{1b}[31m\n", "ok", "not a known mode"),
    ] {
        write("proc/sys/vm/overcommit_memory", text);
        let (state, found, _) = on(root.path(), "overcommit");
        assert!(state == expected && !found.contains('\u{1b}'), "{found}");
        assert_has(&found, &[words]);
    }
}

#[test]
fn a_reader_that_closes_the_pipe_is_no_error() {
    let mut child = doctor()
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Otherwise a probe could not tell a machine that is fine from one without restartable sequences.
#[test]
fn a_problem_is_an_exit_status_for_probes() {
    let code = |mut command: std::process::Command| {
        let output = command.arg("--check").output().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), json["problems"].clone())
    };
    let root = tempfile::tempdir().unwrap();
    let cpus = root.path().join("sys/devices/system/cpu");
    fs::create_dir_all(&cpus).unwrap();
    fs::write(cpus.join("online"), "nonsense").unwrap();
    let mut unreadable = doctor();
    unreadable.arg("--root").arg(root.path());
    let (status, problems) = code(unreadable);
    assert!(
        status == Some(1) && problems.as_u64() > Some(0),
        "{problems}"
    );
    if works() {
        assert_eq!(code(doctor()), (Some(0), 0.into()));
        // A limit that the user has set is no problem.
        let mut limited = doctor();
        limited.env("PINFOLD_MEMORY_LIMIT", "512M");
        assert_eq!(code(limited), (Some(0), 0.into()));
        let (status, problems) = code(filtered(libc::SYS_membarrier, "cid"));
        assert!(
            status == Some(1) && problems.as_u64() > Some(0),
            "{problems}"
        );
    }
}

#[test]
fn a_limit_that_the_user_has_set_is_a_note() {
    let mut command = doctor();
    command.env("PINFOLD_MEMORY_LIMIT", "512M");
    let (state, found, _) = said(command, "memory limit");
    assert_eq!(state, "note");
    assert_has(&found, &["PINFOLD_MEMORY_LIMIT is 512M"]);
}
