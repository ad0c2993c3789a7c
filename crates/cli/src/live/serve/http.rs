//! Answers one request of HTTP on each connection, and closes the connection.
//!
//! Anybody who reaches the address may connect. So a connection has little time and little memory:
//! the number of connections, the bytes of a request, and the time for reading it, for making the
//! answer and for sending the answer are bounded.

use super::connections::{Connections, Phase, Place};
use super::request::{self, Request};
use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of the longest request line with its headers.
const LONGEST: usize = 8 << 10;
/// How long a client may take for its request, and how long for reading the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the server may take to make an answer. Naming the functions of a profile has a shorter
/// deadline of its own, which says more.
const MAKING: Duration = Duration::from_secs(20);
/// How often the server looks whether the client still waits. A client that shuts down its side
/// after the request still gets an answer that is ready within this time.
const LOOK: Duration = Duration::from_millis(500);

/// Shorter texts are not packed.
const LEAST_PACKED: usize = 1 << 10;

/// Headers of every answer. No page of another site may read, show or guess what it says.
const SAFE: &str = "Cache-Control: no-store\r\n\
    Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'\r\n\
    Cross-Origin-Opener-Policy: same-origin\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n\
    Referrer-Policy: no-referrer\r\n\
    X-Content-Type-Options: nosniff\r\n\
    Connection: close\r\n";

/// An answer.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// The value of the header `Content-Type`.
    pub kind: &'static str,
    /// Further headers, each with its end of line.
    pub headers: &'static str,
    pub body: Vec<u8>,
}

impl Response {
    pub fn page(kind: &'static str, body: impl Into<Vec<u8>>) -> Response {
        Response {
            status: 200,
            kind,
            headers: "",
            body: body.into(),
        }
    }

    pub fn error(status: u16, text: impl Into<Vec<u8>>) -> Response {
        Response {
            status,
            kind: "text/plain; charset=utf-8",
            headers: match status {
                405 => "Allow: GET, HEAD\r\n",
                503 => "Retry-After: 5\r\n",
                _ => "",
            },
            body: text.into(),
        }
    }

    /// Packs a long text by gzip.
    fn packed(self) -> Response {
        let is_text = self.kind.contains("text") || self.kind.contains("json");
        if self.body.len() < LEAST_PACKED || !is_text || !self.headers.is_empty() {
            return self;
        }
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        match gzip.write_all(&self.body).and_then(|()| gzip.finish()) {
            Ok(body) => Response {
                headers: "Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n",
                body,
                ..self
            },
            Err(_) => self,
        }
    }

    /// Returns the bytes to send. The answer to HEAD has no body.
    fn bytes(mut self, with_body: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            421 => "Misdirected Request",
            _ => "Service Unavailable",
        };
        let mut bytes = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{SAFE}{}\r\n",
            self.status,
            self.kind,
            self.body.len(),
            self.headers
        )
        .into_bytes();
        if with_body {
            bytes.append(&mut self.body);
        }
        bytes
    }
}

/// Is dropped once nobody waits for an answer any more.
pub type Waiting = Weak<()>;

/// Makes the answer to a request.
pub type Answer = dyn Fn(&Request, Waiting) -> Response + Send + Sync;

pub struct Server {
    listener: TcpListener,
    most: usize,
    connections: Arc<Connections>,
    service: Arc<Service>,
}

struct Service {
    answer: Arc<Answer>,
    /// Each thread that makes an answer has a clone.
    making: Arc<()>,
    /// The names that the user accepts as hosts.
    allowed: Vec<String>,
    most: usize,
}

