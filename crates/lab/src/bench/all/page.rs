//! The report: as one HTML file, and as text.

use super::compare::{Comparison, compare};
use super::rows::Rows;
use super::seeds::Seed;
use crate::Machine;
use crate::figures::{Sheet, date};
use crate::output::Table;
use anyhow::Result;
use pinfold::topology::Topology;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::time::SystemTime;

const STYLE: &str = include_str!("page.css");

/// What the report says about one document.
pub struct Section<'a> {
    seed: &'static Seed,
    /// The command that measures the same alone.
    command: String,
    outcome: &'a Result<Sheet, String>,
    comparison: Comparison,
}

impl Section<'_> {
    pub fn new<'a>(
        seed: &'static Seed,
        command: String,
        outcome: &'a Result<Sheet, String>,
    ) -> Section<'a> {
        let rows = Rows::parse(outcome.as_ref().map_or("", |sheet| &sheet.json));
        Section {
            seed,
            command,
            outcome,
            comparison: compare(&seed.bench, &rows),
        }
    }

    /// Formats the section for a terminal.
    pub fn text(&self) -> String {
        let Seed {
            title,
            source,
            machine,
            question,
            ..
        } = self.seed;
        let line = "=".repeat(title.len());
        let mut text =
            format!("{title}\n{line}\n{question}\nFrom: {source}.\nIts machine: {machine}.\n");
        for (caption, table) in &self.comparison.tables {
            text += &format!("\n{caption}\n{table}");
        }
        text.push('\n');
        text += &match self.outcome {
            Ok(sheet) => format!(
                "{}\n\n$ {}\n{}",
                self.comparison.meaning, self.command, sheet.text
            ),
            Err(why) => format!("Not measured here: {why}\n"),
        };
        text
    }

    /// Returns the benchmark's own object for programs, and what the figures mean beside those of
    /// the document. Without figures, returns why there are none.
    pub fn json(&self) -> Result<Value> {
        let Ok(sheet) = self.outcome else {
            let failure = self.outcome.as_ref().err();
            return Ok(json!({ "bench": self.seed.bench, "failure": failure }));
        };
        let mut object: Map<String, Value> = serde_json::from_str(&sheet.json)?;
        object.insert("meaning".to_owned(), self.comparison.meaning.clone().into());
        Ok(object.into())
    }

    /// Formats the section for the file.
    fn html(&self) -> Result<String> {
        let seed = self.seed;
        let mut html = format!(
            "<section id=\"{}\">\n<h2>{}</h2>\n<p class=\"question\">{}</p>\n\
             <p class=\"source\">From: {}. Its machine: {}.</p>\n",
            escape(&seed.bench),
            escape(&seed.title),
            escape(&seed.question),
            escape(&seed.source),
            escape(&seed.machine),
        );
        match self.outcome {
            Ok(_) => writeln!(
                html,
                "<p class=\"meaning\">{}</p>",
                escape(&self.comparison.meaning)
            )?,
            Err(why) => writeln!(
                html,
                "<p class=\"missing\">Not measured here: {}</p>",
                escape(why)
            )?,
        }
        for (caption, table) in &self.comparison.tables {
            html += &html_table(caption, table);
        }
        if let Some(picture) = &self.comparison.picture {
            let picture = picture.as_ref().map_err(|error| format!("{error:#}"));
            html += &figure("The document's figures and this machine's", picture);
        }
        if let Ok(sheet) = self.outcome {
            let command = escape(&self.command);
            html += &figure(
                "This machine's figures",
                sheet.picture.as_ref().map_err(String::clone),
            );
            writeln!(html, "<h3>All figures: <code>{command}</code></h3>")?;
            writeln!(html, "<pre>{}</pre>", escape(&sheet.text))?;
        }
        Ok(html + "</section>\n")
    }
}

