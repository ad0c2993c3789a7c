//! The commands that read other processes survive what these may show: random bytes, segments cut
//! at any point, processes that are killed at any moment, and many processes at once.
//!
//! `PINFOLD_TEST_SECONDS` says how long the random test runs, `PINFOLD_TEST_PROCESSES` how many
//! processes the last test starts.

mod served;

use pinfold::internal::segment::Segment;
use served::Server;
use std::fs::{self, File};
use std::io::Read;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a command may take before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);

fn number(variable: &str, default: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(default, |value| value.parse().unwrap())
}

fn pinfold(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command
        .args(words)
        .env_remove("LD_PRELOAD")
        .env_remove("PINFOLD_STATS");
    command
}

/// Ends a process when this value is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program on Pinfold that allocates all the time, and waits until it shows itself.
fn program() -> Killed {
    let script = "while :; do x=$x$x$x; [ ${#x} -gt 100000 ] && x=abcdefgh; : $(echo) ; done";
    let child = pinfold(&["run", "--", "sh", "-c", script]).spawn().unwrap();
    let program = Killed(child);
    let end = Instant::now() + PATIENCE;
    while segment_of(program.0.id()).is_none() {
        assert!(Instant::now() < end, "the program shows nothing");
        sleep(Duration::from_millis(5));
    }
    program
}

/// Returns the bytes of a process's segment.
fn segment_of(pid: u32) -> Option<Vec<u8>> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()? {
        let path = entry.ok()?.path();
        let is_segment = fs::read_link(&path)
            .is_ok_and(|link| link.to_string_lossy() == "/memfd:pinfold (deleted)");
        let mut bytes = Vec::new();
        if is_segment && File::open(path).ok()?.read_to_end(&mut bytes).ok()? > 0 {
            let magic = pinfold::internal::segment::MAGIC.to_le_bytes();
            return bytes.starts_with(&magic).then_some(bytes);
        }
    }
    None
}

/// Runs a command. Fails if it hangs, panics or is ended by a signal.
fn survives(words: &[&str], case: &str) {
    let child = pinfold(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = Killed(child.unwrap());
    let (mut out, mut error) = (
        child.0.stdout.take().unwrap(),
        child.0.stderr.take().unwrap(),
    );
    let said = std::thread::spawn(move || {
        let (mut text, mut errors) = (Vec::new(), Vec::new());
        out.read_to_end(&mut text).unwrap();
        error.read_to_end(&mut errors).unwrap();
        String::from_utf8_lossy(&errors).into_owned()
    });
    let end = Instant::now() + PATIENCE;
    let status = loop {
        match child.0.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < end, "{words:?} hangs: {case}"),
        }
        sleep(Duration::from_millis(1));
    };
    let error = said.join().unwrap();
    let ended_well = matches!(status.code(), Some(0 | 2)) && !error.contains("panicked");
    assert!(ended_well, "{words:?}: {status}: {error}: {case}");
}

/// Returns the server's answer to a request for `path`, which it must serve.
fn get(server: &mut Server, path: &str, case: &str) -> String {
    let answer = server.answer(&served::get(path, ""));
    let status = server.child.try_wait().unwrap();
    let is_well = |text: &str| status.is_none() && text.starts_with("HTTP/1.1 200");
    match answer {
        Ok(text) if is_well(&text) => text,
        other => panic!("{other:?} {status:?}: {case}"),
    }
}

/// A file without a name that this process has mapped. The commands take it for its segment.
struct Shown {
    file: File,
    at: *mut libc::c_void,
}

/// Bytes of the mapping. The commands look for the mapping, not into it.
const MAPPED: usize = 4096;

