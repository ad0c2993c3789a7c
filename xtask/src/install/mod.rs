//! `cargo xtask install`: installs the command with its manual pages and completions, the
//! libraries, the headers, and what build systems read.
//!
//! `share/doc/pinfold/files` lists the installed files. By this list, `--remove` removes them, and
//! a later installation removes what it does not have any more.

mod archive;
pub mod elf;
pub mod licenses;
mod texts;

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Builds and installs the command with its manual pages and completions, the libraries, the
/// headers, and the files for pkg-config, Meson and CMake.
#[derive(clap::Args)]
pub struct Args {
    /// Where the files will be used, like /usr/local.
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    prefix: PathBuf,
    /// The folder of the libraries below the prefix, like lib/x86_64-linux-gnu.
    #[arg(long, value_name = "DIR", default_value = "lib", value_parser = below)]
    libdir: String,
    /// Copies the files below this folder instead, for a package.
    #[arg(
        long,
        value_name = "DIR",
        default_value = "",
        hide_default_value = true
    )]
    destdir: OsString,
    /// Removes the installed files instead, wherever their --libdir was.
    #[arg(long)]
    remove: bool,
}

/// Where the files will be used.
pub struct Layout {
    pub prefix: PathBuf,
    /// The folder of the libraries, below the prefix.
    pub libdir: String,
}

/// What [`build`] makes.
pub struct Built {
    pub command: PathBuf,
    pub library: PathBuf,
    /// The symbols and the debug information of the library.
    debug: PathBuf,
    archive: PathBuf,
}

/// The library's name, which is also its soname.
pub const LIBRARY: &str = "libpinfold.so.0";
/// The name that linkers look for. It leads to the library beside it.
const LINK: &str = "libpinfold.so";
/// The headers, below crates/malloc/include and below include.
const HEADERS: [&str; 6] = [
    "pinfold.h",
    "pinfold_heaps.h",
    "pinfold_percpu.h",
    "pinfold_show.h",
    "pinfold_policy.h",
    "pinfold.hpp",
];
/// The list of the names that the library exports.
pub const EXPORTS: &str = "crates/preload/exports";
/// The shells, and where they look for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/pinfold"),
    ("zsh", "share/zsh/site-functions/_pinfold"),
    ("fish", "share/fish/vendor_completions.d/pinfold.fish"),
];
const MANUAL: &str = "share/man/man1";
/// Where debuggers look for debug information, whatever the folder of the library is.
const DEBUG: &str = "lib/debug";
/// The folder with the licenses, the documents that the help texts name, and the list of the
/// installed files.
const OWN: &str = "share/doc/pinfold";
pub const LICENSES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];
/// The file with the licenses of the crates that the installed files contain.
pub const THIRD_PARTY: &str = "THIRD-PARTY";
/// The members of the workspace of which the installed files are made.
pub const MEMBERS: [&str; 3] = ["pinfold-cli", "pinfold-preload", "pinfold-names"];
const LIST: &str = "share/doc/pinfold/files";

fn absolute(folder: &str) -> Result<PathBuf> {
    if !Path::new(folder).is_absolute() {
        bail!("this is not an absolute path");
    }
    readable(folder)?;
    Ok(PathBuf::from(folder))
}

fn below(folder: &str) -> Result<String> {
    readable(folder)?;
    let mut names = folder.split('/');
    if names.any(|name| ["", ".", ".."].contains(&name)) {
        bail!("this is not a path below the prefix, like lib/x86_64-linux-gnu");
    }
    Ok(folder.to_owned())
}

/// Refuses paths that the readers of [`texts`] would take for something else.
fn readable(path: &str) -> Result<()> {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+~".contains(c);
    if let Some(other) = path.chars().find(|c| !is_plain(*c)) {
        bail!("{other:?} would confuse pkg-config or CMake; choose a folder without it");
    }
    Ok(())
}

