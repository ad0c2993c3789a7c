//! The programs: loads, which are small programs of this package, and real programs of the system.
//! `bench/programs.json` lists them.

use super::prepare::{self, Cache};
use super::{input, launch};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

/// A program to run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Program {
    /// The name in `--programs`.
    pub name: &'static str,
    /// What the program does, for the table.
    pub what: &'static str,
    /// Whether the program has as many threads as the run asks for. Otherwise it has one.
    pub threaded: bool,
    /// Whether the program is made to waste an allocator's memory. `all` leaves it out.
    pub attack: bool,
    /// The source in `bench/loads` that is compiled for a load. A real program has none.
    pub source: Option<&'static str>,
    pub defines: Vec<&'static str>,
    /// The command line of a real program. `{input}`, `{cache}`, `{work}` and `{threads}` stand for
    /// the input file, the folder of input files, the folder to write in, and the number of
    /// threads.
    pub call: Vec<&'static str>,
    /// The input file. It is the standard input if the command line does not contain it.
    pub input: Option<&'static str>,
    pub environment: Vec<(&'static str, &'static str)>,
    /// The programs that a real program needs, and the Debian packages that contain them. Without
    /// entries, both have the name of the program that is called.
    pub tools: Vec<(&'static str, &'static str)>,
}

/// The start of a program.
#[derive(Debug, Default)]
pub struct Call {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// The file for standard input.
    pub input: Option<PathBuf>,
    pub environment: Vec<(&'static str, &'static str)>,
    /// The id of the user to run as. `None` means this process's user.
    pub user: Option<u32>,
}

impl Program {
    /// Returns the program's number of threads when a run asks for `asked`.
    pub fn threads(&self, asked: u32) -> u32 {
        if self.threaded { asked } else { 1 }
    }

    /// Makes what the program needs, unless it exists.
    pub fn prepare(&self, cache: &Cache) -> Result<()> {
        if let Some(source) = self.source {
            return prepare::compile_load(cache, self.name, source, &self.defines).map(drop);
        }
        let own = [(self.call[0], self.call[0])];
        let tools = if self.tools.is_empty() {
            &own[..]
        } else {
            &self.tools
        };
        for (tool, package) in tools {
            prepare::tool_or_install(tool, package)?;
        }
        if let Some(name) = self.input {
            let text = match name {
                "gcc.c" => input::c_source(50),
                "clang.c" => input::c_source(45),
                "formulas.smt2" => input::formulas(),
                _ => read(&Path::new("programs").join(name))?,
            };
            cache.write_input(name, &text)?;
        }
        match self.name {
            "git-gc" => input::history(cache),
            "postgres" => database(cache),
            _ => Ok(()),
        }
    }

    /// Does what is needed before each run of the program. Not timed.
    pub fn before(&self, cache: &Cache) -> Result<()> {
        if self.name == "git-gc" {
            let copy = cache.work.join("gc.git");
            let _ = fs::remove_dir_all(&copy);
            let from = cache.input.join("history.git");
            launch::helper("cp", &["-r".as_ref(), from.as_os_str(), copy.as_os_str()])?;
        }
        Ok(())
    }

    /// Returns how a real program is started, with the given number of threads.
    pub fn call(&self, cache: &Cache, threads: u32) -> Result<Call> {
        let input = self.input.map(|name| cache.input.join(name));
        let words = self.call.iter().map(|word| {
            let input = input.clone().unwrap_or_default().display().to_string();
            word.replace("{input}", &input)
                .replace("{cache}", &cache.input.display().to_string())
                .replace("{work}", &cache.work.display().to_string())
                .replace("{threads}", &threads.to_string())
        });
        let is_postgres = self.name == "postgres";
        Ok(Call {
            program: installed(self.call[0])?,
            arguments: words.skip(1).collect(),
            input: input.filter(|_| !self.call.contains(&"{input}")),
            environment: self.environment.clone(),
            user: postgres_user().filter(|_| is_postgres),
        })
    }
}

