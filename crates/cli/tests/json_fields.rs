//! Holds docs/json.md against what the commands print: each field that is printed is documented
//! with its type, and each documented field is printed.

mod program;
mod runs;
mod served;
mod shown;

use pinfold::counter::EventCounter;
use pinfold::export::show;
use program::{Program, ROLE, in_role};
use serde_json::Value;
use served::Server;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    static SHOWN: EventCounter = EventCounter::new();
    SHOWN.add(7);
    show("shown", &SHOWN).unwrap();
    println!("ready {}", std::process::id());
    sleep(Duration::from_secs(120));
}

/// What the document says of a field.
#[derive(Clone, Debug)]
struct Field {
    kind: String,
    is_optional: bool,
    may_be_null: bool,
}

/// The fields of one object, by their paths.
type Fields = BTreeMap<String, Field>;

/// Returns the sections of the document: each heading with the fields of its table.
fn sections() -> BTreeMap<String, Fields> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut sections = BTreeMap::new();
    for section in text.split("\n## ").skip(1) {
        let (heading, body) = section.split_once('\n').unwrap();
        let rows = body.lines().filter(|line| line.starts_with("| `"));
        let fields = rows.map(|row| {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [path, kind, unit, _] = cells[..] else {
                panic!("{row}");
            };
            let path = path.trim_matches('`').to_owned();
            check_unit(&path, unit);
            (path, field(kind))
        });
        let fields: Fields = fields.collect();
        sections.insert(heading.trim_matches('`').to_owned(), fields);
    }
    sections
}

/// The unit is the one that the name says.
fn check_unit(path: &str, unit: &str) {
    let name = path.trim_end_matches(".*");
    for (end, word) in [("_bytes", "bytes"), ("_seconds", "seconds")] {
        assert!(!name.ends_with(end) || unit == word, "{path}: {unit}");
    }
}

fn field(kind: &str) -> Field {
    let (kind, is_optional) = match kind.strip_suffix(", optional") {
        Some(kind) => (kind, true),
        None => (kind, false),
    };
    let (kind, may_be_null) = match kind.strip_suffix(" or null") {
        Some(kind) => (kind, true),
        None => (kind, false),
    };
    let kind = kind.trim_start_matches('[').split(']').next().unwrap();
    Field {
        kind: kind.to_owned(),
        is_optional,
        may_be_null,
    }
}

/// Returns the fields of a command's object, with those of the parts that have sections of their
/// own.
fn fields_of(sections: &BTreeMap<String, Fields>, heading: &str) -> Fields {
    let mut all = sections["Every object"].clone();
    for (path, field) in &sections[heading] {
        let part = match &field.kind[..] {
            "process" => "Process",
            "cache" => "Cache",
            "unread" => "Unread",
            "machine" => "Machine",
            _ => {
                all.insert(path.clone(), field.clone());
                continue;
            }
        };
        all.insert(
            path.clone(),
            Field {
                kind: "object".to_owned(),
                ..field.clone()
            },
        );
        for (name, part) in &sections[part] {
            all.insert(format!("{path}.{name}"), part.clone());
        }
    }
    all
}

/// What was printed of the fields of one section.
struct Check<'c> {
    heading: &'c str,
    fields: &'c Fields,
    seen: BTreeSet<String>,
}

impl Check<'_> {
    /// Checks a value at a path of the object.
    fn value(&mut self, path: &str, value: &Value) {
        let documented = self.fields.get(path);
        let begin = [".", "["].map(|next| format!("{path}{next}"));
        let has_parts = |field: &String| begin.iter().any(|begin| field.starts_with(begin));
        let is_part = path.is_empty() || self.fields.keys().any(has_parts);
        let what = format!("{}: {path}: {value}", self.heading);
        assert!(documented.is_some() || is_part, "{what}: not documented");
        if let Some(field) = documented {
            let fits = match &field.kind[..] {
                "string" => value.is_string(),
                "integer" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                "object" => value.is_object(),
                "list" => value.is_array(),
                "any" => true,
                other => panic!("{what}: there is no type {other}"),
            };
            assert!(fits || (value.is_null() && field.may_be_null), "{what}");
            self.seen.insert(path.to_owned());
            if field.kind == "any" {
                return;
            }
        }
        match value {
            Value::Object(object) => self.object(path, object),
            Value::Array(items) => {
                for item in items {
                    self.value(&format!("{path}[]"), item);
                }
                let item = format!("{path}[]");
                let is_list = self.fields.keys().any(|field| field.starts_with(&item));
                assert!(is_list, "{what}: no list");
                // What an empty list has is known if its items have no parts.
                self.seen.insert(item);
            }
            _ => assert!(documented.is_some(), "{what}: its parts are documented"),
        }
    }

    fn object(&mut self, path: &str, object: &serde_json::Map<String, Value>) {
        let below = |name: &str| match path {
            "" => name.to_owned(),
            _ => format!("{path}.{name}"),
        };
        let star = below("*");
        let has_star = self.fields.keys().any(|field| field.starts_with(&star));
        for (name, value) in object {
            let own = below(name);
            let is_own = self.fields.keys().any(|field| {
                let rest = field.strip_prefix(&own);
                rest.is_some_and(|rest| matches!(rest.chars().next(), None | Some('.' | '[')))
            });
            let own = if !is_own && has_star {
                star.clone()
            } else {
                own
            };
            self.value(&own, value);
        }
        // Each field that is not optional is in each object.
        for (field, documented) in self.fields {
            let name = match path {
                "" => Some(&field[..]),
                _ => field
                    .strip_prefix(path)
                    .and_then(|rest| rest.strip_prefix('.')),
            };
            let name = name.map(|name| name.strip_suffix("[]").unwrap_or(name));
            if let Some(name) = name
                && !name.contains(['.', '[', '*'])
                && !documented.is_optional
            {
                assert!(
                    object.contains_key(name),
                    "{}: {field} is missing",
                    self.heading
                );
            }
        }
    }
}

