//! The environment variables that the library reads, and the check of their values.
//!
//! The library ignores an invalid value, because a library must not end a running program, and does
//! not print. But the user learns of an invalid value at the program's start: `pinfold run` refuses
//! the value, and the preload library calls [`tell`].

use crate::{background, count, heap, init};
use core::fmt::{self, Write};
use core::str::from_utf8;
use pinfold::mempolicy::{self, Mempolicy};
use pinfold::page::{HugePages, Limit};
use pinfold::segment::DIRECTORY_VARIABLE;
use pinfold::slab::debug;
use pinfold_rseq::env;

/// An environment variable with the check of its values.
///
/// ```
/// use pinfold_malloc::settings::SETTINGS;
///
/// let limit = SETTINGS.iter().find(|setting| setting.name() == "PINFOLD_MEMORY_LIMIT").unwrap();
/// assert!(limit.check(b"512M").is_ok());
/// assert!(limit.check(b"lots").is_err());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    name: &'static str,
    check: fn(&[u8]) -> Result<(), Wrong>,
}

/// Lists all variables whose values have a grammar.
pub static SETTINGS: [Setting; 7] = [
    Setting {
        name: "PINFOLD_RSEQ",
        check: |value| {
            one_of(
                value,
                &[b"off", b"0", b"cpu", b"cid"],
                "give off, cpu or cid",
            )
        },
    },
    Setting {
        name: "PINFOLD_HARDENED",
        check: |value| one_of(value, &[b"0", b"1"], "give 0 or 1"),
    },
    Setting {
        name: "PINFOLD_SLAB_DEBUG",
        check: |value| debug::check_settings(text(value, 64 << 10)?).map_err(Wrong::SlabDebug),
    },
    Setting {
        name: "PINFOLD_SHEPHERD",
        check: |value| match background::is_understood(value) {
            true => Ok(()),
            false => Err(Wrong::Remedy(
                "give auto, on, off, or milliseconds from 1 to 86400000",
            )),
        },
    },
    Setting {
        name: "PINFOLD_MEMORY_LIMIT",
        check: |value| match Limit::parse(value) {
            Some(_) => Ok(()),
            None => Err(Wrong::Remedy(
                "give bytes, as 512M or 2G, or a percentage from 1% to 100%",
            )),
        },
    },
    Setting {
        name: "PINFOLD_THP",
        check: |value| match HugePages::parse(value) {
            Some(_) => Ok(()),
            None => Err(Wrong::Remedy("give never, auto or always")),
        },
    },
    Setting {
        name: "PINFOLD_POLICY",
        check: |value| {
            let parsed = Mempolicy::parse(text(value, 4096)?);
            parsed.map(drop).map_err(Wrong::Policy)
        },
    },
];

impl Setting {
    /// Returns the variable's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Checks a value. An empty value is valid, and means the same as an unset variable.
    ///
    /// # Errors
    ///
    /// Returns [`Wrong`] if the library would ignore the value.
    pub fn check(&self, value: &[u8]) -> Result<(), Wrong> {
        if value.is_empty() {
            return Ok(());
        }
        (self.check)(value)
    }
}

/// Why a value is invalid, and what to give instead.
///
/// ```
/// use pinfold_malloc::settings::SETTINGS;
///
/// let wrong = SETTINGS[0].check(b"maybe").unwrap_err();
/// assert_eq!(wrong.to_string(), "give off, cpu or cid, or unset it");
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Wrong {
    /// The variable does not take this value. The text says which values it takes.
    Remedy(&'static str),
    /// The value is not a valid setting of [`debug`].
    SlabDebug(debug::ParseError),
    /// The value is not a valid memory policy.
    Policy(mempolicy::ParseError),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Remedy(remedy) => write!(f, "{remedy}, or unset it"),
            Wrong::SlabDebug(error) => error.fmt(f),
            Wrong::Policy(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for Wrong {}

fn one_of(value: &[u8], allowed: &[&[u8]], remedy: &'static str) -> Result<(), Wrong> {
    let found = allowed.contains(&value);
    found.then_some(()).ok_or(Wrong::Remedy(remedy))
}

fn text(value: &[u8], longest: usize) -> Result<&str, Wrong> {
    let text = from_utf8(value).ok().filter(|_| value.len() <= longest);
    text.ok_or(Wrong::Remedy("give a shorter text in UTF-8"))
}

/// Writes a line to standard error for each variable whose value is ignored. The preload library
/// calls this before the program's `main`. Reads each variable once.
pub fn tell() {
    for setting in &SETTINGS {
        if let Some(value) = env::lookup(setting.name)
            && let Err(wrong) = setting.check(value)
        {
            line(setting.name(), value, &wrong);
        }
    }
    if let Some(directory) = env::lookup("PINFOLD_STATS").filter(|value| !value.is_empty()) {
        init::ready();
        if !count::active() {
            let remedy = "the statistics' file cannot be made there; name a directory that this process may write to";
            line(
                from_utf8(DIRECTORY_VARIABLE.as_bytes()).unwrap_or_default(),
                directory,
                &remedy,
            );
        }
    }
}

/// Writes one line by one system call, so that the lines of several processes do not mix.
fn line(name: &str, value: &[u8], wrong: &dyn fmt::Display) {
    struct Line {
        bytes: [u8; 512],
        length: usize,
    }
    impl Write for Line {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            // The last byte is the line's end.
            let room = &mut self.bytes[self.length..511];
            let count = text.len().min(room.len());
            room[..count].copy_from_slice(&text.as_bytes()[..count]);
            self.length += count;
            Ok(())
        }
    }
    let mut line = Line {
        bytes: [0; 512],
        length: 0,
    };
    let (shown, rest) = value.split_at(value.len().min(100));
    let more = if rest.is_empty() { "" } else { "..." };
    let shown = shown.escape_ascii();
    let _ = write!(line, "pinfold: {name}={shown}{more} is ignored: {wrong}");
    line.bytes[line.length] = b'\n';
    heap::keep_errno(|| {
        // SAFETY: `length + 1` bytes of the line are initialised.
        unsafe { libc::write(2, line.bytes.as_ptr().cast(), line.length + 1) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;

    #[test]
    fn each_setting_takes_good_values_and_refuses_bad_ones() {
        for (name, good, bad) in [
            (
                "PINFOLD_RSEQ",
                &["", "off", "cpu", "cid", "0"][..],
                &["maybe", "OFF", "cpu "][..],
            ),
            ("PINFOLD_HARDENED", &["", "0", "1"], &["yes", "11"]),
            ("PINFOLD_SLAB_DEBUG", &["", "FZPU,a*;-"], &["FQ"]),
            (
                "PINFOLD_SHEPHERD",
                &["", "auto", "on", "off", "250"],
                &["0", "sometimes", "-1"],
            ),
            (
                "PINFOLD_MEMORY_LIMIT",
                &["", "1", "64k", "512M", "2G", "75%"],
                &["0", "lots", "101%", "1.5G", "512MB"],
            ),
            (
                "PINFOLD_POLICY",
                &["", "interleave:0-3", "local"],
                &["bind:x", "nonsense"],
            ),
        ] {
            let setting = SETTINGS
                .iter()
                .find(|setting| setting.name() == name)
                .unwrap();
            for value in good {
                assert!(setting.check(value.as_bytes()).is_ok(), "{name}={value}");
            }
            for value in bad {
                let wrong = setting.check(value.as_bytes()).unwrap_err();
                assert!(!std::format!("{wrong}").is_empty(), "{name}={value}");
            }
            assert!(setting.check(b"\xff\xfe").is_err(), "{name}");
        }
    }
}
