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

/// Returns what `doctor` reports for `name`: whether it is there, what was found, and what follows.
fn said(command: std::process::Command, name: &str) -> (bool, String, String) {
    let output = Command::from_std(command).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = json["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == name).unwrap();
    let text = |field: &str| check[field].as_str().unwrap().to_owned();
    (
        check["ok"].as_bool().unwrap(),
        text("found"),
        text("follows"),
    )
}

/// Returns whether rseq works here. Without it, these tests have nothing to take away.
fn works() -> bool {
    said(doctor(), "rseq").0
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
    let (ok, found, _) = said(without(), "rseq");
    assert!(ok && found.starts_with("Pinfold itself"), "{found}");
    let (ok, found, _) = said(without(), "backend");
    assert!(ok && found.contains("restartable sequences"), "{found}");
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
    let (ok, _, follows) = said(off(), "rseq");
    assert!(ok && follows.contains("PINFOLD_RSEQ=off"), "{follows}");
    let (ok, found, _) = said(off(), "backend");
    assert!(!ok && found.contains("PINFOLD_RSEQ=off"), "{found}");
    let (_, _, follows) = said(off(), "membarrier");
    assert!(follows.contains("not needed"), "{follows}");
}

#[test]
fn a_seccomp_filter_is_named() {
    for backend in ["off", "cid"] {
        let (ok, found, _) = said(filtered(libc::SYS_membarrier, backend), "membarrier");
        assert!(!ok && found.contains("seccomp"), "{backend}: {found}");
        let (ok, found, _) = said(filtered(libc::SYS_rseq, backend), "rseq");
        assert!(!ok && found.contains("seccomp"), "{backend}: {found}");
    }
}

/// Returns a `doctor` below a seccomp filter that answers one system call with EPERM.
fn filtered(call: libc::c_long, backend: &str) -> std::process::Command {
    let mut command = doctor();
    command.env("PINFOLD_RSEQ", backend);
    filter::forbid(&mut command, &[call], libc::EPERM);
    command
}

fn on(root: &Path, name: &str) -> (bool, String, String) {
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
    let (ok, found, _) = on(root.path(), "huge pages");
    assert!(!ok, "{found}");
    assert_has(&found, &["never", "12 reserved"]);
    for (text, expected, words) in [
        ("0\n", true, "costs nothing"),
        ("2\n", false, "charged"),
        ("\u{1b}[31m\n", true, "not a known mode"),
    ] {
        write("proc/sys/vm/overcommit_memory", text);
        let (ok, found, _) = on(root.path(), "overcommit");
        assert!(ok == expected && !found.contains('\u{1b}'), "{found}");
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
