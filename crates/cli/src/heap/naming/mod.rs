//! Names the functions at addresses, in a process of its own.
//!
//! The observed process chose the files that the names come from. A file can be made so that its
//! reader needs any amount of memory or time, and a fault in the code that reads it could be used
//! to take the reader over. So this command never reads such a file itself:
//!
//! 1. It writes the addresses and the files' places ([`Request`]) into a file without a name, and
//!    starts itself again with the hidden subcommand `name-functions`.
//! 2. That process ([`child`]) opens the files, gives up its rights, and limits its memory and its
//!    time. Only then does it read them. It writes what it finds ([`Answer`]) line by line.
//! 3. This command reads the lines. They may hold anything too, so it checks each. It ends the
//!    process at the deadline. What has no name until then keeps its address.

mod child;
mod perf_map;

use crate::foreign::Mapping;
use pinfold_pprof::internal::names::{Found, MOST_INLINED, Names, Place};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Weak;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub use child::main as child_main;

const SUBCOMMAND: &str = "name-functions";

/// How long naming may take by default.
pub const PATIENCE: Duration = Duration::from_secs(8);

pub struct Patience {
    time: Duration,
    /// Naming ends once this is dropped.
    waiting: Option<Weak<()>>,
}

impl From<Duration> for Patience {
    fn from(time: Duration) -> Patience {
        Patience {
            time,
            waiting: None,
        }
    }
}

impl Patience {
    /// Returns a patience of [`PATIENCE`] that also ends when `waiting` is dropped.
    pub fn while_waiting(waiting: Weak<()>) -> Patience {
        Patience {
            time: PATIENCE,
            waiting: Some(waiting),
        }
    }

    fn is_over(&self) -> bool {
        let waiting = self.waiting.as_ref();
        waiting.is_some_and(|waiting| waiting.strong_count() == 0)
    }
}

/// The most files that are read for names: those with the most addresses.
const MOST_FILES: usize = 512;

/// The longest name of a function or file. A longer one is cut.
const LONGEST_NAME: usize = 4096;

/// The most bytes of one line of an answer: the names of all inlined functions, each byte of which
/// may take six in JSON.
const LONGEST_LINE: usize = MOST_INLINED * 2 * LONGEST_NAME * 6;

/// The most bytes of all answers.
const MOST_BYTES: usize = 64 << 20;

/// Whose profile it is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Subject {
    /// A process, by its PID and its start time.
    Process { pid: u32, started: u64 },
    /// A file that a process has left. Its owner chose the places of the files.
    File { uid: u32, gid: u32 },
}

impl Subject {
    pub fn own_file() -> Subject {
        Subject::File {
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
        }
    }
}

/// What the naming process gets: the addresses, and the files of their functions.
#[derive(Serialize, Deserialize)]
struct Request {
    subject: Subject,
    seconds: u64,
    files: Vec<Wanted>,
    /// The numbers of the addresses that are in no file, and these addresses.
    made: Vec<(u32, u64)>,
}

/// A file whose functions are to be named.
#[derive(Serialize, Deserialize)]
struct Wanted {
    mapping: Mapping,
    /// The numbers of the addresses, and their positions in the file.
    places: Vec<(u32, u64)>,
}

/// One line that the naming process writes.
#[derive(Serialize, Deserialize)]
enum Answer {
    /// File `nth` of the request has this build id.
    BuildId(u32, String),
    /// File `nth` of the request cannot be used.
    Unopened(u32, String),
    /// The names of one address.
    Names(u32, Names),
}

