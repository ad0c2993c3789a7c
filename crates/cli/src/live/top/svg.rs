//! A picture of a terminal's cells as an SVG file. Text stays text, so that drawing needs no fonts.

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::Modifier;
use std::fmt::Write;

/// Width and height of a cell, and how far the text's base line is below the cell's top.
const WIDTH: usize = 9;
const HEIGHT: usize = 18;
const BASE: usize = 14;
const MARGIN: usize = 12;

const STYLE: &str = "svg{background:#fff;color:#1b1b1b}\
    @media(prefers-color-scheme:dark){svg{background:#16181d;color:#e4e4e4}}\
    text{font:15px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:currentColor;\
    white-space:pre}.b{font-weight:bold}rect{fill:currentColor}\
    .r{fill:#fff}@media(prefers-color-scheme:dark){.r{fill:#16181d}}";

/// Returns the file's text.
pub fn of(buffer: &Buffer) -> String {
    let (columns, lines) = (buffer.area.width, buffer.area.height);
    let width = 2 * MARGIN + WIDTH * usize::from(columns);
    let height = 2 * MARGIN + HEIGHT * usize::from(lines);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\">\n<style>{STYLE}</style>\n"
    );
    for y in 0..lines {
        let mut x = 0;
        while x < columns {
            let modifier = buffer[(x, y)].modifier;
            let end = (x..columns).find(|&at| buffer[(at, y)].modifier != modifier);
            let end = end.unwrap_or(columns);
            let cells: Vec<&Cell> = (x..end).map(|at| &buffer[(at, y)]).collect();
            run(&mut text, usize::from(x), usize::from(y), &cells);
            x = end;
        }
    }
    text + "</svg>\n"
}

/// Draws cells of one line that have the same style.
fn run(text: &mut String, x: usize, y: usize, cells: &[&Cell]) {
    let (left, top) = (MARGIN + WIDTH * x, MARGIN + HEIGHT * y);
    let modifier = cells[0].modifier;
    let is_reversed = modifier.contains(Modifier::REVERSED);
    let symbols: String = cells.iter().map(|cell| cell.symbol()).collect();
    let width = WIDTH * cells.len();
    let mut draw = || {
        if is_reversed {
            writeln!(
                text,
                "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{HEIGHT}\"/>"
            )?;
        }
        if symbols.trim().is_empty() {
            return Ok(());
        }
        let bold = if modifier.contains(Modifier::BOLD) {
            "b"
        } else {
            ""
        };
        let reversed = if is_reversed { " r" } else { "" };
        // The length keeps columns aligned in any font.
        writeln!(
            text,
            "<text x=\"{left}\" y=\"{}\" class=\"{bold}{reversed}\" textLength=\"{width}\" \
             xml:space=\"preserve\">{}</text>",
            top + BASE,
            escape(&symbols)
        )
    };
    // Writing to a string does not fail.
    let _: std::fmt::Result = draw();
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    #[test]
    fn cells_keep_their_place_and_style() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 12, 2));
        buffer.set_string(0, 0, "a<b & c>", Style::new());
        let reversed = Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD);
        buffer.set_string(2, 1, "NAME", reversed);
        let text = of(&buffer);
        assert!(text.contains(">a&lt;b &amp; c&gt;    </text>"), "{text}");
        let left = MARGIN + 2 * WIDTH;
        let rect = format!("<rect x=\"{left}\" y=\"{}\" width=\"36\"", MARGIN + HEIGHT);
        assert!(text.contains(&rect), "{text}");
        assert!(text.contains("class=\"b r\" textLength=\"36\""), "{text}");
        assert_eq!(text.matches("<text").count(), 2, "{text}");
    }
}
