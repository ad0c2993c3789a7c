//! Caches of values of one type: `cargo run --release -p pinfold --example caches`.
//!
//! * A [`Cache`] gives out handles that own their value, like `Box`. A value may not outlive its
//!   cache, which the borrow checker sees to.
//! * A [`SharedCache`] gives out counted handles, like `Arc`. Value and count are one object.
//!
//! At the end, the example prints what the caches hold, in the form of `/proc/slabinfo`.

use pinfold::slab::{Cache, SharedCache, slabinfo};
use std::error::Error;
use std::thread;

/// A connection of a server.
struct Session {
    peer: String,
    bytes: u64,
}

/// A route that several threads use at once.
struct Route {
    prefix: &'static str,
    gateway: u32,
}

fn main() -> Result<(), Box<dyn Error>> {
    let sessions = Cache::new("session")?;
    // The builder has settings: here, each CPU sets at most 16 free routes aside.
    let routes = SharedCache::builder("route").sheaf_capacity(16).build()?;

    let mut open = Vec::new();
    for number in 0..1000 {
        // `alloc` returns the value if the system has no memory.
        let session = Session {
            peer: format!("10.0.0.{}", number % 256),
            bytes: 0,
        };
        let handle = sessions
            .alloc(session)
            .map_err(|_| "no memory for a session")?;
        open.push(handle);
    }
    for session in &mut open {
        session.bytes += session.peer.len() as u64;
    }
    // Drops 500 values. Their memory waits on this CPU for the next allocations.
    open.truncate(500);
    assert_eq!(sessions.raw().usage().active, 500);

    let route = Route {
        prefix: "10.0.0.0/8",
        gateway: 1,
    };
    let route = routes.alloc(route).map_err(|_| "no memory for a route")?;
    thread::scope(|scope| {
        for _ in 0..4 {
            let route = route.clone();
            scope.spawn(move || assert_eq!((route.prefix, route.gateway), ("10.0.0.0/8", 1)));
        }
    });

    let total: u64 = open.iter().map(|session| session.bytes).sum();
    println!("{} sessions have moved {total} bytes", open.len());
    print!("{}", slabinfo());
    Ok(())
}
