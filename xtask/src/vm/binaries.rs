//! The project's test binaries, built by cargo and found by what it says.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The crates whose tests run inside.
const CRATES: [&str; 3] = ["pinfold-rseq", "pinfold", "pinfold-malloc"];

pub struct Binary {
    /// The test file's name; a crate's unit tests are `NAME-unit`.
    pub name: String,
    pub path: PathBuf,
}

/// How to build: what `cargo` is told of the processor.
#[derive(Default)]
pub struct Build {
    /// What cargo calls the processor, where it is not this machine's.
    pub target: Option<&'static str>,
    pub environment: Vec<(&'static str, &'static str)>,
}

impl Build {
    /// Optimized: emulation is slow enough.
    fn cargo(&self, command: &[&str]) -> Command {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(command)
            .args(["--profile", "vm"])
            .envs(self.environment.iter().copied());
        if let Some(target) = self.target {
            cargo.args(["--target", target]);
        }
        cargo
    }

    /// Builds the tests of all crates.
    pub fn tests(&self) -> Result<Vec<Binary>> {
        let mut cargo = self.cargo(&["test", "--no-run", "--quiet"]);
        cargo.arg("--message-format=json-render-diagnostics");
        for package in CRATES {
            cargo.args(["-p", package]);
        }
        let said = cargo.stderr(Stdio::inherit()).output()?;
        if !said.status.success() {
            bail!("the tests do not build");
        }
        let text = String::from_utf8(said.stdout).context("what cargo says")?;
        let mut found: Vec<_> = text.lines().filter_map(test).collect();
        // Models run in a build of their own.
        found.retain(|binary| !binary.name.starts_with("model"));
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Builds the command and the library to preload; where they are.
    pub fn command(&self, target: &Path) -> Result<[PathBuf; 2]> {
        let mut cargo = self.cargo(&["build", "--quiet"]);
        let built = cargo.args(["-p", "pinfold-preload", "-p", "pinfold-cli"]);
        if !built.status()?.success() {
            bail!("the command does not build");
        }
        let built = target.join(self.target.unwrap_or("")).join("vm");
        Ok(["pinfold", "libpinfold_preload.so"].map(|file| built.join(file)))
    }
}

/// The test binary that a line of cargo's tells of.
fn test(line: &str) -> Option<Binary> {
    let said: Value = serde_json::from_str(line).ok()?;
    let path = said["executable"].as_str()?;
    said["profile"]["test"].as_bool().filter(|test| *test)?;
    let target = &said["target"];
    let name = target["name"].as_str()?;
    let unit = target["kind"][0] != "test";
    Some(Binary {
        name: format!("{name}{}", if unit { "-unit" } else { "" }),
        path: path.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_told_from_other_messages() {
        let line = |kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"x","kind":["{kind}"]}},
                "profile":{{"test":{test}}},"executable":"/t/x-1"}}"#
            )
        };
        assert_eq!(test(&line("test", true)).unwrap().name, "x");
        assert_eq!(test(&line("lib", true)).unwrap().name, "x-unit");
        assert!(test(&line("bin", false)).is_none());
        assert!(test(r#"{"reason":"build-finished"}"#).is_none());
    }
}
