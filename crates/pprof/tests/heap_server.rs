//! What a program says of its own heap: the example's server, asked as a collector asks it.

#[path = "../examples/heap_server.rs"]
mod server;

use pinfold_pprof::internal::pprof::decode;
use pinfold_pprof::internal::profile::{Profile, Values};
use pinfold_pprof::{Error, PROF_CTL};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::LazyLock;
use std::thread;

/// The server, with its table in memory.
static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| {
    assert!(matches!(
        pinfold_pprof::dump_pprof(),
        Err(Error::NotStarted)
    ));
    assert!(matches!(
        pinfold_pprof::activate_with(0),
        Err(Error::Interval(0))
    ));
    assert!(!pinfold_pprof::is_active());
    pinfold_pprof::activate_with(64 << 10).unwrap();
    assert!(pinfold_pprof::is_active());
    std::mem::forget(server::fill_table());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || server::serve(&listener));
    address
});

/// Asks the server for `path`. Returns the head and the body of its answer.
fn get(path: &str) -> (String, Vec<u8>) {
    let mut connection = TcpStream::connect(*SERVER).unwrap();
    write!(connection, "GET {path} HTTP/1.1\r\nhost: here\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let body = answer.split_off(end.unwrap() + 4);
    (String::from_utf8(answer).unwrap(), body)
}

/// Returns what was allocated in functions whose names have `part`.
fn values_of(profile: &Profile, part: &str) -> Values {
    let mut sum = Values::default();
    for stack in &profile.stacks {
        if profile.functions(stack).any(|name| name.contains(part)) {
            sum.add(&stack.values, 1.0);
        }
    }
    sum
}

#[test]
fn the_profile_names_the_function_that_holds_the_memory() {
    let (head, body) = get("/debug/pprof/heap");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let profile = decode(&body).unwrap();
    let table = values_of(&profile, "fill_table");
    // One standard deviation is 3 %: the table has 1,000 times the interval.
    let share = table.bytes / server::TABLE as f64;
    assert!((0.8..1.25).contains(&share), "{share}");
    assert!((0.8..1.25).contains(&(table.objects / 67_108.0)));
    // The allocator's own functions are left out.
    let innermost = profile.stacks.iter().map(|stack| {
        let mut functions = profile.functions(stack);
        functions.next().unwrap_or_default()
    });
    let of_allocator: Vec<_> = innermost
        .filter(|name| name.contains("pinfold::"))
        .collect();
    assert!(of_allocator.is_empty(), "{of_allocator:?}");
    // Names that are known already are in each later profile, too.
    let again = decode(&get("/debug/pprof/heap").1).unwrap();
    assert!(values_of(&again, "fill_table").bytes >= table.bytes);
}

#[test]
fn a_profile_without_names_leaves_them_to_the_build_ids() {
    let _ = *SERVER;
    let profile = decode(&pinfold_pprof::dump_pprof_addresses().unwrap()).unwrap();
    assert_eq!(profile.nameless(), profile.locations.len());
    let program = std::env::current_exe().unwrap();
    let is_program = |path: &str| program.to_str() == Some(path);
    let mut mappings = profile.mappings.iter();
    let own = mappings.find(|mapping| is_program(&mapping.path)).unwrap();
    assert!(own.build_id.len() >= 16, "{own:?}");
}

#[test]
fn the_flame_graph_shows_the_function() {
    let (head, body) = get("/debug/pprof/heap/flamegraph");
    assert!(head.contains("content-type: image/svg+xml"), "{head}");
    assert!(String::from_utf8(body).unwrap().contains("fill_table"));
    assert!(get("/other").0.starts_with("HTTP/1.1 404"));
}

/// The names that users of `jemalloc_pprof` have in their code.
#[test]
fn the_handle_does_what_the_functions_do() {
    let _ = *SERVER;
    let handle = PROF_CTL.as_ref().unwrap().lock().into_inner();
    assert!(handle.activated());
    let profile = decode(&handle.dump_pprof().unwrap()).unwrap();
    assert!(values_of(&profile, "fill_table").bytes > 0.0);
    assert!(handle.dump_flamegraph().unwrap().starts_with(b"<?xml"));
}
