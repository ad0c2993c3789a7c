//! Raw files, and how a value is picked from them.
//!
//! A raw file has an object for each row: `{"machine": …, "rows": [{"subject": "rseq", …}, …]}`.
//! A *pick* is a list of `key=value`. `file` names the raw file and `metric` the field whose value
//! is wanted. `unit`, `digits`, `best` and keys that begin with `by.` say how to show it. Every
//! other key is a field that a row must have with that value. A row that lacks a field has it
//! empty. A metric `a.b` is field `b` of the object `a`.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::{fmt, fs};

/// The keys of a pick that are no fields of a row.
const SETTINGS: [&str; 5] = ["file", "metric", "unit", "digits", "best"];
/// The units in which a value can be shown, with what a value is divided by.
const UNITS: [(&str, f64); 3] = [
    ("MiB", 1_048_576.0),
    ("million", 1_000_000.0),
    ("us", 1_000.0),
];

/// The raw files below one folder, each read once.
pub struct Runs {
    folder: PathBuf,
    read: RefCell<BTreeMap<String, Rc<Value>>>,
}

impl Runs {
    pub fn new(folder: impl Into<PathBuf>) -> Runs {
        Runs {
            folder: folder.into(),
            read: RefCell::default(),
        }
    }

    /// Returns runs of which one file is known.
    #[cfg(test)]
    pub fn of(name: &str, text: &str) -> Runs {
        let runs = Runs::new("missing");
        let file = serde_json::from_str(text).unwrap();
        runs.read
            .borrow_mut()
            .insert(name.to_owned(), Rc::new(file));
        runs
    }

    /// Returns the content of a JSON file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is not JSON.
    pub fn file(&self, name: &str) -> Result<Rc<Value>> {
        if let Some(known) = self.read.borrow().get(name) {
            return Ok(Rc::clone(known));
        }
        let value = Rc::new(serde_json::from_str(&self.text(name)?).context(name.to_owned())?);
        self.read
            .borrow_mut()
            .insert(name.to_owned(), Rc::clone(&value));
        Ok(value)
    }

    /// Returns the content of a file as text.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn text(&self, name: &str) -> Result<String> {
        let path = self.folder.join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    /// Describes where a file's values come from: the machine, its load, and the day.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is not JSON.
    pub fn origin(&self, name: &str) -> Result<String> {
        let file = self.file(name)?;
        let Some(machine) = file.get("machine") else {
            let day = file["date"].as_str().unwrap_or_default();
            let day = day.split(' ').next().unwrap_or_default();
            return Ok(format!("emulated machines, {day}"));
        };
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        let kernel = text(&machine["kernel"]);
        let version = kernel.split('-').next().unwrap_or_default();
        let mut origin = format!(
            "{}, {} CPUs, Linux {version}",
            text(&machine["cpu"]),
            machine["cpus"]
        );
        if let Some(cycles) = machine["primitives"]["locked_add_cycles"].as_f64() {
            origin += &format!(", a locked add takes {cycles:.1} cycles");
        }
        if let Some(load) = file["load"].as_f64() {
            origin += &format!(", load {load:.1}");
        }
        if let Some(date) = file["date"].as_str() {
            origin += &format!(", {}", date.split(' ').next().unwrap_or(date));
        }
        Ok(origin)
    }
}

/// Which value is wanted. A later `key=value` takes the place of an earlier one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pick(BTreeMap<String, String>);

impl Pick {
    /// Reads a list of `key=value`.
    ///
    /// # Errors
    ///
    /// If a word has no `=`.
    pub fn parse(text: &str) -> Result<Pick> {
        let mut pick = Pick::default();
        for word in text.split_whitespace() {
            let (key, value) = word
                .split_once('=')
                .with_context(|| format!("`{word}` is not of the form key=value"))?;
            pick.0.insert(key.to_owned(), value.to_owned());
        }
        Ok(pick)
    }