/// Names addresses. Ends before `patience` is over.
pub fn find(
    subject: Subject,
    mappings: &[Mapping],
    places: &[Place],
    patience: &Patience,
) -> Found {
    let mut found = Found::default();
    if places.is_empty() {
        return found;
    }
    // A program can map one file many times, so the mappings of a file share one entry.
    let mut numbers = HashMap::new();
    let mut files: Vec<(Wanted, Vec<usize>)> = Vec::new();
    let mut made = Vec::new();
    for place in places {
        let Some(nth) = place.mapping else {
            made.push((place.number, place.position));
            continue;
        };
        let mapping = &mappings[nth];
        let key = (mapping.device, mapping.inode, &mapping.path);
        let number = *numbers.entry(key).or_insert_with(|| {
            let mapping = mapping.clone();
            let places = Vec::new();
            files.push((Wanted { mapping, places }, Vec::new()));
            files.len() - 1
        });
        let (wanted, of) = &mut files[number];
        wanted.places.push((place.number, place.position));
        if of.last() != Some(&nth) {
            of.push(nth);
        }
    }
    files.sort_by_key(|(wanted, _)| std::cmp::Reverse(wanted.places.len()));
    if files.len() > MOST_FILES {
        let left = files.len() - MOST_FILES;
        found.notes.push(format!(
            "{left} of {} files were not read for names, because the others hold more of the \
             addresses",
            files.len()
        ));
        files.truncate(MOST_FILES);
    }
    let (wanted, of): (Vec<Wanted>, Vec<Vec<usize>>) = files.into_iter().unzip();
    let request = Request {
        subject,
        seconds: patience.time.as_secs().max(1),
        files: wanted,
        made,
    };
    let mut reader = Reader {
        request: &request,
        of: &of,
        addresses: places.len() as u32,
        found: &mut found,
        unopened: 0,
    };
    if let Err(why) = reader.run(patience) {
        found.notes.push(why);
    }
    found
}

/// Reads what the naming process writes, and checks each line.
struct Reader<'r> {
    request: &'r Request,
    /// The mappings of each file.
    of: &'r [Vec<usize>],
    /// How many addresses there are.
    addresses: u32,
    found: &'r mut Found,
    unopened: usize,
}

impl Reader<'_> {
    fn run(&mut self, patience: &Patience) -> Result<(), String> {
        let deadline = Instant::now() + patience.time;
        let cannot_start = |error: io::Error| {
            format!("functions have no names: the process that finds them did not start: {error}")
        };
        let mut child = start(self.request).map_err(cannot_start)?;
        let read = match child.stdout.take() {
            Some(stdout) => self.read(stdout, deadline, patience),
            None => Ok(()),
        };
        let ended = end(&mut child, read.is_ok(), deadline);
        read?;
        match ended {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!(
                "some functions have no names: the process that finds them ended by {}; a file of \
                 the program may be damaged, or too large",
                cause(status)
            )),
            None => Err(
                "some functions have no names: the process that finds them did not end".to_owned(),
            ),
        }
    }

    fn read(
        &mut self,
        mut from: ChildStdout,
        deadline: Instant,
        patience: &Patience,
    ) -> Result<(), String> {
        let failed = |error: io::Error| {
            format!("some functions have no names: the process that finds them: {error}")
        };
        let (mut line, mut piece, mut all) = (Vec::new(), vec![0; 64 << 10], 0);
        loop {
            if !wait(&from, deadline, patience).map_err(failed)? {
                return Err(
                    "some functions have no names: finding them took too long, and was stopped"
                        .to_owned(),
                );
            }
            let got = from.read(&mut piece).map_err(failed)?;
            if got == 0 {
                return Ok(());
            }
            all += got;
            let mut rest = &piece[..got];
            while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                line.extend_from_slice(&rest[..end]);
                rest = &rest[end + 1..];
                self.take(&line).ok_or_else(nonsense)?;
                line.clear();
            }
            line.extend_from_slice(rest);
            if line.len() > LONGEST_LINE || all > MOST_BYTES {
                return Err(nonsense());
            }
        }
    }

    /// Takes one answer. Returns `None` if the answer is invalid.
    fn take(&mut self, line: &[u8]) -> Option<()> {
        match serde_json::from_slice(line).ok()? {
            Answer::BuildId(nth, id) => {
                let is_id = id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
                is_id.then_some(())?;
                for &nth in self.of.get(nth as usize)? {
                    self.found.build_ids.insert(nth, id.clone());
                }
            }
            Answer::Unopened(nth, why) => {
                const MOST: usize = 5;
                let wanted = self.request.files.get(nth as usize)?;
                let path = String::from_utf8_lossy(&wanted.mapping.path).into_owned();
                self.unopened += 1;
                let note = match self.unopened {
                    ..=MOST => format!("no names from {path}: {}", cut(why)),
                    _ if self.unopened == MOST + 1 => "no names from other files too".to_owned(),
                    _ => return Some(()),
                };
                self.found.notes.push(note);
            }
            Answer::Names(address, mut names) => {
                (address < self.addresses && names.frames.len() <= MOST_INLINED).then_some(())?;
                names.symbol = cut(names.symbol);
                for frame in &mut names.frames {
                    frame.function = cut(std::mem::take(&mut frame.function));
                    frame.file = cut(std::mem::take(&mut frame.file));
                }
                self.found.add(address, names);
            }
        }
        Some(())
    }
}

