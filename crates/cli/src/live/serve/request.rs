//! What a client asks for, and whether it may ask.
//!
//! A page of any web site can have its reader's browser send requests to this server. Two checks
//! keep the numbers from such pages:
//! 1. **The host.** A site can give its own name this server's address (DNS rebinding), and its
//!    page then counts as a page of this server. Such a request carries the site's name in `Host`.
//!    So only IP addresses, `localhost` and the names that the user gave are accepted.
//! 2. **The site.** A browser says in `Sec-Fetch-Site` and `Origin` which site a request comes
//!    from. Only requests of the server's own page, and requests that no page made, are answered. A
//!    link may lead to `/`: the page that has the link learns nothing.

use super::http::Response;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The format of the numbers for Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The text format 0.0.4 of Prometheus.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

/// A request that may be answered.
#[derive(Debug)]
pub struct Request {
    pub path: String,
    /// The text after the question mark.
    pub query: String,
    /// The name and port by which the client calls the server, if it says them.
    pub host: Option<String>,
    pub format: Format,
    /// Whether the client takes an answer that gzip has packed.
    pub takes_gzip: bool,
}

impl Request {
    /// Returns the value of a name in the query.
    pub fn value(&self, name: &str) -> Option<&str> {
        let mut words = self.query.split('&');
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

/// Checks a request whose headers were read. `allowed` are names that the user accepts as hosts.
pub fn check(request: &httparse::Request<'_, '_>, allowed: &[String]) -> Result<Request, Response> {
    if !matches!(request.method, Some("GET" | "HEAD")) {
        return Err(Response::error(405, "only GET and HEAD\n"));
    }
    let target = request.path.unwrap_or_default();
    let values = |name: &'static str| values(request, name);
    // A proxy may send the whole address, and its host counts as much as that of the header.
    let (authority, target) = match target.strip_prefix("http://") {
        Some(rest) => rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len())),
        None => ("", target),
    };
    let mut hosts: Vec<&[u8]> = values("Host").collect();
    if hosts.len() > 1 || (hosts.is_empty() && request.version != Some(0)) {
        let text = "the request needs one header Host\n";
        return Err(Response::error(400, text));
    }
    if !authority.is_empty() {
        hosts.push(authority.as_bytes());
    }
    if !hosts.iter().all(|host| is_known(host, allowed)) {
        return Err(Response::error(
            421,
            "the host of this request is neither an IP address, nor localhost, nor a name that was \
             given by --allow-host: ask by the IP address, or start `pinfold serve` with \
             --allow-host NAME\n",
        ));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if !is_own_site(request, path, hosts.first().copied()) {
        return Err(Response::error(
            403,
            "this request comes from a page of another site, and only the page / may be opened so\n",
        ));
    }
    Ok(Request {
        path: if path.is_empty() { "/" } else { path }.to_owned(),
        query: query.to_owned(),
        host: hosts
            .first()
            .map(|host| String::from_utf8_lossy(host).trim().to_owned()),
        format: wanted(values("Accept")),
        takes_gzip: takes_gzip(values("Accept-Encoding")),
    })
}

fn values<'r>(
    request: &'r httparse::Request<'_, '_>,
    name: &'static str,
) -> impl Iterator<Item = &'r [u8]> {
    let named = request.headers.iter();
    let named = named.filter(move |header| header.name.eq_ignore_ascii_case(name));
    named.map(|header| header.value)
}

/// Returns whether a host, which may have a port, is an IP address, `localhost` or an allowed name.
fn is_known(host: &[u8], allowed: &[String]) -> bool {
    let Ok(host) = str::from_utf8(host) else {
        return false;
    };
    let host = host.trim_ascii();
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((address, port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let has_port = port.strip_prefix(':').is_some_and(is_port);
        return (port.is_empty() || has_port) && address.parse::<Ipv6Addr>().is_ok();
    }
    let (name, port) = host.split_once(':').unwrap_or((host, ""));
    let is_name = |allowed: &String| allowed.eq_ignore_ascii_case(name);
    is_port(port)
        && (name.parse::<Ipv4Addr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || allowed.iter().any(is_name))
}

/// Returns whether no page of another site has made the request. A link of another site may lead to
/// the path `/`.
fn is_own_site(request: &httparse::Request<'_, '_>, path: &str, host: Option<&[u8]>) -> bool {
    let is_only = |name: &'static str, wanted: &[&[u8]]| {
        values(request, name).all(|value| wanted.contains(&value))
    };
    let has = |name: &'static str, wanted: &[u8]| values(request, name).eq([wanted]);
    // A server behind a proxy does not know whether its clients use TLS.
    let is_own_origin = |origin: &[u8]| {
        let name = origin.strip_prefix(b"http://");
        let name = name.or_else(|| origin.strip_prefix(b"https://"));
        name.zip(host)
            .is_some_and(|(name, host)| name.eq_ignore_ascii_case(host))
    };
    let is_link =
        path == "/" && has("Sec-Fetch-Mode", b"navigate") && has("Sec-Fetch-Dest", b"document");
    values(request, "Origin").all(is_own_origin)
        && (is_link || is_only("Sec-Fetch-Site", &[b"same-origin", b"none"]))
}