/// Runs commands, and checks what they print against a section. All fields that are not optional
/// must be seen.
fn check(sections: &BTreeMap<String, Fields>, heading: &str, printed: &[String]) {
    let fields = fields_of(sections, heading);
    let mut check = Check {
        heading,
        fields: &fields,
        seen: BTreeSet::new(),
    };
    let words = heading.strip_prefix("pinfold ").unwrap();
    for text in printed {
        for line in text.lines() {
            let object: Value = serde_json::from_str(line).unwrap_or_else(|why| {
                panic!("{heading}: {why}: {line}");
            });
            let command = object["command"].as_str().unwrap();
            assert!(
                command == words || (command, words) == ("serve", "top"),
                "{line}"
            );
            assert_eq!(object["pinfold"], env!("CARGO_PKG_VERSION"));
            check.value("", &object);
        }
        assert!(!text.is_empty(), "{heading}: nothing was printed");
    }
    for (field, documented) in &fields {
        let is_seen = check.seen.contains(field) || documented.is_optional;
        assert!(
            is_seen,
            "{heading}: {field} is documented and was not printed"
        );
    }
}

/// Runs the command, with `--json`. Returns what it prints.
fn run(words: &str) -> String {
    let words: Vec<&str> = words.split(' ').collect();
    let (out, error, code) = shown::pinfold(&words);
    assert!(matches!(code, Some(0 | 1)), "{words:?}: {error}");
    assert_eq!(out.lines().count(), 1, "{words:?}: {out}");
    out
}

const FRAGMENTS: &str = "heap dump PID --fragmentation --timeout 60 --json";

/// Otherwise a program that reads `--json` could rely on nothing.
#[test]
fn fields_of_processes_are_as_documented() {
    let sections = sections();
    let counts = Program::start(in_role(&[], "shows").env("PINFOLD_SEGMENT", "on"));
    let (lines, ..) = shown::pinfold(&["vmstat", &counts.pid(), "0.05", "2", "--json"]);
    check(&sections, "pinfold vmstat", &[lines]);
    let mut command = Command::new(program::RUN[0]);
    command.args([
        "run",
        "--heap=1",
        "--shepherd",
        "--",
        "sh",
        "-c",
        "echo ready; read line",
    ]);
    let program = Program::start(command.env_remove("LD_PRELOAD"));
    let pid = program.pid();
    let run = |words: &str| run(&words.replace("PID", &pid));
    let ask = |words: &str| run(&format!("{words} --json --timeout 60"));
    check(&sections, "pinfold list", &[run("list --json")]);
    let doctor = [run("doctor --json"), run("doctor PID --json")];
    check(&sections, "pinfold doctor", &doctor);
    check(&sections, "pinfold slabinfo", &[run("slabinfo PID --json")]);
    let (lines, ..) = shown::pinfold(&["stat", &pid, "0.05", "2", "--json"]);
    check(&sections, "pinfold stat", &[lines]);
    check(
        &sections,
        "pinfold heap dump",
        &[run("heap dump PID --json"), run(FRAGMENTS)],
    );
    check(&sections, "pinfold heap start", &[ask("heap start PID")]);
    check(&sections, "pinfold heap stop", &[ask("heap stop PID")]);
    check(&sections, "pinfold trim", &[ask("trim PID")]);
    let all = ask("set PID");
    for field in sections["pinfold set"].keys() {
        if let Some(name) = field.strip_prefix("settings.") {
            assert!(all.contains(&format!("\"{name}\":")), "{field}: {all}");
        }
    }
    let changes = [
        "decay=400",
        "memory-limit=1G",
        "thp=auto",
        "sheaf-budget=8M",
    ];
    let changed = changes.map(|change| ask(&format!("set PID {change}")));
    check(&sections, "pinfold set", &[&[all], &changed[..]].concat());
    let server = Server::start(1000, &[&pid]);
    let status = server.get("/status.json");
    let status = status.split_once("\r\n\r\n").unwrap().1.to_owned();
    let top = [
        run("top --once --json PID"),
        run("top --once --json"),
        status,
    ];
    check(&sections, "pinfold top", &top);
    // A kernel without NUMA has no such numbers.
    if shown::pinfold(&["numastat", &pid]).2 == Some(0) {
        check(
            &sections,
            "pinfold numastat",
            &[run("numastat PID -m --json")],
        );
        if shown::works() {
            check(
                &sections,
                "pinfold migrate",
                &[run("migrate PID all all --json")],
            );
        }
    }
}

