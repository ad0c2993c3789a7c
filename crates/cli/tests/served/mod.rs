//! Runs `pinfold serve`.
#![allow(dead_code, reason = "each test uses a part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a request.
pub fn get(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n")
}

/// `pinfold serve`, which may open few files.
pub struct Server {
    pub child: Child,
    pub address: String,
}

impl Server {
    pub fn start(files: u32, arguments: &[&str]) -> Server {
        let serve = "exec \"$PINFOLD\" serve --listen 127.0.0.1:0 \"$@\"";
        let serve = match arguments.contains(&"--listen") {
            true => serve.replace("--listen 127.0.0.1:0 ", ""),
            false => serve.to_owned(),
        };
        let mut child = Command::new("sh")
            .args(["-c", &format!("ulimit -n {files}; {serve}"), "sh"])
            .args(arguments)
            .env("PINFOLD", env!("CARGO_BIN_EXE_pinfold"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let address = line.strip_prefix("serving at http://").unwrap();
        let address = address.split('/').next().unwrap().to_owned();
        Server { child, address }
    }

    /// Sends `request`, and returns all that the server answers.
    pub fn answer(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    pub fn get(&self, path: &str) -> String {
        self.answer(&get(path, "")).unwrap()
    }

    /// Opens connections that send no whole request.
    pub fn idle_clients(&self, count: usize) -> Vec<TcpStream> {
        let clients = (0..count).map(|nth| {
            let mut stream = TcpStream::connect(&self.address).unwrap();
            if nth % 2 == 0 {
                // It may have given way already.
                let _ = stream.write_all(b"GET /metr");
            }
            stream
        });
        clients.collect()
    }

    /// Waits until the server answers a scrape.
    pub fn await_scrape(&mut self) {
        self.await_text("HTTP/1.1 200");
    }

    /// Waits until the answer to a scrape has this text.
    pub fn await_text(&mut self, text: &str) {
        let begin = Instant::now();
        loop {
            let answer = self.answer(&get("/metrics", "")).unwrap_or_default();
            if answer.contains(text) {
                return;
            }
            assert!(self.child.try_wait().unwrap().is_none(), "it has ended");
            assert!(begin.elapsed() < PATIENCE, "{text} is not in {answer}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn await_end(&mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begin.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
