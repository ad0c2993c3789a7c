//! The subjects: shared libraries that programs are started with.

use super::prepare::{self, Cache};
use crate::args::Preloaded;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// An allocator that programs run under.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The name in `--subjects`.
    pub name: String,
    /// The library for LD_PRELOAD.
    pub library: PathBuf,
    /// Whether this is a build of Pinfold, which is compared with the peers.
    pub is_pinfold: bool,
    /// Environment variables that its programs are started with.
    pub variables: &'static [(String, String)],
}

/// An element of `--subjects`: a known name, or a name and a shared library.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Spec {
    name: String,
    path: Option<PathBuf>,
}

/// A known subject, as `bench/allocators.json` has it: a Debian package and the name of its
/// library, or C or C++ sources of a crate that this package depends on. Pinfold's is built from
/// this workspace, and glibc is the C library that this program uses.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Known {
    name: String,
    package: Option<String>,
    library: String,
    #[serde(rename = "crate")]
    from: Option<String>,
    /// Paths below the crate's folder.
    sources: Vec<String>,
    includes: Vec<String>,
    /// The compiler and its arguments, without sources, folders and output.
    compile: Vec<String>,
    /// The variables that its programs get: they turn on the heap profile, one sample in 512 KiB,
    /// or choose how Pinfold tells CPUs apart.
    variables: Vec<(String, String)>,
}

static KNOWN: LazyLock<Vec<Known>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../allocators.json")).expect("the list has this form")
});

/// The end of the name of a subject that samples its programs for a heap profile. The rest of the
/// name is that of the same subject without a profile.
pub const PROFILED: &str = "-profiled";

/// The arguments that compile every peer from a crate.
const COMMON: &str = "-O3 -DNDEBUG -fPIC -shared -ftls-model=initial-exec -pthread -w";

fn parse(texts: &[String], pinfold: Option<&Path>) -> Result<Vec<Spec>> {
    let mut specs = Vec::new();
    let mut names = HashSet::new();
    for text in texts {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) => (name, Some(PathBuf::from(path))),
            None if is_workspace(text) => (text.as_str(), pinfold.map(Path::to_owned)),
            None => (text.as_str(), None),
        };
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        ensure!(
            !name.is_empty() && name.chars().all(is_plain),
            "subject '{text}': a name has letters, digits, '-', '_' and '.' only; write NAME or NAME=PATH"
        );
        if let Some(path) = &path {
            ensure!(
                path.is_file(),
                "subject {name}: there is no file {}; give the path of a shared library",
                path.display()
            );
        } else if known(name).is_none() {
            let known: Vec<_> = KNOWN.iter().map(|known| known.name.as_str()).collect();
            bail!(
                "subject '{name}' is not known; known are {}; for another one write {name}=PATH",
                known.join(", ")
            );
        }
        ensure!(
            names.insert(name.to_owned()),
            "subject {name} is given twice; give each build a name of its own: NAME=PATH"
        );
        specs.push(Spec {
            name: name.to_owned(),
            path,
        });
    }
    ensure!(
        pinfold.is_none() || texts.iter().any(|text| is_workspace(text)),
        "--pinfold is the library of the subject pinfold-malloc; add pinfold-malloc to --subjects"
    );
    Ok(specs)
}

/// Opens the cache folder and prepares the subjects that the command line asks for.
pub fn open(args: &Preloaded) -> Result<(Cache, Vec<Subject>)> {
    let specs = parse(&args.subjects, args.pinfold.as_deref())?;
    let cache = Cache::open(args.cache.as_deref())?;
    let subjects = prepare(&cache, &specs)?;
    Ok((cache, subjects))
}

/// Returns whether the subject `name` is this workspace's library.
fn is_workspace(name: &str) -> bool {
    name.starts_with("pinfold-malloc") && known(name).is_some()
}

/// Finds or builds every subject's library. Leaves out a peer whose library is missing, with a
/// note.
fn prepare(cache: &Cache, specs: &[Spec]) -> Result<Vec<Subject>> {
    let mut subjects = Vec::new();
    let probe = prepare::compile_load(cache, "probe", "probe.c", &[])?;
    for spec in specs {
        let is_pinfold = spec.name.starts_with("pinfold");
        let subject = library(cache, spec).and_then(|library| {
            let subject = Subject {
                name: spec.name.clone(),
                library,
                is_pinfold,
                variables: known(&spec.name).map_or(&[], |known| &known.variables),
            };
            serves(&probe, &subject)?;
            Ok(subject)
        });
        match subject {
            Ok(subject) => subjects.push(subject),
            // A missing build of Pinfold, or a missing library given by its path, is an error.
            Err(error) if is_pinfold || spec.path.is_some() => {
                return Err(error.context(format!("subject {}", spec.name)));
            }
            Err(error) => eprintln!("note: {} is left out: {error:#}", spec.name),
        }
    }
    Ok(subjects)
}

fn known(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name == name)
}

fn library(cache: &Cache, spec: &Spec) -> Result<PathBuf> {
    if let Some(path) = &spec.path {
        return kept(cache, &spec.name, path);
    }
    let known = known(&spec.name).context("not known")?;
    match (&known.package, &known.from) {
        (Some(package), _) => prepare::packaged_library(package, &known.library),
        (_, Some(package)) => from_crate(cache, package, known),
        _ if is_workspace(&spec.name) => kept(cache, &spec.name, &workspace_library()?),
        _ => system_library(),
    }
}