/// A process that counts every call shows more, and leaves a report.
#[test]
fn fields_of_counted_calls_are_as_documented() {
    let sections = sections();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stats.json");
    let option = format!("--stats={}", file.display());
    let script = "echo ready $$; read line; ls / > /dev/null; exit 3";
    let mut command = Command::new(program::RUN[0]);
    command.args(["run", &option, "--json", "--", "sh", "-c", script]);
    let mut program = Program::start(command.env_remove("LD_PRELOAD"));
    let pid = program.number("ready").to_string();
    let top = shown::json(&["top", "--once", "--json", &pid]);
    for field in ["requested", "rounding", "live", "in_sheaves"] {
        let value = &top["processes"][0][format!("{field}_bytes")];
        assert!(value.is_u64(), "{field}: {top}");
    }
    check(&sections, "pinfold top", &[top.to_string()]);
    drop(program.process.stdin.take());
    assert_eq!(program.process.wait().unwrap().code(), Some(3));
    let report = std::fs::read_to_string(&file).unwrap();
    check(&sections, "pinfold run --stats", &[report]);
}

#[test]
fn fields_of_policies_and_comparisons_are_as_documented() {
    let sections = sections();
    let root = shown::machine();
    let folder = root.path().to_str().unwrap();
    let policies = ["weighted-interleave=relative:0-1", "bind:0-1@0", "bind:3"];
    let policies = policies.map(|policy| run(&format!("policy --json --root {folder} {policy}")));
    check(&sections, "pinfold policy", &policies);
    let process = root.path().join("proc/7");
    std::fs::create_dir_all(&process).unwrap();
    let numbers: Vec<String> = (4..53).map(|number| number.to_string()).collect();
    std::fs::write(
        process.join("stat"),
        format!("7 (p) S {}\n", numbers.join(" ")),
    )
    .unwrap();
    let maps = "1000 bind:1 heap anon=10 N0=4 N1=6 kernelpagesize_kB=4\n";
    std::fs::write(process.join("numa_maps"), maps).unwrap();
    let checked = run(&format!("policy --check 7 --json --root {folder}"));
    check(&sections, "pinfold policy --check", &[checked]);
    let compared = run("compare --json --rounds 6 -- true");
    check(&sections, "pinfold compare", &[compared]);
}

#[test]
fn fields_of_benchmarks_are_as_documented() {
    let sections = sections();
    for (name, words) in [
        ("bench vmstat", "bench vmstat --rounds 1 --calls 1000"),
        ("bench slab", "bench slab --rounds 1 --calls 300 --size 64"),
        ("bench counter", &format!("bench {}", runs::COUNTER)),
        ("bench pft", "bench pft --rounds 1 --memory 4M"),
        ("jitter", "jitter --seconds 0.2 --interval 20"),
        ("bench all", "bench all --quick --seconds 0.05"),
    ] {
        let printed = run(&format!("{words} --json"));
        check(&sections, &format!("pinfold {name}"), &[printed]);
    }
}

/// A section that no test above reads would promise anything.
#[test]
fn each_section_is_of_a_command_that_is_checked() {
    let this = include_str!("json_fields.rs");
    let parts = ["Every object", "Process", "Cache", "Unread", "Machine"];
    for heading in sections().keys() {
        let name = heading.strip_prefix("pinfold ").unwrap_or(heading);
        let named =
            this.contains(&format!("\"{heading}\"")) || this.contains(&format!("(\"{name}\","));
        assert!(named || parts.contains(&&heading[..]), "{heading}");
    }
}
