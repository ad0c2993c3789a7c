//! The one shape of what the command prints for programs.

use super::text::escaped_lines;
use anyhow::Result;
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};

/// What each object begins with. docs/json.md lists these fields and those that follow.
#[derive(Serialize)]
struct Object<'o, V> {
    /// The version of the command.
    pinfold: &'static str,
    command: &'o str,
    /// When the object was made, since the epoch.
    time_seconds: f64,
    #[serde(flatten)]
    value: V,
}

/// Returns a line with one JSON object: the version, the words of the `command` that prints the
/// object, the time, and the fields of `value`. Names that other processes chose are escaped.
///
/// # Errors
///
/// Fails if the value is not a struct or a map, or has no form in JSON.
pub fn object(command: &str, value: impl Serialize) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let object = Object {
        pinfold: env!("CARGO_PKG_VERSION"),
        command,
        time_seconds: now.unwrap_or_default().as_millis() as f64 / 1e3,
        value,
    };
    Ok(escaped_lines(&serde_json::to_string(&object)?).into_owned() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Programs read an object by lines, and terminals obey control characters.
    #[test]
    fn an_object_is_one_harmless_line_with_the_fields_of_its_value() {
        let value = json!({"name": "a\n\u{7f}\u{9b}2J\u{202e}", "held_bytes": u64::MAX});
        let text = object("stat", &value).unwrap();
        let line = text.strip_suffix('\n').unwrap();
        assert!(
            line.chars()
                .all(|char| char.is_ascii_graphic() || char == ' '),
            "{line}"
        );
        let read: Value = serde_json::from_str(line).unwrap();
        assert_eq!(read["pinfold"], env!("CARGO_PKG_VERSION"));
        assert_eq!(read["command"], "stat");
        assert!(read["time_seconds"].as_f64() > Some(1.7e9), "{line}");
        assert_eq!(
            (&read["name"], &read["held_bytes"]),
            (&value["name"], &value["held_bytes"])
        );
        assert!(object("stat", 3).is_err());
    }
}
