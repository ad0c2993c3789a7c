//! The licenses of the crates that the installed files contain.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

/// What the names of the files with licenses and notices begin with.
const FILES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];
/// What was written before this project, and by whom, but is no crate.
const STANDARD: &str = "Rust's standard library (MIT OR Apache-2.0), by the Rust Project's \
    contributors; the texts below have these licenses";

/// A crate that is part of the built files.
pub struct Crate {
    /// Its name, version and license, as `libc 0.2 (MIT OR Apache-2.0)`.
    pub title: String,
    folder: String,
}

/// Returns the crates that the members of this workspace contain, without those of the workspace.
pub fn crates(members: &[&str]) -> Result<Vec<Crate>> {
    let mut metadata = Command::new(env!("CARGO"));
    metadata.args(["metadata", "--format-version=1", "--filter-platform"]);
    metadata.arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH));
    let said = metadata.output().context("cargo metadata")?;
    if !said.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&said.stderr));
    }
    let said: Value = serde_json::from_slice(&said.stdout)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages = list(&said["packages"]);
    let packages: BTreeMap<String, &Value> = packages.iter().map(|p| (text(&p["id"]), p)).collect();
    let nodes = list(&said["resolve"]["nodes"]);
    let nodes: BTreeMap<String, &Value> = nodes.iter().map(|n| (text(&n["id"]), n)).collect();

    let is_member = |package: &&Value| members.contains(&text(&package["name"]).as_str());
    let roots = packages.values().filter(|package| is_member(package));
    let mut left: Vec<String> = roots.map(|package| text(&package["id"])).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = left.pop() {
        let is_macro = list(&packages[&id]["targets"])
            .iter()
            .any(|target| list(&target["kind"]).contains(&"proc-macro".into()));
        if is_macro || !seen.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes[&id]["deps"]) {
            // The kind of dependencies for tests and build scripts has a name.
            if list(&dependency["dep_kinds"])
                .iter()
                .any(|kind| kind["kind"].is_null())
            {
                left.push(text(&dependency["pkg"]));
            }
        }
    }
    let outside = seen
        .iter()
        .map(|id| packages[id])
        .filter(|package| !package["source"].is_null());
    let mut crates: Vec<Crate> = outside
        .map(|package| {
            let [name, version, license, manifest] =
                ["name", "version", "license", "manifest_path"].map(|key| text(&package[key]));
            Crate {
                title: format!("{name} {version} ({license})"),
                folder: manifest.trim_end_matches("Cargo.toml").to_owned(),
            }
        })
        .collect();
    crates.sort_by(|a, b| a.title.cmp(&b.title));
    Ok(crates)
}

/// Returns the texts of the licenses of these crates, each once, below the crates that have it.
pub fn third_party(crates: &[Crate]) -> Result<String> {
    let mut owners: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for each in crates {
        let mut texts = Vec::new();
        for entry in fs::read_dir(&each.folder).context("a crate's folder")? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().to_uppercase();
            if FILES.iter().any(|start| name.starts_with(start)) && entry.file_type()?.is_file() {
                texts.push(plain(&fs::read(entry.path())?));
            }
        }
        if texts.is_empty() {
            bail!(
                "{} has no text of its license in {}",
                each.title,
                each.folder
            );
        }
        for text in texts {
            owners.entry(text).or_default().push(&each.title);
        }
    }
    let mut sections: Vec<(Vec<&str>, String)> = owners.into_iter().map(|(a, b)| (b, a)).collect();
    sections.sort();
    let mut all = format!(
        "The files of Pinfold contain parts of these works. Their licenses follow.\n\n{STANDARD}\n"
    );
    for each in crates {
        all += &format!("{}\n", each.title);
    }
    for (titles, text) in sections {
        all += &format!("\n{:=<80}\n{}\n\n{text}", "", titles.join("\n"));
    }
    Ok(all)
}

/// Returns a text with plain ends of lines, so that equal texts are recognised.
fn plain(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    format!("{}\n", lines.join("\n").trim_matches('\n'))
}
