//! The settings that may change while the process runs, by `pinfold set`.
//!
//! Another process sends a setting's number and its new value in one word. The process checks the
//! value as it checks an environment variable's, because the word may come from a hostile writer.

use crate::settings::parsed;
use core::fmt::{self, Display};
use core::sync::atomic::Ordering::{Relaxed, Release};
use core::time::Duration;
use pinfold::internal::arena::{self, HugePages, Limit};
use pinfold::internal::segment::{self, Answer};
use pinfold::shepherd;
use pinfold::slab;

/// A setting that may change while the process runs.
///
/// ```
/// use pinfold_malloc::changeable;
///
/// let (number, setting) = changeable::find("decay").unwrap();
/// assert_eq!(setting.parse(b"1500"), Some(1500));
/// assert_eq!(setting.parse(b"soon"), None);
/// assert_eq!(changeable::SETTINGS[number].name, "decay");
/// assert_eq!(setting.show(1500).to_string(), "1500 ms");
/// ```
#[derive(Debug)]
pub struct Changeable {
    /// The setting's name for `pinfold set`.
    pub name: &'static str,
    /// The environment variable that sets this setting at the start, if there is one.
    pub variable: Option<&'static str>,
    /// The values that the setting takes, in words.
    pub values: &'static str,
    /// What the setting does, in one line.
    pub help: &'static str,
    unit: Unit,
    set: fn(u64),
    get: fn() -> u64,
}

#[derive(Clone, Copy, Debug)]
enum Unit {
    /// Bytes, or a percentage above [`PERCENT`], or [`NONE`].
    Limit,
    /// The number of a [`HugePages`].
    HugePages,
    Bytes,
    /// Bytes, or [`NONE`].
    BytesOrNone,
    Milliseconds,
    /// Milliseconds, at least 1, or [`NONE`].
    Interval,
}

/// No limit.
const NONE: u64 = Answer::MAX;
/// Added to a percentage.
const PERCENT: u64 = 1 << 53;
/// The most bytes that a setting takes: more than a process can address.
const MOST_BYTES: u64 = 1 << 52;
/// A day.
const MOST_MILLISECONDS: u64 = 86_400_000;

/// Lists the settings. The position of a setting is its number in a request.
pub static SETTINGS: [Changeable; 6] = [
    Changeable {
        name: "memory-limit",
        variable: Some(crate::settings::MEMORY_LIMIT),
        values: "bytes, as 512M, a percentage from 1% to 100%, or none",
        help: "near this much memory, free memory goes back to the system first",
        unit: Unit::Limit,
        set: |value| arena::set_limit(limit_of(value)),
        get: || match arena::limit() {
            None => NONE,
            Some(Limit::Bytes(bytes)) => (bytes as u64).min(MOST_BYTES),
            Some(Limit::Percent(percent)) => PERCENT + percent as u64,
        },
    },
    Changeable {
        name: "thp",
        variable: Some(crate::settings::THP),
        values: "never, auto or always",
        help: "which newly mapped memory uses huge pages",
        unit: Unit::HugePages,
        set: |value| {
            if let Some(mode) = huge_pages_of(value) {
                arena::set_huge_pages(mode);
            }
        },
        get: || arena::huge_pages() as u64,
    },
    Changeable {
        name: "sheaf-budget",
        variable: None,
        values: "bytes, as 32M",
        help: "bytes of free objects that a CPU may keep in its sheaves",
        unit: Unit::Bytes,
        set: |value| slab::set_sheaf_budget(value as usize),
        get: || slab::sheaf_budget() as u64,
    },
    Changeable {
        name: "dirty-limit",
        variable: None,
        values: "bytes, as 16M, or none",
        help: "the most free memory that is kept; none means no bound but the kept share",
        unit: Unit::BytesOrNone,
        set: |value| arena::set_dirty_limit(Some(value as usize).filter(|_| value != NONE)),
        get: || arena::dirty_limit().map_or(NONE, |bytes| bytes as u64),
    },
    Changeable {
        name: "decay",
        variable: None,
        values: "milliseconds from 0 to 86400000",
        help: "how long a free run is kept before it goes back to the system",
        unit: Unit::Milliseconds,
        set: |value| arena::set_dirty_time(Duration::from_millis(value)),
        get: || arena::dirty_time().as_millis() as u64,
    },
    Changeable {
        name: "shepherd-interval",
        variable: None,
        values: "milliseconds from 1 to 86400000, or own",
        help: "how often all shepherds tick; own means that each has its own interval",
        unit: Unit::Interval,
        set: |value| {
            let interval = (value != NONE).then(|| Duration::from_millis(value));
            // `is_valid` has refused what `set_interval` refuses.
            let _ = shepherd::set_interval(interval);
        },
        get: || match shepherd::interval() {
            None => NONE,
            Some(interval) => (interval.as_millis() as u64).max(1),
        },
    },
];