/// Formats the whole file. It loads nothing: style and plots are in it.
pub fn page(sections: &[Section], is_quick: bool) -> Result<String> {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>Pinfold on this machine</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>Pinfold on this machine</h1>\n\
         <p>Five documents about the Linux kernel's per-CPU memory, from 2007 to 2015, each ask a \
         question and answer it with figures. This page puts the figures of this machine beside \
         them. The documents' machines were others, so compare the figures of one column with each \
         other.</p>\n"
    );
    if is_quick {
        html += "<p class=\"missing\">This run had --quick. It shows that everything runs, and its \
                 figures are too short to judge by.</p>\n";
    }
    html += "<table>\n<caption>This machine</caption>\n<tbody>\n";
    for (name, fact) in facts() {
        let (name, fact) = (escape(name), escape(&fact));
        writeln!(
            html,
            "<tr><th scope=\"row\">{name}</th><td class=\"fact\">{fact}</td></tr>"
        )?;
    }
    html += "</tbody>\n</table>\n<nav>\n<ul>\n";
    for Section { seed, .. } in sections {
        let (bench, title) = (escape(&seed.bench), escape(&seed.title));
        writeln!(html, "<li><a href=\"#{bench}\">{title}</a></li>")?;
    }
    html += "</ul>\n</nav>\n";
    for section in sections {
        html += &section.html()?;
    }
    Ok(html + "</body>\n</html>\n")
}

/// Returns the facts about the machine that a reader needs to judge the figures.
fn facts() -> Vec<(&'static str, String)> {
    let machine = Machine::read();
    let nodes = match Topology::system() {
        Ok(topology) => topology.with_memory.len().to_string(),
        Err(error) => format!("unknown ({error})"),
    };
    let mut facts = machine.facts();
    facts.push(("memory nodes", nodes));
    facts.push(("Pinfold", env!("CARGO_PKG_VERSION").to_owned()));
    let (day, time) = date(SystemTime::now());
    facts.push(("date (UTC)", format!("{day} {}", &time[..5])));
    facts
}

/// Formats a plot with its caption. Without a plot, says why it could not be drawn.
fn figure(caption: &str, picture: Result<&String, String>) -> String {
    let caption = escape(caption);
    match picture {
        Ok(svg) => format!("<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>\n"),
        Err(why) => format!(
            "<p class=\"missing\">{caption}: no plot, {}</p>\n",
            escape(&why)
        ),
    }
}

fn html_table(caption: &str, table: &Table) -> String {
    let mut html = format!(
        "<div class=\"wide\"><table>\n<caption>{}</caption>\n",
        escape(caption)
    );
    let mut rows = table.rows().iter();
    let cells = |row: &[String]| {
        let cells = row
            .iter()
            .skip(1)
            .map(|cell| format!("<td>{}</td>", escape(cell)));
        cells.collect::<String>()
    };
    if let Some(heading) = rows.next() {
        let names = heading
            .iter()
            .map(|name| format!("<th scope=\"col\">{}</th>", escape(name)));
        html += &format!(
            "<thead><tr>{}</tr></thead>\n<tbody>\n",
            names.collect::<String>()
        );
    }
    for row in rows {
        let name = row.first().map(|name| escape(name)).unwrap_or_default();
        html += &format!("<tr><th scope=\"row\">{name}</th>{}</tr>\n", cells(row));
    }
    html + "</tbody>\n</table></div>\n"
}

/// Replaces the characters that have a meaning in HTML, and those that it does not allow.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\n' | '\t' => escaped.push(character),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let escaped = escape("<script a=\"b\" c='d'>&\u{1b}[31m\n");
        let expected = "&lt;script a=&quot;b&quot; c=&#39;d&#39;&gt;&amp;\u{fffd}[31m\n";
        assert_eq!(escaped, expected);
        let table = Table::of([()]).column("<name>", |()| "<i>");
        let table = table.column("a&b", |()| "\"").table();
        let html = html_table("<caption>", &table);
        for text in [
            "&lt;caption&gt;",
            "&lt;name&gt;",
            "a&amp;b",
            "&lt;i&gt;",
            "&quot;",
        ] {
            assert!(html.contains(text), "{html}");
        }
    }

    #[test]
    fn a_benchmark_that_failed_says_why_beside_the_documents_figures() {
        for seed in &super::super::seeds::DOCUMENTS.seeds {
            let outcome = Err("no <permission>".to_owned());
            let section = Section::new(seed, "pinfold".to_owned(), &outcome);
            let html = section.html().unwrap();
            assert!(
                html.contains("Not measured here: no &lt;permission&gt;"),
                "{html}"
            );
            assert!(
                section
                    .text()
                    .contains("Not measured here: no <permission>")
            );
        }
    }
}
