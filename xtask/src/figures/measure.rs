//! `cargo xtask figures --measure`: runs the commands that write raw files.

use crate::{run, target};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The folder of the raw files that a command renews.
const FOLDER: &str = "bench/runs/published";
/// The file that has a line for each raw file: its name, and the command that prints it.
const COMMANDS: &str = "bench/runs/published/commands";

/// A line of [`COMMANDS`].
#[derive(Debug, PartialEq)]
struct Run<'a> {
    file: &'a str,
    command: &'a str,
}

impl Run<'_> {
    /// Returns whether the command compares with peers, which need cmake and clang.
    fn has_peers(&self) -> bool {
        self.command.starts_with("pinfold-bench ")
    }

    /// Returns the program with its arguments.
    fn command(&self) -> Command {
        let mut words = self.command.split_whitespace();
        let mut command = match words.next() {
            Some("pinfold") => Command::new(target().join("release/pinfold")),
            Some("pinfold-bench") => {
                let mut cargo = Command::new("cargo");
                cargo.args(["run", "--quiet", "--release", "-p", "pinfold-bench", "--"]);
                cargo
            }
            program => Command::new(program.unwrap_or_default()),
        };
        command.args(words);
        command
    }
}

/// Renews the raw files whose names begin with one of `names`, or without names all that need no
/// peers.
///
/// # Errors
///
/// If no file has such a name, or if a command fails. The files of commands that ran before are
/// written then.
pub fn main(names: &[String]) -> Result<()> {
    let lines = fs::read_to_string(COMMANDS).context(COMMANDS)?;
    let runs = parse(&lines)?;
    let chosen = choose(&runs, names)?;
    // The benchmarks' own threads would count in a later reading.
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    run(Command::new("cargo").args(["build", "--quiet", "--release", "-p", "pinfold-cli"]))?;
    for chosen in chosen {
        let begin = Instant::now();
        eprintln!("{}: {}", chosen.file, chosen.command);
        let output = chosen.command().stderr(Stdio::inherit()).output();
        let output = output.with_context(|| format!("cannot start {}", chosen.command))?;
        if !output.status.success() {
            bail!("{} failed: {}", chosen.command, output.status);
        }
        let output = String::from_utf8(output.stdout).context("the output is not UTF-8")?;
        let output = match chosen.file.ends_with(".json") {
            true => with_origin(&output, chosen.command, &load)?,
            false => output,
        };
        fs::write(Path::new(FOLDER).join(chosen.file), output).context(FOLDER)?;
        eprintln!(
            "{} is written after {} s",
            chosen.file,
            begin.elapsed().as_secs()
        );
    }
    Ok(())
}

/// Reads the lines of [`COMMANDS`]. Lines that begin with `#` are comments.
fn parse(lines: &str) -> Result<Vec<Run<'_>>> {
    let lines = lines
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let runs = lines.map(|line| {
        let (file, command) = line.split_once(' ').context("a file has no command")?;
        let command = command.trim();
        Ok(Run { file, command })
    });
    runs.collect()
}

/// Returns the runs whose files' names begin with one of `names`.
fn choose<'a, 'b>(runs: &'b [Run<'a>], names: &[String]) -> Result<Vec<&'b Run<'a>>> {
    for name in names {
        if !runs.iter().any(|run| run.file.starts_with(name)) {
            bail!("no raw file's name begins with {name}; see {COMMANDS}");
        }
    }
    let is_named = |run: &&Run| names.iter().any(|name| run.file.starts_with(name));
    Ok(match names.is_empty() {
        true => runs.iter().filter(|run| !run.has_peers()).collect(),
        false => runs.iter().filter(is_named).collect(),
    })
}

/// Adds the command, the day and the load of the machine to a benchmark's output, and gives each
/// row a line of its own.
fn with_origin(output: &str, command: &str, load: &str) -> Result<String> {
    let output: Value = serde_json::from_str(output).context("the output is not JSON")?;
    let date = Command::new("date").arg("+%F").output().context("date")?;
    let date = String::from_utf8_lossy(&date.stdout).trim().to_owned();
    let load = load
        .split(' ')
        .next()
        .and_then(|load| load.parse::<f64>().ok());
    let rows = output["rows"]
        .as_array()
        .context("the output has no rows")?;
    let rows: Vec<_> = rows.iter().map(Value::to_string).collect();
    Ok(format!(
        "{{\"command\":{},\"date\":{},\"load\":{},\"bench\":{},\"machine\":{},\"rows\":[\n{}\n]}}\n",
        Value::from(command),
        Value::from(date),
        Value::from(load),
        output["bench"],
        output["machine"],
        rows.join(",\n"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "# comment\n000-a.json  pinfold bench a --json\n\n\
                         001.txt cargo test x\npeers.json pinfold-bench slab\n";

    #[test]
    fn each_raw_file_has_its_command() {
        let runs = parse(LINES).unwrap();
        let files: Vec<_> = runs.iter().map(|run| run.file).collect();
        assert_eq!(files, ["000-a.json", "001.txt", "peers.json"]);
        assert_eq!(runs[0].command, "pinfold bench a --json");
        assert!(parse("alone").is_err());
    }

    #[test]
    fn names_choose_runs_and_peers_are_chosen_by_name_only() {
        let runs = parse(LINES).unwrap();
        let chosen = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| name.to_string()).collect();
            let chosen = choose(&runs, &names);
            chosen.map(|runs| runs.iter().map(|run| run.file).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&[]).unwrap(), ["000-a.json", "001.txt"]);
        assert_eq!(
            chosen(&["pe", "000"]).unwrap(),
            ["000-a.json", "peers.json"]
        );
        assert!(chosen(&["002"]).is_err());
    }

    #[test]
    fn a_raw_file_says_where_it_comes_from() {
        let output = r#"{"bench": "b", "machine": {"cpus": 2}, "rows": [{"a": 1}, {"a": 2.5}]}"#;
        let written = with_origin(output, "pinfold bench b", "0.25 0 0").unwrap();
        let read: Value = serde_json::from_str(&written).unwrap();
        assert_eq!(read["command"], "pinfold bench b");
        assert_eq!(
            (&read["load"], &read["rows"][1]["a"]),
            (&0.25.into(), &2.5.into())
        );
        assert!(
            written.ends_with("\n{\"a\":1},\n{\"a\":2.5}\n]}\n"),
            "{written}"
        );
        assert!(with_origin("no JSON", "", "").is_err());
    }
}
