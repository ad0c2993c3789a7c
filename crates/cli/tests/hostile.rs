//! What looks into processes, beside hostile ones: each command, pointed at each attack, ends in
//! time with status 0 or 2, takes little memory, prints no control character, and does no harm.
//!
//! The attacks are modes of one program, which is this test itself in a role that an environment
//! variable names. `neighbour::MODES` lists them. To start one by hand, or all of them:
//!
//! ```text
//! PINFOLD_TEST_ROLE=fifo cargo test -p pinfold-cli --test hostile -- --exact role --nocapture
//! PINFOLD_TEST_ROLE=all PINFOLD_TEST_LIFE=600 \
//!   cargo test -p pinfold-cli --test hostile -- --exact role --nocapture
//! ```
//!
//! Each prints `neighbour PID` for each of its processes, and then `ready`. `PINFOLD_TEST_LIFE` is
//! how many seconds it lives, 180 by default, and `PINFOLD_TEST_FOLDER` an empty folder for its
//! files, a new one by default. All processes end when the one that started them ends. A mode whose
//! program runs on Pinfold starts by `pinfold run` with `all`, but not by hand: put
//! `target/debug/pinfold run --` in front of the test's own file then.
//!
//! The tests take some of the pairs of command and attack. `every_command_beside_every_neighbour`,
//! which `.ci/nightly` runs, takes all of them.

#[path = "hostile/elf.rs"]
mod elf;
#[path = "hostile/fakes.rs"]
mod fakes;
mod filter;
#[path = "hostile/impostors.rs"]
mod impostors;
#[path = "hostile/neighbour.rs"]
mod neighbour;
#[path = "hostile/programs.rs"]
mod programs;
#[path = "hostile/server.rs"]
mod server;
#[path = "hostile/watched.rs"]
mod watched;

use neighbour::{FOLDER, MODES, Mode, ROLE};
use serde_json::Value;
use server::Server;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;
use watched::Said;

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    let Ok(name) = std::env::var(ROLE) else {
        return;
    };
    let made = tempfile::tempdir().unwrap();
    let folder = std::env::var_os(FOLDER).map_or(made.path().to_owned(), PathBuf::from);
    neighbour::become_neighbour(&name, &folder);
}

/// Returns the command that starts the neighbour in a mode.
fn neighbour_command(mode: &Mode) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut command = if mode.on_pinfold {
        let mut run = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        run.args(["run", "--"]).arg(own);
        run
    } else {
        Command::new(own)
    };
    command
        .args(["--exact", "role", "--nocapture", "--test-threads", "1"])
        .env(ROLE, mode.name)
        .env_remove("PINFOLD_STATS");
    command
}

/// A neighbour. Its processes end when this value is dropped.
struct Neighbour {
    mode: &'static Mode,
    child: Child,
    pids: Vec<u32>,
    folder: TempDir,
}

/// The number of a plain user, for a machine that has no user `nobody`.
const NOBODY: u32 = 65534;

