//! `pinfold serve` with clients that send nothing, too much, or come all at once.

use std::fs::OpenOptions;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

const ROLE: &str = "PINFOLD_TEST_ROLE";

/// Forks, and allocates in the child. Does nothing as a test.
#[test]
fn role() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    // SAFETY: only the child's own thread runs in it, and it uses nothing that another thread of
    // the parent may have locked: Pinfold's malloc takes its locks for a fork.
    let child = unsafe { libc::fork() };
    if child > 0 {
        println!("child {child}");
    }
    let begin = Instant::now();
    while begin.elapsed() < 2 * PATIENCE {
        let blocks: Vec<Vec<u8>> = (0..3000).map(|_| black_box(vec![1; 200])).collect();
        drop(black_box(blocks));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// `pinfold serve` for all processes, which may open few files.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(files: u32) -> Server {
        let serve = "exec \"$PINFOLD\" serve --listen 127.0.0.1:0";
        let mut child = Command::new("sh")
            .args(["-c", &format!("ulimit -n {files}; {serve}")])
            .env("PINFOLD", env!("CARGO_BIN_EXE_pinfold"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("serving at http://").unwrap();
        let address = address.trim_end_matches('/').to_owned();
        Server { child, address }
    }

    /// Sends `request`, and returns all that the server answers.
    fn answer(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Waits until the server answers a scrape.
    fn await_scrape(&mut self) {
        let begin = Instant::now();
        loop {
            let answer = self.answer("GET /metrics HTTP/1.1\r\n\r\n");
            if answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")) {
                return;
            }
            assert!(self.child.try_wait().unwrap().is_none(), "it has ended");
            assert!(begin.elapsed() < PATIENCE, "it does not answer any more");
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

#[test]
fn clients_that_send_nothing_do_not_end_the_server() {
    for files in [24, 1000] {
        let mut server = Server::start(files);
        let idle: Vec<TcpStream> = (0..100)
            .map(|nth| {
                let mut stream = TcpStream::connect(&server.address).unwrap();
                if nth % 2 == 0 {
                    stream.write_all(b"GET /metr").unwrap();
                }
                stream
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        assert!(server.child.try_wait().unwrap().is_none());
        drop(idle);
        server.await_scrape();
    }
}

#[test]
fn a_connection_gets_one_answer() {
    let server = Server::start(1000);
    let many = "GET /status.json HTTP/1.1\r\n\r\n".repeat(1000);
    let answer = server.answer(&many).unwrap();
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 1, "{answer}");
}

#[test]
fn a_full_disk_is_an_error() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["serve", "--listen", "127.0.0.1:0"])
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
}

#[test]
fn forked_children_show_themselves() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    program.arg("run").arg(std::env::current_exe().unwrap());
    let program = program.args(["--exact", "role", "--nocapture"]);
    let mut parent = program
        .env(ROLE, "forks")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let child = lines.find_map(|line| line.unwrap().strip_prefix("child ")?.parse::<i32>().ok());
    let child = child.unwrap();
    let server = Server::start(1000);
    let begin = Instant::now();
    let is_shown = loop {
        let answer = server.answer("GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        if answer.contains(&format!("pid=\"{child}\"")) {
            break true;
        }
        if begin.elapsed() > PATIENCE {
            break false;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    // SAFETY: `kill` uses no memory of this process.
    unsafe { libc::kill(child, libc::SIGKILL) };
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(is_shown, "the child does not show itself");
}
