//! The environment variables that Pinfold reads: their names, values and defaults.
//!
//! The name of a variable stands beside the parser of its values, in the layer that uses the value.
//! This module lists all variables for the library, the command and the tests.
//!
//! The library ignores an invalid value, because a library must not end a running program, and does
//! not print. But the user learns of an invalid value at the program's start: `pinfold run` refuses
//! the value, and the preload library calls [`tell`].

pub use crate::background::VARIABLE as SHEPHERD;
pub use crate::guard::VARIABLE as GUARD;
pub use crate::heap_dumps::VARIABLE as HEAP_DUMP;
pub use crate::heap_profile::FILE_VARIABLE as HEAP_FILE;
pub use pinfold::internal::arena::{HUGE_PAGES_VARIABLE as THP, LIMIT_VARIABLE as MEMORY_LIMIT};
pub use pinfold::internal::heap::SIZED_FREE;
pub use pinfold::internal::heap::sampling::{VARIABLE as HEAP, parse as parse_heap_interval};
pub use pinfold::internal::segment::DIRECTORY_VARIABLE as STATS;
pub use pinfold::internal::show::VARIABLE as SEGMENT;
pub use pinfold::mempolicy::VARIABLE as POLICY;
pub use pinfold::slab::HARDENED_VARIABLE as HARDENED;
pub use pinfold::slab::debug::VARIABLE as SLAB_DEBUG;
pub use pinfold::topology::FAKE_NODES_VARIABLE as FAKE_NODES;
pub use pinfold_rseq::VARIABLE as RSEQ;
/// The environment variable that holds the path of `libpinfold.so`, for `pinfold run`.
pub const LIBRARY: &str = "PINFOLD_LIBRARY";
/// The environment variable that says whether `dlopen` keeps the flag `RTLD_DEEPBIND`, for
/// `libpinfold.so`.
pub const DEEPBIND: &str = "PINFOLD_DEEPBIND";
/// Returns whether [`DEEPBIND`] is set to `keep`. Reads the environment.
pub fn keeps_deepbind() -> bool {
    env::parsed(DEEPBIND, parse_deepbind) == Some(true)
}

/// Returns whether the value of [`DEEPBIND`] means that the flag stays. Returns `None` for an
/// invalid value.
fn parse_deepbind(value: &[u8]) -> Option<bool> {
    match value {
        b"keep" => Some(true),
        b"drop" => Some(false),
        _ => None,
    }
}

use crate::{background, heap_dumps};
use core::fmt::{self, Write};
use core::str::{FromStr, from_utf8};
use pinfold::internal::arena::{HugePages, Limit};
use pinfold::internal::{Text, heap, show};
use pinfold::mempolicy::{self, Mempolicy};
use pinfold::slab::{debug, parse_hardened};
use pinfold::topology::parse_fake_nodes;
use pinfold_rseq::{Backend, env, kernel};

/// An environment variable: what it does, and which values it takes.
///
/// ```
/// use pinfold_malloc::settings::{MEMORY_LIMIT, find};
///
/// let limit = find(MEMORY_LIMIT).unwrap();
/// assert!(limit.check(b"512M").is_ok());
/// assert!(limit.check(b"lots").is_err());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    name: &'static str,
    values: &'static str,
    default: &'static str,
    help: &'static str,
    grammar: Grammar,
}

/// Which values a variable takes.
#[derive(Clone, Copy, Debug)]
enum Grammar {
    /// Words and numbers for which the function returns true.
    Word(fn(&[u8]) -> bool),
    /// Texts that the function accepts.
    Text(fn(&str) -> Result<(), Wrong>),
    /// Any path. The code that opens the file reports an error.
    Path,
}

/// Parses a setting's text as a `T`. Returns `None` if the text is not valid.
pub(crate) fn parsed<T: FromStr>(value: &[u8]) -> Option<T> {
    from_utf8(value).ok()?.parse().ok()
}

