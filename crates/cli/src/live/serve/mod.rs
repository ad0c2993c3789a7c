//! `pinfold serve`: the statistics of running processes over HTTP, for Prometheus and for people.

mod http;
mod metrics;
mod status;

use super::list;
use super::snapshot::Snapshot;
use super::source::Source;
use crate::figures;
use anyhow::{Context, Result};
use http::{Response, Server};
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Serve the statistics of running processes over HTTP
///
/// `/metrics` is for Prometheus, in OpenMetrics. `/` is a page for people, which updates itself.
/// `/status.json` has the numbers of the page. No request changes anything.
#[derive(clap::Args)]
pub struct Args {
    /// The process ids; all processes on Pinfold without them
    #[arg(value_name = "PID", value_parser = super::pid)]
    pids: Vec<u32>,

    /// The address to listen at
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = address, default_value = "127.0.0.1:9464")]
    listen: SocketAddr,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let found: Vec<SocketAddr> = text
        .to_socket_addrs()
        .map_err(|error| format!("give an address and a port, as 127.0.0.1:9464 ({error})"))?
        .collect();
    // A name may have addresses of both kinds, and scrapers are told the older kind.
    let first = found.iter().find(|address| address.is_ipv4());
    first
        .or(found.first())
        .copied()
        .ok_or_else(|| "this name has no address".to_owned())
}

/// How long a list of all processes is used before the next is made.
const LIST_AGE: Duration = Duration::from_secs(5);

/// How often to look whether the named processes have ended.
const LOOK: Duration = Duration::from_secs(1);

/// The processes that are served.
struct Processes {
    /// The processes that the user named. Empty for all.
    named: Vec<u32>,
    sources: Vec<Source>,
    listed: Option<Instant>,
}

impl Processes {
    /// Reads all processes. Forgets those that have ended.
    fn read(&mut self) -> Vec<(&Source, Snapshot)> {
        if self.named.is_empty() && self.listed.is_none_or(|when| when.elapsed() > LIST_AGE) {
            // Where /proc cannot be read, there are no processes to show.
            self.sources = list::sources().map_or(Vec::new(), |found| found.sources);
            self.listed = Some(Instant::now());
        }
        let mut snapshots = Vec::new();
        self.sources.retain(|source| match source.read() {
            Ok(snapshot) => {
                snapshots.push(snapshot);
                true
            }
            Err(_) => false,
        });
        self.sources.iter().zip(snapshots).collect()
    }
}

pub fn main(args: Args) -> Result<ExitCode> {
    let sources = args
        .pids
        .iter()
        .map(|&pid| Source::open(pid).with_context(|| format!("process {pid}")));
    let processes = Arc::new(Mutex::new(Processes {
        sources: sources.collect::<Result<_>>()?,
        named: args.pids,
        listed: None,
    }));
    let served = Arc::clone(&processes);
    let server = Server::new(args.listen, Arc::new(move |url: &str| answer(url, &served)))?;
    // The port of `--listen ADDRESS:0` is known only now.
    figures::print(&format!("serving at http://{}/\n", server.address()?))?;
    let mut looked = Instant::now();
    loop {
        server.serve_one(LOOK);
        if looked.elapsed() < LOOK {
            continue;
        }
        looked = Instant::now();
        let mut processes = lock(&processes);
        if !processes.named.is_empty() && processes.read().is_empty() {
            figures::print("the processes have ended\n")?;
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Takes the lock. What a panicking thread left is as good as any.
fn lock(processes: &Mutex<Processes>) -> MutexGuard<'_, Processes> {
    processes.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer(url: &str, processes: &Mutex<Processes>) -> Response {
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    match path {
        "/" => Response::page("text/html; charset=utf-8", include_str!("page.html")),
        "/metrics" => Response::page(metrics::KIND, metrics::text(&lock(processes).read())),
        "/status.json" => Response::page("application/json", status::text(&lock(processes).read())),
        "/debug/pprof/heap" => heap_profile(processes, query),
        _ => Response::error(
            404,
            "not here; see /, /metrics, /status.json and /debug/pprof/heap\n",
        ),
    }
}

/// Returns the heap profile of the process that the query names by `pid=`, or of the only process
/// that is served.
fn heap_profile(processes: &Mutex<Processes>, query: &str) -> Response {
    // Naming functions takes long, and happens without the lock.
    let pids: Vec<u32> = lock(processes)
        .read()
        .iter()
        .map(|(source, _)| source.pid)
        .collect();
    let asked = query.split('&').find_map(|word| word.strip_prefix("pid="));
    let pid = match (asked, &pids[..]) {
        (None, [only]) => Some(*only),
        (None, _) => None,
        (Some(text), _) => text.parse().ok().filter(|pid| pids.contains(pid)),
    };
    let Some(pid) = pid else {
        let text = format!("name one of the processes {pids:?}: /debug/pprof/heap?pid=PID\n");
        return Response::error(404, text);
    };
    match crate::heap::pprof_of_process(pid) {
        Ok(bytes) => Response {
            headers: "Cache-Control: no-store\r\n\
                Content-Disposition: attachment; filename=heap.pb.gz\r\n",
            ..Response::page("application/octet-stream", bytes)
        },
        Err(error) => Response::error(503, format!("{error:#}\n")),
    }
}