pub fn main(args: Args) -> Result<()> {
    let Args { prefix, libdir, .. } = args;
    let to = match args.destdir.is_empty() {
        true => prefix.clone(),
        false => Path::new(&args.destdir).join(prefix.strip_prefix("/")?),
    };
    if args.remove {
        return remove(&to);
    }
    let tree = install(&build()?, &Layout { prefix, libdir }, &to)?;
    println!("installed {} files in {}", tree.files.len(), to.display());
    Ok(())
}

/// A folder with files of Pinfold's.
pub struct Tree {
    to: PathBuf,
    /// The files, relative to the folder.
    pub files: BTreeSet<String>,
}

impl Tree {
    /// Returns the path of a new file. Removes an old one: a running program may have it mapped, so
    /// that it must not be written to.
    fn place(&mut self, place: &str) -> Result<PathBuf> {
        let path = self.to.join(place);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        let _ = fs::remove_file(&path);
        self.files.insert(place.to_owned());
        Ok(path)
    }

    fn copy(&mut self, from: &Path, place: &str, mode: u32) -> Result<()> {
        let to = self.place(place)?;
        fs::copy(from, &to)
            .with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
        Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
    }

    fn write(&mut self, place: &str, text: &str) -> Result<()> {
        let to = self.place(place)?;
        fs::write(&to, text).with_context(|| to.display().to_string())?;
        Ok(fs::set_permissions(to, fs::Permissions::from_mode(0o644))?)
    }

    fn link(&mut self, target: &str, place: &str) -> Result<()> {
        let to = self.place(place)?;
        symlink(target, &to).with_context(|| to.display().to_string())
    }
}

/// Puts what was built below `to`, to be used in the layout's prefix.
pub fn install(built: &Built, layout: &Layout, to: &Path) -> Result<Tree> {
    let before = listed(to);
    let mut tree = Tree {
        to: to.to_owned(),
        files: BTreeSet::new(),
    };
    let libdir = &layout.libdir;
    tree.copy(&built.command, "bin/pinfold", 0o755)?;
    tree.copy(&built.library, &format!("{libdir}/{LIBRARY}"), 0o644)?;
    tree.link(LIBRARY, &format!("{libdir}/{LINK}"))?;
    tree.copy(&built.archive, &format!("{libdir}/libpinfold.a"), 0o644)?;
    let debug = elf::debug_place(&built.library)?;
    tree.copy(&built.debug, &format!("{DEBUG}/{}", debug.display()), 0o644)?;
    for header in HEADERS {
        let source = Path::new("crates/malloc/include").join(header);
        tree.copy(&source, &format!("include/{header}"), 0o644)?;
    }
    for license in LICENSES {
        tree.copy(Path::new(license), &format!("{OWN}/{license}"), 0o644)?;
    }
    for page in fs::read_dir("docs")? {
        let page = page?.path();
        let is_document = page.extension() == Some(OsStr::new("md"));
        if let Some(name) = page.file_name().filter(|_| is_document) {
            tree.copy(&page, &format!("{OWN}/{}", name.display()), 0o644)?;
        }
    }
    let texts = licenses::third_party(&licenses::crates(&MEMBERS)?)?;
    tree.write(&format!("{OWN}/{THIRD_PARTY}"), &texts)?;
    let pkg_config = format!("{libdir}/pkgconfig/pinfold.pc");
    tree.write(&pkg_config, &texts::pkg_config(layout))?;
    for (name, text) in texts::cmake(layout) {
        tree.write(&format!("{libdir}/cmake/pinfold/{name}"), &text)?;
    }
    for (shell, place) in COMPLETIONS {
        let said = Command::new(&built.command)
            .args(["completions", shell])
            .output()?;
        if !said.status.success() {
            bail!("cannot make the completions for {shell}: {}", said.status);
        }
        tree.write(place, &String::from_utf8(said.stdout)?)?;
    }
    install_manual(&built.command, &mut tree)?;
    let list: String = tree.files.iter().map(|file| format!("{file}\n")).collect();
    tree.write(LIST, &list)?;
    remove_files(to, before.difference(&tree.files))?;
    Ok(tree)
}

