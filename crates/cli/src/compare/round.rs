//! One run of the program on one allocator: to its end, or as a server under a load.

use super::child::{Children, Running, Stop, Written};
use std::ffi::OsString;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// The time between two looks whether a server is ready.
const LOOK: Duration = Duration::from_millis(5);

/// What to run, and how.
pub struct Plan {
    /// The file to execute.
    pub path: PathBuf,
    /// The name that the user gave, and the arguments.
    pub command: Vec<OsString>,
    pub timeout: Duration,
    pub show_output: bool,
    pub load: Option<Load>,
}

/// The work of a server.
pub struct Load {
    /// A shell command.
    pub command: OsString,
    pub ready: Ready,
    /// How long the server rests after the load, before its memory is read.
    pub settle: Duration,
}

/// How to see that a server is ready.
#[derive(Clone)]
pub enum Ready {
    /// It accepts connections at this port of this machine.
    Port(u16),
    /// It accepts connections at this socket.
    Socket(PathBuf),
    /// This shell command succeeds.
    Command(OsString),
}

/// An allocator that the program runs on.
pub struct Allocator {
    pub name: String,
    /// The library, and the `LD_PRELOAD` that loads it. `None` for the program as it is.
    pub library: Option<(PathBuf, OsString)>,
}

/// A run that has ended.
pub struct Run {
    pub status: ExitStatus,
    pub cost: Cost,
    /// The hash of what the program wrote to standard output.
    pub output: u64,
    /// The last line that the program wrote to standard error.
    pub last_line: String,
}

/// What a run cost.
#[derive(Clone, Copy)]
pub struct Cost {
    /// From the program's start to its end, or from the load's.
    pub seconds: f64,
    pub cpu_seconds: f64,
    pub peak_bytes: f64,
    pub faults: f64,
    /// Only of servers.
    pub settled_bytes: Option<f64>,
}

impl Plan {
    /// Runs the program once. Leaves no process behind.
    pub fn run(&self, children: &Children, allocator: &Allocator) -> Result<Run, Stop> {
        let mut command = Command::new(&self.path);
        command.arg0(&self.command[0]).args(&self.command[1..]);
        if let Some((_, preload)) = &allocator.library {
            command.env("LD_PRELOAD", preload);
        }
        if let Some(Load { ready, .. }) = &self.load
            && ready.answers()
        {
            let why = "another server answers already; stop it, or give this one another address";
            return Err(Stop::Failed(why.to_owned()));
        }
        let mut program = children.start(command, self.show_output)?;
        let mut client = None;
        let worked = match &self.load {
            None => self.until_it_ends(&mut program, children).map(|()| None),
            Some(load) => (self.under(load, &mut program, &mut client, children)).map(Some),
        };
        let ended = program.stop(children);
        let is_over = children.end_all();
        if let Err(Stop::Signal(signal)) = ended {
            return Err(Stop::Signal(signal));
        }
        if !is_over {
            // The process may keep the program's output open.
            let why = "a process that it has started does not end, and cannot be killed";
            return Err(Stop::Failed(why.to_owned()));
        }
        let [out, err] = program.written();
        if let Some((library, _)) = &allocator.library {
            check_loaded(library.as_os_str().as_bytes(), &err)?;
        }
        let last_line = err.last_line();
        let worked = worked.map_err(|stop| match (stop, client) {
            (Stop::Failed(why), None) => Stop::Failed(why + &last_line),
            (Stop::Failed(why), Some(client)) => {
                let [_, err] = client.written();
                Stop::Failed(why + &err.last_line())
            }
            (signal, _) => signal,
        })?;
        let ended = ended?;
        Ok(Run {
            status: ended.status,
            cost: Cost {
                seconds: worked.map_or(ended.seconds, |(seconds, _)| seconds),
                cpu_seconds: ended.cpu_seconds,
                peak_bytes: ended.peak_bytes,
                faults: ended.faults,
                settled_bytes: worked.map(|(_, settled)| settled),
            },
            output: out.hash,
            last_line,
        })
    }

