//! The figures of sentences, and whether the tables beside them show the same.

use super::document::Section;

/// Words behind a number that make it a figure.
const UNITS: [&str; 13] = [
    "ns", "µs", "us", "ms", "cycle", "cycles", "KiB", "MiB", "GiB", "%", "times", "×", "million",
];
/// Units that a ratio of two values can have.
const OF_RATIOS: [&str; 3] = ["%", "times", "×"];

/// The most ratios of a section that a percentage may be one of. In a large table, every percentage
/// is the ratio of some pair.
const MOST_RATIOS: usize = 400;

/// A number in a text.
#[derive(Debug, PartialEq)]
pub struct Number<'a> {
    /// Where the number begins.
    at: usize,
    text: &'a str,
    pub value: f64,
    /// The number of digits behind the point.
    digits: usize,
    /// The unit behind the number, or nothing.
    unit: &'static str,
}

/// Returns each figure that is in no table of its section, by its line, and what is wrong with it.
pub fn judge(sections: &[Section]) -> Vec<(usize, String)> {
    let mut faults = Vec::new();
    for section in sections {
        let seen = sections
            .iter()
            .filter(|other| section.see.contains(&other.title));
        let tables = seen.chain([section]).flat_map(|section| &section.tables);
        let pool = Pool::new(tables);
        let said: Vec<_> = numbers(&section.said).map(|number| number.text).collect();
        for title in &section.see {
            if !sections.iter().any(|other| other.title == *title) {
                let line = section.prose.first().map_or(1, |(line, _)| *line);
                faults.push((line, format!("the document has no section `{title}`")));
            }
        }
        let text: String = section
            .prose
            .iter()
            .flat_map(|(_, line)| [line.as_str(), "\n"])
            .collect();
        let text = without_code(&text);
        for number in numbers(&text).filter(Number::is_figure) {
            if pool.has(&number) || said.contains(&number.text) {
                continue;
            }
            let before = text[..number.at].matches('\n').count();
            let fault = format!(
                "{} {} is in no table of this section; see bench/README.md",
                number.text, number.unit
            );
            faults.push((section.prose[before].0, fault));
        }
    }
    faults
}

/// The values that a section shows, and the ratios of those that a reader compares.
struct Pool {
    values: Vec<f64>,
    ratios: Vec<f64>,
}

impl Pool {
    fn new<'a>(tables: impl Iterator<Item = &'a Vec<Vec<f64>>>) -> Pool {
        let mut pool = Pool {
            values: Vec::new(),
            ratios: Vec::new(),
        };
        for table in tables {
            let widest = table.iter().map(Vec::len).max().unwrap_or(0);
            let columns = (0..widest).map(|nth| {
                table
                    .iter()
                    .filter_map(move |row| row.get(nth))
                    .copied()
                    .collect()
            });
            for line in table.iter().cloned().chain(columns) {
                let line: Vec<f64> = line;
                for one in &line {
                    pool.ratios.extend(line.iter().map(|other| one / other));
                }
            }
            pool.values.extend(table.iter().flatten());
        }
        pool
    }

    /// Returns whether a value rounds to the number, or a ratio if the number's unit allows one.
    fn has(&self, number: &Number<'_>) -> bool {
        let near = |value: f64, wanted: f64, unit: f64| {
            (value - wanted).abs() <= unit * (0.5 * 0.1_f64.powi(number.digits as i32) + 1e-9)
        };
        if self
            .values
            .iter()
            .any(|&value| near(value, number.value, 1.0))
        {
            return true;
        }
        // A cell may show a ratio itself.
        let mut ratios = self.ratios.iter().chain(&self.values);
        match number.unit {
            "%" => {
                let part = number.value / 100.0;
                self.ratios.len() <= MOST_RATIOS
                    && ratios.any(|ratio| {
                        [part, 1.0 + part, 1.0 - part]
                            .iter()
                            .any(|&part| near(*ratio, part, 0.01))
                    })
            }
            unit if unit.is_empty() || OF_RATIOS.contains(&unit) => {
                ratios.any(|&ratio| near(ratio, number.value, 1.0))
            }
            _ => false,
        }
    }
}

impl Number<'_> {
    /// Returns whether the number looks measured: it has a unit, or a decimal point.
    fn is_figure(&self) -> bool {
        !self.unit.is_empty() || self.digits > 0
    }
}