/// Returns whether the header `Accept-Encoding` allows gzip. A word about gzip counts more than the
/// star, which means any other coding.
fn takes_gzip<'r>(accepted: impl Iterator<Item = &'r [u8]>) -> bool {
    let (mut gzip, mut any) = (None, None);
    for value in accepted {
        for coding in String::from_utf8_lossy(value).split(',') {
            let (name, weight) = coding.split_once(';').unwrap_or((coding, "q=1"));
            let weight = weight.trim().to_ascii_lowercase();
            let weight = weight
                .strip_prefix("q=")
                .and_then(|text| text.trim().parse().ok());
            let is_allowed = weight.is_some_and(|weight: f32| weight > 0.0);
            match &name.trim().to_ascii_lowercase()[..] {
                "gzip" | "x-gzip" => gzip = Some(is_allowed),
                "*" => any = Some(is_allowed),
                _ => {}
            }
        }
    }
    gzip.or(any).unwrap_or(false)
}

/// Returns the format that the header `Accept` asks for. OpenMetrics goes only to clients that name
/// it, and do not prefer plain text.
fn wanted<'r>(accepted: impl Iterator<Item = &'r [u8]>) -> Format {
    let (mut open, mut text) = (0.0f32, 0.0f32);
    for value in accepted {
        for range in String::from_utf8_lossy(value).split(',') {
            let mut words = range.split(';').map(str::trim);
            let kind = words.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut version) = (1.0f32, "");
            for word in words {
                let (name, value) = word.split_once('=').unwrap_or((word, ""));
                let value = value.trim().trim_matches('"');
                match &name.trim().to_ascii_lowercase()[..] {
                    "q" => quality = value.parse().unwrap_or(0.0),
                    "version" => version = value,
                    _ => {}
                }
            }
            match (&kind[..], version) {
                // A parser of version 0.0.1 reads 1.0.0, as Prometheus itself does.
                ("application/openmetrics-text", "" | "0.0.1" | "1.0.0") => {
                    open = quality.max(open);
                }
                ("text/plain", "" | "0.0.4") => text = quality.max(text),
                _ => {}
            }
        }
    }
    match open > 0.0 && open >= text {
        true => Format::OpenMetrics,
        false => Format::Text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the outcome for a target and headers: the path, or the status of the refusal.
    fn outcome(target: &str, headers: &str) -> Result<String, u16> {
        let text = format!("GET {target} HTTP/1.1\r\n{headers}\r\n");
        let mut headers = [httparse::EMPTY_HEADER; 16];
        let mut request = httparse::Request::new(&mut headers);
        assert!(request.parse(text.as_bytes()).unwrap().is_complete());
        let allowed = ["node7.example".to_owned()];
        check(&request, &allowed)
            .map(|request| request.path)
            .map_err(|refused| refused.status)
    }

    #[test]
    fn hosts_are_addresses_localhost_and_allowed_names() {
        for host in [
            "127.0.0.1",
            "10.1.2.3:9464",
            "[::1]",
            "[fe80::1]:9464",
            "localhost",
            "LocalHost:1",
            "node7.example",
            "NODE7.example:9464",
        ] {
            let said = outcome("/metrics", &format!("Host: {host}\r\n"));
            assert_eq!(said.as_deref(), Ok("/metrics"), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9464",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "node7.example.evil",
            "0x7f.1",
            "127.1",
            "2130706433",
            "::1",
            "[::1",
            "[::1]x",
            "[::1]evil.example",
            "127.0.0.1:80@evil.example",
            "user@127.0.0.1",
            "localhost:x",
            "",
            "\u{e9}",
        ] {
            let said = outcome("/metrics", &format!("Host: {host}\r\n"));
            assert_eq!(said, Err(421), "{host}");
        }
    }

    #[test]
    fn a_request_has_one_host() {
        assert_eq!(outcome("/", ""), Err(400));
        assert_eq!(outcome("/", "Host: localhost\r\nHost: a\r\n"), Err(400));
        let own = "Host: localhost\r\n";
        for (target, expected) in [
            ("http://127.0.0.1:9464/metrics?a", Ok("/metrics")),
            ("http://localhost", Ok("/")),
            ("http://evil.example/metrics", Err(421)),
            ("http://evil.example?/", Err(421)),
        ] {
            assert_eq!(outcome(target, own), expected.map(str::to_owned));
        }
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let link = "Sec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n";
        let frame = "Sec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n";
        for (target, headers, is_answered) in [
            ("/status.json", String::new(), true),
            (
                "/status.json",
                "Sec-Fetch-Site: same-origin\r\n".to_owned(),
                true,
            ),
            ("/metrics", format!("Sec-Fetch-Site: none\r\n{link}"), true),
            (
                "/metrics",
                "Sec-Fetch-Site: cross-site\r\n".to_owned(),
                false,
            ),
            ("/", "Sec-Fetch-Site: cross-site\r\n".to_owned(), false),
            ("/", "Sec-Fetch-Site: same-site\r\n".to_owned(), false),
            ("/", "Sec-Fetch-Site: new-word\r\n".to_owned(), false),
            ("/", format!("Sec-Fetch-Site: cross-site\r\n{link}"), true),
            ("/", format!("Sec-Fetch-Site: cross-site\r\n{frame}"), false),
            (
                "/debug/pprof/heap",
                format!("Sec-Fetch-Site: cross-site\r\n{link}"),
                false,
            ),
            (
                "/metrics",
                "Origin: http://127.0.0.1:9464\r\n".to_owned(),
                true,
            ),
            (
                "/metrics",
                "Origin: https://127.0.0.1:9464\r\n".to_owned(),
                true,
            ),
            (
                "/metrics",
                "Origin: http://127.0.0.1:3000\r\n".to_owned(),
                false,
            ),
            (
                "/metrics",
                "Origin: http://evil.example\r\n".to_owned(),
                false,
            ),
            ("/metrics", "Origin: null\r\n".to_owned(), false),
        ] {
            let said = outcome(target, &format!("Host: 127.0.0.1:9464\r\n{headers}"));
            let expected = is_answered.then_some(target.to_owned()).ok_or(403);
            assert_eq!(said, expected, "{target} {headers}");
        }
    }

    #[test]
    fn gzip_is_for_clients_that_take_it() {
        for (accepted, expected) in [
            ("gzip", true),
            ("deflate, GZIP;q=0.5", true),
            ("x-gzip", true),
            ("*", true),
            ("gzip;q=0, *", false),
            ("*;q=0, gzip", true),
            ("gzip;q=0.0", false),
            ("gzip;q=x", false),
            ("identity, br", false),
            ("", false),
        ] {
            assert_eq!(
                takes_gzip([accepted.as_bytes()].into_iter()),
                expected,
                "{accepted}"
            );
        }
        assert!(!takes_gzip(std::iter::empty()));
    }

    #[test]
    fn openmetrics_is_for_clients_that_name_it() {
        let plain = [
            "",
            "*/*",
            "text/plain",
            "text/html,*/*;q=0.8",
            "text/plain;version=0.0.4",
        ];
        let both = "application/openmetrics-text; version=1.0.0; q=0.2, text/plain;q=0.3";
        let never = "application/openmetrics-text;q=0";
        let later = "application/openmetrics-text;version=2.0.0";
        for accept in plain.into_iter().chain([both, never, later]) {
            assert_eq!(
                wanted([accept.as_bytes()].into_iter()),
                Format::Text,
                "{accept}"
            );
        }
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
            text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let older = "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5";
        for accept in [
            prometheus,
            older,
            "Application/OpenMetrics-Text; Version=\"1.0.0\"",
        ] {
            let format = wanted([accept.as_bytes()].into_iter());
            assert_eq!(format, Format::OpenMetrics, "{accept}");
        }
        assert_eq!(wanted(std::iter::empty()), Format::Text);
    }
}