    fn until_it_ends(&self, program: &mut Running, children: &Children) -> Result<(), Stop> {
        match program.wait(children, Instant::now() + self.timeout)? {
            Some(_) => Ok(()),
            None => Err(self.too_late("it did not end")),
        }
    }

    fn too_late(&self, what: &str) -> Stop {
        let seconds = self.timeout.as_secs_f64();
        Stop::Failed(format!("{what} within {seconds} s; raise --timeout"))
    }

    /// Waits until the server is ready, and runs the load. Returns the load's seconds, and the
    /// server's resident bytes after it has settled. If it was the load that failed, leaves it in
    /// `failed`.
    fn under(
        &self,
        load: &Load,
        server: &mut Running,
        failed: &mut Option<Running>,
        children: &Children,
    ) -> Result<(f64, f64), Stop> {
        let until = Instant::now() + self.timeout;
        let lives = |server: &mut Running, when: &str| match server.ended()? {
            None => Ok(()),
            Some(ended) => Err(Stop::Failed(format!(
                "the server ended {when} ({}); a server that goes to the background needs its option that keeps it in the foreground",
                describe(ended.status)
            ))),
        };
        while !self.is_ready(&load.ready, children, until)? {
            lives(server, "before it was ready")?;
            if Instant::now() >= until {
                return Err(self.too_late("the server was not ready"));
            }
            children.wait(Instant::now() + LOOK)?;
        }
        // Another server may have answered.
        lives(server, "before it was ready")?;
        let mut client = children.start(shell(&load.command), self.show_output)?;
        let until = Instant::now() + self.timeout;
        let ended = loop {
            let ended = client.ended()?;
            // A server that has crashed may be why the load does not end, or fails.
            lives(server, "during the load")?;
            if ended.is_some() || !children.wait(until)? {
                break ended;
            }
        };
        let Some(ended) = ended else {
            *failed = Some(client);
            return Err(self.too_late("the load did not end"));
        };
        if !ended.status.success() {
            let how = describe(ended.status);
            *failed = Some(client);
            return Err(Stop::Failed(format!("the load failed: {how}")));
        }
        let until = Instant::now() + load.settle;
        while children.wait(until)? {
            lives(server, "after the load")?;
        }
        Ok((ended.seconds, children.resident()? as f64))
    }

    fn is_ready(&self, ready: &Ready, children: &Children, until: Instant) -> Result<bool, Stop> {
        let Ready::Command(command) = ready else {
            return Ok(ready.answers());
        };
        let mut asking = children.start(shell(command), self.show_output)?;
        let ended = asking.wait(children, until)?;
        Ok(ended.is_some_and(|ended| ended.status.success()))
    }
}

impl Ready {
    fn answers(&self) -> bool {
        match self {
            Ready::Port(port) => {
                let all = ("localhost", *port).to_socket_addrs();
                all.into_iter().flatten().any(|address| connects(&address))
            }
            Ready::Socket(path) => UnixStream::connect(path).is_ok(),
            Ready::Command(_) => false,
        }
    }
}

/// Returns whether a server accepts a connection.
fn connects(address: &SocketAddr) -> bool {
    let stream = TcpStream::connect_timeout(address, Duration::from_secs(1));
    // A connection to a free port may come from the same port, and so have no server.
    stream.is_ok_and(|stream| stream.local_addr().is_ok_and(|local| local != *address))
}

fn shell(text: &OsString) -> Command {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(text);
    command
}

/// Says how a program ended.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (_, signal) => format!("signal {}", signal.unwrap_or_default()),
    }
}

/// Fails if the loader reported that it did not load the library: the program then ran as it is.
fn check_loaded(library: &[u8], errors: &Written) -> Result<(), Stop> {
    let refusal = |line: &&[u8]| {
        let has = |part: &[u8]| line.windows(part.len()).any(|window| window == part);
        line.starts_with(b"ERROR: ld.so: object '") && has(library)
    };
    let mut lines = errors.head.split(|&byte| byte == b'\n');
    match lines.find(refusal) {
        Some(line) => Err(Stop::Failed(String::from_utf8_lossy(line).into_owned())),
        None => Ok(()),
    }
}
