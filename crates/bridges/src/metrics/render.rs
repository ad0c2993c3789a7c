//! The text format of Prometheus, version 0.0.4.

use super::builder::Settings;
use super::names::{push_help, push_label_value, recommended};
use super::registry::{Description, Family, Kind, Labels};
use super::series::{Distribution, Metric, Value};
use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// Returns the page: all families, each with its description if it has one, and an empty line after
/// each.
pub fn page(
    families: &BTreeMap<String, Family>,
    descriptions: &BTreeMap<String, Description>,
    settings: &Settings,
) -> String {
    let mut page = Page::default();
    for (name, family) in families {
        let described = descriptions.get(name);
        let shown = if settings.recommended_naming {
            let unit = described.and_then(|described| described.unit);
            recommended(name, unit, family.kind == Kind::Counter)
        } else {
            name.clone()
        };
        page.head(&shown, family, described);
        for (labels, metric) in &family.series {
            page.series(&shown, labels, metric.value());
        }
        page.0.push('\n');
    }
    page.0
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, family: &Family, described: Option<&Description>) {
        for kind in &family.hidden {
            let (refused, kind, owner) = (name, kind.name(), family.kind.name());
            self.line(format_args!(
                "# {kind} {refused} is not shown: a {owner} has that name"
            ));
        }
        if let Some(described) = described {
            self.0.push_str("# HELP ");
            self.0.push_str(name);
            self.0.push(' ');
            push_help(&mut self.0, &described.help);
            self.0.push('\n');
        }
        self.line(format_args!("# TYPE {name} {}", type_of(family)));
    }

    fn series(&mut self, name: &str, labels: &Labels, value: Value) {
        match value {
            Value::Counter(value) => self.sample(name, "", labels, None, value),
            Value::Gauge(value) => self.sample(name, "", labels, None, Float(value)),
            Value::Histogram(value) => self.distribution(name, labels, &value),
        }
    }

    fn distribution(&mut self, name: &str, labels: &Labels, value: &Distribution) {
        for &(at, value) in &value.quantiles {
            self.sample(
                name,
                "",
                labels,
                Some(("quantile", Float(at))),
                Float(value),
            );
        }
        for &(bound, count) in &value.buckets {
            self.sample(name, "_bucket", labels, Some(("le", Float(bound))), count);
        }
        self.sample(name, "_sum", labels, None, Float(value.sum));
        self.sample(name, "_count", labels, None, value.count);
    }

    fn sample(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &Labels,
        last: Option<(&str, Float)>,
        value: impl Display,
    ) {
        self.0.push_str(name);
        self.0.push_str(suffix);
        let mut before = '{';
        for (name, value) in labels {
            self.0.push(before);
            self.0.push_str(name);
            self.0.push_str("=\"");
            push_label_value(&mut self.0, value);
            self.0.push('"');
            before = ',';
        }
        if let Some((name, value)) = last {
            self.write(format_args!("{before}{name}=\"{value}\""));
            before = ',';
        }
        if before == ',' {
            self.0.push('}');
        }
        self.line(format_args!(" {value}"));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        let written = self.0.write_fmt(text);
        debug_assert!(written.is_ok(), "a String takes everything");
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        self.write(text);
        self.0.push('\n');
    }
}

/// Returns Prometheus's type of a family. All histograms of a name have the same kind, so the first
/// one decides.
fn type_of(family: &Family) -> &'static str {
    match (family.kind, family.series.values().next()) {
        (Kind::Histogram, Some(Metric::Histogram(first))) => first.metric().type_name(),
        (kind, _) => kind.name(),
    }
}

/// Prints a number in the form that Prometheus reads.
struct Float(f64);

impl Display for Float {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            number => number.fmt(f),
        }
    }
}