/// Shows the present values of the settings in the segment. A few loads and stores.
pub(crate) fn publish() {
    if let Some(segment) = segment::current() {
        for (place, setting) in segment.settings.iter().zip(&SETTINGS) {
            place.store(setting.get(), Relaxed);
        }
        // Release pairs with the acquire of a process that reads the segment.
        segment.settings_used.store(SETTINGS.len() as u32, Release);
    }
}

const _: () = assert!(SETTINGS.len() <= segment::SETTINGS);

/// Returns the number and the setting with this name, or with this environment variable.
pub fn find(name: &str) -> Option<(usize, &'static Changeable)> {
    let mut settings = SETTINGS.iter().enumerate();
    settings.find(|(_, setting)| setting.name == name || setting.variable == Some(name))
}

fn limit_of(value: u64) -> Option<Limit> {
    match value {
        NONE => None,
        bytes if bytes < PERCENT => Some(Limit::Bytes(bytes as usize)),
        percent => Some(Limit::Percent((percent - PERCENT) as usize)),
    }
}

fn huge_pages_of(value: u64) -> Option<HugePages> {
    let modes = [HugePages::Auto, HugePages::Never, HugePages::Always];
    modes.into_iter().find(|&mode| mode as u64 == value)
}

impl Changeable {
    /// Returns the number for a value in words, or `None` for an invalid value.
    pub fn parse(&self, value: &[u8]) -> Option<u64> {
        let number = match (self.unit, value) {
            (Unit::Limit | Unit::BytesOrNone, b"none") | (Unit::Interval, b"own") => NONE,
            (
                Unit::BytesOrNone | Unit::Bytes,
                [b'0'] | [b'0', b'k' | b'K' | b'm' | b'M' | b'g' | b'G' | b't' | b'T'],
            ) => 0,
            (Unit::Limit | Unit::BytesOrNone | Unit::Bytes, _) => match parsed(value)? {
                Limit::Bytes(bytes) => bytes as u64,
                Limit::Percent(percent) => PERCENT + percent as u64,
            },
            (Unit::HugePages, _) => parsed::<HugePages>(value)? as u64,
            (Unit::Milliseconds | Unit::Interval, _) => parsed(value)?,
        };
        self.is_valid(number).then_some(number)
    }

    /// Returns whether the setting takes the value that a number stands for.
    pub fn is_valid(&self, value: u64) -> bool {
        match self.unit {
            Unit::Limit if value == NONE => true,
            Unit::Limit => {
                (1..=MOST_BYTES).contains(&value)
                    || value
                        .checked_sub(PERCENT)
                        .is_some_and(|n| (1..=100).contains(&n))
            }
            Unit::HugePages => huge_pages_of(value).is_some(),
            Unit::Bytes => value <= MOST_BYTES,
            Unit::BytesOrNone => value <= MOST_BYTES || value == NONE,
            Unit::Milliseconds => value <= MOST_MILLISECONDS,
            Unit::Interval => (1..=MOST_MILLISECONDS).contains(&value) || value == NONE,
        }
    }

