//! `cargo xtask deb`: the Debian packages libpinfold0, libpinfold-dev and pinfold.

use crate::install::{self, EXPORTS, LIBRARY, Layout, THIRD_PARTY, elf, licenses};
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the Debian packages libpinfold0, libpinfold-dev and pinfold.
///
/// They depend on the C library of this machine, or on an older one if that has all that the files
/// need. SOURCE_DATE_EPOCH, or else the time of the last commit, is the time in the packages.
#[derive(clap::Args)]
pub struct Args {
    /// The folder for the packages [default: target/debian].
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// The maintainer of the packages, as `NAME <ADDRESS>`.
    #[arg(long, default_value = "The Pinfold authors <maintainers@pinfold.invalid>", value_parser = person)]
    maintainer: String,
}

/// The revision of the packaging. Debian's own packages, whose first revision is 1, replace these.
const REVISION: &str = "0pinfold1";

/// A package: which of the installed files it has, and what it says.
struct Package {
    name: &'static str,
    section: &'static str,
    /// Several architectures' packages may be installed side by side.
    is_multi_arch: bool,
    /// Whether it depends on libpinfold0 of the same version.
    needs_library: bool,
    summary: &'static str,
    description: &'static str,
}

impl Package {
    /// Returns the members of the workspace of which its files are made.
    fn members(&self) -> &'static [&'static str] {
        match self.name {
            "pinfold" => &["pinfold-cli", "pinfold-preload"],
            "libpinfold0" => &["pinfold-preload"],
            _ => &["pinfold-names"],
        }
    }
}

const PACKAGES: [Package; 3] = [
    Package {
        name: "libpinfold0",
        section: "libs",
        is_multi_arch: true,
        needs_library: false,
        summary: "memory allocator on per-CPU caches - shared library",
        description: "Pinfold keeps free memory and counters per CPU, by restartable sequences, as\n\
                      the Linux kernel does.\n\nThis package has the library with which programs are \
                      linked or started:\nLD_PRELOAD=libpinfold.so.0 COMMAND",
    },
    Package {
        name: "libpinfold-dev",
        section: "libdevel",
        is_multi_arch: true,
        needs_library: true,
        summary: "memory allocator on per-CPU caches - development files",
        description: "Pinfold keeps free memory and counters per CPU, by restartable sequences, as\n\
                      the Linux kernel does.\n\nThis package has the headers for C and C++, the static \
                      library, and the\nfiles for pkg-config, Meson and CMake.",
    },
    Package {
        name: "pinfold",
        section: "utils",
        is_multi_arch: false,
        needs_library: true,
        summary: "runs programs on Pinfold and looks into them",
        description: "Pinfold keeps free memory and counters per CPU, by restartable sequences, as\n\
                      the Linux kernel does.\n\nThis package has the command pinfold, which starts any \
                      dynamically linked\nprogram on Pinfold, and shows and changes the memory of \
                      running programs.",
    },
];

/// What is the same for all packages.
struct Build<'a> {
    args: &'a Args,
    version: String,
    /// Debian's name of the architecture.
    architecture: &'static str,
    /// The Unix time in the packages.
    epoch: String,
    /// The folder of the folders with the packages' files.
    work: PathBuf,
}

fn person(text: &str) -> Result<String> {
    let parts = text
        .strip_suffix('>')
        .and_then(|text| text.split_once(" <"));
    let is_person = |(name, address): (&str, &str)| {
        !name.is_empty() && address.contains('@') && !text.contains(char::is_control)
    };
    if !parts.is_some_and(is_person) {
        bail!("this is not like NAME <ADDRESS>");
    }
    Ok(text.to_owned())
}

pub fn main(args: &Args) -> Result<()> {
    let (architecture, triplet) = match std::env::consts::ARCH {
        "x86_64" => ("amd64", "x86_64-linux-gnu"),
        "aarch64" => ("arm64", "aarch64-linux-gnu"),
        other => bail!("Pinfold has no packages for {other}"),
    };
    let (to, work) = install::folders(args.to.as_deref(), "debian")?;

    let built = install::build()?;
    let layout = Layout {
        prefix: "/usr".into(),
        libdir: format!("lib/{triplet}"),
    };
    let all = work.join("all");
    let tree = install::install(&built, &layout, &all.join("usr"))?;
    for file in &tree.files {
        if let Some(package) = package_of(file, &layout.libdir) {
            let (from, to) = (
                all.join("usr").join(file),
                work.join(package).join("usr").join(file),
            );
            fs::create_dir_all(to.parent().context("no folder")?)?;
            fs::rename(&from, &to).with_context(|| from.display().to_string())?;
        }
    }
    let build = Build {
        args,
        version: format!("{}-{REVISION}", env!("CARGO_PKG_VERSION")),
        architecture,
        epoch: epoch()?,
        work,
    };
    for package in &PACKAGES {
        let depends = match package.name {
            "libpinfold0" => depends(&elf::needs(&[&built.library])?)?,
            "pinfold" => depends(&elf::needs(&[&built.command])?)?,
            _ => Vec::new(),
        };
        build.documents(package)?;
        build.control(package, depends)?;
        let file = build.pack(package, &to)?;
        println!("{}", file.display());
    }
    Ok(fs::remove_dir_all(&build.work)?)
}

