//! Names and texts with the characters that Prometheus allows, made as metrics-exporter-prometheus
//! makes them.

use ::metrics::Unit;

/// Returns a metric's name, of the form `[a-zA-Z_:][a-zA-Z0-9_:]*`. Other characters become `_`.
pub fn metric_name(name: &str) -> String {
    replace(name, |c| c == ':')
}

/// Returns a label's name, of the form `[a-zA-Z_][a-zA-Z0-9_]*`. Other characters become `_`.
pub fn label_name(name: &str) -> String {
    replace(name, |_| false)
}

/// Replaces the characters of `name` that are not allowed. `also` accepts further characters.
fn replace(name: &str, also: impl Fn(char) -> bool) -> String {
    let allowed = |(at, c): (usize, char)| {
        let fits = c.is_ascii_alphabetic() || c == '_' || also(c) || (at > 0 && c.is_ascii_digit());
        if fits { c } else { '_' }
    };
    // Prometheus does not allow an empty name.
    match name {
        "" => "_".to_owned(),
        _ => name.chars().enumerate().map(allowed).collect(),
    }
}

/// Appends a label's value, which the caller puts in quotes.
pub fn push_label_value(text: &mut String, value: &str) {
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            other => push_escaped(text, other),
        }
    }
}

/// Appends a description.
pub fn push_help(text: &mut String, help: &str) {
    help.chars().for_each(|c| push_escaped(text, c));
}

fn push_escaped(text: &mut String, c: char) {
    match c {
        '\\' => text.push_str("\\\\"),
        '\n' => text.push_str("\\n"),
        // A terminal would obey control characters in a name.
        control if control.is_control() => {
            text.push_str("\\\\u");
            text.push_str(&format!("{:04x}", u32::from(control)));
        }
        other => text.push(other),
    }
}

/// Returns `name` with its unit and, for counters, `_total`, as Prometheus recommends. The unit
/// comes before a suffix that the name already has. Nothing is appended twice.
pub fn recommended(name: &str, unit: Option<Unit>, is_counter: bool) -> String {
    let mut name = name.to_owned();
    if let Some(unit) = unit.and_then(suffix) {
        let end = ["_sum", "_count", "_bucket", "_total"]
            .iter()
            .find(|end| name.ends_with(*end))
            .map_or(name.len(), |end| name.len() - end.len());
        if !name[..end].ends_with(unit) {
            name.insert_str(end, &format!("_{unit}"));
        }
    }
    if is_counter && !name.ends_with("_total") {
        name.push_str("_total");
    }
    name
}

/// Returns the unit as it appears in names.
fn suffix(unit: Unit) -> Option<&'static str> {
    match unit {
        Unit::Count => None,
        Unit::Percent => Some("ratio"),
        other => Some(other.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_only_allowed_characters() {
        assert_eq!(metric_name("http.requests:all-2"), "http_requests:all_2");
        assert_eq!(metric_name("2xx"), "_xx");
        assert_eq!(metric_name(""), "_");
        assert_eq!(label_name("a:b é"), "a_b__");
    }

    #[test]
    fn texts_are_escaped() {
        let (mut value, mut help) = (String::new(), String::new());
        push_label_value(&mut value, "C:\\new \"x\"\n");
        push_help(&mut help, "a \"b\" \\ \n");
        assert_eq!(value, "C:\\\\new \\\"x\\\"\\n");
        assert_eq!(help, "a \"b\" \\\\ \\n");
    }

    #[test]
    fn no_suffix_is_appended_twice() {
        let bytes = Some(Unit::Bytes);
        assert_eq!(recommended("sent", bytes, true), "sent_bytes_total");
        assert_eq!(recommended("sent_total", bytes, true), "sent_bytes_total");
        assert_eq!(
            recommended("sent_bytes_total", bytes, true),
            "sent_bytes_total"
        );
        assert_eq!(
            recommended("full", Some(Unit::Percent), false),
            "full_ratio"
        );
        assert_eq!(recommended("calls", Some(Unit::Count), false), "calls");
    }
}