    /// Returns this pick, changed by another one.
    pub fn and(&self, other: &Pick) -> Pick {
        let mut both = self.clone();
        let others = other
            .0
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()));
        both.0.extend(others);
        both
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Returns the values, one for each way to choose among values that a slash separates.
    /// `None` is a value that the run could not measure.
    ///
    /// # Errors
    ///
    /// If a setting is missing or wrong, or if no row of the file is as wanted.
    pub fn values(&self, runs: &Runs) -> Result<Vec<Option<f64>>> {
        let split = self
            .0
            .iter()
            .find(|(key, value)| *key != "file" && value.contains('/'));
        let Some((key, alternatives)) = split else {
            return Ok(vec![self.value(runs)?]);
        };
        let mut values = Vec::new();
        for alternative in alternatives.split('/') {
            values.extend(self.with(key, alternative).values(runs)?);
        }
        Ok(values)
    }

    /// Returns the values as a table shows them, with a dash for `None`.
    ///
    /// # Errors
    ///
    /// If `digits` is not a number.
    pub fn show(&self, values: &[Option<f64>]) -> Result<String> {
        let digits = self.get("digits").unwrap_or("1");
        let digits: usize = digits.parse().with_context(|| format!("digits={digits}"))?;
        let shown = values.iter().map(|value| match value {
            Some(value) => with_separators(&format!("{value:.digits$}")),
            None => "-".to_owned(),
        });
        Ok(shown.collect::<Vec<_>>().join(" / "))
    }

    fn value(&self, runs: &Runs) -> Result<Option<f64>> {
        if self.get("best").is_some() {
            return self.by_the_best(runs);
        }
        let mut base = self.clone();
        base.0.retain(|key, _| !key.starts_with("by."));
        let value = base.mean(runs)?;
        let changes = self.0.iter().filter(|(_, value)| !value.is_empty());
        let changes = changes
            .filter_map(|(key, value)| Some((key.strip_prefix("by.")?.to_owned(), value.clone())));
        let changes: Vec<_> = changes.collect();
        let divisor = match self.get("unit") {
            _ if !changes.is_empty() => {
                base.0.extend(changes);
                base.mean(runs)?
            }
            None => Some(1.0),
            Some(unit) => {
                let known = UNITS.iter().find(|(name, _)| *name == unit);
                Some(
                    known
                        .with_context(|| format!("the unit {unit} is not known"))?
                        .1,
                )
            }
        };
        Ok(value.zip(divisor).map(|(value, divisor)| value / divisor))
    }

    /// Returns the value divided by the least of the subjects in the same cell that are not
    /// Pinfold's. If a field of the pick names several values, returns the geometric mean over
    /// these cells.
    fn by_the_best(&self, runs: &Runs) -> Result<Option<f64>> {
        let mut several = self
            .0
            .iter()
            .filter(|(key, _)| !SETTINGS.contains(&key.as_str()));
        if let Some((key, values)) = several.find(|(_, value)| value.contains(',')) {
            let cells = values
                .split(',')
                .map(|value| self.with(key, value).value(runs));
            return Ok(geometric_mean(&cells.collect::<Result<Vec<_>>>()?));
        }
        let mut cell = self.clone();
        cell.0.remove("subject");
        let is_rival = |row: &&Value| {
            let subject = row["subject"].as_str();
            subject.is_some_and(|subject| !subject.starts_with("pinfold"))
        };
        let rivals = cell.metrics(runs, is_rival)?;
        let best = rivals.into_iter().flatten().reduce(f64::min);
        let best = best.with_context(|| format!("nothing to compare with has {cell}"))?;
        Ok(self.mean(runs)?.map(|value| value / best))
    }

    /// Returns this pick with one other value.
    fn with(&self, key: &str, value: &str) -> Pick {
        let mut pick = self.clone();
        pick.0.insert(key.to_owned(), value.to_owned());
        pick
    }

    /// Returns the metric of the row that is as wanted. If several rows are, returns the geometric
    /// mean.
    fn mean(&self, runs: &Runs) -> Result<Option<f64>> {
        Ok(match self.metrics(runs, |_| true)?[..] {
            [] => bail!("no row has {self}"),
            [value] => value,
            ref values => geometric_mean(values),
        })
    }

    /// Returns the metric of all rows that are as wanted and that `is_meant` accepts.
    fn metrics(&self, runs: &Runs, is_meant: impl Fn(&&Value) -> bool) -> Result<Vec<Option<f64>>> {
        let name = self.get("file").context("no file=… is given")?;
        let metric = self.get("metric").context("no metric=… is given")?;
        let file = runs.file(name)?;
        let rows = file["rows"].as_array();
        let rows = rows.with_context(|| format!("{name} has no rows"))?;
        let wanted = rows.iter().filter(|row| self.fits(row)).filter(is_meant);
        let values = wanted.map(|row| {
            let value = row.pointer(&format!("/{}", metric.replace('.', "/")));
            Ok(value
                .with_context(|| format!("a row of {name} has no {metric}"))?
                .as_f64())
        });
        values.collect()
    }

    fn fits(&self, row: &Value) -> bool {
        let mut fields = self
            .0
            .iter()
            .filter(|(key, _)| !SETTINGS.contains(&key.as_str()));
        fields.all(|(key, wanted)| {
            let found = match row.get(key) {
                Some(Value::String(text)) => text.clone(),
                None | Some(Value::Null) => String::new(),
                Some(value) => value.to_string(),
            };
            wanted.split(',').any(|wanted| wanted == found)
        })
    }
}

