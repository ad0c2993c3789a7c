//! The names of code that a process made at run time: of Python's trampolines, and of just-in-time
//! compilers. The process writes them to `/tmp/perf-PID.map` for perf, one function a line:
//!
//! ```text
//! 7f3a00001000 b py::handle:/srv/app.py
//! ```
//!
//! A line holds the start and the size in hexadecimal digits, and the name.

use pinfold_pprof::internal::names::Names;
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;

/// The most bytes of a file that are read.
const MOST: u64 = 64 << 20;

/// The most bytes of a line that are read.
const LINE: u64 = 8192;

/// Returns the path of a process's file, by the PID that the process knows.
pub fn name(pid: u32) -> PathBuf {
    format!("/tmp/perf-{pid}.map").into()
}

/// Names those of `places`, each with a number and an address, that the file names. The last line
/// counts if several have an address, because a compiler uses memory again.
pub fn find(file: impl Read, places: &[(u32, u64)]) -> io::Result<HashMap<u32, Names>> {
    let mut places = places.to_vec();
    places.sort_by_key(|&(_, address)| address);
    let mut found = HashMap::new();
    let mut text = BufReader::new(file.take(MOST));
    let mut line = Vec::new();
    while (&mut text).take(LINE).read_until(b'\n', &mut line)? > 0 {
        if let Some((start, size, name)) = parse(&line) {
            // A return address is behind its call, so it may be the end.
            let after = places.partition_point(|&(_, address)| address <= start);
            let of = places[after..].iter();
            for &(number, _) in of.take_while(|&&(_, address)| address - start <= size) {
                let symbol = String::from_utf8_lossy(name).into_owned();
                let frames = Vec::new();
                found.insert(number, Names { symbol, frames });
            }
        }
        line.clear();
    }
    Ok(found)
}

/// Returns the start, the size and the name of a line, or `None` if it is another one.
fn parse(line: &[u8]) -> Option<(u64, u64, &[u8])> {
    let line = line.strip_suffix(b"\n")?;
    let mut words = line.splitn(3, |&byte| byte == b' ');
    let mut number = || {
        let digits = str::from_utf8(words.next()?).ok()?;
        u64::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16).ok()
    };
    let (start, size) = (number()?, number()?);
    let name = words.next().filter(|name| !name.is_empty())?;
    Some((start, size, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: [(u32, u64); 5] = [(0, 0x1000), (1, 0x1001), (2, 0x100b), (3, 0x100c), (4, 9)];

    #[test]
    fn the_last_line_with_an_address_names_it() {
        let text = b"1000 c old\n1000 b py::f:/a b.py\nffffffffffffffff ffffffffffffffff all\n";
        let found = find(&text[..], &PLACES).unwrap();
        let symbol = |number| found.get(&number).map(|names| names.symbol.as_str());
        // An address is behind the call that it belongs to.
        assert_eq!(symbol(0), None);
        assert_eq!(symbol(1), Some("py::f:/a b.py"));
        assert_eq!(symbol(2), Some("py::f:/a b.py"));
        assert_eq!(symbol(3), Some("old"));
        assert_eq!(symbol(4), None);
    }

    #[test]
    fn other_lines_name_nothing() {
        let mut text = b"1000\n1000 b\n1000 b \nx b f\n1000 -b f\n\xff\n\n".to_vec();
        text.extend_from_slice(b"1000 b ");
        text.extend_from_slice(&[b'f'; 100_000]);
        text.extend_from_slice(b"\n1000 b cut");
        assert!(find(&text[..], &PLACES).unwrap().is_empty());
    }
}
