//! Checks sections and their mutants in all scenarios.

use crate::image::{Arch, Image, Program};
use crate::kernel::Event;
use crate::machine::Rules;
use crate::mutants::{Mutant, mutants};
use crate::scenarios::{NAMES, scenarios};
use crate::scene::{Scenario, Scene, Subject};
use anyhow::{Context, Result};
use std::path::Path;

/// Where a section did what it must not do.
pub struct Found {
    pub scenario: &'static str,
    pub violation: String,
    pub events: Vec<Event>,
}

/// What a check of one section came to.
#[derive(Default)]
pub struct Verdict {
    pub states: usize,
    pub found: Option<Found>,
}

/// The mutants of a section.
#[derive(Default)]
pub struct Tally {
    pub found: usize,
    /// Mutants that are no fault, and why.
    pub equivalent: Vec<(String, &'static str)>,
    /// Mutants that no scenario has found.
    pub missed: Vec<String>,
    /// Mutants that were found although a rule calls them no fault.
    pub wrong: Vec<String>,
}

impl Tally {
    pub fn made(&self) -> usize {
        self.found + self.equivalent.len() + self.missed.len() + self.wrong.len()
    }

    pub fn is_complete(&self) -> bool {
        self.missed.is_empty() && self.wrong.is_empty()
    }
}

/// Reads a library that `probe` has built.
///
/// # Errors
///
/// If a section is missing, or has an instruction that the interpreter does not know.
pub fn subject(library: &Path) -> Result<Subject> {
    let bytes = std::fs::read(library).with_context(|| library.display().to_string())?;
    Subject::new(Image::parse(&bytes)?, &NAMES)
}

/// Runs the scenarios until one finds a violation.
pub fn check(
    subject: &Subject,
    rules: Rules,
    scenarios: &[Scenario],
    mutant: Option<&Program>,
) -> Verdict {
    let mut verdict = Verdict::default();
    for scenario in scenarios {
        // Arm has no trap flag.
        if scenario.stepped && subject.image.arch == Arch::Arm {
            continue;
        }
        // What registers hold before they are set matters in the scenarios that are quick, too.
        let fills = if scenario.budget < 2 { 2 } else { 1 };
        for ones in [true, false].into_iter().take(fills) {
            let (violation, events) = match Scene::new(subject, rules, scenario, mutant, ones) {
                Ok(scene) => {
                    let outcome = scene.run();
                    verdict.states += outcome.states;
                    match outcome.violation {
                        Some(found) => found,
                        None => continue,
                    }
                }
                Err(violation) => (violation, Vec::new()),
            };
            verdict.found = Some(Found {
                scenario: scenario.name,
                violation,
                events,
            });
            return verdict;
        }
    }
    verdict
}

/// Makes every mutant of a section, and counts those that are found.
pub fn count_mutants(subject: &Subject, name: &str, budget: u8) -> Tally {
    let mut tally = Tally::default();
    let all = scenarios(name, budget, false);
    let few = scenarios(name, 1, false);
    for Mutant {
        what,
        program,
        equivalent,
        if_not_found,
    } in mutants(subject.program(name))
    {
        let scenarios = if equivalent.is_some() { &few } else { &all };
        let verdict = check(subject, Rules::Version2, scenarios, Some(&program));
        match (verdict.found, equivalent) {
            (Some(_), None) => tally.found += 1,
            (Some(_), Some(_)) => tally.wrong.push(what),
            (None, _) => match equivalent.or(if_not_found) {
                Some(why) => tally.equivalent.push((what, why)),
                None => tally.missed.push(what),
            },
        }
    }
    tally
}