fn install_manual(command: &Path, tree: &mut Tree) -> Result<()> {
    let pages = crate::target().join("manual");
    let _ = fs::remove_dir_all(&pages);
    crate::run(Command::new(command).arg("man").arg(&pages))?;
    for page in fs::read_dir(&pages)? {
        let name = page?.file_name().to_string_lossy().into_owned();
        tree.copy(&pages.join(&name), &format!("{MANUAL}/{name}"), 0o644)?;
    }
    Ok(())
}

/// Returns the files that the list of an installation names. Leaves out what is not below `to`.
fn listed(to: &Path) -> BTreeSet<String> {
    let list = fs::read_to_string(to.join(LIST)).unwrap_or_default();
    let is_below = |file: &&str| {
        let mut parts = Path::new(file).components();
        parts.all(|part| matches!(part, Component::Normal(_)))
    };
    list.lines().filter(is_below).map(str::to_owned).collect()
}

/// Removes what [`install`] has installed. Removes Pinfold's own folders if they are empty then,
/// and no other folder.
fn remove(to: &Path) -> Result<()> {
    let files = listed(to);
    if files.is_empty() {
        bail!(
            "nothing is installed in {}: there is no list {LIST}",
            to.display()
        );
    }
    let removed = remove_files(to, files.iter())? + remove_files(to, [&LIST.to_owned()])?;
    println!("removed {removed} files from {}", to.display());
    Ok(())
}

fn remove_files<'a>(to: &Path, files: impl IntoIterator<Item = &'a String>) -> Result<usize> {
    let mut removed = 0;
    for file in files {
        let file = to.join(file);
        match fs::remove_file(&file) {
            Ok(()) => removed += 1,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| file.display().to_string()),
        }
        let is_own = |folder: &&Path| {
            folder.ends_with("pinfold") || folder.iter().any(|name| name == ".build-id")
        };
        for folder in file.ancestors().skip(1).take_while(is_own) {
            // Fails for a folder that is not empty.
            let _ = fs::remove_dir(folder);
        }
    }
    Ok(removed)
}

/// Returns the folder for packages of a kind, by default a folder of that name in cargo's target,
/// and a path for their parts, where nothing is.
pub fn folders(to: Option<&Path>, kind: &str) -> Result<(PathBuf, PathBuf)> {
    let target = crate::target();
    let to = to.map_or_else(|| target.join(kind), Path::to_owned);
    fs::create_dir_all(&to).with_context(|| to.display().to_string())?;
    let parts = target.join(format!("{kind}-parts"));
    match fs::remove_dir_all(&parts) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| parts.display().to_string())
        }
        _ => Ok((to, parts)),
    }
}

/// Builds the libraries and then the command, which contains the stripped library.
pub fn build() -> Result<Built> {
    // The same crates in both calls: a crate's features depend on what else is built.
    let cargo = |extra: &[&str]| -> Result<Command> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "-p", "pinfold-preload"]);
        cargo.args(["-p", "pinfold-names", "-p", "pinfold-cli"]);
        cargo.args(extra);
        let flags = flags_without_paths(&crate::target())?;
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags);
        Ok(cargo)
    };
    let release = std::path::absolute(crate::target().join("release"))?;
    let folder = release.join("installed");
    fs::create_dir_all(&folder)?;
    let built = Built {
        command: folder.join("pinfold"),
        library: folder.join(LIBRARY),
        debug: folder.join("libpinfold.so.0.debug"),
        archive: folder.join("libpinfold.a"),
    };
    crate::run(&mut cargo(&["--lib"])?)?;
    let library = release.join("libpinfold_preload.so");
    elf::strip(&library, &built.library)?;
    elf::split_debug(&library, &built.debug)?;
    let exports = fs::read_to_string(EXPORTS).context(EXPORTS)?;
    let declared = exports.lines().filter(|name| name.starts_with("pinfold_"));
    let declared: Vec<&str> = declared.collect();
    archive::make(
        &release.join("libpinfold_names.a"),
        &built.archive,
        &declared,
    )?;
    crate::run(cargo(&[])?.env("PINFOLD_CONTAINED_LIBRARY", &built.library))?;
    elf::strip(&release.join("pinfold"), &built.command)?;
    Ok(built)
}

