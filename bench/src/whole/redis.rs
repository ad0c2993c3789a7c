//! redis: a server that runs under the subject, and a client that does not.

use super::Settings;
use super::launch::{self, Sample};
use super::prepare::{self, Cache};
use super::real::Call;
use super::subjects::Subject;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

pub const NAME: &str = "redis";

/// The arguments of redis-benchmark, for one call after the other.
const REQUESTS: [&[&str]; 3] = [
    &["-t", "set", "-r", "100000", "-d", "300", "-n", "400000"],
    &[
        "-t",
        "lpush,sadd,hset,zadd",
        "-r",
        "100000",
        "-d",
        "60",
        "-n",
        "100000",
    ],
    &["-t", "get,lrange_100", "-r", "100000", "-n", "40000"],
];

fn socket(cache: &Cache) -> PathBuf {
    cache.work.join("redis.sock")
}

/// Returns how the server is started.
pub fn server(cache: &Cache, _threads: u32) -> Result<Call> {
    let options = [
        "--port",
        "0",
        "--save",
        "",
        "--appendonly",
        "no",
        "--daemonize",
        "no",
    ];
    let mut call = Call::tool("redis-server", &options)?;
    call.arguments
        .extend([OsString::from("--unixsocket"), socket(cache).into()]);
    Ok(call)
}

/// Starts the server under `subject`, sends requests to it, and stops it.
pub fn once(cache: &Cache, subject: &Subject, settings: Settings) -> Result<Sample> {
    let socket = socket(cache);
    let _ = fs::remove_file(&socket);
    let call = server(cache, 1)?;
    let mut server = Running(launch::launcher(cache, &call, subject, settings)?.spawn()?);
    let start = Instant::now();
    while !socket.exists() {
        ensure!(
            server.0.try_wait()?.is_none() && start.elapsed() < Duration::from_secs(10),
            "the redis server did not start: {}",
            launch::report(cache, settings)
                .err()
                .map_or_else(String::new, |error| format!("{error:#}"))
        );
        thread::sleep(Duration::from_millis(5));
    }
    let path = socket
        .to_str()
        .context("the cache folder's path is not UTF-8; give another --cache")?;
    let start = Instant::now();
    for requests in REQUESTS {
        let arguments = [&["-s", path, "-q", "-P", "16", "-c", "20"], requests].concat();
        launch::helper("redis-benchmark", &arguments)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    // Which keys exist depends on chance, but every kind of key exists.
    let mut found = Vec::new();
    for key in ["mylist", "myset", "myhash", "myzset"] {
        found.extend(launch::helper("redis-cli", &["-s", path, "type", key])?);
    }
    // The server ends without sending an answer, so the client's status is ignored.
    let cli = prepare::tool("redis-cli").context("there is no redis-cli; install redis-tools")?;
    let _ = std::process::Command::new(cli)
        .args(["-s", path, "shutdown", "nosave"])
        .output()?;
    server.0.wait()?;
    let report = launch::report(cache, settings)?;
    Ok(Sample {
        seconds,
        ..launch::of_report(&report, launch::hash(&found))
    })
}

/// A server that ends with its measurement, even if the measurement fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let (Ok(None), Ok(launcher)) = (self.0.try_wait(), i32::try_from(self.0.id())) {
            // SAFETY: `kill` touches no memory of this process. `try_wait` above has not reaped the
            // launcher, so the id is still the launcher's. The launcher ends the server.
            unsafe { libc::kill(launcher, libc::SIGTERM) };
            let _ = self.0.wait();
        }
    }
}
