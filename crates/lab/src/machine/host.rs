//! The kind of host that a run was made on. Figures of different kinds are not comparable.

use super::Primitives;
use serde::Deserialize;

/// How many times as long each primitive may take on one of two hosts of the same kind, in the
/// order of [`Primitives::named`]. Runs on one host differ less.
const FACTORS: [f64; 6] = [1.5, 5.0, 2.0, 5.0, 3.0, 3.0];

/// What a saved run says about its host. All of it may be wrong, because it comes from a file.
#[derive(Clone, Debug, Deserialize)]
pub struct Host {
    /// The CPU's model name.
    pub cpu: String,
    /// The processor architecture.
    pub architecture: String,
    /// What the host's primitives cost. All are absent in runs of a version that did not measure
    /// them.
    #[serde(default)]
    pub primitives: Primitives,
}

impl Host {
    /// Returns how this host and the `new` one differ, or `None` if they are of one kind. Compares
    /// only primitives that both runs could measure.
    pub fn difference(&self, new: &Host) -> Option<String> {
        for (what, old, new) in [
            ("architecture", &self.architecture, &new.architecture),
            ("CPU model", &self.cpu, &new.cpu),
        ] {
            if old != new {
                return Some(format!(
                    "the {what} was {old:?} in the old run, and {new:?} in the new"
                ));
            }
        }
        let old = self.primitives.named();
        let pairs = old.into_iter().zip(new.primitives.named()).zip(FACTORS);
        pairs
            .into_iter()
            .find_map(|(((name, old), (_, new)), factor)| {
                let was_shown = |cycles: &f64| *cycles > 0.0;
                let (old, new) = (old.filter(was_shown)?, new.filter(was_shown)?);
                (old.max(new) > factor * old.min(new)).then(|| {
                format!(
                    "a {name} took {old} cycles in the old run, and {new} in the new: more than \
                     {factor} times as long on one of the two"
                )
            })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(locked_add: f64, system_call: f64) -> Host {
        Host {
            cpu: "CPU".to_owned(),
            architecture: "x86_64".to_owned(),
            primitives: Primitives {
                locked_add_cycles: Some(locked_add),
                system_call_cycles: Some(system_call),
                tlb_miss_cycles: Some(0.0),
                ..Primitives::default()
            },
        }
    }

    #[test]
    fn hosts_differ_by_model_or_by_what_a_primitive_costs() {
        let old = host(3.0, 200.0);
        assert_eq!(old.difference(&host(4.4, 390.0)), None);
        let why = old.difference(&host(14.2, 200.0)).unwrap();
        assert!(
            why.contains("a locked add took 3 cycles") && why.contains("14.2"),
            "{why}"
        );
        let why = host(3.0, 1000.0).difference(&old).unwrap();
        assert!(why.contains("a system call took 1000 cycles"), "{why}");
        let mut other = host(3.0, 200.0);
        other.cpu = "other".to_owned();
        assert!(old.difference(&other).unwrap().contains("CPU model"));
    }

    #[test]
    fn a_primitive_that_one_run_could_not_measure_does_not_count() {
        let mut new = host(3.0, 200.0);
        new.primitives.tlb_miss_cycles = Some(40.0);
        new.primitives.cache_line_cycles = Some(40.0);
        assert_eq!(host(3.0, 200.0).difference(&new), None);
    }
}
