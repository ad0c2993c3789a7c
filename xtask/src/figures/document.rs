//! The comments of a document that say where its figures come from, and the tables between them.

use super::raw::{Pick, Runs};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;

/// How a comment begins that says what the table behind it shows.
const TABLE: &str = "<!-- table";
/// The comment after a table.
const END: &str = "<!-- end -->";
/// How a comment begins that names values that no table shows.
const VALUES: &str = "<!-- values";
/// How a comment begins that lists figures that no run can hold.
const SAID: &str = "<!-- said";
/// How a comment begins that names sections whose figures this section repeats.
const SEE: &str = "<!-- see";
/// The words with which the lines of such a comment begin, after the first line.
const WORDS: [&str; 4] = ["row", "rows", "column", "columns"];
/// The widest line below a table, in characters.
const MAX_COLUMNS: usize = 100;

/// A document whose tables are those of the raw files.
pub struct Drawn {
    pub text: String,
    pub sections: Vec<Section>,
}

/// What stands between a heading and the next one.
#[derive(Default)]
pub struct Section {
    pub title: String,
    /// The values of each table, row by row, and those of comments, as one row.
    pub tables: Vec<Vec<Vec<f64>>>,
    /// All numbers of the comments that list figures that no run can hold.
    pub said: String,
    /// The titles of sections whose figures this one repeats.
    pub see: Vec<String>,
    /// The lines of sentences and of tables that are not drawn, with their numbers.
    pub prose: Vec<(usize, String)>,
}

/// A comment without its first word.
struct Comment<'a> {
    text: String,
    kind: &'a str,
}

/// A line that is wrong, by its number, and what is wrong.
type Fault = (usize, anyhow::Error);

/// Draws the tables of a document again. `folder` is how the document links to the raw files.
///
/// # Errors
///
/// If a comment is wrong, or asks for what the raw files do not have.
pub fn draw(text: &str, runs: &Runs, folder: &str) -> Result<Drawn, Fault> {
    let mut lines = (1..).zip(text.lines()).peekable();
    let mut out = Vec::new();
    let mut sections = vec![Section::default()];
    let mut fenced = false;
    while let Some((number, line)) = lines.next() {
        out.push(line.to_owned());
        let section = sections.last_mut().expect("there is always a section");
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        let Some(kind) = [TABLE, VALUES, SAID, SEE]
            .into_iter()
            .find(|kind| line.starts_with(kind))
        else {
            if line.starts_with('#') {
                sections.push(Section {
                    title: line.trim_start_matches('#').trim().to_owned(),
                    ..Section::default()
                });
            } else {
                section.prose.push((number, line.to_owned()));
            }
            continue;
        };
        let mut comment = Comment {
            text: line[kind.len()..].to_owned(),
            kind,
        };
        while !comment.text.contains("-->") {
            let Some((_, line)) = lines.next() else {
                return Err((number, anyhow::anyhow!("this comment has no end")));
            };
            out.push(line.to_owned());
            comment.text += "\n";
            comment.text += line;
        }
        let fault = |error| (number, error);
        if kind != TABLE {
            comment.note(section, runs).map_err(fault)?;
            continue;
        }
        let mut old = Vec::new();
        loop {
            match lines.next() {
                Some((_, line)) if line == END => break,
                Some((_, line)) => old.push(line),
                None => return Err(fault(anyhow::anyhow!("no `{END}` follows this table"))),
            }
        }
        let table =
            Template::parse(comment.body()).and_then(|template| template.draw(&old, runs, folder));
        let table = table.map_err(fault)?;
        out.extend(table.lines);
        out.push(END.to_owned());
        section.tables.push(table.values);
    }
    Ok(Drawn {
        text: out.join("\n") + "\n",
        sections,
    })
}

impl Comment<'_> {
    /// Returns what stands between the comment's first word and its end.
    fn body(&self) -> &str {
        let body = self.text.split("-->").next().unwrap_or_default();
        body.trim_start_matches(':').trim()
    }

    /// Adds what this comment says to its section.
    fn note(&self, section: &mut Section, runs: &Runs) -> Result<()> {
        match self.kind {
            SAID => {
                section.said += self.body();
                section.said += "\n";
            }
            SEE => {
                let titles = self.body().split(';');
                section.see.extend(
                    titles.map(|title| title.split_whitespace().collect::<Vec<_>>().join(" ")),
                );
            }
            _ => section.tables.push(vec![self.values(runs)?]),
        }
        Ok(())
    }

    /// Returns the values that this comment names: those of its picks, or all numbers of a text.
    fn values(&self, runs: &Runs) -> Result<Vec<f64>> {
        let (defaults, _) = self.body().split_once('{').unwrap_or((self.body(), ""));
        let defaults = Pick::parse(defaults)?;
        let cell = Cell::parse(&self.body()[self.body().find('{').unwrap_or(self.body().len())..])?;
        let file = defaults.get("file").context("no file=… is given")?;
        if cell.picks.is_empty() && file.ends_with(".txt") {
            let text = runs.text(file)?;
            let numbers = super::prose::numbers(&text);
            return Ok(numbers.map(|number| number.value).collect());
        }
        let values = cell
            .picks
            .iter()
            .map(|pick| defaults.and(pick).values(runs));
        let values: Vec<_> = values.collect::<Result<_>>()?;
        Ok(values.into_iter().flatten().flatten().collect())
    }
}

