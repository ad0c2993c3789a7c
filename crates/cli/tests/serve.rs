//! `pinfold serve` with clients that send nothing, too much, or come all at once, and with
//! processes that end or change.

mod program;
mod served;
mod texts;

use program::{Program, ROLE, RUN, in_role};
use served::{PATIENCE, Server, get};
use std::fs::OpenOptions;
use std::hint::black_box;
use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use texts::assert_has;

/// Acts as a program. Does nothing as a test.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match &role[..] {
        "forks" => {
            // SAFETY: only the child's own thread runs in it, and it uses nothing that another
            // thread of the parent may have locked: Pinfold's malloc takes its locks for a fork.
            let child = unsafe { libc::fork() };
            if child > 0 {
                println!("says {child}");
            }
        }
        // The test runs in a thread that has a name of its own.
        "named" => std::fs::write("/proc/self/comm", b"a\"b\\c\x1bd").unwrap(),
        _ => {}
    }
    if role != "forks" {
        println!("says {}", std::process::id());
    }
    if role == "executes" {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let mut next = in_role(&RUN, "allocates");
        use std::os::unix::process::CommandExt;
        panic!("{}", next.exec());
    }
    let begin = Instant::now();
    while begin.elapsed() < 2 * PATIENCE {
        let blocks: Vec<Vec<u8>> = (0..3000).map(|_| black_box(vec![1; 200])).collect();
        drop(black_box(blocks));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts a program in a role, and waits for the number that it says.
fn start(role: &str) -> Program {
    let mut program = Program::of(&mut in_role(&RUN, role));
    assert!(program.says("says "), "it ended");
    program
}

#[test]
fn clients_that_send_nothing_do_not_keep_others_out() {
    for files in [24, 1000] {
        let mut server = Server::start(files, &[]);
        // The server closes a connection after 10 s in which its client sent nothing. So a scrape
        // that takes less has not waited for that. On a busy machine one may take longer.
        let is_quick = (0..5).any(|_| {
            let _idle = server.idle_clients(100);
            let begin = Instant::now();
            server.await_scrape();
            begin.elapsed() < Duration::from_secs(8)
        });
        assert!(is_quick);
    }
}

#[test]
fn a_process_is_served_as_long_as_it_lives() {
    let program = start("allocates");
    let pid = program.number("says").to_string();
    let mut server = Server::start(24, &[&pid]);
    let idle = server.idle_clients(60);
    std::thread::sleep(Duration::from_millis(1500));
    server.await_text(&format!("pinfold_held_bytes{{pid=\"{pid}\""));
    drop(idle);
    drop(program);
    assert_eq!(server.await_end().code(), Some(0));
}

#[test]
fn a_process_that_executes_another_program_is_followed() {
    let mut program = start("executes");
    let pid = program.number("says").to_string();
    let mut server = Server::start(1000, &[&pid]);
    server.await_text(&format!("pid=\"{pid}\""));
    let started = |answer: &str| {
        let mut lines = answer.lines();
        lines.find_map(|line| {
            line.strip_prefix("pinfold_cache_refills_total")
                .map(str::to_owned)
        })
    };
    assert!(started(&server.get("/metrics")).is_some());
    program
        .process
        .stdin
        .take()
        .unwrap()
        .write_all(b"go\n")
        .unwrap();
    // The new program says its number again.
    assert!(program.says("says "));
    std::thread::sleep(Duration::from_millis(1500));
    server.await_text(&format!("pinfold_held_bytes{{pid=\"{pid}\""));
    drop(program);
    assert_eq!(server.await_end().code(), Some(0));
}

#[test]
fn names_are_escaped_once() {
    let program = start("named");
    let server = Server::start(1000, &[&program.number("says").to_string()]);
    let name = "a\\\"b\\\\c\\\\u001bd";
    let metrics = server.get("/metrics");
    assert_has(&metrics, &[&format!(",process=\"{name}\"}} ")]);
    let status = server.get("/status.json");
    assert!(status.contains(&format!("\"name\":\"{name}\"")), "{status}");
}

#[test]
fn a_connection_gets_one_answer() {
    let server = Server::start(1000, &[]);
    let many = get("/status.json", "").repeat(1000);
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
    let program = start("forks");
    let child = program.number("says");
    let mut server = Server::start(1000, &[]);
    server.await_text(&format!("pid=\"{child}\""));
    // SAFETY: `kill` uses no memory of this process.
    unsafe { libc::kill(child as i32, libc::SIGKILL) };
}

#[test]
fn other_sites_get_nothing() {
    let server = Server::start(1000, &["--allow-host", "node7.example"]);
    for (path, headers, status) in [
        ("/metrics", "Host: localhost", "200"),
        ("/metrics", "Host: [::1]:9464", "200"),
        ("/metrics", "Host: Node7.example:9464", "200"),
        ("/metrics", "Host: evil.example", "421"),
        ("/", "Host: evil.example", "421"),
        ("/metrics", "Accept: */*", "400"),
        (
            "/metrics",
            "Host: localhost\r\nSec-Fetch-Site: cross-site",
            "403",
        ),
        (
            "/status.json",
            "Host: localhost\r\nSec-Fetch-Site: same-site",
            "403",
        ),
        (
            "/metrics",
            "Host: localhost\r\nOrigin: http://evil.example",
            "403",
        ),
        (
            "/status.json",
            "Host: localhost:1\r\nOrigin: http://localhost:1",
            "200",
        ),
        (
            "/debug/pprof/heap?pid=1",
            "Host: localhost\r\nSec-Fetch-Site: cross-site",
            "403",
        ),
        (
            "/heap.svg?pid=1",
            "Host: localhost\r\nSec-Fetch-Site: cross-site",
            "403",
        ),
    ] {
        let answer = server.answer(&format!("GET {path} HTTP/1.1\r\n{headers}\r\n\r\n"));
        let answer = answer.unwrap();
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{path} {headers}: {answer}");
        for words in [
            "X-Content-Type-Options: nosniff",
            "Cross-Origin-Resource-Policy: same-origin",
            "Referrer-Policy: no-referrer",
            "Cache-Control: no-store",
            "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; \
             connect-src 'self'; img-src 'self'; base-uri 'none'; ",
        ] {
            assert!(answer.contains(words), "{words}: {answer}");
        }
    }
}

#[test]
fn the_page_has_no_inline_script_or_style() {
    let server = Server::start(1000, &[]);
    let page = server.get("/");
    assert!(
        !page.contains("<style") && !page.contains("<script>"),
        "{page}"
    );
    for (path, kind, word) in [
        ("/page.js", "text/javascript; charset=utf-8", "status.json"),
        ("/page.css", "text/css; charset=utf-8", "font"),
    ] {
        assert!(page.contains(&format!("\"{}\"", &path[1..])), "{page}");
        let part = server.get(path);
        assert!(part.contains(&format!("Content-Type: {kind}\r\n")) && part.contains(word));
    }
}

#[test]
fn the_format_is_the_one_that_the_client_asks_for() {
    let program = start("allocates");
    let server = Server::start(1000, &[&program.number("says").to_string()]);
    let plain = "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n";
    let open = "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
    for (accept, kind) in [
        ("", plain),
        ("Accept: */*\r\n", plain),
        ("Accept: text/plain\r\n", plain),
        (
            "Accept: text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n",
            plain,
        ),
        ("Accept: application/openmetrics-text\r\n", open),
        (
            "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2\r\n",
            open,
        ),
    ] {
        let answer = server.answer(&get("/metrics", accept)).unwrap();
        assert!(answer.contains(kind), "{accept}: {answer}");
        let is_open = kind == open;
        assert_eq!(answer.ends_with("\n# EOF\n"), is_open, "{answer}");
        assert_eq!(answer.contains("# UNIT "), is_open);
        let family =
            ["pinfold_returned_bytes_total", "pinfold_returned_bytes"][usize::from(is_open)];
        assert_has(&answer, &[&format!("\n# TYPE {family} counter\n")]);
        assert!(answer.contains("\npinfold_returned_bytes_total{pid="));
    }
}

#[test]
fn all_addresses_are_a_port_alone() {
    let server = Server::start(1000, &["--listen", ":0"]);
    let port = server.address.strip_prefix("localhost:").unwrap();
    let stream = TcpStream::connect(format!("127.0.0.1:{port}"));
    assert!(stream.is_ok(), "{}", server.address);
    assert!(server.get("/").starts_with("HTTP/1.1 200"));
}

/// Returns the lines of a page of metrics that are samples.
fn samples(answer: &str) -> Vec<&str> {
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    body.lines().filter(|line| !line.starts_with('#')).collect()
}

#[test]
fn caches_can_be_left_out_and_the_order_is_fixed() {
    let programs = ["allocates", "named"].map(start);
    let pids = programs
        .each_ref()
        .map(|program| program.number("says").to_string());
    let server = Server::start(1000, &[&pids[0], &pids[1]]);
    let (whole, few) = (server.get("/metrics"), server.get("/metrics?caches=0"));
    assert!(
        whole.contains("\npinfold_cache_slabs{") && !few.contains("pinfold_cache_"),
        "{few}"
    );
    assert!(
        few.contains("\npinfold_held_bytes{") && samples(&few).len() < 60,
        "{few}"
    );
    let names = |answer: &str| -> Vec<String> {
        let mut names = samples(answer).into_iter();
        let names = names
            .by_ref()
            .map(|line| line.rsplit_once(' ').unwrap().0.to_owned());
        names.collect()
    };
    let mut families: Vec<&str> = whole.lines().collect();
    families.retain(|line| line.starts_with("# TYPE "));
    assert!(families.is_sorted(), "{families:?}");
    assert_eq!(names(&few), names(&server.get("/metrics?caches=0")));
}

#[test]
fn long_answers_are_packed_for_clients_that_take_gzip() {
    use std::io::Read;
    let program = start("allocates");
    let server = Server::start(1000, &[&program.number("says").to_string()]);
    for path in ["/metrics", "/status.json", "/page.js"] {
        let plain = server
            .answer(&get(path, "Accept-Encoding: br\r\n"))
            .unwrap();
        assert!(!plain.contains("Content-Encoding"), "{plain}");
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let request = get(path, "Accept-Encoding: gzip, deflate\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut packed = Vec::new();
        stream.read_to_end(&mut packed).unwrap();
        let end = packed
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .unwrap();
        let (head, body) = (String::from_utf8_lossy(&packed[..end]), &packed[end + 4..]);
        assert!(head.contains("\r\nContent-Encoding: gzip\r\n"), "{head}");
        let length = format!("Content-Length: {}\r\n", body.len());
        assert!(head.contains(&length), "{head}");
        let mut text = String::new();
        flate2::read::GzDecoder::new(body)
            .read_to_string(&mut text)
            .unwrap();
        let first = plain
            .split_once("\r\n\r\n")
            .unwrap()
            .1
            .lines()
            .next()
            .unwrap();
        assert!(text.starts_with(&first[..first.len().min(30)]), "{text}");
        assert!(
            body.len() < text.len() / 2,
            "{path}: {} of {}",
            body.len(),
            text.len()
        );
    }
}

/// Two programs with the same name differ by their cgroups, or by their command lines. These may
/// hold secrets, so they are shown only if the user asked for it.
#[test]
fn an_info_metric_tells_processes_apart() {
    let program = start("allocates");
    let pid = program.number("says").to_string();
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    for arguments in [&[][..], &["--command-lines"]] {
        let server = Server::start(1000, &[arguments, &[&pid]].concat());
        let metrics = server.get("/metrics");
        let info = format!("pinfold_process_info{{pid=\"{pid}\",process=");
        let info = samples(&metrics)
            .into_iter()
            .find(|line| line.starts_with(&info));
        let info = info.expect(&metrics);
        assert!(info.ends_with(" 1"), "{info}");
        let path = info.split_once("cgroup=\"").unwrap().1;
        let path = path.split('"').next().unwrap().replace(r"\\", r"\");
        let is_there = cgroups
            .lines()
            .any(|line| line.ends_with(&format!(":{path}")));
        assert!(is_there, "{info}: {cgroups}");
        let has_command = info.contains("cmdline=\"");
        assert_eq!(has_command, !arguments.is_empty(), "{info}");
    }
}

#[test]
fn collectors_of_profiles_find_the_processes() {
    let program = start("named");
    let pid = program.number("says").to_string();
    let server = Server::start(1000, &[&pid]);
    let answer = server
        .answer("GET /sd HTTP/1.1\r\nHost: localhost:9464\r\n\r\n")
        .unwrap();
    assert_has(&answer, &["Content-Type: application/json\r\n"]);
    let found = answer.split_once("\r\n\r\n").unwrap().1;
    let found: serde_json::Value = serde_json::from_str(found).unwrap();
    let expected = serde_json::json!([{
        "targets": ["localhost:9464"],
        "labels": {"__param_pid": pid, "pid": pid, "process": "a\"b\\c\\u001bd"},
    }]);
    assert_eq!(found, expected);
}

/// Returns the names of metrics in a text that `serve` may have.
fn metrics_in(text: &str) -> std::collections::BTreeSet<&str> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = text.split(|letter: char| !is_part(letter));
    let begins = |word: &&str| word.starts_with("pinfold_") || word.starts_with("process_");
    words.filter(begins).collect()
}

/// Otherwise a panel would be empty, and an alert would never fire.
#[test]
fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
    let program = start("allocates");
    let server = Server::start(1000, &[&program.number("says").to_string()]);
    let answer = server.get("/metrics");
    let served: Vec<&str> = samples(&answer);
    for (file, least) in [("dashboard.json", 12), ("alerts.yml", 5)] {
        let path = format!("{}/../../docs/deploy/{file}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let named = metrics_in(&text);
        assert!(named.len() >= least, "{file}: {named:?}");
        for name in named {
            let begin = format!("{name}{{");
            assert!(
                served.iter().any(|line| line.starts_with(&begin)),
                "{file}: {name}"
            );
        }
    }
}

#[test]
fn each_link_of_the_page_is_answered() {
    let program = start("allocates");
    let server = Server::start(1000, &[&program.number("says").to_string()]);
    let page = server.get("/");
    let links: Vec<&str> = page.split("<a href=\"").skip(1).collect();
    assert!(links.len() >= 4, "{page}");
    for link in links {
        let path = format!("/{}", link.split('"').next().unwrap());
        let answer = server.get(&path);
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    // The script shows each part that the chart stacks.
    let status = server.get("/status.json");
    let script = server.get("/page.js");
    for part in [
        "live_and_sheaves_bytes",
        "in_barns_bytes",
        "free_in_slabs_bytes",
        "dirty_bytes",
        "metadata_bytes",
        "resident_bytes",
    ] {
        assert!(status.contains(&format!("\"{part}\":")), "{part}: {status}");
        assert!(script.contains(part), "{part}");
    }
    // It shows the flame graph of a process as an image. Without a profile, the answer says what to
    // do, and the script shows that.
    assert_has(
        &script,
        &["`heap.svg?pid=${process.pid}`", "createElement(\"img\")"],
    );
    let flame = server.get("/heap.svg");
    assert!(flame.starts_with("HTTP/1.1 503"), "{flame}");
    assert_has(&flame, &["heap start"]);
}
