//! Measures all tables. For each number of threads there are rounds. In each round every subject's
//! region is filled once, interleaved.

use super::amount::default_region;
use super::subjects::{Contenders, SubjectName, contenders};
use super::{KINDS, Kind, Plan, Row, crew, title};
use crate::figures::Progress;
use crate::stats::median;
use anyhow::{Context, Result};
use pinfold_rseq::Backend;

/// The results, in the order of the tables.
pub struct Measured {
    pub rows: Vec<Row>,
    /// Remarks that a reader needs to judge the rows.
    pub notes: Vec<String>,
}

pub fn measure(plan: &Plan, progress: &Progress) -> Result<Measured> {
    let mut measured = Measured {
        rows: Vec::new(),
        notes: Vec::new(),
    };
    if pinfold_rseq::backend() == Backend::Atomic {
        let why = pinfold_rseq::missing();
        let note = format!("Pinfold runs on atomics: restartable sequences are {why}.");
        measured.notes.push(note);
    }
    progress.begin(KINDS.len() * plan.threads * (plan.rounds as usize + 1));
    for kind in KINDS {
        let mut contenders = contenders(kind, plan.pages, plan.zero, &mut measured.notes);
        for threads in 1..=plan.threads {
            cell(
                plan,
                kind,
                &mut contenders,
                threads,
                &mut measured,
                progress,
            )?;
        }
    }
    Ok(measured)
}

/// The samples of one subject, one for each round.
#[derive(Default)]
struct Samples {
    by_cpu: Vec<f64>,
    by_wall: Vec<f64>,
    /// Faults that the kernel served, in percent of the pages.
    percent: Vec<f64>,
}

fn cell(
    plan: &Plan,
    kind: Kind,
    contenders: &mut Contenders,
    threads: usize,
    measured: &mut Measured,
    progress: &Progress,
) -> Result<()> {
    let count = contenders.len();
    let mut samples: Vec<Samples> = (0..count).map(|_| Samples::default()).collect();
    for round in 0..=plan.rounds as usize {
        // Every other round reverses the order, so that no subject always follows the same one.
        // What the previous subject leaves in the processor's caches changes a figure by some
        // percent.
        let at = |turn| match round % 2 {
            0 => turn,
            _ => (count - turn) % count,
        };
        for at in (0..count).map(at) {
            let ((name, subject), samples) = (&mut contenders[at], &mut samples[at]);
            let lap = subject
                .prepare()
                .and_then(|()| crew::run(&**subject, threads, plan.pages));
            subject.release();
            let lap = lap.with_context(|| name.name())?;
            // Round 0 only brings the memory in.
            if round > 0 {
                let pages = plan.pages as f64;
                // A clock that stood still must not cause a division by zero.
                samples.by_cpu.push(pages / lap.cpu_seconds().max(1e-9));
                samples.by_wall.push(pages / lap.wall_seconds().max(1e-9));
                samples
                    .percent
                    .push(100.0 * lap.kernels_faults as f64 / pages);
            }
        }
        progress.step();
    }
    for ((subject, _), samples) in contenders.iter().zip(samples) {
        measured.look_for_faults(kind, *subject, threads, median(&samples.percent));
        measured.rows.push(Row {
            memory: kind.0,
            policy: kind.1,
            threads,
            subject: *subject,
            same_code_as: subject.same_code_as(kind),
            faults_per_cpu_second: median(&samples.by_cpu),
            faults_per_wall_second: median(&samples.by_wall),
        });
    }
    Ok(())
}

impl Measured {
    /// Returns whether a subject was measured.
    pub fn has(&self, subject: SubjectName) -> bool {
        self.rows.iter().any(|row| row.subject == subject)
    }

    /// Adds a note if the kernel had to bring an arena's pages back in. Then the subject's figures
    /// include the kernel's page faults. A region that is too large causes this.
    fn look_for_faults(&mut self, kind: Kind, subject: SubjectName, threads: usize, percent: f64) {
        if subject == SubjectName::Kernel || percent < 1.0 {
            return;
        }
        let (table, subject) = (title(kind), subject.name());
        let best = default_region();
        self.notes.push(format!(
            "{table}, N = {threads}, {subject}: {percent:.0} % of the pages had left memory, so these \
             figures include the kernel's page faults; try --memory below {best}."
        ));
    }
}