pub fn installed(name: &str) -> Result<PathBuf> {
    prepare::tool(name).with_context(|| format!("there is no {name}; install it"))
}

/// Reads a file of this package.
fn read(path: &Path) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the user to run PostgreSQL as, because it refuses to run as root.
fn postgres_user() -> Option<u32> {
    const NOBODY: u32 = 65534;
    // SAFETY: the call takes no arguments and touches no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    is_root.then_some(NOBODY)
}

fn database(cache: &Cache) -> Result<()> {
    let folder = cache.input.join("postgres");
    if folder.join("made").is_file() {
        return Ok(());
    }
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder)?;
    let mut words = vec![installed("initdb")?.display().to_string()];
    if let Some(user) = postgres_user() {
        chown(&folder, Some(user), Some(user))?;
        let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
        let setpriv = ["setpriv", &user, &group, "--clear-groups"];
        words.splice(0..0, setpriv.map(str::to_owned));
    }
    let options = "--no-sync --no-locale --encoding=UTF8 --username=postgres -D";
    words.extend(options.split(' ').map(str::to_owned));
    words.push(folder.display().to_string());
    launch::helper(&words[0], &words[1..])?;
    fs::write(folder.join("made"), "")?;
    Ok(())
}

/// Returns all programs, loads first.
pub fn all() -> Result<Vec<Program>> {
    serde_json::from_str(include_str!("../../programs.json")).context("bench/programs.json")
}

/// Returns the programs that `names` ask for, in the order of [`all`]. `all`, `loads`, `real` and
/// `attacks` stand for several programs; all but the last one leave out attacks.
pub fn choose(names: &[String]) -> Result<Vec<Program>> {
    let all = all()?;
    let stands_for = |name: &str, program: &Program| match name {
        "all" => !program.attack,
        "loads" => program.source.is_some() && !program.attack,
        "attacks" => program.attack,
        "real" => program.source.is_none(),
        name => program.name == name,
    };
    for name in names {
        if !all.iter().any(|program| stands_for(name, program)) {
            let known: Vec<_> = all.iter().map(|program| program.name).collect();
            bail!(
                "program '{name}' is not known; give all, loads, real, attacks, or some of {}",
                known.join(", ")
            );
        }
    }
    let chosen = |program: &Program| names.iter().any(|name| stands_for(name, program));
    Ok(all.into_iter().filter(chosen).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(texts: &[&str]) -> Result<Vec<&'static str>> {
        let texts: Vec<_> = texts.iter().map(|&text| text.to_owned()).collect();
        Ok(choose(&texts)?.iter().map(|program| program.name).collect())
    }

    #[test]
    fn programs_are_chosen_by_name_and_by_kind() {
        assert_eq!(names(&["phases", "larson"]).unwrap(), ["larson", "phases"]);
        let (loads, real) = (names(&["loads"]).unwrap(), names(&["real"]).unwrap());
        assert_eq!(names(&["all"]).unwrap(), [loads.clone(), real].concat());
        assert_eq!(names(&["loads", "larson"]).unwrap(), loads);
        assert_eq!(
            names(&["attacks"]).unwrap(),
            ["robson", "ladder", "sleepers"]
        );
    }

    #[test]
    fn an_unknown_program_is_an_error_that_lists_the_known_ones() {
        let error = names(&["nosuch"]).unwrap_err().to_string();
        assert!(
            error.contains("'nosuch'") && error.contains("larson"),
            "{error}"
        );
    }

    #[test]
    fn names_are_unique_and_every_source_exists() {
        let all = all().unwrap();
        let mut names: Vec<_> = all.iter().map(|program| program.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all.len());
        for program in all {
            match program.source {
                Some(source) => assert!(read(&Path::new("loads").join(source)).is_ok(), "{source}"),
                None => assert!(!program.call.is_empty(), "{}", program.name),
            }
        }
    }
}
