//! A process as seen from a user namespace in which no user is mapped. There every owner shows as
//! the overflow user 65534, and so does this user: equal numbers must not mean the same owner.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn an_unmapped_user_may_not_look_or_ask() {
    let command = assert_cmd::cargo::cargo_bin("pinfold");
    if !command
        .with_file_name("deps/libpinfold_preload.so")
        .is_file()
    {
        eprintln!("the library is not built");
        return;
    }
    let mut program = Command::new(&command)
        .args(["run", "--", "sleep", "60"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let pid = program.id().to_string();
    let said = |words: &[&str]| {
        let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), error)
    };
    let command = command.to_str().unwrap();
    // `run` executes the program, so the process is the same. It takes a moment to start.
    let begin = Instant::now();
    while said(&[command, "stat", &pid]).0 != Some(0) {
        assert!(begin.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
    let (status, error) = said(&["unshare", "--user", "true"]);
    if status == Some(0) {
        for words in [&["stat"][..], &["trim"], &["heap", "start"]] {
            let all = [&["unshare", "--user", command], words, &[&*pid]].concat();
            let (status, error) = said(&all);
            assert_eq!(status, Some(2), "{words:?}: {error}");
            assert!(error.contains("may not look"), "{words:?}: {error}");
        }
    } else {
        eprintln!("this machine allows no user namespace: {error}");
    }
    program.kill().unwrap();
    program.wait().unwrap();
}
