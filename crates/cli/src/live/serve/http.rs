//! Answers one request of HTTP on each connection, and closes the connection.
//!
//! Anybody who reaches the address may connect. So a connection has little time and little memory:
//! the number of connections, the bytes of a request and the time for both directions are bounded.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest number of connections at once. Further ones are refused.
const MOST: usize = 64;
/// Bytes of the longest request line with its headers.
const LONGEST: usize = 8 << 10;
/// How long a client may take for its request, and how long for reading the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// An answer.
pub struct Response {
    pub status: u16,
    /// The value of the header `Content-Type`.
    pub kind: &'static str,
    /// Further headers, each with its end of line.
    pub headers: &'static str,
    pub body: Vec<u8>,
}

impl Response {
    /// Returns a page that must not be kept.
    pub fn page(kind: &'static str, body: impl Into<Vec<u8>>) -> Response {
        Response {
            status: 200,
            kind,
            headers: "Cache-Control: no-store\r\n",
            body: body.into(),
        }
    }

    /// Returns an error with a text for people.
    pub fn error(status: u16, text: impl Into<Vec<u8>>) -> Response {
        Response {
            status,
            kind: "text/plain; charset=utf-8",
            headers: if status == 405 {
                "Allow: GET, HEAD\r\n"
            } else {
                ""
            },
            body: text.into(),
        }
    }

    /// Returns the bytes to send. The answer to HEAD has no body.
    fn bytes(mut self, with_body: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            _ => "Service Unavailable",
        };
        let mut bytes = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n{}\r\n",
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

/// Answers a request for a path with a query.
pub type Answer = dyn Fn(&str) -> Response + Send + Sync;

pub struct Server {
    listener: TcpListener,
    answer: Arc<Answer>,
    /// Each connection has a clone.
    connections: Arc<()>,
}

impl Server {
    pub fn new(address: SocketAddr, answer: Arc<Answer>) -> Result<Server> {
        let listener = TcpListener::bind(address)
            .with_context(|| format!("cannot listen at {address}; give another --listen"))?;
        // A client may be gone between the kernel's word that it is there and `accept`.
        listener.set_nonblocking(true)?;
        Ok(Server {
            listener,
            answer,
            connections: Arc::new(()),
        })
    }

    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Serves a client, or waits for one for `time` at most.
    pub fn serve_one(&self, time: Duration) {
        let mut wanted = libc::pollfd {
            fd: self.listener.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let time = time.as_millis() as libc::c_int;
        // SAFETY: `wanted` is one valid entry.
        unsafe { libc::poll(&raw mut wanted, 1, time) };
        match self.listener.accept() {
            Ok((stream, _)) => self.begin(stream),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // No descriptors or no memory are left: connections that end give some back.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }

    /// Serves a client in a thread of its own. A broken connection concerns only its client.
    fn begin(&self, mut stream: TcpStream) {
        let mine = Arc::clone(&self.connections);
        if stream.set_nonblocking(false).is_err() {
            return;
        }
        // One for the server, and one for this connection.
        if Arc::strong_count(&mine) > 1 + MOST {
            let busy = Response::error(503, "too many connections; try again\n");
            let _ = send(&mut stream, &busy.bytes(true));
            return;
        }
        let answer = Arc::clone(&self.answer);
        // Without a thread, the connection is closed.
        let _ = std::thread::Builder::new().spawn(move || {
            let _ = serve(stream, &*answer);
            drop(mine);
        });
    }
}

/// Reads a request and answers it.
fn serve(mut stream: TcpStream, answer: &Answer) -> std::io::Result<()> {
    let mut head = Vec::new();
    let end = Instant::now() + PATIENCE;
    let response = loop {
        if let Some(response) = answered(&head, answer) {
            break response;
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        stream.set_read_timeout(Some(left))?;
        let mut part = [0; 1024];
        match stream.read(&mut part)? {
            0 => return Ok(()),
            length => head.extend_from_slice(&part[..length]),
        }
    };
    send(&mut stream, &response)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    // What the client has sent beyond its request is read, so that closing does not reset the
    // connection before the client has read the answer.
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut rest = [0; LONGEST];
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end && stream.read(&mut rest)? > 0 {}
    Ok(())
}

/// Sends bytes, for [`PATIENCE`] at most.
fn send(stream: &mut TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
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

/// Returns the bytes that answer the request in `head`, or `None` if the request is not complete.
fn answered(head: &[u8], answer: &Answer) -> Option<Vec<u8>> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    let response = match request.parse(head) {
        Ok(httparse::Status::Partial) if head.len() < LONGEST => return None,
        Ok(httparse::Status::Complete(_)) => match (request.method, request.path) {
            (Some("GET" | "HEAD"), Some(path)) => answer(path),
            _ => Response::error(405, "only GET and HEAD\n"),
        },
        Ok(_) => Response::error(400, "the request is too long\n"),
        Err(error) => Response::error(400, format!("not a request: {error}\n")),
    };
    Some(response.bytes(request.method != Some("HEAD")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(head: &str) -> Option<String> {
        let answer = |path: &str| Response::page("text/plain", format!("here is {path}"));
        answered(head.as_bytes(), &answer).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn requests_are_answered_once_they_are_complete() {
        assert_eq!(said(""), None);
        assert_eq!(said("GET /a HTTP/1.1\r\nHost: x\r\n"), None);
        let page = said("GET /a?b=1 HTTP/1.1\r\nHost: x\r\n\r\nGET /c").unwrap();
        assert!(
            page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\r\n\r\nhere is /a?b=1")
        );
        assert!(page.contains("Content-Length: 14\r\n") && page.contains("Connection: close"));
        let head = said("HEAD /a HTTP/1.0\r\n\r\n").unwrap();
        assert!(head.contains("Content-Length: 10\r\n") && head.ends_with("\r\n\r\n"));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (head, status) in [
            ("POST / HTTP/1.1\r\n\r\n".to_owned(), "405"),
            ("\0\0\0\0".to_owned(), "400"),
            (format!("GET /{} HTTP/1.1\r\n", "a".repeat(LONGEST)), "400"),
            (
                format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(100)),
                "400",
            ),
        ] {
            let said = said(&head).unwrap();
            assert!(said.starts_with(&format!("HTTP/1.1 {status} ")), "{said}");
        }
    }
}
