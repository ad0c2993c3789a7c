//! A server that shows the heap profile of its own process, on the standard library alone:
//!
//! ```sh
//! cargo run --release --features flamegraph --example heap_server &
//! go tool pprof -top http://127.0.0.1:8080/debug/pprof/heap
//! ```

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;
use std::{error, io};

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

#[cfg_attr(
    test,
    expect(dead_code, reason = "the test starts the server by `serve`")
)]
fn main() -> Result<(), Box<dyn error::Error>> {
    pinfold_pprof::activate_with(64 << 10)?;
    let _table = fill_table();
    let listener = TcpListener::bind("127.0.0.1:8080")?;
    println!("http://{}/debug/pprof/heap", listener.local_addr()?);
    serve(&listener)?;
    Ok(())
}

/// The bytes that [`fill_table`] holds.
pub const TABLE: usize = 64 << 20;

/// Holds the memory that the profile shows.
#[inline(never)]
pub fn fill_table() -> Vec<Vec<u8>> {
    let row = || vec![1; 1000];
    (0..TABLE / 1000).map(|_| row()).collect()
}

/// Answers requests until the listener fails.
pub fn serve(listener: &TcpListener) -> io::Result<()> {
    for connection in listener.incoming() {
        // A client that goes away keeps no other from its answer.
        let _ = answer(connection?);
    }
    Ok(())
}

fn answer(mut connection: TcpStream) -> io::Result<()> {
    const LONGEST: u64 = 4096;
    connection.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut request = String::new();
    let mut reader = BufReader::new(io::Read::take(&connection, LONGEST));
    reader.read_line(&mut request)?;
    // The rest of the request has no meaning here. It is read because a socket that is closed with
    // unread bytes resets the connection.
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let answer = match request.split(' ').nth(1) {
        Some("/debug/pprof/heap") => {
            pinfold_pprof::dump_pprof().map(|body| ("application/octet-stream", body))
        }
        Some("/debug/pprof/heap/flamegraph") => {
            pinfold_pprof::dump_flamegraph().map(|body| ("image/svg+xml", body))
        }
        _ => return connection.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
    };
    let (status, (kind, body)) = match answer {
        Ok(answer) => ("200 OK", answer),
        Err(error) => (
            "503 Service Unavailable",
            ("text/plain", format!("{error}\n").into_bytes()),
        ),
    };
    write!(
        connection,
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    )?;
    connection.write_all(&body)
}