/// Copies a library, so that a build that runs meanwhile does not change it between two rounds.
fn kept(cache: &Cache, name: &str, path: &Path) -> Result<PathBuf> {
    let copy = cache.lib.join(format!("lib{name}.so"));
    // A program may have the old file mapped, so the copy gets the name by a rename.
    let fresh = cache.lib.join(format!("lib{name}.so.new"));
    fs::copy(path, &fresh).with_context(|| format!("cannot copy {}", path.display()))?;
    fs::rename(&fresh, &copy)?;
    Ok(copy)
}

/// Builds Pinfold's shared library and returns its path.
fn workspace_library() -> Result<PathBuf> {
    eprintln!("building pinfold-malloc");
    let output = Command::new("cargo")
        .args(["build", "--release", "--package", "pinfold-preload"])
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot start cargo; give the library with --pinfold PATH")?;
    ensure!(
        output.status.success(),
        "cargo build failed; give a built library with --pinfold PATH"
    );
    let lines = String::from_utf8(output.stdout)?;
    let messages = lines
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let mut files = messages.flat_map(|message: Value| {
        let files = message["filenames"].as_array().cloned().unwrap_or_default();
        files
            .into_iter()
            .filter_map(|file| file.as_str().map(PathBuf::from))
    });
    files
        .rfind(|file| file.ends_with("libpinfold_preload.so"))
        .context("cargo named no libpinfold_preload.so; give it with --pinfold PATH")
}

/// Returns the C library of this program. As LD_PRELOAD, it takes precedence over an allocator that
/// a program was linked with.
fn system_library() -> Result<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    (path.map(PathBuf::from))
        .find(|path| path.ends_with("libc.so.6"))
        .context("this program does not use a libc.so.6")
}

fn from_crate(cache: &Cache, package: &str, known: &Known) -> Result<PathBuf> {
    let folder = crate_folder(package)?;
    let output = cache.lib.join(format!("lib{}.so", known.name));
    let mut arguments = known.compile.clone();
    // Only x86-64 has this instruction.
    arguments.retain(|word| word != "-mcx16" || cfg!(target_arch = "x86_64"));
    arguments.extend(COMMON.split(' ').map(str::to_owned));
    let below = |part: &String| folder.join(part).display().to_string();
    let includes = known.includes.iter().map(below);
    arguments.extend(includes.map(|folder| format!("-I{folder}")));
    arguments.extend(known.sources.iter().map(below));
    prepare::compile(&arguments, &output)?;
    Ok(output)
}

/// Returns the folder of `package`'s sources, in the version that this package depends on.
fn crate_folder(package: &str) -> Result<PathBuf> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .context("cannot start cargo; install Rust")?;
    ensure!(output.status.success(), "cargo metadata failed");
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let manifest = (packages.iter())
        .find(|found| found["name"] == package)
        .and_then(|found| found["manifest_path"].as_str())
        .with_context(|| format!("cargo does not know the crate {package}"))?;
    Ok(Path::new(manifest)
        .parent()
        .context("no folder")?
        .to_owned())
}

/// Checks that a program started with the library gets its memory from it.
fn serves(probe: &Path, subject: &Subject) -> Result<()> {
    let output = Command::new(probe)
        .env("LD_PRELOAD", &subject.library)
        .envs(subject.variables.iter().cloned())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let served = fs::canonicalize(text.trim()).ok();
    ensure!(
        output.status.success() && served == fs::canonicalize(&subject.library).ok(),
        "{} does not serve malloc by LD_PRELOAD: {}{}",
        subject.library.display(),
        text.trim(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(texts: &[&str], pinfold: Option<&str>) -> Result<Vec<Spec>> {
        let texts: Vec<_> = texts.iter().map(|&text| text.to_owned()).collect();
        parse(&texts, pinfold.map(Path::new))
    }

    #[test]
    fn a_subject_is_a_name_or_a_name_and_a_file() {
        let specs = parsed(&["glibc", "pinfold-old=/proc/self/exe"], None).unwrap();
        assert_eq!((specs[0].name.as_str(), &specs[0].path), ("glibc", &None));
        assert_eq!(specs[1].name, "pinfold-old");
        assert_eq!(specs[1].path.as_deref(), Some(Path::new("/proc/self/exe")));
    }

    #[test]
    fn the_library_of_pinfold_can_be_given() {
        let specs = parsed(&["pinfold-malloc"], Some("/proc/self/exe")).unwrap();
        assert_eq!(specs[0].path.as_deref(), Some(Path::new("/proc/self/exe")));
    }

    #[test]
    fn the_library_of_pinfold_needs_its_subject() {
        let error = parsed(&["glibc"], Some("/proc/self/exe")).unwrap_err();
        assert!(error.to_string().contains("--subjects"), "{error}");
    }

    #[test]
    fn wrong_subjects_are_errors_with_a_remedy() {
        for (texts, named, remedy) in [
            (&["nosuch"][..], "'nosuch'", "nosuch=PATH"),
            (&["x=/no/such/file"], "/no/such/file", "shared library"),
            (&["glibc", "glibc"], "glibc is given twice", "NAME=PATH"),
            (&["a/b=/bin/sh"], "'a/b=/bin/sh'", "NAME=PATH"),
        ] {
            let error = parsed(texts, None).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains(remedy), "{error}");
        }
    }

    #[test]
    fn this_program_has_a_c_library() {
        assert!(system_library().unwrap().is_absolute());
    }
}
