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
    pub fn new<const N: usize>(columns: [&str; N]) -> Table {
        Table {
            rows: vec![columns.map(str::to_owned).into()],
            left: 0,
        }
    }

    /// Makes a table whose last column is the left-aligned one: for names of any length.
    pub fn with_names_last<const N: usize>(columns: [&str; N]) -> Table {
        Table {
            left: N - 1,
            ..Table::new(columns)
        }
    }

    /// Adds a row. What a cell holds cannot end the row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows
            .push(cells.map(|cell| escaped(&cell).into_owned()).into());
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