/// What a comment says of the table behind it.
#[derive(Debug, Default)]
struct Template {
    defaults: Pick,
    columns: Vec<Cell>,
    rows: Vec<(String, Pick, Vec<Cell>)>,
}

/// A cell: texts with picks between them, or what stands in the table already.
#[derive(Clone, Debug, Default)]
struct Cell {
    /// One more than there are picks.
    texts: Vec<String>,
    picks: Vec<Pick>,
    keep: bool,
}

/// A table as the raw files give it.
struct Table {
    lines: Vec<String>,
    values: Vec<Vec<f64>>,
}

impl Template {
    fn parse(body: &str) -> Result<Template> {
        let lines = logical_lines(body);
        let mut lines = lines.iter();
        let mut template = Template {
            defaults: Pick::parse(lines.next().map_or("", |line| line))?,
            ..Template::default()
        };
        for line in lines {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "column" => template.columns.push(Cell::parse_column(rest)?),
                "columns" | "rows" => {
                    let (key, values) = rest.split_once('=').context("no key=… is given")?;
                    for value in values.split(',') {
                        let pick = format!("{key}={value}");
                        match word {
                            "rows" => template.rows.push((
                                value.to_owned(),
                                Pick::parse(&pick)?,
                                Vec::new(),
                            )),
                            _ => template.columns.push(Cell::parse_column(&pick)?),
                        }
                    }
                }
                "row" => {
                    let mut parts = rest.split(" | ");
                    let (label, pick) = parts
                        .next()
                        .and_then(|part| part.rsplit_once(": "))
                        .context("no `: ` follows the label")?;
                    let cells = parts.map(Cell::parse).collect::<Result<_>>()?;
                    template
                        .rows
                        .push((label.to_owned(), Pick::parse(pick)?, cells));
                }
                _ => bail!("`{word}` is none of {WORDS:?}"),
            }
        }
        Ok(template)
    }

    /// Draws the table. Takes its two lines of headings, and the cells that are to be kept, from
    /// the table as it stands in the document.
    fn draw(&self, old: &[&str], runs: &Runs, folder: &str) -> Result<Table> {
        let old: Vec<_> = old.iter().filter(|line| line.starts_with('|')).collect();
        let [first, second, old @ ..] = &old[..] else {
            bail!("the table has no line of headings");
        };
        if !second.starts_with("|-") {
            bail!("the table has no line of dashes below its headings");
        }
        let mut table = Table {
            lines: vec![first.to_string(), second.to_string()],
            values: Vec::new(),
        };
        let mut files = BTreeSet::new();
        for (nth, (label, pick, cells)) in self.rows.iter().enumerate() {
            let pick = self.defaults.and(pick);
            let mut shown = vec![label.clone()];
            let mut values = Vec::new();
            let cells = if cells.is_empty() {
                &self.columns
            } else {
                cells
            };
            for cell in cells {
                if cell.keep {
                    let kept = old
                        .get(nth)
                        .and_then(|row| row.split('|').nth(shown.len() + 1));
                    shown.push(kept.unwrap_or_default().trim().to_owned());
                    continue;
                }
                shown.push(cell.draw(&pick, runs, &mut values, &mut files)?);
            }
            table.lines.push(format!("| {} |", shown.join(" | ")));
            table.values.push(values);
        }
        table.lines.push(String::new());
        let mut origins = Vec::new();
        for file in files {
            let name = file.rsplit('/').next().unwrap_or(&file);
            let name = name.trim_end_matches(".json");
            origins.push(format!("[{name}]({folder}{file}), {}", runs.origin(&file)?));
        }
        let origins = format!("Raw data: {}.", origins.join("; "));
        table.lines.extend(wrapped(&origins));
        Ok(table)
    }
}

impl Cell {
    /// Reads a text with picks in braces.
    fn parse(text: &str) -> Result<Cell> {
        let mut cell = Cell::default();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once('{') {
            let (pick, after) = behind.split_once('}').context("a { has no }")?;
            cell.texts.push(before.to_owned());
            cell.picks.push(Pick::parse(pick)?);
            rest = after;
        }
        cell.texts.push(rest.to_owned());
        Ok(cell)
    }

    /// Reads what stands after `column`: a text with picks in braces, one pick, or `keep`.
    fn parse_column(text: &str) -> Result<Cell> {
        Ok(match text {
            "keep" => Cell {
                keep: true,
                ..Cell::default()
            },
            _ if text.contains('{') => Cell::parse(text)?,
            _ => Cell::parse(&format!("{{{text}}}"))?,
        })
    }

