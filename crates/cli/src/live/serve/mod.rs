//! `pinfold serve`: the statistics of running processes over HTTP, for Prometheus and for people.

mod connections;
mod exposition;
mod http;
mod look;
mod metrics;
mod once;
mod request;

use super::list;
use super::source::Source;
use super::status::Status;
use crate::heap::Patience;
use crate::output;
use anyhow::{Context, Result};
use http::{Response, Server, Waiting};
use look::{Look, Processes, Reading};
use request::Request;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

/// Serve the statistics of running processes over HTTP
///
/// `/metrics` is for Prometheus, as OpenMetrics or as text of version 0.0.4; with `?caches=0`, it
/// leaves out the object caches. `/` is a page for people, which updates itself. `/status.json` has
/// the numbers of the page. `/debug/pprof/heap` is a heap profile, `/heap.svg` its flame graph, and
/// `/sd` names the processes to collectors of profiles. No request changes anything. Ends with the
/// processes that were named. A named process that executes another program is served again once
/// that program shows statistics.
///
/// Anybody who can reach the address can read the numbers. A browser can do so only for the
/// server's own page: a request must name the server by an IP address, as localhost, or by a name
/// that --allow-host gives, and must not come from a page of another site.
#[derive(clap::Args)]
pub struct Args {
    /// The process ids; all processes on Pinfold without them
    #[arg(value_name = "PID", value_parser = super::pid)]
    pids: Vec<u32>,

    /// The address to listen at; :PORT means all addresses of this machine
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = listen, default_value = "127.0.0.1:9464")]
    listen: Listen,

    /// Also answer clients that call the server by this name; may be given several times
    #[arg(long, value_name = "NAME", value_parser = host)]
    allow_host: Vec<String>,

    /// Also serve the first 128 bytes of each process's command line, which may hold secrets
    #[arg(long)]
    command_lines: bool,
}

/// The address to listen at. The others are for a machine without the first one's kind.
#[derive(Clone, Debug)]
struct Listen(Vec<SocketAddr>);

fn listen(text: &str) -> Result<Listen, String> {
    let wrong = |error: &dyn std::fmt::Display| {
        format!("give an address and a port, as 127.0.0.1:9464 or :9464 ({error})")
    };
    if let Some(port) = text.strip_prefix(':') {
        let port: u16 = port.parse().map_err(|error| wrong(&error))?;
        // The IPv6 address takes clients of both kinds.
        let (six, four) = (Ipv6Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED);
        return Ok(Listen(vec![(six, port).into(), (four, port).into()]));
    }
    let found = text.to_socket_addrs().map_err(|error| wrong(&error))?;
    let mut found: Vec<SocketAddr> = found.collect();
    // A name may have addresses of both kinds, and scrapers are told the older kind.
    found.sort_by_key(SocketAddr::is_ipv6);
    found.truncate(1);
    match found.is_empty() {
        true => Err("this name has no address".to_owned()),
        false => Ok(Listen(found)),
    }
}

fn host(text: &str) -> Result<String, &'static str> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    match !text.is_empty() && text.bytes().all(is_name) {
        true => Ok(text.to_owned()),
        false => Err("give a host's name without scheme and port, as node7.example.org"),
    }
}

/// How often to look whether the named processes have ended.
const LOOK: Duration = Duration::from_secs(1);

const MOST_CLIENTS: u64 = 64;
/// Descriptors that the command needs beside those of clients and processes.
const OWN_FILES: u64 = 16;
/// Descriptors for each process.
const FILES_EACH: u64 = 4;

/// Returns how many clients and how many processes there may be with this limit of open files.
fn shares(files: u64) -> (usize, usize) {
    let left = files.saturating_sub(OWN_FILES);
    let clients = (left / 2).clamp(2, MOST_CLIENTS);
    let processes = (left.saturating_sub(clients) / FILES_EACH).max(1);
    let limited = |count| usize::try_from(count).unwrap_or(usize::MAX);
    (limited(clients), limited(processes))
}

/// Has all threads share the C library's main heap. Each answer has a thread of its own, and glibc
/// would spread these over many heaps, each of which keeps what the largest answer left in it.
fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call sets a number in the C library, before this command starts a thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

