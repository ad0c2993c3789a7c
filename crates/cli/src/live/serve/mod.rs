//! `pinfold serve`: the statistics of running processes over HTTP, for Prometheus and for people.

mod metrics;
mod status;

use super::list;
use super::snapshot::Snapshot;
use super::source::Source;
use anyhow::{Context, Result, anyhow};
use std::io::Cursor;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tiny_http::{Header, Method, Request, Response, Server};

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
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9464")]
    listen: SocketAddr,
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
            self.sources = list::sources(Duration::ZERO).map_or(Vec::new(), |found| found.sources);
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
    let mut processes = Processes {
        sources: sources.collect::<Result<_>>()?,
        named: args.pids,
        listed: None,
    };
    let server = Server::http(args.listen).map_err(|error| {
        anyhow!(
            "cannot listen at {}: {error}; give another --listen",
            args.listen
        )
    })?;
    // The port of `--listen ADDRESS:0` is known only now.
    println!("serving at http://{}/", server.server_addr());
    loop {
        if let Some(request) = server.recv_timeout(LOOK)? {
            answer(request, &mut processes);
        }
        if !processes.named.is_empty() && processes.read().is_empty() {
            println!("the processes have ended");
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn answer(request: Request, processes: &mut Processes) {
    if !matches!(request.method(), Method::Get | Method::Head) {
        let refused = Response::from_string("only GET and HEAD\n").with_status_code(405);
        return send(request, refused.with_header(header("Allow", "GET, HEAD")));
    }
    let url = request.url().to_owned();
    let (path, query) = url.split_once('?').unwrap_or((&url, ""));
    if path == "/debug/pprof/heap" {
        return send(request, heap_profile(processes, query));
    }
    let (kind, text) = match path {
        "/" => (
            "text/html; charset=utf-8",
            include_str!("page.html").to_owned(),
        ),
        "/metrics" => (metrics::KIND, metrics::text(&processes.read())),
        "/status.json" => ("application/json", status::text(&processes.read())),
        _ => {
            let missing = Response::from_string(
                "not here; see /, /metrics, /status.json and /debug/pprof/heap\n",
            );
            return send(request, missing.with_status_code(404));
        }
    };
    let page = Response::from_string(text)
        .with_header(header("Content-Type", kind))
        .with_header(header("Cache-Control", "no-store"));
    send(request, page);
}

/// Returns the heap profile of the process that the query names by `pid=`, or of the only process
/// that is served.
fn heap_profile(processes: &mut Processes, query: &str) -> Response<Cursor<Vec<u8>>> {
    let refused = |status, text: String| Response::from_string(text).with_status_code(status);
    let pids: Vec<u32> = processes
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
        return refused(404, text);
    };
    match crate::heap::pprof_of_process(pid) {
        Ok(bytes) => Response::from_data(bytes)
            .with_header(header("Content-Type", "application/octet-stream"))
            .with_header(header(
                "Content-Disposition",
                "attachment; filename=heap.pb.gz",
            ))
            .with_header(header("Cache-Control", "no-store")),
        Err(error) => refused(503, format!("{error:#}\n")),
    }
}

/// Sends a response. A client that reads slowly keeps only a thread of its own waiting.
fn send(request: Request, response: Response<Cursor<Vec<u8>>>) {
    // A broken connection concerns only its client.
    std::thread::spawn(move || drop(request.respond(response)));
}

fn header(name: &str, value: &str) -> Header {
    Header::from_bytes(name, value).expect("the callers pass ASCII")
}