impl fmt::Display for Pick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = self
            .0
            .iter()
            .filter(|(key, _)| !SETTINGS.contains(&key.as_str()));
        let fields: Vec<_> = fields
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        write!(f, "{}", fields.join(" "))
    }
}

/// Returns the geometric mean, or nothing if a value is missing.
fn geometric_mean(values: &[Option<f64>]) -> Option<f64> {
    let logarithms: Option<Vec<f64>> = values.iter().map(|value| value.map(f64::ln)).collect();
    logarithms.map(|them| (them.iter().sum::<f64>() / them.len() as f64).exp())
}

/// Puts commas between the thousands of a whole number. Leaves other numbers as they are.
fn with_separators(number: &str) -> String {
    if number.contains('.') {
        return number.to_owned();
    }
    let mut separated = String::new();
    for (at, digit) in number.chars().enumerate() {
        let left = number.len() - at;
        if at > 0 && left.is_multiple_of(3) && !separated.ends_with('-') {
            separated.push(',');
        }
        separated.push(digit);
    }
    separated
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what a pick shows of a folder with one file, `a.json`.
    fn shown(pick: &str) -> Result<String> {
        let rows = r#"{"machine": {}, "rows": [
            {"subject": "a", "size": 8, "late": false, "ns": 2.04, "bytes": 3145728, "error": null},
            {"subject": "a", "size": 16, "late": false, "ns": 8.16, "bytes": 1, "error": 0},
            {"subject": "b", "size": 8, "late": false, "ns": 4.08, "bytes": 1234567, "error": 7},
            {"subject": "pinfold", "size": 8, "ns": 1.02},
            {"subject": "pinfold", "size": 16, "ns": 16.32},
            {"subject": "pinfold", "size": 32, "ns": 1, "of": {"part": 7}}
        ]}"#;
        let runs = Runs::of("a.json", rows);
        let pick = Pick::parse("file=a.json metric=ns")?.and(&Pick::parse(pick)?);
        pick.show(&pick.values(&runs)?)
    }

    #[test]
    fn a_pick_names_one_value_several_or_a_mean() {
        assert_eq!(shown("subject=b late=false").unwrap(), "4.1");
        assert_eq!(
            shown("subject=a size=8/16 digits=2").unwrap(),
            "2.04 / 8.16"
        );
        assert_eq!(shown("subject=a").unwrap(), "4.1");
        assert_eq!(shown("subject=a,b size=8 digits=2").unwrap(), "2.88");
    }

    #[test]
    fn a_pick_shows_units_ratios_and_what_was_not_measured() {
        assert_eq!(
            shown("subject=a size=8 metric=bytes unit=MiB").unwrap(),
            "3.0"
        );
        assert_eq!(
            shown("subject=a size=8 by.subject=b digits=2").unwrap(),
            "0.50"
        );
        assert_eq!(shown("subject=a size=8 by.subject=a").unwrap(), "1.0");
        assert_eq!(shown("subject=a size=8 by.subject=").unwrap(), "2.0");
        assert_eq!(shown("subject=pinfold size=8 late=").unwrap(), "1.0");
        assert_eq!(shown("size=32 metric=of.part").unwrap(), "7.0");
        assert_eq!(
            shown("subject=b metric=bytes digits=0").unwrap(),
            "1,234,567"
        );
        assert_eq!(shown("subject=a metric=error size=8").unwrap(), "-");
        assert_eq!(
            shown("subject=a metric=error size=16 digits=0").unwrap(),
            "0"
        );
    }

    #[test]
    fn a_pick_is_compared_with_the_best_of_each_cell() {
        assert_eq!(
            shown("subject=pinfold size=8 best=others digits=2").unwrap(),
            "0.50"
        );
        assert_eq!(
            shown("subject=pinfold size=8,16 best=others digits=2").unwrap(),
            "1.00"
        );
        assert!(shown("subject=pinfold size=32 best=others").is_err());
    }

    #[test]
    fn a_pick_that_names_no_row_is_an_error() {
        for wrong in [
            "subject=c",
            "size=9",
            "metric=us",
            "unit=miles",
            "file=b.json",
            "subject",
        ] {
            assert!(shown(wrong).is_err(), "{wrong}");
        }
    }
}
