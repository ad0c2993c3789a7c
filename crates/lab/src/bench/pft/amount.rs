//! Amounts of memory: how people write them, and how much memory is available.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(pub usize);

const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Amount, String> {
        let lower = text.trim_end_matches("iB");
        let unit = |(letter, shift)| Some((lower.strip_suffix(letter)?, shift));
        let (digits, shift) = UNITS.into_iter().find_map(unit).unwrap_or((text, 0));
        let number = digits.parse::<usize>().ok();
        match number.and_then(|number| number.checked_mul(1 << shift)) {
            Some(0) => Err("0 would measure nothing; give a size like 64M".to_owned()),
            Some(bytes) => Ok(Amount(bytes)),
            None => {
                Err("give a number of bytes, optionally with K, M, G or T, like 64M".to_owned())
            }
        }
    }
}

impl Amount {
    /// Rounds down to a few digits, for a limit that a user can type.
    pub fn about(self) -> Amount {
        let units = UNITS.into_iter().rev();
        let fits = units
            .map(|(_, shift)| shift)
            .find(|&shift| self.0 >> shift >= 1000);
        fits.map_or(self, |shift| Amount(self.0 >> shift << shift))
    }
}

/// Writes the amount in the largest unit of which it is a whole number.
impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |shift: u32| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match UNITS.into_iter().rev().find(|&(_, shift)| fits(shift)) {
            Some((letter, shift)) => write!(f, "{}{letter}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Returns the default size of the region: a 128th of the machine's memory, at least 15 MiB and at
/// most 64 MiB, in whole MiB.
pub fn default_region() -> Amount {
    const MOST: usize = 64 << 20;
    // Less than the 16 MiB of free memory that Pinfold keeps in any case, if there is no limit.
    const LEAST: usize = 15 << 20;
    let total = meminfo("MemTotal:").unwrap_or(usize::MAX);
    Amount((total / 128).clamp(LEAST, MOST) >> 20 << 20)
}

/// Returns how much memory can be used without swapping, or `None` if the system does not say.
pub fn available() -> Option<Amount> {
    let free = meminfo("MemAvailable:").into_iter();
    free.chain(left_to_group()).min().map(Amount)
}

fn meminfo(name: &str) -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Returns how much the limits of this process's control groups leave, or `None` without a limit.
fn left_to_group() -> Option<usize> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group = Path::new("/sys/fs/cgroup").join(path);
    let number = |file: &Path| -> Option<usize> {
        let text = fs::read_to_string(file).ok()?;
        text.trim().parse().ok()
    };
    let left = |group: &Path| {
        let most = number(&group.join("memory.max"))?;
        Some(most.saturating_sub(number(&group.join("memory.current"))?))
    };
    group.ancestors().filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::Amount;

    #[test]
    fn sizes_are_parsed_and_printed() {
        for (text, bytes, shown) in [
            ("4096", 4096, "4K"),
            ("64M", 64 << 20, "64M"),
            ("1MiB", 1 << 20, "1M"),
            ("1536K", 1536 << 10, "1536K"),
            ("3000", 3000, "3000"),
            ("2049K", 2049 << 10, "2049K"),
            ("2T", 2 << 40, "2T"),
        ] {
            let amount: Amount = text.parse().unwrap();
            assert_eq!(amount, Amount(bytes));
            assert_eq!(amount.to_string(), shown);
        }
        assert_eq!(Amount((22 << 30) + 1).about().to_string(), "22G");
        assert_eq!(Amount(23_456_789_000).about().to_string(), "22370M");
        assert_eq!(Amount(999).about(), Amount(999));
        for text in ["", "M", "-1", "1.5G", "99999999T", "64m", "x", "0", "0K"] {
            assert!(text.parse::<Amount>().is_err(), "{text}");
        }
    }
}