/// Returns the numbers of a text that are words of their own.
pub fn numbers(text: &str) -> impl Iterator<Item = Number<'_>> {
    let mut rest = 0;
    std::iter::from_fn(move || {
        loop {
            let at = rest + text[rest..].find(|letter: char| letter.is_ascii_digit())?;
            let is_inside = |letter: char| letter.is_ascii_digit() || ".,".contains(letter);
            let length = text[at..].find(|letter| !is_inside(letter));
            let end = length.map_or(text.len(), |length| at + length);
            let word = text[at..end].trim_end_matches(['.', ',']);
            rest = end;
            let before = text[..at].chars().next_back().unwrap_or(' ');
            let behind = &text[at + word.len()..];
            let is_own = !before.is_alphanumeric()
                && !"._-".contains(before)
                && !behind
                    .starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_');
            let plain = word.replace(',', "");
            if let Some(value) = plain.parse().ok().filter(|_| is_own) {
                return Some(Number {
                    at,
                    text: word,
                    value,
                    digits: plain.split_once('.').map_or(0, |(_, digits)| digits.len()),
                    unit: unit(behind),
                });
            }
        }
    })
}

/// Returns the unit with which a text begins, or nothing.
fn unit(text: &str) -> &'static str {
    let text = text.trim_start();
    let is_whole = |unit: &str| {
        let rest = &text[unit.len()..];
        !rest.starts_with(char::is_alphanumeric) || unit == "%"
    };
    let mut units = UNITS.into_iter();
    units
        .find(|unit| text.starts_with(unit) && is_whole(unit))
        .unwrap_or("")
}

/// Replaces code and the targets of links by spaces.
fn without_code(text: &str) -> String {
    let mut out = String::new();
    for (nth, part) in text.split('`').enumerate() {
        let is_code = nth % 2 == 1;
        out.extend(part.chars().map(|letter| {
            if is_code && letter != '\n' {
                ' '
            } else {
                letter
            }
        }));
        out.push(' ');
    }
    let mut links = String::new();
    for (nth, part) in out.split("](").enumerate() {
        let target = if nth == 0 {
            0
        } else {
            part.find(')').unwrap_or(0)
        };
        links += if nth == 0 { "" } else { "  " };
        links.extend(
            part[..target]
                .chars()
                .map(|letter| if letter == '\n' { '\n' } else { ' ' }),
        );
        links += &part[target..];
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(prose: &str) -> Section {
        Section {
            title: "Here".to_owned(),
            tables: vec![vec![vec![3.44, 25.3], vec![31.4, 2150.0]]],
            said: "14.049 ns, 5 %".to_owned(),
            prose: (10..).zip(prose.lines().map(str::to_owned)).collect(),
            ..Section::default()
        }
    }

    /// Returns the lines of the figures that are wrong.
    fn wrong(prose: &str) -> Vec<usize> {
        judge(&[section(prose)])
            .into_iter()
            .map(|(line, _)| line)
            .collect()
    }

    #[test]
    fn a_figure_is_a_rounding_of_a_value() {
        assert!(wrong("a pair takes 3.4 cycles, instead of 25.3 or 31 ns").is_empty());
        assert_eq!(wrong("it takes\n3.5 cycles"), [11]);
        assert_eq!(wrong("it takes 30\ncycles, or\n2,151 cycles"), [10, 12]);
        assert_eq!(wrong("it takes 7.4 cycles"), [10], "a ratio is no time");
    }

    #[test]
    fn a_figure_is_a_ratio_of_values_in_one_row_or_column() {
        assert!(wrong("7.4 times, 9.1 × and 14 % of it").is_empty());
        assert!(wrong("85 times as long").is_empty(), "2150 / 25.3");
        assert!(wrong("244 % more").is_empty(), "3.44 may be a ratio");
        assert_eq!(wrong("625 times as long"), [10], "2150 / 3.44");
    }

    #[test]
    fn a_percentage_beside_a_large_table_must_be_listed() {
        let mut large = section("61 % of it, and 3.44 cycles");
        let row: Vec<f64> = (0..20).map(|nth| 3.44 + f64::from(nth)).collect();
        large.tables = vec![vec![row; 2]];
        let faults = judge(&[large]);
        assert!(
            matches!(&faults[..], [(10, fault)] if fault.starts_with("61 %")),
            "{faults:?}"
        );
    }

    #[test]
    fn numbers_without_unit_or_point_are_no_figures() {
        assert!(wrong("2 CPUs, 16 threads, `9.9 ns`, [a](b-7.7.md), x86-64, 1.0.2").is_empty());
    }

    #[test]
    fn what_a_comment_lists_is_accepted_in_its_section_only() {
        assert!(wrong("the mail has 14.049 ns, 5 % less").is_empty());
        assert_eq!(wrong("the mail has 14.821 ns"), [10]);
        let mut other = section("3.4 cycles");
        (other.title, other.tables) = ("There".to_owned(), Vec::new());
        assert_eq!(judge(&[section(""), other]).len(), 1);
        let mut other = section("3.4 cycles");
        (other.title, other.tables) = ("There".to_owned(), Vec::new());
        other.see = vec!["Here".to_owned(), "Nowhere".to_owned()];
        assert_eq!(
            judge(&[section(""), other]).len(),
            1,
            "only Nowhere is wrong"
        );
    }
}