impl Neighbour {
    /// Starts the neighbour as a user. Returns `None` if the user may not attack in this way.
    fn start(mode: &'static Mode, user: Option<u32>) -> Option<Neighbour> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = neighbour_command(mode);
        if let Some(user) = user {
            std::os::unix::fs::chown(folder.path(), Some(user), Some(user)).unwrap();
            command.uid(user).gid(user);
        }
        let child = command
            .env(FOLDER, folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut neighbour = Neighbour {
            mode,
            child: child.unwrap(),
            pids: Vec::new(),
            folder,
        };
        let out = neighbour.child.stdout.take().unwrap();
        for line in BufReader::new(out).lines() {
            let line = String::from_utf8_lossy(line.unwrap().as_bytes()).into_owned();
            // The harness begins the first line.
            if let Some((_, pid)) = line.split_once("neighbour ") {
                neighbour.pids.push(pid.parse().unwrap());
            }
            if line.contains("skipped") {
                println!("{}: {line}", mode.name);
                return None;
            }
            if line.contains("ready") {
                return Some(neighbour);
            }
        }
        panic!("the neighbour {} did not start", mode.name);
    }

    /// Returns the process to point a command at.
    fn target(&self) -> String {
        let pid = self.pids[0];
        let children = || fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok();
        let child = self.mode.ends.then(children).flatten();
        let child = child.and_then(|all| Some(all.split_whitespace().next()?.to_owned()));
        child.unwrap_or_else(|| pid.to_string())
    }

    /// Says what harm was done to the neighbour, or by it.
    fn harm(&self) -> Result<(), String> {
        for &pid in &self.pids {
            // While a thread other than the first executes a program, the process looks ended.
            let is_back = |_| {
                sleep(Duration::from_millis(20));
                is_alive(pid)
            };
            if !is_alive(pid) && !(0..50).any(is_back) {
                return Err(format!("process {pid} has ended"));
            }
        }
        if self.mode.name == "sparse" {
            let entries = fs::read_dir(format!("/proc/{}/fd", self.pids[0])).unwrap();
            let files = entries.filter_map(|entry| fs::metadata(entry.ok()?.path()).ok());
            // Other files are small.
            let filled = files.map(|file| file.blocks() * 512).max().unwrap_or(0);
            if filled > 1 << 20 {
                return Err(format!("{filled} bytes of a hole have memory"));
            }
        }
        Ok(())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        for &pid in &self.pids {
            // SAFETY: the call uses no memory of this process.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let rest = stat.rsplit(|&byte| byte == b')').next().unwrap_or_default();
    !rest.starts_with(b" Z") && !rest.starts_with(b" X")
}

/// The commands about one process. PID and FILE stand for the process and for a file to write.
const ABOUT_ONE: [&str; 20] = [
    "stat PID",
    "heap dump PID",
    "trim PID --timeout 1",
    "doctor PID",
    "heap start PID --timeout 1 --interval 64k",
    "slabinfo PID",
    "heap dump PID --stacks 5",
    "set PID decay=500 --timeout 1",
    "top --once --delay 0.01 PID",
    "heap dump PID --json",
    "vmstat PID",
    "numastat PID",
    "policy --check PID",
    "migrate PID 0 0",
    "heap dump PID -o FILE",
    "stat PID --json",
    "heap dump PID --flame FILE",
    "set PID --timeout 1",
    "heap stop PID --timeout 1",
    "slabinfo PID --json",
];

/// The commands about all processes.
const ABOUT_ALL: [&str; 5] = [
    "list",
    "list --json",
    "top --once --delay 0.01",
    "numastat",
    "doctor",
];

/// Runs a command. Returns why it is not what a command may do, or what it said.
fn run(words: &str, user: Option<u32>) -> Result<Said, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.args(words.split(' ')).env_remove("LD_PRELOAD");
    let said = watched::run(watched::limit(&mut command, user));
    let said = said.map_err(|why| format!("`pinfold {words}` {why}"))?;
    if words.contains("--json") && said.code == Some(0) {
        let values = serde_json::Deserializer::from_str(&said.out).into_iter::<Value>();
        let bad = values.into_iter().find_map(Result::err);
        if let Some(why) = bad {
            return Err(format!("`pinfold {words}` prints no JSON: {why}"));
        }
    }
    if said.code == Some(2) && said.error.trim().is_empty() {
        return Err(format!("`pinfold {words}` says nothing about its status 2"));
    }
    Ok(said)
}

/// Runs a command about a neighbour. Returns what is wrong.
fn run_about(neighbour: &Neighbour, words: &str, user: Option<u32>) -> Result<(), String> {
    let file = tempfile::tempdir().map_err(|error| error.to_string())?;
    let file = file.path().join("written");
    let words = words.replace("PID", &neighbour.target());
    let words = words.replace("FILE", file.to_str().unwrap());
    let judge = |said: Said| match said.code {
        // A user that may read a process sees it, whatever its names are.
        Some(2) if words.starts_with("stat ") && neighbour.mode.is_shown => Err(said.error),
        _ => neighbour.harm(),
    };
    let done = run(&words, user).and_then(judge);
    done.map_err(|why| format!("{}: {words}: {why}", neighbour.mode.name))
}

/// Does `task` for each number below `count`, some at once. Returns what is wrong.
fn at_once(count: usize, task: impl Fn(usize) -> Result<(), String> + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut wrong = Vec::new();
        loop {
            let nth = next.fetch_add(1, Relaxed);
            if nth >= count {
                return wrong;
            }
            wrong.extend(task(nth).err());
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        let wrong = workers.into_iter().map(|worker| worker.join().unwrap());
        wrong.flatten().collect()
    })
}

/// Starts all neighbours. Those of root's test belong to a plain user.
fn start_all() -> Vec<Neighbour> {
    let user = other_user();
    let started = MODES.iter().map(|mode| Neighbour::start(mode, user));
    started.flatten().collect()
}

/// Returns a plain user, if this test runs as root and that user may run the test's programs.
fn other_user() -> Option<u32> {
    // SAFETY: the call has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let may_run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        command
            .arg("--version")
            .stdout(Stdio::null())
            .uid(NOBODY)
            .gid(NOBODY);
        command.status().is_ok_and(|status| status.success())
    };
    let found = (is_root && may_run()).then_some(NOBODY);
    if found.is_none() {
        println!("left out: attacks by another user than the command's, which need root");
    }
    found
}

/// Watches files that no command may open.
struct Secrets {
    notices: fs::File,
}