/// Returns the package that has this file, or `None` if none has.
fn package_of(file: &str, libdir: &str) -> Option<&'static str> {
    let in_libdir = file
        .strip_prefix(libdir)
        .and_then(|rest| rest.strip_prefix('/'));
    match in_libdir {
        Some(LIBRARY) => Some("libpinfold0"),
        Some(_) => Some("libpinfold-dev"),
        None if file.starts_with("include/") => Some("libpinfold-dev"),
        // `documents` writes what Debian wants there. Debug information has packages of its own in
        // Debian's archive.
        None if file.starts_with("share/doc/") || file.starts_with("lib/debug/") => None,
        None => Some("pinfold"),
    }
}

/// Returns the Unix time in the packages.
pub fn epoch() -> Result<String> {
    let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(epoch) => epoch,
        Err(_) => said(Command::new("git").args(["log", "-1", "--format=%ct"]))
            .context("set SOURCE_DATE_EPOCH to the time of the release")?,
    };
    if epoch.parse::<u64>().is_err() {
        bail!("SOURCE_DATE_EPOCH is {epoch}; set it to seconds since 1970");
    }
    Ok(epoch)
}

/// Parts of glibc. Before 2.34, some are libraries of their own.
const GLIBC: [&str; 6] = [
    "libc.so",
    "libm.so",
    "libdl.so",
    "libpthread.so",
    "librt.so",
    "ld-linux",
];

/// Returns the packages that have these libraries.
fn depends(needs: &elf::Needs) -> Result<Vec<String>> {
    let mut packages = Vec::new();
    for library in &needs.libraries {
        let is_glibc = GLIBC.iter().any(|name| library.starts_with(name));
        packages.push(match library.as_str() {
            "libgcc_s.so.1" => "libgcc-s1 (>= 4.2)".to_owned(),
            _ if is_glibc => format!("libc6 (>= {}.{})", needs.glibc.0, needs.glibc.1),
            other => bail!("the files need {other}; add its package to xtask/src/deb.rs"),
        });
    }
    packages.sort();
    packages.dedup();
    Ok(packages)
}

/// Runs a command, and returns what it prints, without the end of the line.
fn said(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output();
    let output = output.with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!(
            "{name} failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

impl Build<'_> {
    /// Writes the copyright and the changelog, and compresses these and the manual pages.
    fn documents(&self, package: &Package) -> Result<()> {
        let usr = self.work.join(package.name).join("usr/share");
        let folder = usr.join("doc").join(package.name);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("copyright"), copyright(package)?)?;
        let texts = folder.join(THIRD_PARTY);
        let crates = licenses::crates(package.members())?;
        fs::write(&texts, licenses::third_party(&crates)?)?;
        let date = said(
            Command::new("date")
                .args(["-u", "-R", "-d"])
                .arg(format!("@{}", self.epoch)),
        )?;
        let changelog = folder.join("changelog.Debian");
        let text = format!(
            "pinfold ({}) unstable; urgency=medium\n\n  * Version {}. The changes are in CHANGELOG.md \
             of the source.\n\n -- {}  {date}\n",
            self.version,
            env!("CARGO_PKG_VERSION"),
            self.args.maintainer
        );
        fs::write(&changelog, text)?;
        let mut files = vec![changelog, texts];
        if let Ok(pages) = fs::read_dir(usr.join("man/man1")) {
            for page in pages {
                files.push(page?.path());
            }
        }
        crate::run(Command::new("gzip").arg("-9n").args(files))
    }

    fn control(&self, package: &Package, mut depends: Vec<String>) -> Result<()> {
        let tree = self.work.join(package.name);
        let folder = tree.join("DEBIAN");
        fs::create_dir_all(&folder)?;
        if package.needs_library {
            depends.push(format!("libpinfold0 (= {})", self.version));
        }
        let mut files = Vec::new();
        collect(&tree.join("usr"), &mut files)?;
        let bytes = files.iter().map(|file| Ok(file.symlink_metadata()?.len()));
        let bytes: u64 = bytes.sum::<Result<u64>>()?;
        let mut text = format!(
            "Package: {}\nSource: pinfold\nVersion: {}\nArchitecture: {}\nMaintainer: {}\n\
             Installed-Size: {}\nSection: {}\nPriority: optional\n",
            package.name,
            self.version,
            self.architecture,
            self.args.maintainer,
            bytes.div_ceil(1024),
            package.section
        );
        if package.is_multi_arch {
            text += "Multi-Arch: same\n";
        }
        if !depends.is_empty() {
            text += &format!("Depends: {}\n", depends.join(", "));
        }
        if package.name == "libpinfold0" {
            // The library loads the unwinder when it first walks a stack.
            text += "Recommends: libgcc-s1\n";
            self.library_files(&folder)?;
        }
        text += &format!("Description: {}\n", package.summary);
        for line in package.description.lines() {
            text += &format!(" {}\n", if line.is_empty() { "." } else { line });
        }
        fs::write(folder.join("control"), text)?;
        files.retain(|file| !file.is_symlink());
        files.sort();
        let names = files.iter().map(|file| file.strip_prefix(&tree));
        let names: Vec<&Path> = names.collect::<Result<_, _>>()?;
        let sums = said(Command::new("md5sum").args(names).current_dir(&tree))?;
        Ok(fs::write(folder.join("md5sums"), sums + "\n")?)
    }

    /// Writes what programs that are linked with the library depend on, and has the loader's cache
    /// renewed.
    fn library_files(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join("triggers"), "activate-noawait ldconfig\n")?;
        fs::write(folder.join("shlibs"), "libpinfold 0 libpinfold0\n")?;
        let mut symbols =
            format!("{LIBRARY} libpinfold0 #MINVER#\n* Build-Depends-Package: libpinfold-dev\n");
        for name in fs::read_to_string(EXPORTS).context(EXPORTS)?.lines() {
            symbols += &format!(" {name}@Base {}\n", env!("CARGO_PKG_VERSION"));
        }
        Ok(fs::write(folder.join("symbols"), symbols)?)
    }

    /// Makes the package's file, with root as the owner of all files in it.
    fn pack(&self, package: &Package, to: &Path) -> Result<PathBuf> {
        let tree = self.work.join(package.name);
        set_modes(&tree)?;
        let name = format!(
            "{}_{}_{}.deb",
            package.name, self.version, self.architecture
        );
        let file = to.join(name);
        let mut pack = Command::new("dpkg-deb");
        pack.args(["--root-owner-group", "-Zxz", "--build"]);
        pack.arg(&tree).arg(&file);
        pack.env("SOURCE_DATE_EPOCH", &self.epoch);
        said(&mut pack)?;
        Ok(file)
    }
}

