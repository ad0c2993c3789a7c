//! Numbers in the form that people read.

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