    /// Returns whether setting this value may make a system call that malloc does not make: the one
    /// that asks how much memory the machine has.
    pub fn needs_the_machine(&self, value: u64) -> bool {
        matches!(self.unit, Unit::Limit) && (PERCENT..NONE).contains(&value)
    }

    /// Sets the setting in this process. Returns false, and changes nothing, for an invalid value.
    pub(crate) fn set(&self, value: u64) -> bool {
        let is_valid = self.is_valid(value);
        if is_valid {
            (self.set)(value);
            publish();
        }
        is_valid
    }

    /// Returns the setting's value in this process.
    pub(crate) fn get(&self) -> u64 {
        (self.get)()
    }

    /// Returns a value in words.
    pub fn show(&self, value: u64) -> Shown {
        Shown(self.unit, value)
    }
}

/// A setting's value, to be printed.
#[derive(Clone, Copy, Debug)]
pub struct Shown(Unit, u64);

impl Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shown(unit, value) = *self;
        match unit {
            Unit::Limit | Unit::BytesOrNone if value == NONE => f.write_str("none"),
            Unit::Limit if value > PERCENT => write!(f, "{}%", value - PERCENT),
            Unit::Limit | Unit::Bytes | Unit::BytesOrNone => {
                Limit::Bytes(usize::try_from(value).unwrap_or(usize::MAX)).fmt(f)
            }
            Unit::HugePages => huge_pages_of(value).unwrap_or(HugePages::Auto).fmt(f),
            Unit::Interval if value == NONE => f.write_str("own"),
            Unit::Milliseconds | Unit::Interval => write!(f, "{value} ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use std::string::ToString;

    #[test]
    fn values_are_parsed_and_shown_alike() {
        for (name, value, shown) in [
            ("memory-limit", "512M", "512M"),
            ("memory-limit", "2048k", "2M"),
            ("PINFOLD_MEMORY_LIMIT", "75%", "75%"),
            ("memory-limit", "none", "none"),
            ("thp", "always", "always"),
            ("PINFOLD_THP", "auto", "auto"),
            ("sheaf-budget", "1000", "1000"),
            ("dirty-limit", "0", "0"),
            ("sheaf-budget", "0M", "0"),
            ("dirty-limit", "none", "none"),
            ("decay", "0", "0 ms"),
            ("decay", "86400000", "86400000 ms"),
            ("shepherd-interval", "250", "250 ms"),
            ("shepherd-interval", "own", "own"),
        ] {
            let (_, setting) = find(name).unwrap();
            let number = setting.parse(value.as_bytes());
            let number = number.unwrap_or_else(|| panic!("{name}={value}"));
            assert!(number <= Answer::MAX);
            assert_eq!(setting.show(number).to_string(), shown, "{name}={value}");
        }
        for (name, value) in [
            ("memory-limit", "0"),
            ("memory-limit", "101%"),
            ("memory-limit", "8192T"),
            ("thp", "on"),
            ("sheaf-budget", "50%"),
            ("sheaf-budget", "none"),
            ("dirty-limit", "50%"),
            ("decay", "86400001"),
            ("decay", "-1"),
            ("decay", ""),
            ("shepherd-interval", "0"),
            ("shepherd-interval", "86400001"),
            ("shepherd-interval", "none"),
        ] {
            let (_, setting) = find(name).unwrap();
            assert_eq!(setting.parse(value.as_bytes()), None, "{name}={value}");
        }
    }

    #[test]
    fn any_word_is_refused_or_valid() {
        let words = [0, 1, MOST_BYTES + 1, PERCENT, PERCENT + 101, u64::MAX, NONE];
        for setting in &SETTINGS {
            for word in words {
                // Any word can be shown without a panic.
                assert!(!setting.show(word).to_string().is_empty());
            }
            assert!(!setting.is_valid(u64::MAX), "{}", setting.name);
            assert!(!setting.is_valid(PERCENT + 101), "{}", setting.name);
            assert!(setting.is_valid(setting.get()), "{}", setting.name);
        }
    }
}