    /// Returns the cell's text, and adds its values and the files that they come from.
    fn draw(
        &self,
        defaults: &Pick,
        runs: &Runs,
        values: &mut Vec<f64>,
        files: &mut BTreeSet<String>,
    ) -> Result<String> {
        let mut text = String::new();
        for (at, before) in self.texts.iter().enumerate() {
            text += before;
            let Some(pick) = self.picks.get(at) else {
                break;
            };
            let pick = defaults.and(pick);
            let found = pick.values(runs)?;
            text += &pick.show(&found)?;
            values.extend(found.into_iter().flatten());
            files.extend(pick.get("file").map(str::to_owned));
        }
        Ok(text)
    }
}

/// Joins the lines of a comment that do not begin with a word that says what they hold.
fn logical_lines(body: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    let is_list = |line: &str| line.ends_with(',') && !line.ends_with("},");
    for line in body.lines().map(str::trim) {
        let last = lines.last_mut().expect("there is always a line");
        let word = line.split(' ').next().unwrap_or_default();
        if WORDS.contains(&word) {
            lines.push(line.to_owned());
        } else if last.is_empty() || last.ends_with('=') || is_list(last) {
            last.push_str(line);
        } else {
            last.push(' ');
            last.push_str(line);
        }
    }
    lines
}

/// Breaks a text into lines.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is always a line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > MAX_COLUMNS {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# One\n\nWords.\n\n<!-- table file=b.json metric=ns\nrows subject=x,\ny\n\
        column size=8\ncolumn keep\nrow both: subject=x,y\n-->\n| | 8 | mail |\n|---|---|---|\n\
        | x | 1.0 | 46 |\n| y | 9.0 | 61 |\n<!-- end -->\n\n## Two\n<!-- said: 46 cycles -->\n\
        <!-- values: file=b.json metric=ns {subject=x size=8}\n{subject=y size=8} -->\nMore.\n";

    fn drawn(text: &str) -> Result<Drawn, Fault> {
        let rows = r#"{"machine": {"cpu": "C", "cpus": 2, "kernel": "6.1.0-x",
            "primitives": {"locked_add_cycles": 2.94}}, "load": 0.04, "date": "2026-01-02",
            "rows": [{"subject": "x", "size": 8, "ns": 2}, {"subject": "y", "size": 8, "ns": 8}]}"#;
        draw(text, &Runs::of("b.json", rows), "../")
    }

    #[test]
    fn a_stale_table_is_drawn_again_and_kept_cells_stay() {
        let drawn = drawn(TEXT).unwrap();
        let expected = "| x | 2.0 | 46 |\n| y | 8.0 | 61 |\n| both | 4.0 |  |\n\n\
            Raw data: [b](../b.json), C, 2 CPUs, Linux 6.1.0, a locked add takes 2.9 cycles, load \
            0.0,\n2026-01-02.\n<!-- end -->\n";
        assert!(drawn.text.contains(expected), "{}", drawn.text);
        let again = self::drawn(&drawn.text).unwrap();
        assert_eq!(again.text, drawn.text);
        assert!(drawn.text.ends_with("More.\n") && drawn.text.starts_with("# One\n\nWords.\n"));
    }

    #[test]
    fn sections_hold_their_values_and_their_sentences() {
        let sections = drawn(TEXT).unwrap().sections;
        let [_, one, two] = &sections[..] else {
            panic!("there are two headings");
        };
        assert_eq!(one.tables, [[vec![2.0], vec![8.0], vec![4.0]]]);
        assert_eq!(two.tables, [[vec![2.0, 8.0]]]);
        assert_eq!(
            (two.title.as_str(), two.said.as_str()),
            ("Two", "46 cycles\n")
        );
        assert_eq!(two.prose, [(22, "More.".to_owned())]);
    }

    #[test]
    fn a_text_gives_all_its_numbers() {
        let runs = Runs::new("../bench/runs");
        let text = "<!-- values: file=2026-11-28-isolate/quiet.txt -->\n";
        let drawn = draw(text, &runs, "").map_err(|(_, error)| error).unwrap();
        let values = &drawn.sections[0].tables[0][0];
        assert!(values.contains(&101_031_447.0) && values.contains(&300.0));
    }

    #[test]
    fn a_cell_mixes_texts_and_values() {
        let text = "<!-- table file=b.json metric=ns\n\
            row any: digits=0 | x {subject=x},\n y {subject=y digits=1}\n-->\n| | |\n|---|---|\n<!-- end -->\n";
        let drawn = drawn(text).unwrap();
        assert!(
            drawn.text.contains("\n| any | x 2, y 8.0 |\n"),
            "{}",
            drawn.text
        );
    }

    #[test]
    fn a_wrong_comment_is_named_by_its_line() {
        for (line, wrong) in [
            (5, TEXT.replace("size=8\n", "size=9\n")),
            (5, TEXT.replace("column keep", "colum keep")),
            (5, TEXT.replace("<!-- end -->", "<!-- End -->")),
            (5, TEXT.replace("b.json metric=ns\n", "c.json metric=ns\n")),
            (5, TEXT.replace("|---|---|---|", "")),
            (20, TEXT.replace("{subject=y", "{subject=z")),
            (20, TEXT.replace("size=8} -->", "size=8}")),
        ] {
            let fault = drawn(&wrong).err().map(|(line, _)| line);
            assert_eq!(fault, Some(line), "{wrong}");
        }
    }
}
