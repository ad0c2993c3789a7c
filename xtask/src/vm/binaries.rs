//! The project's test binaries. Cargo builds them, and its messages tell their paths.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The crates whose tests run on the machine.
const CRATES: [&str; 3] = ["pinfold-rseq", "pinfold", "pinfold-malloc"];

pub struct Binary {
    /// The name of the test file, or `NAME-unit` for the unit tests of a crate.
    pub name: String,
    pub path: PathBuf,
}

/// How cargo builds for the emulated processor.
#[derive(Default)]
pub struct Build {
    /// Cargo's name of the target, if it differs from this machine's.
    pub target: Option<&'static str>,
    pub environment: Vec<(&'static str, &'static str)>,
}

impl Build {
    /// Returns a cargo command that builds optimised code, because emulation is slow.
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
            bail!("the tests do not build; cargo's errors are above");
        }
        let text = String::from_utf8(said.stdout).context("cargo's messages are not UTF-8")?;
        let mut found: Vec<_> = text.lines().filter_map(test).collect();
        // Models need a build of their own.
        found.retain(|binary| !binary.name.starts_with("model"));
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Builds the command and the library to preload. Returns their paths.
    pub fn command(&self, target: &Path) -> Result<[PathBuf; 2]> {
        let mut cargo = self.cargo(&["build", "--quiet"]);
        crate::run(cargo.args(["-p", "pinfold-preload", "-p", "pinfold-cli"]))?;
        let built = target.join(self.target.unwrap_or("")).join("vm");
        Ok(["pinfold", "libpinfold_preload.so"].map(|file| built.join(file)))
    }
}

/// Returns the test binary that a line of cargo's messages describes, if any.
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
    fn only_messages_about_tests_are_used() {
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
