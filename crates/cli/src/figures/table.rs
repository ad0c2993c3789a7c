//! Results for people.

use anyhow::Result;
use std::fmt;
use std::io::Write;

/// Rows under a heading. The first column is left-aligned, the others are right-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table with these columns.
    pub fn new<const N: usize>(columns: [&str; N]) -> Table {
        Table {
            rows: vec![columns.map(str::to_owned).into()],
        }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
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
                line += &match column {
                    0 => format!("{cell:<width$}"),
                    _ => format!("  {cell:>width$}"),
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Writes to standard output. A reader that closes the pipe early is no error.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
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
