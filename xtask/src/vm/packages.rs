//! Debian's packages: tools, which are installed, and packages that are only unpacked below
//! target/vm.

use super::arch::Arch;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Installs `package` unless `program` is in the path.
pub fn tool(program: &str, package: &str) -> Result<()> {
    have(program, || in_path(program), package)
}

/// Installs `package` unless `file` exists.
pub fn file(file: &Path, package: &str) -> Result<()> {
    have(&file.display().to_string(), || file.is_file(), package)
}

fn have(what: &str, is_there: impl Fn() -> bool, package: &str) -> Result<()> {
    if is_there() {
        return Ok(());
    }
    let install = || {
        let status = Command::new("apt-get")
            .args(["install", "-y", "-qq", "--no-install-recommends", package])
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdout(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    };
    if install() && is_there() {
        return Ok(());
    }
    bail!("{what} is missing, and apt-get could not install it; install the package {package}")
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Fills `folder` by `fill`, unless that was done before. Returns the folder. `fill` gets a folder
/// for what it needs meanwhile, and the folder to fill.
pub fn filled(folder: &Path, fill: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<PathBuf> {
    if folder.is_dir() {
        return Ok(folder.to_path_buf());
    }
    // An interrupted attempt must not pass for a complete one, so the folder gets its name at the
    // end.
    let name = folder.file_name().context("a folder without a name")?;
    let begun = folder.with_file_name(format!("{}.begun", name.display()));
    let _ = fs::remove_dir_all(&begun);
    let tree = begun.join("tree");
    fs::create_dir_all(&tree).with_context(|| tree.display().to_string())?;
    fill(&begun, &tree)?;
    fs::rename(&tree, folder).with_context(|| folder.display().to_string())?;
    fs::remove_dir_all(&begun)?;
    Ok(folder.to_path_buf())
}

/// Unpacks `packages` into `folder`, unless that was done before. Returns the folder.
pub fn unpacked(folder: &Path, packages: &[String]) -> Result<PathBuf> {
    unpacked_with(folder, packages, &[])
}

/// Unpacks `packages` into `folder` like [`unpacked`]. apt gets these options.
pub fn unpacked_with(folder: &Path, packages: &[String], options: &[String]) -> Result<PathBuf> {
    filled(folder, |begun, tree| {
        let mut packages = packages.iter();
        packages.try_for_each(|package| unpack(package, options, begun, tree))
    })
}

fn unpack(package: &str, options: &[String], download: &Path, tree: &Path) -> Result<()> {
    let said = Command::new("apt-get")
        .args(options)
        .args(["download", "-qq", package])
        .current_dir(download)
        .output()
        .context("cannot start apt-get, which downloads Debian's packages")?;
    let name = package.split([':', '=']).next().unwrap_or(package);
    let prefix = format!("{name}_");
    let archive = entry(download, |file| {
        file.starts_with(&prefix) && file.ends_with(".deb")
    });
    let Some(archive) = archive else {
        let why = String::from_utf8_lossy(&said.stderr);
        bail!("cannot download the package {package}: {}", why.trim());
    };
    let mut unpack = Command::new("dpkg-deb");
    crate::run(unpack.arg("-x").args([&archive, tree]))?;
    fs::remove_file(archive)?;
    Ok(())
}

/// Unpacks the original source of a Debian package into `folder`, unless that was done before.
/// Returns the folder.
///
/// Uses a list of sources of its own, because most machines have only the list of binaries.
pub fn source(folder: &Path, package: &str) -> Result<PathBuf> {
    filled(folder, |begun, tree| unpack_source(package, begun, tree))
}

/// Returns a list of the sources of this machine's release, from where its packages come.
fn source_list() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let named = |line: &str| Some(line.strip_prefix("VERSION_CODENAME=")?.trim().to_owned());
    let release = release.lines().find_map(named).unwrap_or_default();
    let said = Command::new("apt-get")
        .args(["indextargets", "Created-By: Packages", "--format"])
        .arg("deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)")
        .arg(format!("Codename: {release}"))
        .output()
        .context("cannot start apt-get, which knows this machine's lists of packages")?;
    let said = String::from_utf8_lossy(&said.stdout);
    let lists: BTreeSet<&str> = said.lines().collect();
    if lists.is_empty() {
        bail!("apt has no list of {release}'s packages; add one, and run apt-get update");
    }
    Ok(lists.into_iter().map(|list| format!("{list}\n")).collect())
}

fn unpack_source(package: &str, begun: &Path, tree: &Path) -> Result<()> {
    fs::create_dir_all(begun.join("lists/partial"))?;
    fs::write(begun.join("sources.list"), source_list()?)?;
    for command in [&["update"][..], &["source", "--download-only", package]] {
        let begun = begun.display();
        let said = Command::new("apt-get")
            .arg("-qq")
            .arg(format!("-oDir::Etc::SourceList={begun}/sources.list"))
            .arg("-oDir::Etc::SourceParts=/dev/null")
            .arg(format!("-oDir::State::Lists={begun}/lists"))
            .args(command)
            .current_dir(begun.to_string())
            .output()
            .context("cannot start apt-get, which downloads Debian's sources")?;
        if !said.status.success() {
            let why = String::from_utf8_lossy(&said.stderr);
            bail!("cannot download the source of {package}: {}", why.trim());
        }
    }
    let archive = entry(begun, |name| name.contains(".orig.tar."));
    let archive = archive.with_context(|| format!("the source of {package} has no archive"))?;
    let mut unpack = Command::new("tar");
    unpack.args(["--strip-components=1", "-xf"]);
    crate::run(unpack.args([&archive, Path::new("-C"), tree]))
}

/// Returns an entry of `folder` whose name fits.
fn entry(folder: &Path, fits: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let mut entries = fs::read_dir(folder).ok()?.flatten();
    let found = entries.find(|entry| fits(&entry.file_name().to_string_lossy()))?;
    Some(found.path())
}

/// Returns the package that `package` depends on and whose name begins with `prefix`. Debian's
/// names without a version depend on those with one.
pub fn behind(package: &str, prefix: &str) -> Result<String> {
    let said = Command::new("apt-cache")
        .args(["depends", package])
        .output()
        .context("cannot start apt-cache, which looks up Debian's packages")?;
    let text = String::from_utf8_lossy(&said.stdout);
    let found = text.lines().find_map(|line| {
        let (kind, name) = line.trim().split_once(": ")?;
        (kind.ends_with("Depends") && name.starts_with(prefix)).then(|| name.to_owned())
    });
    found.with_context(|| format!("apt-cache knows no package {package}; run apt-get update"))
}

/// A kernel of Debian's.
pub struct Kernel {
    pub image: PathBuf,
    /// The text that `uname -r` shows.
    pub release: String,
}

impl Kernel {
    /// Finds the kernel in the folder of an unpacked package: `boot/vmlinuz-RELEASE`, or since 7.0
    /// `usr/lib/modules/RELEASE/vmlinuz`.
    pub fn in_folder(folder: &Path) -> Result<Kernel> {
        let named = |folder: PathBuf, prefix: &str| {
            let path = entry(&folder, |name| name.starts_with(prefix))?;
            let name = path.file_name()?.to_string_lossy();
            let release = name.trim_start_matches(prefix).to_owned();
            Some((path, release))
        };
        let found = named(folder.join("boot"), "vmlinuz-").or_else(|| {
            let (modules, release) = named(folder.join("usr/lib/modules"), "")?;
            Some((modules.join("vmlinuz"), release))
        });
        let (image, release) = found.with_context(|| {
            let folder = folder.display();
            format!("there is no kernel in {folder}; delete that folder")
        })?;
        Ok(Kernel { image, release })
    }

    /// Returns whether the kernel has concurrency ids: 6.3 and newer ones have.
    pub fn has_ids(&self) -> bool {
        let mut parts = self.release.split(|c: char| !c.is_ascii_digit());
        let mut number = || parts.next().and_then(|part| part.parse().ok()).unwrap_or(0);
        (number(), number()) >= (6, 3)
    }
}

/// Returns the kernel for virtual machines of this machine's release. Downloads it if necessary.
pub fn kernel(cache: &Path, arch: Arch) -> Result<Kernel> {
    let folder = cache.join("kernel");
    if !folder.is_dir() {
        arch.add_to_apt()?;
        let meta = format!("linux-image-cloud-{0}:{0}", arch.debian());
        let real = behind(&meta, "linux-image-")?;
        let name = real.split(':').next().unwrap_or(&real);
        unpacked(&folder, &[format!("{name}:{}", arch.debian())])?;
    }
    Kernel::in_folder(&folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_concurrency_ids_since_6_3() {
        let has_ids = |release: &str| {
            let release = release.to_owned();
            let image = PathBuf::new();
            Kernel { image, release }.has_ids()
        };
        assert!(has_ids("6.12.117+deb13-cloud-amd64") && has_ids("7.0.4+deb13-cloud-amd64"));
        assert!(has_ids("6.3.0-1-cloud-amd64") && !has_ids("6.1.0-50-cloud-amd64"));
    }
}
