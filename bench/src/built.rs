//! How the peers in this program were built. The facts come from the program file itself, because
//! the environment and the manifests may have changed since the build.

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
fn compilers(program: &[u8]) -> Option<Vec<String>> {
    let section = comment_section(program)?;
    let mut names: Vec<_> = section
        .split(|&byte| byte == 0)
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .filter(|name| !name.is_empty() && !name.starts_with("Linker"))
        .collect();
    names.sort_unstable();
    names.dedup();
    Some(names)
}

/// Finds `.comment` in a little-endian 64-bit ELF file.
///
/// The ELF header has the section headers' offset at 40, and their size, their number and the index
/// of the name table at 58, 60 and 62. A section header has the name's offset at 0, and the
/// section's offset and size at 24 and 32.
fn comment_section(elf: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(usize::from(u16::from_le_bytes(bytes(elf, at)?)));
    let long = |at: usize| usize::try_from(u64::from_le_bytes(bytes(elf, at)?)).ok();
    let (table, size, count, names) = (long(40)?, word(58)?, word(60)?, word(62)?);
    let header = |index: usize| table.checked_add(index * size);
    let names = elf.get(long(header(names)?.checked_add(24)?)?..)?;
    for index in 0..count {
        let header = header(index)?;
        let name = u32::from_le_bytes(bytes(elf, header)?) as usize;
        if names.get(name..)?.starts_with(b".comment\0") {
            let (at, length) = (long(header + 24)?, long(header + 32)?);
            return elf.get(at..)?.get(..length);
        }
    }
    None
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..)?.get(..N)?.try_into().ok()
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

    #[test]
    fn a_file_that_is_not_elf_has_no_comment_section() {
        assert_eq!(comment_section(b""), None);
        assert_eq!(comment_section(&[0xff; 100]), None);
    }
}