impl Shown {
    fn new(bytes: &[u8], seals: bool) -> Shown {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string, and the descriptor belongs to the file alone.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"pinfold".as_ptr(), flags)) };
        file.write_all_at(bytes, 0).unwrap();
        if seals {
            // SAFETY: the call uses no memory of this process.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        }
        let (place, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: the kernel chooses the place.
        let at = unsafe { libc::mmap(place, MAPPED, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Shown { file, at }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        // SAFETY: nothing uses the mapping.
        unsafe { libc::munmap(self.at, MAPPED) };
    }
}

/// A generator of pseudo-random numbers. The seed is printed with each failure.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Spoils a segment: changes bytes of the head or anywhere, or all, and cuts it.
fn spoil(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..random.below(8) {
        let end = [size_of::<Segment>(), 4096, bytes.len()][random.below(3)];
        let at = random.below(end.min(bytes.len()));
        bytes[at] = match random.below(3) {
            0 => random.next() as u8,
            1 => 0xff,
            _ => bytes[at] ^ 1 << random.below(8),
        };
    }
    match random.below(8) {
        0 => bytes[16..]
            .iter_mut()
            .for_each(|byte| *byte = random.next() as u8),
        1 => bytes
            .iter_mut()
            .for_each(|byte| *byte = random.next() as u8),
        2 | 3 => bytes.truncate(random.below(bytes.len())),
        4 => bytes.truncate(random.below(size_of::<Segment>() + 64)),
        _ => {}
    }
}

#[test]
fn random_and_cut_segments_end_no_command() {
    let program = program();
    let whole = segment_of(program.0.id()).unwrap();
    let own = std::process::id();
    let pid = own.to_string();
    let mut server = Server::start(1000, &[]);
    let seed = Instant::now().elapsed().as_nanos() as u64
        ^ std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let mut random = Random(seed | 1);
    let end = Instant::now() + Duration::from_secs(number("PINFOLD_TEST_SECONDS", 5));
    let (mut rounds, mut cut) = (0, 0);
    while Instant::now() < end {
        let case = format!("seed {seed}, round {rounds}");
        let mut bytes = whole.clone();
        bytes[offset_of!(Segment, pid)..][..4].copy_from_slice(&own.to_le_bytes());
        if rounds % 2 == 0 {
            spoil(&mut bytes, &mut random);
        } else {
            // Every boundary between words, in turn.
            cut = (cut + 8) % bytes.len();
            bytes.truncate(cut);
        }
        let shown = Shown::new(&bytes, rounds % 3 == 0);
        survives(&["stat", &pid, "--json"], &case);
        survives(&["slabinfo", &pid], &case);
        if rounds % 8 == 0 {
            survives(&["list"], &case);
            survives(&["top", "--once", "--delay", "0.01", &pid], &case);
            survives(&["top", "--once", "--delay", "0.01"], &case);
            survives(&["trim", &pid, "--timeout", "0.01"], &case);
            get(&mut server, "/metrics", &case);
            get(&mut server, "/status.json", &case);
            // The file changes while a command reads it.
            let reader = std::thread::spawn({
                let (pid, case) = (pid.clone(), case.clone());
                move || survives(&["stat", &pid, "0.01", "5"], &case)
            });
            while !reader.is_finished() {
                let at = random.below(bytes.len());
                shown
                    .file
                    .write_all_at(&random.next().to_le_bytes(), at as u64)
                    .unwrap();
                let _ = shown.file.set_len(random.below(whole.len()) as u64);
            }
            reader.join().unwrap();
        }
        rounds += 1;
    }
    println!("{rounds} rounds");
}

#[test]
fn a_process_may_be_killed_at_any_moment() {
    for nth in 0..12 {
        let mut victim = program();
        let pid = victim.0.id().to_string();
        let case = format!("killed after {nth} ms");
        let commands = [
            &["stat", &pid, "0.01"][..],
            &["top", "--once", "--delay", "0.02", &pid],
            &["slabinfo", &pid],
            &["trim", &pid, "--timeout", "0.5"],
            &["set", &pid, "--timeout", "0.5"],
        ];
        std::thread::scope(|scope| {
            for words in &commands {
                scope.spawn(|| survives(words, &case));
            }
            sleep(Duration::from_millis(nth));
            victim.0.kill().unwrap();
            victim.0.wait().unwrap();
        });
    }
}

#[test]
fn many_processes_are_listed_and_served() {
    let count = number("PINFOLD_TEST_PROCESSES", 40) as usize;
    let start = || pinfold(&["run", "--", "sleep", "600"]).spawn().unwrap();
    let programs: Vec<Killed> = (0..count).map(|_| Killed(start())).collect();
    let end = Instant::now() + PATIENCE;
    while !programs
        .iter()
        .all(|program| segment_of(program.0.id()).is_some())
    {
        assert!(Instant::now() < end, "some programs show nothing");
        sleep(Duration::from_millis(50));
    }
    let timed = |words: &[&str]| {
        let begin = Instant::now();
        let output = pinfold(words).output().unwrap();
        println!("{words:?} with {count} processes: {:?}", begin.elapsed());
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let listed = timed(&["list"]);
    let top = timed(&["top", "--once", "--delay", "0.01"]);
    // Other programs of this machine may have the few lines of the picture.
    let shown = top
        .strip_prefix("pinfold top: ")
        .and_then(|rest| rest.split(' ').next());
    let shown: usize = shown.unwrap().parse().unwrap();
    assert!(shown >= count, "{top}");
    let mut server = Server::start(1000, &[]);
    let begin = Instant::now();
    let metrics = get(&mut server, "/metrics", "many");
    println!(
        "a scrape with {count} processes: {:?}, {} bytes",
        begin.elapsed(),
        metrics.len()
    );
    for program in &programs {
        let pid = program.0.id().to_string();
        let is_listed = |line: &str| line.split_whitespace().nth(1) == Some(&pid);
        assert!(listed.lines().any(is_listed), "{pid} is missing");
    }
    // The whole body has arrived.
    let (head, body) = metrics.split_once("\r\n\r\n").unwrap();
    let length = format!("Content-Length: {}", body.len());
    assert!(head.lines().any(|line| line == length), "{head}");
}

#[test]
fn another_user_is_told_who_may_look() {
    use std::os::unix::process::CommandExt;
    // Root's test asks as `nobody`. Any other user asks about root's first process.
    // SAFETY: the call has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let program = program();
    let pid = if is_root {
        program.0.id().to_string()
    } else {
        "1".to_owned()
    };
    for words in [
        &["stat", &pid][..],
        &["slabinfo", &pid],
        &["top", "--once", &pid],
        &["serve", "--listen", "127.0.0.1:0", &pid],
        &["trim", &pid],
        &["set", &pid, "decay=1"],
    ] {
        let mut command = pinfold(words);
        if is_root {
            command.uid(65_534).gid(65_534);
        }
        let Ok(output) = command.output() else {
            println!("skipped: nobody may not run the command here");
            return;
        };
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {error}");
        assert!(
            error.contains(&pid) && error.contains("may not look"),
            "{words:?}: {error}"
        );
    }
}

/// Kills a process and starts another one with the same number while `pinfold stat` reads it.
const REUSE: &str = r#"
"$0" run -- sleep 100 & old=$!
until [ "$("$0" stat $old | wc -l)" = 3 ]; do sleep 0.1; done
lines=$(mktemp)
"$0" stat $old 0.05 > "$lines" & stat=$!
until [ -s "$lines" ]; do sleep 0.1; done
kill -9 $old; wait $old
echo $((old - 1)) > /proc/sys/kernel/ns_last_pid || exit 77
"$0" run -- sleep 100 & new=$!
[ $old = $new ] || exit 77
until [ "$("$0" stat $new | wc -l)" = 3 ]; do sleep 0.1; done
wait $stat; echo "stat ended"
kill $new; rm "$lines"
"#;

#[test]
fn a_process_with_a_reused_number_is_another_process() {
    // To choose the next process's number takes root and a PID namespace. `timeout` ends the test
    // if `stat` does not exit.
    let unshare = [
        "120",
        "unshare",
        "--kill-child",
        "-p",
        "-f",
        "--mount-proc",
        "sh",
        "-c",
        REUSE,
    ];
    let output = Command::new("timeout")
        .args(unshare)
        .arg(env!("CARGO_BIN_EXE_pinfold"))
        .env_remove("LD_PRELOAD")
        .output();
    let Ok(output) = output else {
        return println!("skipped: there is no timeout");
    };
    if matches!(output.status.code(), Some(1 | 77 | 127)) {
        return println!("skipped: this user cannot choose the numbers of processes");
    }
    let (out, error) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && out.starts_with(b"stat ended"),
        "{:?}: {error}",
        output.status
    );
}
