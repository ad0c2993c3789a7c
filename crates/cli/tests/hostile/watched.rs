//! Runs the command within limits, and judges what it does.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// How long a command may take. Each has a far shorter deadline of its own: this one is for a
/// machine that is very busy.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How much memory a command may touch at once, in bytes.
const MEMORY: u64 = 512 << 20;
/// How much address space a command may have. This bound protects the machine.
const SPACE: u64 = 8 << 30;
/// More than a command prints about any process here.
const OUTPUT: usize = 32 << 20;

pub struct Said {
    pub out: String,
    pub error: String,
    pub code: Option<i32>,
}

/// Limits the address space of a command, and makes it another user's if there is one.
pub fn limit(command: &mut Command, user: Option<u32>) -> &mut Command {
    let prepare = move || {
        let limit = libc::rlimit {
            rlim_cur: SPACE,
            rlim_max: SPACE,
        };
        // SAFETY: `limit` is readable.
        unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
        Ok(())
    };
    // SAFETY: the closure makes one system call and allocates nothing, so it may run after fork.
    unsafe { command.pre_exec(prepare) };
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    command
}

/// Runs a command. Returns why it is not what a command may do, or what it said.
pub fn run(command: &mut Command) -> Result<Said, String> {
    let spawned = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = spawned.map_err(|error| error.to_string())?;
    let out = read(child.stdout.take().unwrap());
    let error = read(child.stderr.take().unwrap());
    let ended = wait(&mut child);
    let (out, error) = (out.join().unwrap(), error.join().unwrap());
    let (status, memory) =
        ended.ok_or_else(|| format!("still runs after {PATIENCE:?}: {}", error.escape_ascii()))?;
    let what = error.escape_ascii();
    if !matches!(status.code(), Some(0 | 2)) {
        return Err(format!("{status}: {what}"));
    }
    if memory > MEMORY {
        return Err(format!("has taken {} MiB: {what}", memory >> 20));
    }
    if out.len() > OUTPUT {
        return Err("prints without end".to_owned());
    }
    Ok(Said {
        out: clean(&out)?,
        error: clean(&error)?,
        code: status.code(),
    })
}

fn read(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    spawn(move || {
        let (mut all, mut part) = (Vec::new(), vec![0; 64 << 10]);
        while let Ok(got @ 1..) = from.read(&mut part) {
            // The rest is read, so that the command goes on.
            if all.len() <= OUTPUT {
                all.extend_from_slice(&part[..got]);
            }
        }
        all
    })
}

/// Waits for the end of a command. Returns its status and its peak resident memory. Ends it and
/// returns `None` if it takes too long.
fn wait(child: &mut Child) -> Option<(ExitStatus, u64)> {
    let end = Instant::now() + PATIENCE;
    let pid = child.id() as i32;
    loop {
        let mut status = 0;
        // SAFETY: the structure is of plain numbers.
        let mut used: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to writable values.
        let ended = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut used) };
        if ended == pid {
            return Some((ExitStatus::from_raw(status), used.ru_maxrss as u64 * 1024));
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        sleep(Duration::from_millis(3));
    }
}

/// Checks that the bytes are UTF-8 without control characters, and that no line is one that the
/// watched process forged.
pub fn clean(bytes: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| {
        let lines = bytes.split(|&byte| byte == b'\n');
        let bad = lines
            .clone()
            .find(|line| std::str::from_utf8(line).is_err());
        format!(
            "prints no UTF-8: {}",
            bad.unwrap_or_default().escape_ascii()
        )
    })?;
    for line in text.lines() {
        if line.contains(|character: char| character.is_control()) {
            return Err(format!("prints control characters: {line:?}"));
        }
        if line.starts_with("FORGED") {
            return Err(format!(
                "prints a line of another process's making: {line:?}"
            ));
        }
    }
    Ok(text.to_owned())
}
