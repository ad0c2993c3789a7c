//! The sections of both architectures obey the kernel's rules with one disturbance, and the checker
//! finds faults. `cargo run --release -p pinfold-prove` allows two disturbances, and makes all
//! mutants.

use pinfold_prove::image::Arch;
use pinfold_prove::machine::Rules;
use pinfold_prove::mutants::mutants;
use pinfold_prove::probe::{Built, build};
use pinfold_prove::report::{check, subject};
use pinfold_prove::scenarios::{NAMES, scenarios};
use pinfold_prove::scene::Subject;
use std::sync::LazyLock;

/// The libraries that can be built here.
static SUBJECTS: LazyLock<Vec<Subject>> = LazyLock::new(|| {
    let mut subjects = Vec::new();
    for arch in [Arch::X86, Arch::Arm] {
        match build(arch).expect("a library") {
            Built::Library(library) => subjects.push(subject(&library).expect("known code")),
            Built::Missing(what) => eprintln!("skipped for {}: {what}", arch.name()),
        }
    }
    subjects
});

// Each operation takes effect exactly once or not at all, under the rules of both versions.
#[test]
fn the_sections_obey_the_rules() {
    for subject in &*SUBJECTS {
        for name in NAMES {
            // The ids are the difference between the rules, and all sections use them alike.
            let rules = match name {
                "pop" => &[Rules::Version1, Rules::Version2][..],
                _ => &[Rules::Version2],
            };
            for &rules in rules {
                let verdict = check(subject, rules, &scenarios(name, 1, false), None);
                let found = verdict.found.map(|found| (found.scenario, found.violation));
                assert_eq!(
                    found,
                    None,
                    "{} {name} {rules:?}",
                    subject.image.arch.name()
                );
            }
        }
    }
}

// A kernel that does not abort a preempted thread breaks every section.
#[test]
fn the_bug_of_linux_6_19_is_found() {
    let is_arm = |subject: &&Subject| subject.image.arch == Arch::Arm;
    for subject in SUBJECTS.iter().filter(is_arm) {
        for name in NAMES {
            let verdict = check(subject, Rules::Arm619, &scenarios(name, 1, false), None);
            assert!(verdict.found.is_some(), "{name}");
        }
    }
}

// The section must cover its commit, and nothing behind it.
#[test]
fn a_moved_commit_is_found() {
    for subject in &*SUBJECTS {
        for name in NAMES {
            let moved = |what: &str| what.starts_with("the section");
            let all = mutants(subject.program(name)).into_iter();
            let all: Vec<_> = all.filter(|mutant| moved(&mutant.what)).collect();
            assert_eq!(all.len(), 3);
            for mutant in all.iter().filter(|mutant| mutant.equivalent.is_none()) {
                let disturbances = if mutant.what.contains("late") { 2 } else { 1 };
                let scenarios = scenarios(name, disturbances, false);
                let verdict = check(subject, Rules::Version2, &scenarios, Some(&mutant.program));
                let arch = subject.image.arch.name();
                assert!(verdict.found.is_some(), "{arch} {name}: {}", mutant.what);
            }
        }
    }
}
