//! `pinfold serve`, and what a client sees of it.

use crate::watched::{self, PATIENCE};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// How much memory the server may have touched at once, in KiB.
const MEMORY: u64 = 512 << 10;

/// `pinfold serve` for all processes.
pub struct Server {
    process: Child,
    address: String,
}

impl Server {
    pub fn start() -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        command.args(["serve", "--listen", "127.0.0.1:0"]);
        let spawned = watched::limit(&mut command, None)
            .env_remove("LD_PRELOAD")
            .stdout(Stdio::piped())
            .spawn();
        let mut process = spawned.unwrap();
        let mut line = String::new();
        let out = process.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("serving at http://").unwrap();
        Server {
            address: address.trim_end_matches('/').to_owned(),
            process,
        }
    }

    /// Requests a path. Returns what is wrong with the answer, which may be an error.
    pub fn look(&self, path: &str) -> Result<(), String> {
        let wrong = |why: String| format!("GET {path}: {why}");
        let answer = self.get(path).map_err(|error| wrong(error.to_string()))?;
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
        let (head, body) = answer.split_at(end.ok_or_else(|| wrong("no head".to_owned()))?);
        let head = String::from_utf8_lossy(head);
        if !head.starts_with("HTTP/1.1 ") {
            return Err(wrong(head.into_owned()));
        }
        if body.len() > 16 << 20 {
            return Err(wrong(format!("{} bytes", body.len())));
        }
        let is_packed = body.windows(3).any(|three| three == [0x1f, 0x8b, 8]);
        let text: Vec<u8> = body.iter().copied().filter(|&byte| byte != b'\r').collect();
        match is_packed {
            true => Ok(()),
            false => watched::clean(&text).map(|_| ()).map_err(wrong),
        }
    }

    fn get(&self, path: &str) -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let host = &self.address;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    }

    /// Says what is wrong with the server after all requests.
    pub fn end(&mut self) -> Result<(), String> {
        if let Some(status) = self.process.try_wait().map_err(|error| error.to_string())? {
            return Err(format!("serve has ended: {status}"));
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.map_err(|error| error.to_string())?;
        let peak = status.lines().find_map(|line| {
            let rest = line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?;
            rest.trim().parse::<u64>().ok()
        });
        match peak {
            Some(peak) if peak <= MEMORY => Ok(()),
            peak => Err(format!("serve has taken {peak:?} KiB")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
