//! Makes `libpinfold.a` of the archive that the compiler makes.
//!
//! The compiler's archive contains Rust's standard library, and all its names are global. A second
//! static library from Rust contains the standard library too. If the two copies differ, because
//! another compiler made them or optimised one of them with its program, the linker finds two
//! definitions of `rust_eh_personality` and others, and fails.
//!
//! So this module makes two objects:
//!
//! * `names.o` defines the C malloc family and C++'s operators under their own names. It stays
//!   apart, because a program with another malloc that only counts must not get these names.
//! * `rest.o` is everything else, linked into one object. Only the names of the headers are global,
//!   and those that `names.o` uses. The latter get a prefix.

use super::elf::{DROPPED, objcopy};
use anyhow::{Context, Result, bail};
use object::read::archive::ArchiveFile;
use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A name that only `names.o` defines.
const MALLOC: &str = "malloc";
/// What `names.o` uses of `rest.o` begins with this text.
const PREFIX: &str = "pinfold_inner.";

/// Writes `to`, made of the archive `built`. `declared` are the names of the headers.
pub fn make(built: &Path, to: &Path, declared: &[&str]) -> Result<()> {
    let work = to.with_extension("parts");
    let _ = fs::remove_dir_all(&work);
    fs::create_dir_all(&work)?;
    let (names, rest) = unpack(built, &work)?;
    let linked = work.join("linked.o");
    let mut link = Command::new("ld");
    // Without groups: the linker keeps one group of several with the same name, and drops the
    // other's symbols, which are not the same ones here.
    link.args(["-r", "--force-group-allocation", "-o"])
        .arg(&linked)
        .args(&rest);
    crate::run(&mut link).context("ld comes with Debian's package binutils")?;

    let defined = symbols(&linked, |symbol| {
        symbol.is_definition() && symbol.is_global()
    })?;
    let used = symbols(&names, |symbol| symbol.is_undefined())?;
    let inner = used.intersection(&defined);
    let inner = inner.filter(|name| !declared.contains(&name.as_str()));
    let (mut renamed, mut kept) = (String::new(), declared.join("\n") + "\n");
    for name in inner {
        renamed += &format!("{name} {PREFIX}{name}\n");
        kept += &format!("{name}\n{PREFIX}{name}\n");
    }
    let (renames, keeps) = (work.join("renamed"), work.join("kept"));
    fs::write(&renames, renamed)?;
    fs::write(&keeps, kept)?;

    let objects = [work.join("names.o"), work.join("rest.o")];
    for (from, to) in [&names, &linked].into_iter().zip(&objects) {
        let mut copy = objcopy();
        copy.arg("--strip-debug").args(DROPPED);
        copy.arg(with("--redefine-syms=", &renames));
        if from == &linked {
            copy.arg(with("--keep-global-symbols=", &keeps));
        }
        crate::run(copy.arg(from).arg(to))?;
    }
    let _ = fs::remove_file(to);
    crate::run(Command::new("ar").arg("rcsD").arg(to).args(&objects))?;
    Ok(fs::remove_dir_all(&work)?)
}

fn with(option: &str, path: &Path) -> std::ffi::OsString {
    let mut word = std::ffi::OsString::from(option);
    word.push(path);
    word
}

/// Writes the archive's objects to files in `work`. Returns the one that defines `malloc`, and the
/// others.
fn unpack(archive: &Path, work: &Path) -> Result<(PathBuf, Vec<PathBuf>)> {
    let bytes = fs::read(archive).with_context(|| archive.display().to_string())?;
    let (mut names, mut rest) = (None, Vec::new());
    for (number, member) in ArchiveFile::parse(&*bytes)?.members().enumerate() {
        let content = member?.data(&*bytes)?;
        let Ok(object) = object::File::parse(content) else {
            continue;
        };
        // Members may have the same name.
        let file = work.join(format!("member{number}.o"));
        fs::write(&file, content)?;
        let is_malloc =
            |symbol: object::Symbol| symbol.is_definition() && symbol.name() == Ok(MALLOC);
        match object.symbols().any(is_malloc) {
            true if names.is_some() => bail!("two members of {} define malloc", archive.display()),
            true => names = Some(file),
            false => rest.push(file),
        }
    }
    let names = names.with_context(|| format!("no member of {} defines malloc", archive.display()));
    Ok((names?, rest))
}

/// Returns the names of the symbols for which `fits` returns true.
fn symbols(file: &Path, fits: impl Fn(&object::Symbol) -> bool) -> Result<BTreeSet<String>> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let object = object::File::parse(&*bytes)?;
    let names = object.symbols().filter(|symbol| fits(symbol));
    names.map(|symbol| Ok(symbol.name()?.to_owned())).collect()
}
