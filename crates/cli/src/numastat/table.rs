//! Tables for people, in the layout of `numastat`: mebibytes by node, and their total. `numastat`
//! calls mebibytes MBs.

use super::Report;
use crate::output::escaped;
use std::fmt::Write;

const MIB: f64 = (1 << 20) as f64;

/// How tables are written.
#[derive(Clone, Copy, Default)]
pub struct Form {
    /// Columns are as narrow as their words, and numbers whole.
    pub compact: bool,
    /// Rows and columns of zeroes are left out.
    pub skip_zeroes: bool,
}

/// A table: bytes by row and node.
pub struct Table<'t> {
    pub title: &'t str,
    /// The heading of the rows' names.
    pub corner: &'t str,
    pub nodes: &'t [usize],
    pub rows: Vec<(String, Vec<u64>)>,
    /// Whether the last row is the sum of the others, which a rule separates.
    pub has_sum: bool,
    /// Spaces between the rows' names and the numbers.
    pub gap: usize,
}

impl Table<'_> {
    pub fn text(mut self, form: Form) -> String {
        let sum = |row: &[u64]| {
            row.iter()
                .fold(0u64, |sum, &bytes| sum.saturating_add(bytes))
        };
        let is_shown = |bytes: u64| !form.skip_zeroes || number(bytes, form) != number(0, form);
        self.rows.retain(|(_, row)| is_shown(sum(row)));
        let shown: Vec<usize> = (0..self.nodes.len())
            .filter(|&nth| self.rows.iter().any(|(_, row)| is_shown(row[nth])))
            .collect();
        let heads = shown.iter().map(|&nth| format!("Node {}", self.nodes[nth]));
        let heads: Vec<String> = heads.chain(["Total".to_owned()]).collect();
        let cells = self.rows.iter().map(|(_, row)| {
            let bytes = shown.iter().map(|&nth| row[nth]).chain([sum(row)]);
            bytes.map(|bytes| number(bytes, form)).collect()
        });
        let cells: Vec<Vec<String>> = cells.collect();
        let widths: Vec<usize> = (0..heads.len())
            .map(|nth| match form.compact {
                false => 15,
                true => {
                    let column = cells.iter().map(|row| row[nth].len());
                    column.chain([heads[nth].len()]).max().unwrap_or(0)
                }
            })
            .collect();
        let least = if form.compact { 0 } else { 16 };
        let names = self.rows.iter().map(|(name, _)| name.chars().count());
        let label = names.chain([self.corner.len(), least]).max().unwrap_or(0);
        let gap = self.gap;
        let line = |name: &str, cells: &[String]| {
            let mut line = format!("{name:<label$}{:gap$}", "");
            for (nth, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let space = if nth == 0 { "" } else { " " };
                let _ = write!(line, "{space}{cell:>width$}");
            }
            line.trim_end().to_owned() + "\n"
        };
        let rules: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
        let under = if self.corner.is_empty() { 0 } else { label };
        let mut text = format!("\n{}\n", self.title);
        text += &line(self.corner, &heads);
        text += &line(&"-".repeat(under), &rules);
        for (nth, ((name, _), cells)) in self.rows.iter().zip(&cells).enumerate() {
            if self.has_sum && nth + 1 == self.rows.len() {
                text += &line(&"-".repeat(label), &rules);
            }
            text += &line(name, cells);
        }
        text
    }
}

fn number(bytes: u64, form: Form) -> String {
    let digits = if form.compact { 0 } else { 2 };
    format!("{:.digits$}", bytes as f64 / MIB)
}

pub fn of(report: &Report, form: Form) -> String {
    let row = |name: &str, row: &[u64]| (name.to_owned(), row.to_vec());
    let table = Table {
        title: &format!(
            "Per-node process memory usage (in MBs) for PID {} ({})",
            report.process.pid,
            escaped(&report.process.name)
        ),
        corner: "",
        nodes: &report.nodes,
        rows: vec![
            row("Huge", &report.huge),
            row("Heap", &report.heap),
            row("Stack", &report.stack),
            row("Private", &report.private),
            row("Total", &report.total),
        ],
        has_sum: true,
        gap: 2,
    };
    table.text(form)
}

/// Formats a table with a row for each process.
pub fn of_all(reports: &[Report], form: Form) -> String {
    let mut nodes: Vec<usize> = reports
        .iter()
        .flat_map(|report| &report.nodes)
        .copied()
        .collect();
    nodes.sort_unstable();
    nodes.dedup();
    let on = |report: &Report, node| {
        let nth = report.nodes.iter().position(|&known| known == node);
        nth.map_or(0, |nth| report.total[nth])
    };
    let mut rows: Vec<(String, Vec<u64>)> = reports
        .iter()
        .map(|report| {
            let name = format!("{} ({})", report.process.pid, escaped(&report.process.name));
            (name, nodes.iter().map(|&node| on(report, node)).collect())
        })
        .collect();
    let sum = |nth: usize| {
        let column = rows.iter().map(|(_, row)| row[nth]);
        column.fold(0u64, u64::saturating_add)
    };
    let total = (0..nodes.len()).map(sum).collect();
    rows.push(("Total".to_owned(), total));
    let table = Table {
        title: "Per-node process memory usage (in MBs)",
        corner: "PID",
        nodes: &nodes,
        rows,
        has_sum: true,
        gap: 2,
    };
    table.text(form)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::Identity;

    fn report(pid: u32, nodes: &[usize], huge: &[u64]) -> Report {
        Report {
            process: Identity::named(pid, "cat".to_owned()),
            nodes: nodes.to_vec(),
            huge: huge.to_vec(),
            heap: vec![1 << 19; nodes.len()],
            stack: vec![5243; nodes.len()],
            private: vec![0; nodes.len()],
            total: huge.iter().map(|huge| huge + (1 << 19) + 5243).collect(),
        }
    }

    #[test]
    fn one_process_has_the_layout_of_numastat() {
        let text = of(&report(7, &[0, 2], &[0, 2 << 20]), Form::default());
        let expected = "
Per-node process memory usage (in MBs) for PID 7 (cat)
                           Node 0          Node 2           Total
                  --------------- --------------- ---------------
Huge                         0.00            2.00            2.00
Heap                         0.50            0.50            1.00
Stack                        0.01            0.01            0.01
Private                      0.00            0.00            0.00
----------------  --------------- --------------- ---------------
Total                        0.51            2.51            3.01
";
        assert_eq!(text, expected);
    }

    #[test]
    fn several_processes_have_a_row_each() {
        let reports = [report(7, &[0], &[0]), report(80, &[0, 2], &[3 << 20, 0])];
        let expected = "
Per-node process memory usage (in MBs)
PID                        Node 0          Node 2           Total
----------------  --------------- --------------- ---------------
7 (cat)                      0.51            0.00            0.51
80 (cat)                     3.51            0.51            4.01
----------------  --------------- --------------- ---------------
Total                        4.01            0.51            4.52
";
        assert_eq!(of_all(&reports, Form::default()), expected);
    }

    #[test]
    fn compact_tables_are_narrow_and_zeroes_are_left_out() {
        let form = Form {
            compact: true,
            skip_zeroes: true,
        };
        let text = of(&report(7, &[0, 2], &[0, 20 << 20]), form);
        let expected = "
Per-node process memory usage (in MBs) for PID 7 (cat)
       Node 0 Node 2 Total
       ------ ------ -----
Huge        0     20    20
Heap        0      0     1
-----  ------ ------ -----
Total       1     21    21
";
        assert_eq!(text, expected);
    }
}
