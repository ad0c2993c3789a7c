//! A program that is the test itself, run in a role that an environment variable names.
#![allow(dead_code, reason = "each test uses a part")]

use std::ffi::OsStr;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The variable that names the role.
pub const ROLE: &str = "PINFOLD_TEST_ROLE";

/// The words that run a program by `pinfold run`.
pub const RUN: [&str; 3] = [env!("CARGO_BIN_EXE_pinfold"), "run", "--"];

/// Words that a program prints before the numbers of its children.
const CHILDREN: [&str; 3] = ["child", "filtered", "limited"];

/// Returns a command that runs this test in a role, behind the words `before`.
pub fn in_role(before: &[&str], role: &str) -> Command {
    let this = std::env::current_exe().unwrap();
    let mut words: Vec<&OsStr> = before.iter().map(OsStr::new).collect();
    words.push(this.as_os_str());
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .args(["--exact", "role", "--nocapture"])
        .env("RUST_TEST_THREADS", "1")
        .env(ROLE, role)
        .env_remove("PINFOLD_STATS");
    command
}

/// Returns a command that runs this test in a role by `pinfold run`, in a shell that has run the
/// words `shell`.
pub fn in_shell(shell: &str, role: &str) -> Command {
    let words = format!("{shell} exec \"$0\" \"$@\"");
    in_role(&["sh", "-c", &words, RUN[0], RUN[1], RUN[2]], role)
}

/// Allocates and frees for a while, with pauses.
pub fn work(life: Duration) {
    let end = Instant::now() + life;
    while Instant::now() < end {
        let blocks: Vec<Vec<u8>> = (0..3000).map(|_| black_box(vec![1; 200])).collect();
        drop(black_box(blocks));
        sleep(Duration::from_millis(5));
    }
}

/// Starts a child that does `act` and ends. Prints its number behind `word`, and returns it.
pub fn fork_child(word: &str, act: impl FnOnce()) -> libc::pid_t {
    // SAFETY: only the child's own thread runs in it, and it uses nothing that another thread of
    // the parent may have locked: Pinfold's malloc takes its locks for a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        act();
        std::process::exit(0);
    }
    println!("{word} {child}");
    child
}

/// Waits until `is_so` returns true, for a minute at most.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        sleep(Duration::from_millis(20));
    }
}

/// A program. Ends when this value is dropped, and the children that it has named with it.
pub struct Program {
    pub process: Child,
    pub lines: BufReader<ChildStdout>,
    /// The numbers that the program has printed, with the words before them.
    pub numbers: Vec<(String, u32)>,
}

impl Program {
    pub fn of(command: &mut Command) -> Program {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        Program {
            lines: BufReader::new(process.stdout.take().unwrap()),
            process,
            numbers: Vec::new(),
        }
    }

    /// Starts a program, and waits until it is ready.
    pub fn start(command: &mut Command) -> Program {
        let mut program = Program::of(command);
        assert!(program.says("ready"), "it ended");
        program
    }

    /// Waits for a line with `words`. Returns false if the program ends before it.
    pub fn says(&mut self, words: &str) -> bool {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some((before, number)) = line.trim().rsplit_once(' ')
                && let Ok(number) = number.parse()
            {
                let word = before.rsplit(' ').next().unwrap();
                self.numbers.push((word.to_owned(), number));
            }
            if line.contains(words) {
                return true;
            }
            line.clear();
        }
        false
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn pid(&self) -> String {
        self.id().to_string()
    }

    /// Returns the number that the program has printed behind `word`.
    pub fn number(&self, word: &str) -> u32 {
        let mut numbers = self.numbers.iter();
        let number = numbers.find(|(name, _)| name == word);
        number
            .unwrap_or_else(|| panic!("no {word}: {:?}", self.numbers))
            .1
    }

    /// Returns the children that the program has named.
    pub fn children(&self) -> Vec<u32> {
        let numbers = self.numbers.iter();
        let children = numbers.filter(|(word, _)| CHILDREN.contains(&word.as_str()));
        children.map(|(_, number)| *number).collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Some children end with their input.
        drop(self.process.stdin.take());
        for child in self.children() {
            // SAFETY: the call uses no memory of this process.
            unsafe { libc::kill(child as i32, libc::SIGKILL) };
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
