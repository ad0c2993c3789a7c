//! Numbers and times in the form that people read.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a number of rounds: "1 round", "11 rounds".
pub fn rounds(count: u32) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} round{plural}")
}

/// Formats a label of an axis: at most three digits and a letter for thousands, millions or
/// billions.
pub fn label(value: f64) -> String {
    let (scaled, letter) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        size if size >= 100.0 || size == size.trunc() => 0,
        size if size >= 10.0 => 1,
        size if size >= 0.1 => 2,
        _ => 4,
    };
    format!("{scaled:.digits$}{letter}")
}

/// Returns the day and the time of day in UTC: `2026-11-23` and `07:30:59`.
pub fn date(time: SystemTime) -> (String, String) {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let seconds = seconds.try_into().unwrap_or(0);
    // SAFETY: zeroes are a valid `tm`, and both arguments are live variables.
    let tm = unsafe {
        let mut tm: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&raw const seconds, &raw mut tm);
        tm
    };
    let (year, month) = (tm.tm_year + 1900, tm.tm_mon + 1);
    (
        format!("{year}-{month:02}-{:02}", tm.tm_mday),
        format!("{:02}:{:02}:{:02}", tm.tm_hour, tm.tm_min, tm.tm_sec),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn labels_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (7.0, "7"),
            (1500.0, "1500"),
            (12_500.0, "12.5k"),
            (3e6, "3M"),
            (2.5e9, "2.50G"),
        ] {
            assert_eq!(label(value), text);
        }
    }
    #[test]
    fn dates_are_right() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_735_689_599, "2024-12-31 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            let (day, time) = date(UNIX_EPOCH + Duration::from_secs(seconds));
            assert_eq!(format!("{day} {time}"), text);
        }
    }
}
