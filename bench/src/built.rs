//! How the peers in this program were built. The facts come from the program file itself, because
//! the environment and the manifests may have changed since the build.

use object::{Object, ObjectSection};
use serde::Serialize;
use std::fs;

/// Facts read from the program file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Built {
    /// The compilers whose objects are in the program.
    pub compilers: Vec<String>,
    /// Peers built with their assertions, which make them up to 50 times slower than in their
    /// users' builds.
    pub with_assertions: Vec<&'static str>,
}

/// For each peer, a text that is in the program only if the peer was built with assertions. `~`
/// stands for `rt`, so that this table does not itself put the text into the program.
const ASSERTIONS: [(&str, &str); 2] = [
    ("snmalloc", "asse~ fail: {} in {} on {}"),
    ("tcmalloc", "Asse~IsFull(const absl::container_internal::"),
];

impl Built {
    /// Reads the program file. Returns empty facts if it cannot be read.
    pub fn read() -> Built {
        let Ok(program) = fs::read("/proc/self/exe") else {
            return Built::default();
        };
        let with_assertions = (ASSERTIONS.iter())
            .filter(|(_, text)| contains(&program, text.replace('~', "rt").as_bytes()))
            .map(|&(peer, _)| peer)
            .collect();
        Built {
            compilers: compilers(&program).unwrap_or_default(),
            with_assertions,
        }
    }

    /// Returns a line for each reason why the peers' figures are unfair.
    pub fn warnings(&self) -> Vec<String> {
        (self.with_assertions.iter())
            .map(|peer| {
                format!(
                    "warning: {peer} was built with assertions and is far slower than in a release build: see bench/README.md"
                )
            })
            .collect()
    }
}

fn contains(program: &[u8], text: &[u8]) -> bool {
    (program.windows(text.len())).any(|window| window[0] == text[0] && window == text)
}

/// Returns the texts that compilers leave in a program's `.comment` section.
fn compilers(program: &[u8]) -> object::Result<Vec<String>> {
    let program = object::File::parse(program)?;
    let section = program
        .section_by_name(".comment")
        .map(|found| found.data());
    let mut names: Vec<_> = (section.unwrap_or(Ok(&[]))?)
        .split(|&byte| byte == 0)
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .filter(|name| !name.is_empty() && !name.starts_with("Linker"))
        .collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_names_its_compiler() {
        let compilers = Built::read().compilers;
        assert!(
            compilers.iter().any(|name| name.contains("rustc")),
            "{compilers:?}"
        );
    }
}