impl Server {
    /// Listens at `address`, for at most `most` clients at once.
    pub fn new(
        address: SocketAddr,
        most: usize,
        allowed: Vec<String>,
        answer: Arc<Answer>,
    ) -> Result<Server> {
        let listener = TcpListener::bind(address)
            .with_context(|| format!("cannot listen at {address}; give another --listen"))?;
        // A client may be gone between the kernel's word that it is there and `accept`.
        listener.set_nonblocking(true)?;
        Ok(Server {
            listener,
            most,
            connections: Connections::new(most),
            service: Arc::new(Service {
                answer,
                making: Arc::new(()),
                allowed,
                most,
            }),
        })
    }

    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Serves a client, or waits for one for `time` at most.
    pub fn serve_one(&self, time: Duration) {
        is_ready(self.listener.as_raw_fd(), libc::POLLIN, time);
        match self.listener.accept() {
            Ok((stream, _)) => self.begin(stream),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) => {}
            // No descriptors or no memory are left. A connection that waits gives some back.
            Err(_) => {
                self.connections.close_oldest();
                thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// Serves a client in a thread of its own. A broken connection concerns only its client.
    fn begin(&self, stream: TcpStream) {
        if stream.set_nonblocking(false).is_err() {
            return;
        }
        let stream = Arc::new(stream);
        let Some(place) = self.connections.admit(&stream) else {
            let text = format!("{} clients wait for answers; try again\n", self.most);
            // The bytes fit in the socket's buffer.
            let _ = send(&stream, &Response::error(503, text).bytes(true));
            return;
        };
        let service = Arc::clone(&self.service);
        // Without a thread, the connection is closed.
        let _ = thread::Builder::new().spawn(move || service.serve(&stream, &place));
    }
}

/// Waits for an event at a descriptor, for `time` at most. Returns whether it is there.
fn is_ready(fd: libc::c_int, events: libc::c_short, time: Duration) -> bool {
    let mut wanted = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: `wanted` is one valid entry.
    unsafe { libc::poll(&raw mut wanted, 1, time.as_millis() as libc::c_int) > 0 }
}

impl Service {
    /// Reads a request and answers it. An error is that of a broken connection.
    fn serve(&self, stream: &TcpStream, place: &Place) -> std::io::Result<()> {
        let mut head = Vec::new();
        let end = Instant::now() + PATIENCE;
        let (request, with_body) = loop {
            if let Some(read) = read(&head, &self.allowed) {
                break read;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            stream.set_read_timeout(Some(left))?;
            let mut part = [0; 1024];
            match (&*stream).read(&mut part)? {
                0 => return Ok(()),
                length => head.extend_from_slice(&part[..length]),
            }
        };
        if !place.enter(Phase::Making) {
            return Ok(());
        }
        let response = match request {
            Ok(request) => self.made(request, stream),
            Err(refused) => Some(refused),
        };
        // Without a response, nobody waits for it any more.
        let Some(response) = response else {
            return Ok(());
        };
        place.enter(Phase::Reading);
        send(stream, &response.bytes(with_body))?;
        place.enter(Phase::Answered);
        stream.shutdown(Shutdown::Write)?;
        // What the client has sent beyond its request is read, so that closing does not reset the
        // connection before the client has read the answer.
        stream.set_read_timeout(Some(Duration::from_millis(200)))?;
        let mut rest = [0; LONGEST];
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && (&*stream).read(&mut rest)? > 0 {}
        Ok(())
    }

    /// Makes an answer in a thread of its own, and waits for it for [`MAKING`] at most. Returns
    /// `None` once the client has closed the connection.
    fn made(&self, request: Request, stream: &TcpStream) -> Option<Response> {
        let (answer, mine) = (Arc::clone(&self.answer), Arc::clone(&self.making));
        let late = || {
            Some(Response::error(
                503,
                "the answer took too long; try again\n",
            ))
        };
        // One belongs to the server, and one to this answer. The others are mostly those that no
        // client waits for any more.
        if Arc::strong_count(&mine) > 2 + 2 * self.most {
            return late();
        }
        let waiting = Arc::new(());
        let seen = Arc::downgrade(&waiting);
        let (give, take) = channel();
        let making = move || {
            let response = answer(&request, seen);
            // The client may be gone.
            let _ = give.send(match request.takes_gzip {
                true => response.packed(),
                false => response,
            });
            drop(mine);
        };
        if thread::Builder::new().spawn(making).is_err() {
            return Some(Response::error(503, "no thread is left; try again\n"));
        }
        let end = Instant::now() + MAKING;
        while Instant::now() < end {
            match take.recv_timeout(LOOK) {
                Ok(response) => return Some(response),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Some(Response::error(503, "this answer cannot be made\n"));
                }
            }
            if is_ready(stream.as_raw_fd(), libc::POLLRDHUP, Duration::ZERO) {
                return None;
            }
        }
        late()
    }
}

/// Sends bytes, for [`PATIENCE`] at most.
fn send(mut stream: &TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    let end = Instant::now() + PATIENCE;
    while !bytes.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            sent => bytes = &bytes[sent..],
        }
    }
    Ok(())
}

