//! A table for people: MiB by node, in the form of `numastat -p`.

use super::Report;
use super::process::printable;
use std::fmt::Write;

const WIDTH: usize = 15;
const MIB: f64 = (1 << 20) as f64;

/// Formats the table of one process.
pub fn of(report: &Report) -> String {
    let Report { pid, name, .. } = report;
    let heads = report.nodes.iter().map(|node| format!("Node {node}"));
    let heads: Vec<String> = heads.chain(["Total".to_owned()]).collect();
    let rules: Vec<String> = heads.iter().map(|_| "-".repeat(WIDTH)).collect();
    let name = printable(name);
    let mut text = format!("Per-node process memory usage (in MiB) for PID {pid} ({name})\n");
    text += &line("", &heads);
    text += &line("", &rules);
    for (label, bytes) in [
        ("Huge", &report.huge),
        ("Heap", &report.heap),
        ("Stack", &report.stack),
        ("Private", &report.private),
    ] {
        text += &line(label, &cells(bytes));
    }
    text += &line(&"-".repeat(WIDTH), &rules);
    text += &line("Total", &cells(&report.total));
    text
}

/// Formats a column for each node, and their sum.
fn cells(bytes: &[u64]) -> Vec<String> {
    let sum = bytes
        .iter()
        .fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
    let all = bytes.iter().chain([&sum]);
    all.map(|&bytes| format!("{:.2}", bytes as f64 / MIB))
        .collect()
}

fn line(label: &str, cells: &[String]) -> String {
    let mut line = format!("{label:<WIDTH$}");
    for cell in cells {
        let _ = write!(line, "  {cell:>WIDTH$}");
    }
    line.trim_end().to_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let report = Report {
            pid: 7,
            name: "cat".into(),
            nodes: vec![0, 2],
            huge: vec![0, 2 << 20],
            heap: vec![1 << 19, 0],
            stack: vec![0, 5243],
            private: vec![0, 0],
            total: vec![1 << 19, (2 << 20) + 5243],
        };
        let text = of(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1],
            "                          Node 0           Node 2            Total"
        );
        assert_eq!(
            lines[4],
            "Heap                        0.50             0.00             0.50"
        );
        assert_eq!(
            lines[8],
            "Total                       0.50             2.01             2.51"
        );
        assert_eq!(lines.len(), 9);
    }
}