/// Lists Pinfold's own environment variables. docs/environment.md describes them in this order.
/// Variables that only tests read are not here, except the last.
pub static SETTINGS: [Setting; 17] = [
    Setting {
        name: MEMORY_LIMIT,
        values: "bytes, as 512M, or a percentage from 1% to 100%",
        default: "no soft limit",
        help: "near this much memory, free memory goes back to the system first",
        grammar: Grammar::Word(|value| parsed::<Limit>(value).is_some()),
    },
    Setting {
        name: THP,
        values: "never, auto or always",
        default: "auto",
        help: "which memory comes in huge pages of 2 MiB",
        grammar: Grammar::Word(|value| parsed::<HugePages>(value).is_some()),
    },
    Setting {
        name: SHEPHERD,
        values: "auto, on, off, or milliseconds from 1 to 86400000",
        default: "auto",
        help: "when a background thread gives idle memory back",
        grammar: Grammar::Word(|value| background::parse(value).is_some()),
    },
    Setting {
        name: POLICY,
        values: "a memory policy, as interleave:0-3",
        default: "the policy that the process inherits",
        help: "which nodes memory comes from",
        grammar: Grammar::Text(|text| Mempolicy::parse(text).map(drop).map_err(Wrong::Policy)),
    },
    Setting {
        name: SLAB_DEBUG,
        values: "letters and cache names, as FZPU,kmalloc-*",
        default: "no checks",
        help: "which faults the allocator looks for",
        grammar: Grammar::Text(|text| debug::check_settings(text).map_err(Wrong::SlabDebug)),
    },
    Setting {
        name: HARDENED,
        values: "0 or 1",
        default: "0",
        help: "1 finds double frees and writes to freed memory",
        grammar: Grammar::Word(|value| parse_hardened(value).is_some()),
    },
    Setting {
        name: SIZED_FREE,
        values: "check or ignore",
        default: "check",
        help: "whether caches that check for faults check the size that a sized delete passes",
        grammar: Grammar::Word(|value| heap::parse_sized_free(value).is_some()),
    },
    Setting {
        name: HEAP,
        values: "on, or bytes from one sample to the next, as 512k",
        default: "no heap profile",
        help: "samples allocations with their call stacks from the start",
        grammar: Grammar::Word(|value| parse_heap_interval(value).is_some()),
    },
    Setting {
        name: HEAP_FILE,
        values: "the path of a file",
        default: "none",
        help: "where a process writes its heap profile at its end; its number is appended",
        grammar: Grammar::Path,
    },
    Setting {
        name: HEAP_DUMP,
        values: "moments, as above:90%,peak:10%,every:5m,signal:USR2,keep:4",
        default: "only at the process's end",
        help: "when a process also writes its heap profile",
        grammar: Grammar::Text(|text| match heap_dumps::parse(text.as_bytes()) {
            Some(_) => Ok(()),
            None => Err(Wrong::Values(
                "above:BYTES or above:N%, peak:N%, every:TIME as 30s, 5m or 2h, and keep:N, \
                 with commas between them and one moment at least",
            )),
        }),
    },
    Setting {
        name: GUARD,
        values: "on, or bytes from one sample to the next, as 512k",
        default: "no guarded blocks",
        help: "gives some blocks pages of their own, to find wrong accesses",
        grammar: Grammar::Word(|value| parse_heap_interval(value).is_some()),
    },
    Setting {
        name: RSEQ,
        values: "off, cpu or cid",
        default: "the best that the machine offers",
        help: "how operations on per-CPU memory are carried out",
        grammar: Grammar::Word(|value| parsed::<Backend>(value).is_some()),
    },
    Setting {
        name: STATS,
        values: "a folder",
        default: "nothing is counted",
        help: "where each process writes what the allocator did",
        grammar: Grammar::Path,
    },
    Setting {
        name: SEGMENT,
        values: "on or off",
        default: "on",
        help: "whether other processes can read what the allocator does",
        grammar: Grammar::Word(|value| show::parse(value).is_some()),
    },
    Setting {
        name: DEEPBIND,
        values: "drop or keep",
        default: "drop",
        help: "whether dlopen keeps RTLD_DEEPBIND, with which a library uses another malloc",
        grammar: Grammar::Word(|value| parse_deepbind(value).is_some()),
    },
    Setting {
        name: LIBRARY,
        values: "the path of libpinfold.so.0",
        default: "a file beside the command, or the command's own copy",
        help: "the library that `pinfold run` preloads",
        grammar: Grammar::Path,
    },
    Setting {
        name: FAKE_NODES,
        values: "a number from 1 to 63",
        default: "the machine's nodes",
        help: "made-up memory nodes, for tests",
        grammar: Grammar::Word(|value| parse_fake_nodes(value).is_some()),
    },
];

/// Returns the setting of the environment variable `name`.
pub fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

impl Setting {
    /// Returns the variable's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the values that the variable takes, in words.
    pub fn values(&self) -> &'static str {
        self.values
    }

    /// Returns the variable's default, in words.
    pub fn default(&self) -> &'static str {
        self.default
    }

    /// Returns what the variable sets, in one line.
    pub fn help(&self) -> &'static str {
        self.help
    }

    /// Checks a value. An empty value is valid, and means the same as an unset variable.
    ///
    /// # Errors
    ///
    /// Returns [`Wrong`] if Pinfold would ignore the value.
    pub fn check(&self, value: &[u8]) -> Result<(), Wrong> {
        match self.grammar {
            _ if value.is_empty() => Ok(()),
            Grammar::Word(is_valid) if value.len() <= env::MAX_WORD && is_valid(value) => Ok(()),
            Grammar::Word(_) => Err(Wrong::Values(self.values)),
            Grammar::Text(check) => match from_utf8(value) {
                Ok(text) if text.len() <= env::MAX_TEXT => check(text),
                _ => Err(Wrong::Values("a shorter text in UTF-8")),
            },
            Grammar::Path => Ok(()),
        }
    }
}

