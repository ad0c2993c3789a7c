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

/// The backends of a test binary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backends {
    /// Each backend that the kernel has.
    All,
    /// The best backend that the kernel has.
    Best,
    /// Only `cpu`, because the test is about the numbers of CPUs.
    Cpu,
}
use Backends::{All, Best, Cpu};

/// What the runs depend on.
pub struct Choice<'a> {
    /// Words that choose the binaries: those whose name contains one of them, or equals the text
    /// behind `=`. Without words, all are chosen.
    pub filters: &'a [String],
    /// The backends of all binaries, instead of those in the table. Empty for those in the table.
    pub backends: &'a [Backend],
    /// Whether the kernel has concurrency ids.
    pub ids: bool,
}

/// A value of `PINFOLD_RSEQ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    Cid,
    Cpu,
    Off,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Backend::Cid => "cid",
            Backend::Cpu => "cpu",
            Backend::Off => "off",
        }
    }
}

impl Backends {
    fn list(self, ids: bool) -> &'static [Backend] {
        use Backend::{Cid, Cpu, Off};
        match (self, ids) {
            (All, true) => &[Cid, Cpu, Off],
            (All, false) => &[Cpu, Off],
            (Best, true) => &[Cid],
            (Best, false) | (Backends::Cpu, _) => &[Cpu],
        }
    }
}

/// Test binaries that take twice as long as the others: their settings and backends.
///
/// Tests that read their duration from the environment are shortened, because emulation is about 20
/// times slower.
const SPECIAL: &[(&str, &[&str], Backends)] = &[
    ("operations", &[], All),
    ("counter", &[], All),
    ("counter_hostile", &[], All),
    ("counter_tree", &[], All),
    ("counter_litmus", &["PINFOLD_LITMUS=2000"], All),
    ("slab", &[], All),
    ("machine_quiet", &["PINFOLD_QUIET_SECONDS=30"], Cpu),
    ("machine_hotplug", &[], Cpu),
    (
        "slab_stress",
        &["PINFOLD_STRESS_SECONDS=3", "PINFOLD_STRESS_TIMER_US=5000"],
        All,
    ),
    ("slab_storm", &["PINFOLD_STORM_SECONDS=20"], All),
    (
        "stress",
        &["PINFOLD_STRESS_SECONDS=3", "PINFOLD_STRESS_TIMER_US=2000"],
        All,
    ),
];

/// Returns the runs of the chosen binaries.
pub fn runs(binaries: &[Binary], choice: &Choice) -> Vec<Run> {
    let fits = |name: &str, filter: &str| match filter.strip_prefix('=') {
        Some(whole) => name == whole,
        None => name.contains(filter),
    };
    let filters = choice.filters;
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|part| fits(name, part));
    let binaries = binaries.iter().filter(|binary| chosen(&binary.name));
    let runs = binaries.flat_map(|binary| runs_of(&binary.name, choice));
    runs.collect()
}

fn runs_of(name: &str, choice: &Choice) -> Vec<Run> {
    let special = SPECIAL.iter().find(|special| special.0 == name);
    let (settings, backends, limit) = special.map_or((&[][..], Best, LIMIT), |special| {
        (special.1, special.2, 2 * LIMIT)
    });
    let backends = match choice.backends {
        [] => backends.list(choice.ids),
        chosen => chosen,
    };
    // Tests of the machine change it, so they run one after the other.
    let whole = name.starts_with("machine_");
    // Other tests start enough threads themselves for the few CPUs that emulate the machine.
    let arguments: &[&str] = match whole {
        true => &["--include-ignored", "--test-threads=1"],
        false => &["--test-threads=1"],
    };
    let one = |backend: &Backend| Run {
        name: match backends.len() {
            1 => name.to_owned(),
            _ => format!("{name}:{}", backend.name()),
        },
        limit,
        words: [format!("PINFOLD_RSEQ={}", backend.name())]
            .into_iter()
            .chain(settings.iter().map(|&setting| setting.to_owned()))
            .chain([format!("/tests/{name}")])
            .chain(arguments.iter().map(|&argument| argument.to_owned()))
            .collect(),
    };
    backends.iter().map(one).collect()
}

/// Returns the run that switches on the kernel's debug mode of restartable sequences. In this mode
/// the kernel checks each field that it shares with a thread, and kills the thread if one is wrong.
pub fn rseq_debug() -> Run {
    let file = "/sys/kernel/debug/rseq/debug";
    let script = format!(
        "mount -t debugfs debug /sys/kernel/debug; [ -e {file} ] && echo 1 >{file} && \
         [ \"$(cat {file})\" = on -o \"$(cat {file})\" = 1 -o \"$(cat {file})\" = Y ] || \
         {{ echo 'the debug mode is not on: this kernel has no {file}'; exit 1; }}"
    );
    Run {
        name: "rseq-debug".to_owned(),
        limit: LIMIT,
        words: ["sh", "-c", &script].map(str::to_owned).into(),
    }
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

    fn choice<'a>(filters: &'a [String], backends: &'a [Backend], ids: bool) -> Choice<'a> {
        Choice {
            filters,
            backends,
            ids,
        }
    }

    #[test]
    fn filters_choose_binaries_and_machine_tests_include_ignored_ones() {
        let binary = |name: &str| Binary {
            name: name.to_owned(),
            path: "/x".into(),
        };
        let binaries = ["operations", "machine_cpus", "slab", "topology"].map(binary);
        let names = |filters: &[&str]| -> Vec<String> {
            let filters: Vec<_> = filters.iter().map(|&part| part.to_owned()).collect();
            runs(&binaries, &choice(&filters, &[], false))
                .into_iter()
                .map(|run| run.name)
                .collect()
        };
        assert_eq!(names(&["topo", "machine_"]), ["machine_cpus", "topology"]);
        assert_eq!(names(&["operations"]), ["operations:cpu", "operations:off"]);
        assert_eq!(names(&["=slab"]), ["slab:cpu", "slab:off"]);
        assert!(names(&["=sla"]).is_empty());
        assert_eq!(names(&[]).len(), 6);
        let names = |backends: &[Backend]| -> Vec<String> {
            let runs = runs(&binaries, &choice(&[], backends, true));
            runs.into_iter().map(|run| run.name).collect()
        };
        let slabs = ["slab:cid", "slab:cpu", "slab:off"];
        assert_eq!(names(&[])[4..7], slabs);
        assert_eq!(names(&[Backend::Cid, Backend::Cpu]).len(), 8);
        let script = script(
            &runs(&binaries, &choice(&["machine_".to_owned()], &[], false)),
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
