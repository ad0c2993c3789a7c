//! Tables for people.

use super::text::escaped;
use std::fmt;

/// Rows under a heading. One column is left-aligned, the others are right-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
    left: usize,
}

impl Table {
    /// Makes a table with these columns, the first of them left-aligned.
    pub fn new<C: Into<String>>(columns: impl IntoIterator<Item = C>) -> Table {
        Table {
            rows: vec![columns.into_iter().map(Into::into).collect()],
            left: 0,
        }
    }

    /// Makes a table whose last column is the left-aligned one: for names of any length.
    pub fn with_names_last<C: Into<String>>(columns: impl IntoIterator<Item = C>) -> Table {
        let table = Table::new(columns);
        Table {
            left: table.rows[0].len().saturating_sub(1),
            ..table
        }
    }

    /// Adds a row. What a cell holds cannot end the row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells = cells.into_iter().map(|cell| escaped(&cell).into_owned());
        self.rows.push(cells.collect());
    }

    /// Returns whether there is no row below the heading.
    pub fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// Returns the heading and the rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = self.width(column);
                line += if column > 0 { "  " } else { "" };
                line += &match column == self.left {
                    true => format!("{cell:<width$}"),
                    false => format!("{cell:>width$}"),
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["subject", "cycles"]);
        table.row(["event".to_owned(), "5.5".to_owned()]);
        table.row(["masked-signals".to_owned(), "1234.5".to_owned()]);
        assert_eq!(
            table.to_string(),
            "subject         cycles\nevent              5.5\nmasked-signals  1234.5\n"
        );
    }
}