pub fn main(args: Args) -> Result<ExitCode> {
    share_one_heap();
    let (clients, most) = shares(list::allow_many_files());
    let sources = args
        .pids
        .iter()
        .map(|&pid| Source::open(pid).with_context(|| format!("process {pid}")));
    let sources: Vec<Source> = sources.collect::<Result<_>>()?;
    let served = Arc::new(Served {
        processes: Processes::new(sources, most, args.command_lines),
        is_naming: AtomicBool::new(false),
    });
    let answers = Arc::clone(&served);
    let answer =
        Arc::new(move |request: &Request, waiting: Waiting| answers.answer(request, &waiting));
    let mut server = None;
    for &address in &args.listen.0 {
        server = Some(Server::new(
            address,
            clients,
            args.allow_host.clone(),
            Arc::clone(&answer) as Arc<http::Answer>,
        ));
        if server.as_ref().is_some_and(Result::is_ok) {
            break;
        }
    }
    let server = server.context("no address to listen at")??;
    // The port of `--listen ADDRESS:0` is known only now.
    let address = server.address()?;
    let ip = address.ip().to_canonical();
    if !ip.is_loopback() {
        output::note(format_args!(
            "anybody who can reach this machine's port {} can read the numbers; a client that calls \
             the server by a name needs --allow-host NAME",
            address.port()
        ));
    }
    let place = match ip.is_unspecified() {
        true => format!(
            "localhost:{}/ and at all addresses of this machine",
            address.port()
        ),
        false => format!("{address}/"),
    };
    output::print(&format!("serving at http://{place}\n"))?;
    let mut looked = Instant::now();
    loop {
        server.serve_one(LOOK);
        if looked.elapsed() < LOOK {
            continue;
        }
        looked = Instant::now();
        if served.processes.have_ended() {
            output::print("the processes have ended\n")?;
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Returns the numbers of the page for people.
fn status(look: &Look) -> String {
    let readings = look.readings.iter();
    let status = Status {
        processes: readings.map(Reading::status).collect(),
        unread: look.unread,
    };
    // The numbers and names have a form in JSON.
    output::object("serve", &status).unwrap_or_default()
}

/// A form in which a heap profile is served.
struct Form {
    kind: &'static str,
    headers: &'static str,
    make: fn(u32, Patience) -> Result<Vec<u8>>,
}

const PPROF: Form = Form {
    kind: "application/octet-stream",
    headers: "Content-Disposition: attachment; filename=heap.pb.gz\r\n",
    make: crate::heap::pprof_of_process,
};

/// The page shows the flame graph as an image, in which no script runs. A link saves it as a file:
/// the policy of this server's answers forbids the script and the style that are in it.
const FLAME: Form = Form {
    kind: "image/svg+xml",
    headers: "Content-Disposition: attachment; filename=heap.svg\r\n",
    make: crate::heap::flame_of_process,
};

struct Served {
    processes: Processes,
    /// Whether the functions of a profile are being named.
    is_naming: AtomicBool,
}

impl Served {
    fn answer(&self, request: &Request, waiting: &Waiting) -> Response {
        match &request.path[..] {
            "/" => Response::page("text/html; charset=utf-8", include_str!("page.html")),
            "/page.css" => Response::page("text/css; charset=utf-8", include_str!("page.css")),
            "/page.js" => Response::page("text/javascript; charset=utf-8", include_str!("page.js")),
            "/metrics" => self.numbers(false, |look| {
                let with_caches = request.value("caches") != Some("0");
                let text = metrics::text(look, request.format, with_caches);
                Response::page(metrics::kind(request.format), text)
            }),
            "/status.json" => self.numbers(true, |look| {
                Response::page("application/json", status(look))
            }),
            "/sd" => self.numbers(false, |look| discovery(look, request)),
            "/debug/pprof/heap" => self.numbers(false, |look| {
                self.profile(look, request, waiting.clone(), &PPROF)
            }),
            "/heap.svg" => self.numbers(false, |look| {
                self.profile(look, request, waiting.clone(), &FLAME)
            }),
            _ => Response::error(
                404,
                "not here; see /, /metrics, /status.json, /debug/pprof/heap, /heap.svg and /sd\n",
            ),
        }
    }

    fn numbers(&self, with_threads: bool, answer: impl Fn(&Look) -> Response) -> Response {
        match self.processes.look(with_threads) {
            Some(look) => answer(&look),
            None => Response::error(503, "the processes could not be read in time; try again\n"),
        }
    }

    /// Returns the heap profile of the process that the query names by `pid=`, or of the only
    /// process that is served. Naming functions takes long and much memory, so one is made at a
    /// time. Naming ends when the client leaves.
    fn profile(&self, look: &Look, request: &Request, waiting: Waiting, form: &Form) -> Response {
        let pids: Vec<u32> = look.readings.iter().map(|reading| reading.pid).collect();
        let asked = request.value("pid");
        let pid = match (asked, &pids[..]) {
            (None, [only]) => Some(*only),
            (None, _) => None,
            (Some(text), _) => text.parse().ok().filter(|pid| pids.contains(pid)),
        };
        let Some(pid) = pid else {
            let text = format!(
                "name one of the processes {pids:?}: {}?pid=PID\n",
                request.path
            );
            return Response::error(404, text);
        };
        // Acquire and Release order one profile's work before that of the next.
        if self.is_naming.swap(true, Acquire) {
            let text = "another profile is being made, and there is one at a time; try again\n";
            return Response::error(503, text);
        }
        let _turn = Turn(&self.is_naming);
        match (form.make)(pid, Patience::while_waiting(waiting)) {
            Ok(bytes) => Response {
                headers: form.headers,
                ..Response::page(form.kind, bytes)
            },
            Err(error) => {
                let text = format!("{error:#}");
                Response::error(503, format!("{}\n", output::escaped(&text)))
            }
        }
    }
}

/// Returns the processes in the form of Prometheus' HTTP service discovery. A collector of profiles
/// asks each target for its path of heap profiles, with the parameter `pid`.
fn discovery(look: &Look, request: &Request) -> Response {
    let Some(host) = &request.host else {
        return Response::error(400, "the request needs one header Host\n");
    };
    let targets = look.readings.iter().map(|reading| {
        let pid = reading.pid.to_string();
        serde_json::json!({
            "targets": [host],
            "labels": { "__param_pid": pid, "pid": pid, "process": reading.name },
        })
    });
    let text = serde_json::Value::from_iter(targets).to_string();
    Response::page("application/json", text)
}

/// Gives back the turn to make a profile, also after a panic.
struct Turn<'t>(&'t AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::snapshot::Snapshot;
    use crate::live::snapshot::tests::segment;
    use request::Format;

    #[test]
    fn one_profile_is_made_at_a_time() {
        let look = Look {
            readings: vec![Reading::with(Snapshot::parse(&segment(0)).unwrap())],
            unread: list::Unread::default(),
        };
        let request = Request {
            path: "/debug/pprof/heap".to_owned(),
            query: String::new(),
            host: None,
            format: Format::Text,
            takes_gzip: false,
        };
        let served = Served {
            processes: Processes::new(Vec::new(), 1, false),
            is_naming: AtomicBool::new(true),
        };
        let said = || {
            let response = served.profile(&look, &request, Waiting::new(), &FLAME);
            assert_eq!(response.status, 503);
            assert!(response.headers.contains("Retry-After:"));
            String::from_utf8(response.body).unwrap()
        };
        assert!(said().contains("one at a time"));
        served.is_naming.store(false, Release);
        // The process has no profile, and gives the turn back.
        assert!(!said().contains("one at a time"));
        assert!(!said().contains("one at a time"));
    }

    #[test]
    fn clients_and_processes_share_the_files() {
        assert_eq!(shares(24), (4, 1));
        assert_eq!(shares(1024), (64, 236));
        for files in [0, 3, 16, u64::MAX] {
            let (clients, processes) = shares(files);
            assert!(clients >= 2 && processes >= 1);
        }
    }

    #[test]
    fn a_port_alone_means_all_addresses() {
        let all = listen(":9464").unwrap().0;
        assert!(all.iter().all(|address| address.ip().is_unspecified()));
        assert_eq!(listen("127.0.0.1:1").unwrap().0.len(), 1);
        for wrong in ["", ":", "9464", ":x", ":70000", "127.0.0.1"] {
            assert!(listen(wrong).is_err(), "{wrong}");
        }
        assert!(host("node7.example").is_ok());
        for wrong in ["", "a b", "http://a", "a:1", "*"] {
            assert!(host(wrong).is_err(), "{wrong}");
        }
    }
}