/// Returns the text that Debian wants in a package, with the licenses of Pinfold and of the crates
/// that it contains.
fn copyright(package: &Package) -> Result<String> {
    let indented = |text: &str| -> String {
        let line = |line: &str| match line.trim_end() {
            "" => " .\n".to_owned(),
            line => format!(" {line}\n"),
        };
        text.lines().map(line).collect()
    };
    let mit = fs::read_to_string("LICENSE-MIT").context("LICENSE-MIT")?;
    let (holder, terms) = mit
        .split_once("\n\n")
        .context("LICENSE-MIT has no holder")?;
    let crates = licenses::crates(package.members())?;
    let titles: Vec<&str> = crates.iter().map(|each| each.title.as_str()).collect();
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: pinfold\n\
         Comment: The files contain these crates and parts of Rust's standard library, under\n \
         the licenses that follow each crate's name. {THIRD_PARTY}.gz has their texts.\n{}\n\
         Files: *\nCopyright: {}\nLicense: Expat or Apache-2.0\n\n\
         License: Expat\n{}\n\
         License: Apache-2.0\n On Debian systems, the text is in \
         /usr/share/common-licenses/Apache-2.0.\n",
        indented(&titles.join("\n")),
        holder.trim_start_matches("Copyright (c) "),
        indented(terms)
    ))
}

/// Lists the files and symbolic links below `folder`.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => collect(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}

/// Gives the folders and files below `folder` the modes of installed ones, whatever this user's
/// mask is.
fn set_modes(folder: &Path) -> Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            set_modes(&path)?;
            continue;
        }
        let is_program = path.parent().is_some_and(|folder| folder.ends_with("bin"));
        let mode = if is_program { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_has_its_package() {
        let libdir = "lib/x86_64-linux-gnu";
        for (file, package) in [
            ("bin/pinfold", Some("pinfold")),
            ("share/man/man1/pinfold.1", Some("pinfold")),
            ("include/pinfold.h", Some("libpinfold-dev")),
            ("lib/x86_64-linux-gnu/libpinfold.so", Some("libpinfold-dev")),
            ("lib/x86_64-linux-gnu/libpinfold.so.0", Some("libpinfold0")),
            ("lib/debug/.build-id/ab/cd.debug", None),
            ("share/doc/pinfold/files", None),
        ] {
            assert_eq!(package_of(file, libdir), package, "{file}");
        }
    }

    #[test]
    fn a_maintainer_has_a_name_and_an_address() {
        assert!(person("A B <a@b.example>").is_ok());
        for wrong in ["", "A B", "<a@b>", " <a@b>", "A <a>", "A\nB <a@b>"] {
            assert!(person(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_unknown_library_is_an_error() {
        let needs = |library: &str| elf::Needs {
            libraries: [library.to_owned(), "ld-linux-x86-64.so.2".to_owned()].into(),
            glibc: (2, 35),
        };
        assert_eq!(depends(&needs("libc.so.6")).unwrap(), ["libc6 (>= 2.35)"]);
        let error = depends(&needs("libother.so.1")).unwrap_err().to_string();
        assert!(error.contains("libother.so.1"), "{error}");
    }
}
