//! The connections of clients, of which a limited number is open at once.
//!
//! A client that connects and then does nothing must not keep another client out. So at the limit,
//! the connection that has waited longest for its client is closed, and a new one takes its place.

use crate::live::locked;
use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What a connection waits for. The first kinds give way first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The client has its answer, and has not closed the connection.
    Answered,
    /// The client has not sent a whole request.
    Asking,
    /// The client has not read the whole answer.
    Reading,
    /// The server makes the answer. Such a connection does not give way.
    Making,
}

struct Connection {
    stream: Arc<TcpStream>,
    phase: Phase,
    since: Instant,
}

pub struct Connections {
    most: usize,
    open: Mutex<(u64, HashMap<u64, Connection>)>,
}

impl Connections {
    /// Makes an empty table of at most `most` connections.
    pub fn new(most: usize) -> Arc<Connections> {
        Arc::new(Connections {
            most,
            open: Mutex::default(),
        })
    }

    /// Adds a connection. At the limit, closes the one that has waited longest for its client.
    /// Returns `None` if the server makes an answer for each of them.
    pub fn admit(self: &Arc<Self>, stream: &Arc<TcpStream>) -> Option<Place> {
        let mut open = locked(&self.open);
        let (next, connections) = &mut *open;
        if connections.len() >= self.most && !close_oldest(connections) {
            return None;
        }
        *next += 1;
        let (stream, number) = (Arc::clone(stream), *next);
        let connection = Connection {
            stream,
            phase: Phase::Asking,
            since: Instant::now(),
        };
        connections.insert(number, connection);
        Some(Place {
            number,
            all: Arc::clone(self),
        })
    }

    /// Closes the connection that has waited longest for its client, if there is one.
    pub fn close_oldest(&self) {
        close_oldest(&mut locked(&self.open).1);
    }
}

fn close_oldest(connections: &mut HashMap<u64, Connection>) -> bool {
    let waiting = connections.iter();
    let waiting = waiting.filter(|(_, connection)| connection.phase != Phase::Making);
    let oldest = waiting.min_by_key(|(_, connection)| (connection.phase, connection.since));
    let Some(number) = oldest.map(|(&number, _)| number) else {
        return false;
    };
    if let Some(connection) = connections.remove(&number) {
        // Its thread waits for the client, and this ends the wait. The client may be gone already.
        let _ = connection.stream.shutdown(Shutdown::Both);
    }
    true
}

/// A connection's place in the table, which becomes free when this value is dropped.
pub struct Place {
    number: u64,
    all: Arc<Connections>,
}

impl Place {
    /// Notes what the connection waits for. Returns false if it has given way to another.
    pub fn enter(&self, phase: Phase) -> bool {
        let mut open = locked(&self.all.open);
        let connection = open.1.get_mut(&self.number);
        let is_open = connection.is_some();
        if let Some(connection) = connection {
            connection.phase = phase;
            connection.since = Instant::now();
        }
        is_open
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        locked(&self.all.open).1.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn stream() -> Arc<TcpStream> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap())
    }

    #[test]
    fn the_connection_that_waited_longest_gives_way() {
        let connections = Connections::new(3);
        let stream = stream();
        let admit = || connections.admit(&stream);
        let [first, second, third] = [admit(), admit(), admit()].map(Option::unwrap);
        assert!(first.enter(Phase::Making));
        let fourth = admit().unwrap();
        assert!(!second.enter(Phase::Asking), "it gave way");
        assert!(fourth.enter(Phase::Answered));
        let fifth = admit().unwrap();
        assert!(!fourth.enter(Phase::Answered), "it had its answer");
        assert!(third.enter(Phase::Making));
        assert!(fifth.enter(Phase::Making));
        assert!(admit().is_none(), "all are being answered");
        drop(first);
        assert!(admit().is_some());
    }
}