/// Returns the compiler's flags with which no file names this source folder, the crates' folder or
/// the builder's home. The flags of the environment stay.
fn flags_without_paths(target: &Path) -> Result<OsString> {
    const BETWEEN: &str = "\x1f";
    let mut flags: Vec<OsString> =
        match std::env::var_os("CARGO_ENCODED_RUSTFLAGS").filter(|flags| !flags.is_empty()) {
            Some(flags) => Vec::from([flags]),
            None => {
                let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
                flags.split_whitespace().map(OsString::from).collect()
            }
        };
    let home = std::env::home_dir();
    let crates = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let crates = crates.or_else(|| Some(home.as_ref()?.join(".cargo")));
    // The compiler takes the last pair that fits, so that the innermost folder comes last.
    for (folder, name) in [
        (home, "home"),
        (crates, "cargo"),
        (Some(std::env::current_dir()?), "pinfold"),
        (Some(std::path::absolute(target)?), "target"),
    ] {
        let Some(folder) = folder.filter(|folder| folder.parent().is_some()) else {
            continue;
        };
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(folder);
        flag.push("=");
        flag.push(name);
        flags.push(flag);
    }
    Ok(flags.join(OsStr::new(BETWEEN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_leaves_what_is_not_pinfolds() {
        let to = std::env::temp_dir().join(format!("pinfold-remove-{}", std::process::id()));
        let mut tree = Tree {
            to: to.clone(),
            files: BTreeSet::new(),
        };
        let ours = [
            "bin/pinfold",
            "lib/x/libpinfold.so",
            "lib/x/cmake/pinfold/pinfold-config.cmake",
            "lib/debug/.build-id/ab/cd.debug",
            "share/man/man1/pinfold-run.1",
        ];
        let theirs = ["share/man/man1/pinfold-tools.1", "lib/other.so"];
        for file in ours.iter().chain(&theirs) {
            tree.write(file, "").unwrap();
        }
        let list = format!("{}\n../outside\n/lib/other.so\n", ours.join("\n"));
        tree.write(LIST, &list).unwrap();
        let outside = to.with_file_name("outside");
        fs::write(&outside, "").unwrap();
        remove(&to).unwrap();
        assert!(ours.iter().all(|file| !to.join(file).exists()));
        assert!(theirs.iter().all(|file| to.join(file).exists()) && outside.exists());
        for own in ["lib/x/cmake/pinfold", "lib/debug/.build-id", OWN] {
            assert!(!to.join(own).exists(), "{own}");
        }
        assert!(to.join("lib/x/cmake").is_dir() && to.join("lib/debug").is_dir());
        let error = remove(&to).unwrap_err().to_string();
        assert!(error.contains("nothing is installed"), "{error}");
        fs::remove_file(outside).unwrap();
        fs::remove_dir_all(to).unwrap();
    }

    #[test]
    fn paths_that_build_systems_misread_are_refused() {
        assert!(absolute("/opt/pin-fold_1.2").is_ok() && below("lib/x86_64-linux-gnu").is_ok());
        for path in ["/a b", "/a;b", "/a$b", "/a\"b", "/a\nb", "relative"] {
            assert!(absolute(path).is_err(), "{path}");
        }
        for path in ["", "/lib", "../lib", "lib/", "lib/../x", "li$b"] {
            assert!(below(path).is_err(), "{path}");
        }
    }
}
