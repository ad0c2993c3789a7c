//! Writes metrics in the two text formats that Prometheus reads.
//!
//! They differ in three things: OpenMetrics ends with a mark, has a line for the unit, and names a
//! counter's family without the suffix of its samples.

use super::request::Format;
use crate::output;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};

/// What kind of number a family's samples are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
}

/// A family of metrics.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The name without the suffixes of the unit and the kind.
    pub name: &'static str,
    /// Empty for a number without a unit.
    pub unit: &'static str,
    pub kind: Kind,
    pub help: &'static str,
}

impl Family {
    fn write(&self, samples: &Labelled, format: Format, text: &mut String) -> fmt::Result {
        let is_open = format == Format::OpenMetrics;
        let (name, help) = (self.full_name(), self.help);
        let (kind, suffix) = match self.kind {
            Kind::Counter => ("counter", "_total"),
            Kind::Gauge => ("gauge", ""),
        };
        let family = if is_open { "" } else { suffix };
        writeln!(text, "# HELP {name}{family} {help}.")?;
        writeln!(text, "# TYPE {name}{family} {kind}")?;
        if is_open && !self.unit.is_empty() {
            writeln!(text, "# UNIT {name} {}", self.unit)?;
        }
        for (labels, value) in samples {
            match labels.is_empty() {
                true => writeln!(text, "{name}{suffix} {value}")?,
                false => writeln!(text, "{name}{suffix}{{{labels}}} {value}")?,
            }
        }
        Ok(())
    }

    fn full_name(&self) -> String {
        match self.unit {
            "" => self.name.to_owned(),
            unit => format!("{}_{unit}", self.name),
        }
    }
}

/// The value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    Whole(i128),
    Real(f64),
}

impl From<u64> for Value {
    fn from(value: u64) -> Value {
        Value::Whole(value.into())
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Whole(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Real(value)
    }
}

impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Whole(value) => value.fmt(f),
            Value::Real(value) => value.fmt(f),
        }
    }
}

/// The labels of a sample, written.
#[derive(Clone, Debug, Default)]
pub struct Labels(String);

impl Labels {
    /// Returns these labels and a further one. The value is escaped as for a terminal.
    pub fn with(&self, name: &str, value: &str) -> Labels {
        let mut text = self.0.clone();
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        for letter in output::escaped(value).chars() {
            if matches!(letter, '"' | '\\') {
                text.push('\\');
            }
            text.push(letter);
        }
        text.push('"');
        Labels(text)
    }
}

/// The samples of one family, by their written labels.
type Labelled = BTreeMap<String, Value>;

/// Samples by family and labels.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<&'static str, (Option<Family>, Labelled)>);

impl Samples {
    /// Adds a sample. Samples of a family with the same labels become one, with the sum of their
    /// values.
    pub fn add(&mut self, family: Family, labels: &Labels, value: impl Into<Value>) {
        let value = value.into();
        let (described, samples) = self.0.entry(family.name).or_default();
        *described = Some(family);
        let sample = samples.entry(labels.0.clone());
        sample
            .and_modify(|sum| {
                *sum = match (*sum, value) {
                    (Value::Whole(one), Value::Whole(two)) => Value::Whole(one.saturating_add(two)),
                    (_, other) => other,
                }
            })
            .or_insert(value);
    }

    /// Writes all samples, sorted by family and labels.
    pub fn text(&self, format: Format) -> String {
        let mut text = String::new();
        for (family, samples) in self.0.values() {
            // Writing to a string does not fail.
            let _ = family.map(|family| family.write(samples, format, &mut text));
        }
        if format == Format::OpenMetrics {
            text.push_str("# EOF\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETURNED: Family = Family {
        name: "returned",
        unit: "bytes",
        kind: Kind::Counter,
        help: "Bytes given back",
    };
    const AGE: Family = Family {
        name: "age",
        unit: "",
        kind: Kind::Gauge,
        help: "Years",
    };

    #[test]
    fn both_formats_are_written() {
        let mut samples = Samples::default();
        let labels = Labels::default().with("pid", "7");
        samples.add(RETURNED, &labels.with("name", "z"), 1u64);
        samples.add(RETURNED, &labels.with("name", "a\"b\\c\nd\x1b"), 2u64);
        samples.add(RETURNED, &labels.with("name", "z"), u64::MAX);
        samples.add(AGE, &Labels::default(), 1.5);
        let values = "returned_bytes_total{pid=\"7\",name=\"a\\\"b\\\\c\\\\u000ad\\\\u001b\"} 2\n\
             returned_bytes_total{pid=\"7\",name=\"z\"} 18446744073709551616\n";
        let age = "# HELP age Years.\n# TYPE age gauge\nage 1.5\n";
        let text = format!(
            "{age}# HELP returned_bytes_total Bytes given back.\n\
             # TYPE returned_bytes_total counter\n{values}"
        );
        assert_eq!(samples.text(Format::Text), text);
        let text = format!(
            "{age}# HELP returned_bytes Bytes given back.\n# TYPE returned_bytes counter\n\
             # UNIT returned_bytes bytes\n{values}# EOF\n"
        );
        assert_eq!(samples.text(Format::OpenMetrics), text);
    }
}
