//! The programs: loads, which are small programs of this package, and real programs of the system.

use super::prepare::Cache;
use super::real::{self, Real};
use anyhow::{Result, bail};
use std::path::PathBuf;

/// A program to run.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name in `--programs`.
    pub name: &'static str,
    /// What the program does, for the table.
    pub what: &'static str,
    /// The number of threads: one, or as many as the run asks for.
    pub threads: Threads,
    /// How the program is made and started.
    pub work: Work,
}

/// How many threads a program has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Threads {
    One,
    Asked,
}

/// How a program is made and started.
#[derive(Clone, Debug)]
pub enum Work {
    /// A source in bench/loads that is compiled.
    Load {
        source: &'static str,
        defines: &'static [&'static str],
    },
    /// An installed program.
    Real(&'static Real),
}

impl Program {
    /// Returns the program's number of threads when a run asks for `asked`.
    pub fn threads(&self, asked: u32) -> u32 {
        match self.threads {
            Threads::One => 1,
            Threads::Asked => asked,
        }
    }
}

/// The sources of the loads, of the launcher, and of the probe.
const SOURCES: &[(&str, &str)] = &[
    ("load.h", include_str!("../../loads/load.h")),
    ("alloc-test.c", include_str!("../../loads/alloc-test.c")),
    ("cache.c", include_str!("../../loads/cache.c")),
    ("drift.c", include_str!("../../loads/drift.c")),
    ("glibc-simple.c", include_str!("../../loads/glibc-simple.c")),
    ("glibc-thread.c", include_str!("../../loads/glibc-thread.c")),
    ("large.c", include_str!("../../loads/large.c")),
    ("larson.cc", include_str!("../../loads/larson.cc")),
    ("launch.c", include_str!("../../loads/launch.c")),
    ("mleak.c", include_str!("../../loads/mleak.c")),
    ("mstress.c", include_str!("../../loads/mstress.c")),
    ("phases.c", include_str!("../../loads/phases.c")),
    ("probe.c", include_str!("../../loads/probe.c")),
    (
        "producer-consumer.c",
        include_str!("../../loads/producer-consumer.c"),
    ),
    ("realloc.c", include_str!("../../loads/realloc.c")),
    ("rptest.c", include_str!("../../loads/rptest.c")),
    ("xmalloc.c", include_str!("../../loads/xmalloc.c")),
];

/// Writes the sources to the cache folder and returns their folder.
pub fn write_sources(cache: &Cache) -> Result<PathBuf> {
    for (name, text) in SOURCES {
        cache.write_input(name, text)?;
    }
    Ok(cache.input.clone())
}

/// A load's name, source, definitions, threads and purpose.
type Load = (
    &'static str,
    &'static str,
    &'static [&'static str],
    Threads,
    &'static str,
);

const LOADS: &[Load] = {
    use Threads::{Asked, One};
    &[
        (
            "larson",
            "larson.cc",
            &[],
            Asked,
            "a server's threads replace random blocks and hand them on to their successors",
        ),
        (
            "larson-sized",
            "larson.cc",
            &["SIZED"],
            Asked,
            "the same as larson, with sized operator delete",
        ),
        (
            "xmalloc",
            "xmalloc.c",
            &[],
            Asked,
            "threads free batches of blocks that other threads allocated",
        ),
        (
            "cache-scratch",
            "cache.c",
            &["SCRATCH"],
            Asked,
            "threads write their own blocks, next to one that another thread allocated",
        ),
        (
            "cache-thrash",
            "cache.c",
            &[],
            Asked,
            "threads write their own blocks",
        ),
        (
            "alloc-test",
            "alloc-test.c",
            &[],
            Asked,
            "threads fill and empty random places of a large table",
        ),
        (
            "mstress",
            "mstress.c",
            &[],
            Asked,
            "blocks of all sizes, exchanged by threads that end",
        ),
        (
            "rptest",
            "rptest.c",
            &[],
            Asked,
            "thousands of blocks up to 16 KiB, and batches for the neighbour",
        ),
        (
            "mleak",
            "mleak.c",
            &[],
            Asked,
            "twelve thousand short threads",
        ),
        (
            "malloc-large",
            "large.c",
            &[],
            One,
            "twenty blocks of 5 to 25 MiB",
        ),
        (
            "large",
            "large.c",
            &["SIZES_2_64"],
            One,
            "six blocks of 2 to 64 MiB",
        ),
        (
            "glibc-simple",
            "glibc-simple.c",
            &[],
            One,
            "batches of one size",
        ),
        (
            "glibc-thread",
            "glibc-thread.c",
            &[],
            Asked,
            "threads replace blocks of 4 bytes to 32 KiB",
        ),
        (
            "phases",
            "phases.c",
            &[],
            One,
            "100 MiB of one size after the other",
        ),
        (
            "drift",
            "drift.c",
            &[],
            One,
            "57 MiB of sizes that grow; settled memory is with all blocks in use",
        ),
        (
            "producer-consumer",
            "producer-consumer.c",
            &[],
            Asked,
            "messages through rings between threads",
        ),
        ("realloc", "realloc.c", &[], One, "buffers that grow"),
    ]
};

/// Returns all programs, loads first.
pub fn all() -> Vec<Program> {
    let loads = LOADS
        .iter()
        .map(|&(name, source, defines, threads, what)| Program {
            name,
            what,
            threads,
            work: Work::Load { source, defines },
        });
    let reals = real::ALL.iter().map(|real| Program {
        name: real.name,
        what: real.what,
        threads: real.threads,
        work: Work::Real(real),
    });
    loads.chain(reals).collect()
}

/// Returns the programs that `names` ask for, in the order of [`all`]. `all`, `loads` and `real`
/// stand for several programs.
pub fn choose(names: &[String]) -> Result<Vec<Program>> {
    let all = all();
    let stands_for = |name: &str, program: &Program| match name {
        "all" => true,
        "loads" => matches!(program.work, Work::Load { .. }),
        "real" => matches!(program.work, Work::Real(_)),
        name => program.name == name,
    };
    for name in names {
        if !all.iter().any(|program| stands_for(name, program)) {
            let known: Vec<_> = all.iter().map(|program| program.name).collect();
            bail!(
                "program '{name}' is not known; give all, loads, real, or some of {}",
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
        let mut names: Vec<_> = all().iter().map(|program| program.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for (_, source, ..) in LOADS {
            assert!(SOURCES.iter().any(|(name, _)| name == source), "{source}");
        }
    }
}
