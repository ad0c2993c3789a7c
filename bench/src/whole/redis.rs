//! redis: a server that runs under the subject, and a client that does not.

use super::Settings;
use super::launch::{self, Sample};
use super::prepare::Cache;
use super::programs::Call;
use super::subjects::Subject;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

pub const NAME: &str = "redis";

/// The arguments of redis-benchmark, for one call after the other.
const REQUESTS: [&str; 3] = [
    "-t set -r 100000 -d 300 -n 400000",
    "-t lpush,sadd,hset,zadd -r 100000 -d 60 -n 100000",
    "-t get,lrange_100 -r 100000 -n 40000",
];

/// Starts the server under `subject` as `call` says, sends requests to it, and stops it.
pub fn once(cache: &Cache, call: &Call, subject: &Subject, settings: Settings) -> Result<Sample> {
    let socket = cache.work.join("redis.sock");
    let _ = fs::remove_file(&socket);
    let mut server = Running(launch::launcher(cache, call, subject, settings)?.spawn()?);
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
        let mut arguments = vec!["-s", path, "-q", "-P", "16", "-c", "20"];
        arguments.extend(requests.split(' '));
        launch::helper("redis-benchmark", &arguments)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    // Which keys exist depends on chance, but every kind of key exists.
    let mut found = Vec::new();
    for key in ["mylist", "myset", "myhash", "myzset"] {
        found.extend(launch::helper("redis-cli", &["-s", path, "type", key])?);
    }
    // The server ends without sending an answer, so the client's status is ignored.
    let _ = launch::helper("redis-cli", &["-s", path, "shutdown", "nosave"]);
    server.0.wait()?;
    let output = launch::hash(&found);
    Ok(Sample {
        seconds,
        output,
        ..launch::report(cache, settings)?
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
