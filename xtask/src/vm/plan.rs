//! The runs of the test binaries: their settings and time limits.

use super::binaries::Binary;

/// One run of a test binary.
pub struct Run {
    pub name: String,
    /// Seconds after which the run counts as hanging.
    pub limit: u32,
    /// Settings, the program and its arguments, in the form that `env` takes.
    pub words: Vec<String>,
}

const LIMIT: u32 = 120;
/// The kernel has restartable sequences but no concurrency ids, so these are its backends.
const BOTH: &[&str] = &["cpu", "off"];
const ONE: &[&str] = &["cpu"];

/// Test binaries that take twice as long as the others: their settings and backends.
///
/// Tests that read their duration from the environment are shortened, because emulation is about 20
/// times slower.
const SPECIAL: &[(&str, &[&str], &[&str])] = &[
    ("operations", &[], BOTH),
    ("counter", &[], BOTH),
    ("counter_hostile", &[], BOTH),
    ("counter_litmus", &["PINFOLD_LITMUS=2000"], BOTH),
    ("slab", &[], BOTH),
    ("machine_quiet", &["PINFOLD_QUIET_SECONDS=30"], ONE),
    ("machine_hotplug", &[], ONE),
    (
        "slab_stress",
        &["PINFOLD_STRESS_SECONDS=3", "PINFOLD_STRESS_TIMER_US=5000"],
        BOTH,
    ),
    (
        "stress",
        &["PINFOLD_STRESS_SECONDS=3", "PINFOLD_STRESS_TIMER_US=2000"],
        BOTH,
    ),
];

/// Returns the runs of the chosen binaries: those whose name contains one of `filters` or equals
/// the text behind `=`. Without filters, all are chosen.
pub fn runs(binaries: &[Binary], filters: &[String]) -> Vec<Run> {
    let fits = |name: &str, filter: &str| match filter.strip_prefix('=') {
        Some(whole) => name == whole,
        None => name.contains(filter),
    };
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|part| fits(name, part));
    let binaries = binaries.iter().filter(|binary| chosen(&binary.name));
    binaries.flat_map(|binary| runs_of(&binary.name)).collect()
}

fn runs_of(name: &str) -> Vec<Run> {
    let special = SPECIAL.iter().find(|special| special.0 == name);
    let (settings, backends, limit) = special.map_or((&[][..], ONE, LIMIT), |special| {
        (special.1, special.2, 2 * LIMIT)
    });
    // Tests of the machine change it, so they run one after the other.
    let whole = name.starts_with("machine_");
    // Other tests start enough threads themselves for the few CPUs that emulate the machine.
    let arguments: &[&str] = match whole {
        true => &["--include-ignored", "--test-threads=1"],
        false => &["--test-threads=1"],
    };
    let one = |backend: &&str| Run {
        name: match backends.len() {
            1 => name.to_owned(),
            _ => format!("{name}:{backend}"),
        },
        limit,
        words: [format!("PINFOLD_RSEQ={backend}")]
            .into_iter()
            .chain(settings.iter().map(|&setting| setting.to_owned()))
            .chain([format!("/tests/{name}")])
            .chain(arguments.iter().map(|&argument| argument.to_owned()))
            .collect(),
    };
    backends.iter().map(one).collect()
}

/// Returns the list that vm/init executes.
pub fn script(runs: &[Run], environment: &[(&str, String)], shell: Option<&str>) -> String {
    let mut text = String::new();
    for (name, value) in environment {
        text += &format!("export {name}={}\n", quoted(value));
    }
    for run in runs {
        let words: Vec<_> = run.words.iter().map(|word| quoted(word)).collect();
        text += &format!("run {} {} {}\n", run.name, run.limit, words.join(" "));
    }
    if let Some(command) = shell {
        text += &format!("run shell 86400 sh -c {}\n", quoted(command));
    }
    text
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_choose_binaries_and_machine_tests_include_ignored_ones() {
        let binary = |name: &str| Binary {
            name: name.to_owned(),
            path: "/x".into(),
        };
        let binaries = ["operations", "machine_cpus", "slab", "topology"].map(binary);
        let names = |filters: &[&str]| -> Vec<String> {
            let filters: Vec<_> = filters.iter().map(|&part| part.to_owned()).collect();
            runs(&binaries, &filters)
                .into_iter()
                .map(|run| run.name)
                .collect()
        };
        assert_eq!(names(&["topo", "machine_"]), ["machine_cpus", "topology"]);
        assert_eq!(names(&["operations"]), ["operations:cpu", "operations:off"]);
        assert_eq!(names(&["=slab"]), ["slab:cpu", "slab:off"]);
        assert!(names(&["=sla"]).is_empty());
        assert_eq!(names(&[]).len(), 6);
        let script = script(
            &runs(&binaries, &["machine_".to_owned()]),
            &[],
            Some("echo 'x'"),
        );
        assert_eq!(
            script,
            "run machine_cpus 120 'PINFOLD_RSEQ=cpu' '/tests/machine_cpus' '--include-ignored' '--test-threads=1'\n\
             run shell 86400 sh -c 'echo '\\''x'\\'''\n"
        );
    }
}