fn nonsense() -> String {
    "some functions have no names: the process that finds them answered nonsense, and was stopped"
        .to_owned()
}

/// Shortens a name that is too long.
fn cut(mut name: String) -> String {
    if name.len() > LONGEST_NAME {
        let is_end = |&at: &usize| name.is_char_boundary(at);
        let end = (0..=LONGEST_NAME).rev().find(is_end).unwrap_or(0);
        name.truncate(end);
        name.push('…');
    }
    name
}

fn start(request: &Request) -> io::Result<Child> {
    let mut input = File::from(memfd_create("pinfold-names", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(io::BufWriter::new(&input), request)?;
    input.flush()?;
    input.rewind()?;
    // The file of this very command, also if another one has replaced it.
    Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(input))
        .stdout(Stdio::piped())
        // The message of a panic could show parts of a foreign file on the terminal.
        .stderr(Stdio::null())
        .spawn()
}

/// Waits until there is something to read, or the other end is closed. Returns false at the
/// deadline, or when `patience` is over.
fn wait(from: &ChildStdout, deadline: Instant, patience: &Patience) -> io::Result<bool> {
    /// The time between two checks whether `patience` is over.
    const LOOK: Duration = Duration::from_millis(200);
    while !patience.is_over() {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_last = left <= LOOK;
        let left = left.min(LOOK);
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&left)) {
            Ok(0) if is_last => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}

/// Ends the naming process: at once, or at `deadline` if its answer is whole. Returns `None` if the
/// kernel does not let the process end: it may wait for a file system that does not answer.
fn end(child: &mut Child, is_done: bool, deadline: Instant) -> Option<ExitStatus> {
    const TIME_TO_DIE: Duration = Duration::from_millis(500);
    const PAUSE: Duration = Duration::from_millis(2);
    if !is_done {
        let _ = child.kill();
    }
    let mut last = deadline.max(Instant::now() + TIME_TO_DIE);
    let mut is_killed = !is_done;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < last => sleep(PAUSE),
            Ok(None) if !is_killed => {
                let _ = child.kill();
                is_killed = true;
                last = Instant::now() + TIME_TO_DIE;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

fn cause(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("signal {signal}"),
        (None, code) => format!("status {}", code.unwrap_or(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// A client that leaves must not keep other clients from their profiles.
    #[test]
    fn naming_ends_when_nobody_waits_for_it() {
        let mut child = Command::new("sleep")
            .arg("60")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let request = Request {
            subject: Subject::own_file(),
            seconds: 60,
            files: Vec::new(),
            made: Vec::new(),
        };
        let mut reader = Reader {
            request: &request,
            of: &[],
            addresses: 0,
            found: &mut Found::default(),
            unopened: 0,
        };
        let client = Arc::new(());
        let patience = Patience::while_waiting(Arc::downgrade(&client));
        let begin = Instant::now();
        let deadline = begin + Duration::from_secs(50);
        let stdout = child.stdout.take().unwrap();
        let read = std::thread::scope(|scope| {
            let read = scope.spawn(|| reader.read(stdout, deadline, &patience));
            drop(client);
            read.join().unwrap()
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(read.unwrap_err().contains("stopped"));
        assert_eq!(end(&mut child, false, deadline).unwrap().signal(), Some(9));
    }
}