impl Secrets {
    fn watch(neighbours: &[Neighbour]) -> Secrets {
        use std::os::fd::{AsRawFd, FromRawFd};
        use std::os::unix::ffi::OsStrExt;
        // SAFETY: the call has no preconditions. The descriptor belongs to the file alone.
        let notices = unsafe { fs::File::from_raw_fd(libc::inotify_init1(libc::IN_NONBLOCK)) };
        for neighbour in neighbours {
            let path = neighbour.folder.path().join(programs::SECRET);
            let mut path = path.as_os_str().as_bytes().to_vec();
            path.push(0);
            let events = libc::IN_OPEN | libc::IN_ACCESS;
            // SAFETY: the path ends with a zero byte.
            unsafe { libc::inotify_add_watch(notices.as_raw_fd(), path.as_ptr().cast(), events) };
        }
        Secrets { notices }
    }

    fn was_opened(&mut self) -> bool {
        use std::io::Read;
        self.notices.read(&mut [0; 4096]).is_ok_and(|got| got > 0)
    }
}

/// Looks at all neighbours at once: by the commands about all processes, by a server, and by the
/// commands about one process that `chosen` takes.
fn look_at_all(chosen: impl Fn(&Mode, usize, usize) -> bool + Sync) {
    let neighbours = start_all();
    let mut secrets = Secrets::watch(&neighbours);
    let mut server = Server::start();
    let pairs: Vec<(usize, usize)> = (0..neighbours.len())
        .flat_map(|nth| (0..ABOUT_ONE.len()).map(move |word| (nth, word)))
        .filter(|&(nth, word)| chosen(neighbours[nth].mode, nth, word))
        .collect();
    let mut wrong = at_once(ABOUT_ALL.len(), |nth| run(ABOUT_ALL[nth], None).map(|_| ()));
    let about_one = |nth: usize| {
        let (neighbour, word) = pairs[nth];
        run_about(&neighbours[neighbour], ABOUT_ONE[word], None)
    };
    wrong.extend(at_once(pairs.len(), about_one));
    wrong.extend(server.look("/metrics").err());
    wrong.extend(server.look("/status.json").err());
    wrong.extend(at_once(neighbours.len(), |nth| {
        let pid = neighbours[nth].target();
        let path = format!("/debug/pprof/heap?pid={pid}");
        let name = neighbours[nth].mode.name;
        server.look(&path).map_err(|why| format!("{name}: {why}"))
    }));
    wrong.extend(server.look("/metrics").err());
    wrong.extend(server.end().err());
    for neighbour in &neighbours {
        let harm = neighbour.harm();
        wrong.extend(
            harm.err()
                .map(|why| format!("{}: {why}", neighbour.mode.name)),
        );
    }
    if secrets.was_opened() {
        wrong.push("a command has opened a file that the process did not map".to_owned());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Pairs that once did harm.
const HARMFUL: [(&str, &str); 6] = [
    ("name", "heap start"),
    ("child", "heap start"),
    ("environment", "doctor"),
    ("escapes", "slabinfo"),
    ("escapes", "vmstat"),
    ("escapes", "heap dump PID --stacks"),
];

#[test]
fn commands_beside_neighbours() {
    // Each neighbour gets the first two commands and two of the others in turn.
    let others = ABOUT_ONE.len() - 2;
    look_at_all(|mode, nth, word| {
        let is_harmful =
            |pair: &(&str, &str)| mode.name == pair.0 && ABOUT_ONE[word].starts_with(pair.1);
        let is_in_turn = word < 2 || (word - 2) % (others / 2) == nth % (others / 2);
        is_in_turn || HARMFUL.iter().any(is_harmful)
    });
}

#[test]
#[ignore = "takes minutes; .ci/nightly runs it"]
fn every_command_beside_every_neighbour() {
    look_at_all(|_, _, _| true);
}

/// A plain user's command is refused by root's process, and says so.
#[test]
fn a_plain_user_learns_nothing_of_other_users_neighbours() {
    let Some(user) = other_user() else {
        return;
    };
    let modes = ["latin", "escapes", "answers"];
    let is_chosen = |mode: &&Mode| modes.contains(&mode.name);
    let neighbours: Vec<Neighbour> = MODES
        .iter()
        .filter(is_chosen)
        .filter_map(|mode| Neighbour::start(mode, None))
        .collect();
    let asked = ABOUT_ONE.iter().enumerate().filter(|(nth, _)| nth % 3 != 1);
    let asked: Vec<&str> = asked.map(|(_, words)| *words).collect();
    let wrong = at_once(neighbours.len() * asked.len(), |nth| {
        let (neighbour, words) = (&neighbours[nth / asked.len()], asked[nth % asked.len()]);
        let words = words.replace("PID", &neighbour.target());
        let words = words.replace("FILE", "/dev/null/none");
        let said = run(&words, Some(user))?;
        let is_refused = said.code == Some(2) && said.out.is_empty();
        // `doctor` goes on with what everybody may know.
        if !is_refused && !words.starts_with("doctor") {
            return Err(format!("{words}: status {:?}: {}", said.code, said.out));
        }
        neighbour.harm()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    run("list", Some(user)).unwrap();
}