/// A request that may be answered, or the answer that refuses it; and whether the client wants the
/// body.
type Asked = (Result<Request, Response>, bool);

/// Returns the request in `head`, or `None` if it is not complete.
fn read(head: &[u8], allowed: &[String]) -> Option<Asked> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    let outcome = match request.parse(head) {
        Ok(httparse::Status::Partial) if head.len() < LONGEST => return None,
        Ok(httparse::Status::Complete(_)) => request::check(&request, allowed),
        Ok(_) => Err(Response::error(400, "the request is too long\n")),
        Err(error) => Err(Response::error(400, format!("not a request: {error}\n"))),
    };
    Some((outcome, request.method != Some("HEAD")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn said(head: &str) -> Option<String> {
        let (request, with_body) = read(head.as_bytes(), &[])?;
        let response = request
            .map(|request| Response::page("text/plain", format!("here is {}", request.path)))
            .unwrap_or_else(|refused| refused);
        Some(String::from_utf8(response.bytes(with_body)).unwrap())
    }

    #[test]
    fn requests_are_answered_once_they_are_complete() {
        assert_eq!(said(""), None);
        assert_eq!(said("GET /a HTTP/1.1\r\nHost: localhost\r\n"), None);
        let page = said("GET /a?b=1 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /c").unwrap();
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\r\n\r\nhere is /a"));
        assert!(page.contains("Content-Length: 10\r\n") && page.contains("Connection: close"));
        let head = said("HEAD /a HTTP/1.0\r\n\r\n").unwrap();
        assert!(head.contains("Content-Length: 10\r\n") && head.ends_with("\r\n\r\n"));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (head, status) in [
            ("POST / HTTP/1.1\r\n\r\n".to_owned(), "405"),
            ("GET / HTTP/1.1\r\n\r\n".to_owned(), "400"),
            (
                "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n".to_owned(),
                "421",
            ),
            ("\0\0\0\0".to_owned(), "400"),
            (format!("GET /{} HTTP/1.1\r\n", "a".repeat(LONGEST)), "400"),
            (
                format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(100)),
                "400",
            ),
        ] {
            let said = said(&head).unwrap();
            assert!(said.starts_with(&format!("HTTP/1.1 {status} ")), "{said}");
            assert!(said.contains("\r\nX-Content-Type-Options: nosniff\r\n"));
        }
    }

    #[test]
    fn nobody_waits_for_the_answer_to_a_client_that_has_gone() {
        let (tell, told) = channel();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let service = Service {
            answer: Arc::new(move |_: &Request, waiting: Waiting| {
                while waiting.strong_count() > 0 {
                    thread::sleep(Duration::from_millis(10));
                }
                let _ = tell.send(());
                Response::page("text/plain", "")
            }),
            making: Arc::new(()),
            allowed: Vec::new(),
            most: 1,
        };
        drop(client);
        let head = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let begin = Instant::now();
        let (request, _) = read(head.as_bytes(), &[]).unwrap();
        assert!(service.made(request.unwrap(), &stream).is_none());
        assert!(begin.elapsed() < MAKING);
        // The answer's own thread learns it too.
        told.recv_timeout(MAKING).unwrap();
    }
}