/// Why a value is invalid, and what to give instead.
///
/// ```
/// use pinfold_malloc::settings::{RSEQ, find};
///
/// let wrong = find(RSEQ).unwrap().check(b"maybe").unwrap_err();
/// assert_eq!(wrong.to_string(), "give off, cpu or cid, or unset it");
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Wrong {
    /// The variable does not take this value. The text says which values it takes.
    Values(&'static str),
    /// The value is not a valid setting of [`debug`].
    SlabDebug(debug::ParseError),
    /// The value is not a valid memory policy.
    Policy(mempolicy::ParseError),
}

pinfold_rseq::error_texts! { Wrong:
    Wrong::Values(values) => "give {values}, or unset it";
    Wrong::SlabDebug(error) => "{error}";
    Wrong::Policy(error) => "{error}";
}

/// Writes a line to standard error for each variable whose value is ignored. The preload library
/// calls this before the program's `main`. Reads each variable once.
pub fn tell() {
    for setting in &SETTINGS {
        let Some(value) = env::lookup(setting.name).filter(|value| !value.is_empty()) else {
            continue;
        };
        if let Err(wrong) = setting.check(value) {
            line(setting.name, value, &wrong);
        } else if setting.name == STATS {
            heap::ready();
            if !heap::counts_calls() {
                let remedy = "the statistics' file cannot be made there; name a directory that this process may write to";
                line(STATS, value, &remedy);
            }
        }
    }
}

/// Writes one line by one system call, so that the lines of several processes do not mix.
fn line(name: &str, value: &[u8], wrong: &dyn fmt::Display) {
    let mut line = Text::<511>::new();
    let (shown, rest) = value.split_at(value.len().min(100));
    let more = if rest.is_empty() { "" } else { "..." };
    let shown = shown.escape_ascii();
    let _ = write!(line, "pinfold: {name}={shown}{more} is ignored: {wrong}");
    let mut ended = [b'\n'; 511];
    let text = line.get();
    ended[..text.len()].copy_from_slice(text);
    let _ = kernel::write(2, &ended[..=text.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use std::string::String;
    use std::vec::Vec;

    #[test]
    fn each_setting_takes_good_values_and_refuses_bad_ones() {
        for (name, good, bad) in [
            (
                RSEQ,
                &["off", "cpu", "cid", "0"][..],
                &["maybe", "OFF", "cpu "][..],
            ),
            (HARDENED, &["0", "1"], &["yes", "11"]),
            (SIZED_FREE, &["check", "ignore"], &["0", "off"]),
            (SEGMENT, &["on", "off"], &["1", "auto"]),
            (DEEPBIND, &["drop", "keep"], &["0", "on"]),
            (SLAB_DEBUG, &["FZPU,a*;-"], &["FQ"]),
            (
                SHEPHERD,
                &["auto", "on", "off", "250"],
                &["0", "sometimes", "-1"],
            ),
            (
                MEMORY_LIMIT,
                &["1", "64k", "512M", "2G", "75%"],
                &["0", "lots", "101%", "1.5G", "512MB"],
            ),
            (THP, &["never", "auto", "always"], &["on", "Auto"]),
            (
                POLICY,
                &["interleave:0-3", "local"],
                &["bind:x", "nonsense"],
            ),
            (FAKE_NODES, &["1", "63"], &["0", "64", "two"]),
        ] {
            let setting = find(name).unwrap();
            for value in good {
                assert!(setting.check(value.as_bytes()).is_ok(), "{name}={value}");
            }
            for value in bad {
                let wrong = setting.check(value.as_bytes()).unwrap_err();
                assert!(!std::format!("{wrong}").is_empty(), "{name}={value}");
            }
            assert!(setting.check(b"\xff\xfe").is_err(), "{name}");
            let long = "1".repeat(env::MAX_TEXT + 1);
            assert!(setting.check(long.as_bytes()).is_err(), "{name}");
        }
        assert!(SETTINGS.iter().all(|setting| setting.check(b"").is_ok()));
    }

    /// Returns the cells of each row below the heading `heading`, without the marks of code.
    fn rows<'d>(document: &'d str, heading: &str) -> impl Iterator<Item = Vec<String>> + 'd {
        let (_, section) = document.split_once(heading).unwrap();
        let section = section.split("\n#").next().unwrap();
        let rows = section.lines().filter(|line| line.starts_with("| "));
        rows.skip(1).map(|row| {
            let cells = row.split('|').skip(1);
            cells.map(|cell| cell.trim().replace('`', "")).collect()
        })
    }

    #[test]
    fn the_documentation_lists_the_same_variables_values_and_defaults() {
        let document = include_str!("../../../docs/environment.md");
        let mut settings = SETTINGS.iter();
        for cells in rows(document, "# Environment variables\n") {
            let setting = settings.next().unwrap();
            let name = setting.name;
            let link = std::format!("[{name}](#{})", name.to_lowercase());
            assert_eq!(cells[..3], [&link, setting.values, setting.default]);
            assert!(document.contains(&std::format!("\n## {name}\n")), "{name}");
        }
        // The variables that only tests set stand in a table of their own.
        for cells in rows(document, "## Variables for tests\n") {
            if cells[1] == "the library" {
                assert_eq!(Some(&*cells[0]), settings.next().map(Setting::name));
            }
        }
        assert!(settings.next().is_none());
    }
}
