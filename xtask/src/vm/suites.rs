//! Kernels and C libraries of Debian's other suites, for `--kernel` and `--libc`.
//!
//! apt reads the suites through private lists below target/vm, so this machine's own lists stay as
//! they are. apt verifies each list by the archive's signature, and each package by the list.

use super::packages::{self, Kernel};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The keys of Debian's archive.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const ARCHIVE: &str = "http://deb.debian.org/debian";
const SECURITY: &str = "http://deb.debian.org/debian-security";
/// The suites, each with its archive. If several have the same version, the first of them is used.
const SUITES: &[(&str, &str)] = &[
    (ARCHIVE, "bookworm"),
    (SECURITY, "bookworm-security"),
    (ARCHIVE, "bookworm-backports"),
    (ARCHIVE, "trixie"),
    (SECURITY, "trixie-security"),
    (ARCHIVE, "trixie-backports"),
    (ARCHIVE, "forky"),
    (ARCHIVE, "sid"),
];
/// An old suite, which may leave the archive. It is left out if it cannot be read.
const OLD: (&str, &str) = (ARCHIVE, "bullseye");
/// Packages whose libraries replace this machine's libraries. All come from the same suite.
const LIBRARIES: [&str; 3] = ["libc6", "libgcc-s1", "libstdc++6"];

/// A version of a package in a suite.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offer {
    name: String,
    version: String,
    suite: String,
}

/// The lists of packages of all suites.
struct Suites {
    folder: PathBuf,
    offers: Vec<Offer>,
}

/// A C library that replaces this machine's.
pub struct Libc {
    pub version: String,
    /// The folder of its libraries.
    pub folder: PathBuf,
}

/// A suite, as the source of a whole root file system.
pub struct Release {
    pub archive: String,
    pub suite: String,
}

/// Returns the suite whose C library has a version that begins with `version`. Of several, returns
/// the one with the newest C library.
pub fn release(cache: &Path, version: &str) -> Result<Release> {
    let offers = Suites::open(cache)?.offers;
    // The other suites only add packages to one of these.
    let is_whole = |one: &&Offer| one.name == "libc6" && !one.suite.contains('-');
    let all: Vec<_> = offers.iter().filter(is_whole).collect();
    let libc = newest(&all, version).with_context(|| lacks("C libraries", &all))?;
    let mut suites = SUITES.iter().chain([&OLD]);
    let found = suites.find(|suite| suite.1 == libc.suite);
    let (archive, suite) = found.with_context(|| format!("no suite {}", libc.suite))?;
    Ok(Release {
        archive: archive.to_string(),
        suite: suite.to_string(),
    })
}

/// Returns the newest kernel whose version begins with `version`. Downloads it if necessary.
pub fn kernel(cache: &Path, version: &str) -> Result<Kernel> {
    let (folder, _) = cached(cache, "kernel", version, |offers| {
        let image = newest_kernel(offers, version)?;
        Ok(vec![holder(offers, image)])
    })?;
    Kernel::in_folder(&folder)
}

/// Returns the newest C library whose version begins with `version`. Downloads it if necessary.
pub fn libc(cache: &Path, version: &str) -> Result<Libc> {
    let (tree, version) = cached(cache, "libc", version, |offers| libraries(offers, version))?;
    let folder = tree.join("usr/lib/x86_64-linux-gnu");
    Ok(Libc { version, folder })
}

/// Unpacks the packages that `choose` chooses. Returns their folder and the first one's version.
///
/// Lists from an earlier call may be too old: a package has been replaced, or the version is newer
/// than the list. So after a failure the lists are downloaded again, once.
fn cached(
    cache: &Path,
    kind: &str,
    version: &str,
    choose: impl Fn(&[Offer]) -> Result<Vec<Offer>>,
) -> Result<(PathBuf, String)> {
    let there = cache.join("lists").is_dir();
    let attempt = |suites: Suites| {
        let offers = choose(&suites.offers)?;
        let full = offers[0].version.clone();
        let names: Vec<_> = offers
            .iter()
            .map(|offer| format!("{}={}", offer.name, offer.version))
            .collect();
        let folder = cache.join(format!("{kind}-{full}"));
        let options = options(&suites.folder);
        Ok((packages::unpacked_with(&folder, &names, &options)?, full))
    };
    let tried = Suites::open(cache).and_then(attempt);
    match tried {
        Err(_) if there => Suites::renew(cache).and_then(attempt),
        other => other,
    }
    .with_context(|| format!("no {kind} {version}"))
}

impl Suites {
    /// Reads the lists. Downloads them if necessary.
    fn open(cache: &Path) -> Result<Suites> {
        let folder = packages::filled(&cache.join("lists"), |_, tree| download(tree))?;
        let text = fs::read_to_string(folder.join("offers"))?;
        let offers = text.lines().filter_map(offer).collect();
        Ok(Suites { folder, offers })
    }

    /// Downloads the lists again. The old ones stay if that fails.
    fn renew(cache: &Path) -> Result<Suites> {
        let new = cache.join("lists.new");
        let _ = fs::remove_dir_all(&new);
        packages::filled(&new, |_, tree| download(tree))?;
        fs::remove_dir_all(cache.join("lists"))?;
        fs::rename(new, cache.join("lists"))?;
        Suites::open(cache)
    }
}

/// Returns the options that make apt use only the lists in `folder`, and only verified ones.
fn options(folder: &Path) -> Vec<String> {
    let folder = folder.display();
    [
        format!("Dir::Etc::SourceList={folder}/sources.list"),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        format!("Dir::State::Lists={folder}/lists"),
        format!("Dir::Cache={folder}/cache"),
        "Acquire::AllowInsecureRepositories=false".to_owned(),
        "APT::Get::AllowUnauthenticated=false".to_owned(),
    ]
    .map(|option| format!("-o{option}"))
    .into()
}

/// Downloads the lists of all suites into `folder`, and writes the packages that matter to the file
/// `offers` there, because apt takes seconds to read the lists.
fn download(folder: &Path) -> Result<()> {
    packages::file(Path::new(KEYRING), "debian-archive-keyring")?;
    fs::create_dir_all(folder.join("lists/partial"))?;
    fs::create_dir_all(folder.join("cache/archives/partial"))?;
    let source = |(archive, suite): &(&str, &str)| {
        format!("deb [arch=amd64 target=Packages signed-by={KEYRING}] {archive} {suite} main\n")
    };
    let sources: String = SUITES.iter().map(source).collect();
    let update = |sources: String| {
        fs::write(folder.join("sources.list"), sources)?;
        apt(folder, "apt-get", &["update", "-qq", "--error-on=any"])
    };
    update(sources.clone() + &source(&OLD)).or_else(|_| update(sources))?;
    let names = apt(folder, "apt-cache", &["pkgnames", "linux-"])?;
    let kernels = |name: &&str| {
        let is_kernel = name.starts_with("linux-image-") || name.starts_with("linux-binary-");
        is_kernel && name.ends_with("-amd64")
    };
    let mut asked = vec!["madison"];
    asked.extend(LIBRARIES);
    asked.extend(names.lines().filter(kernels));
    fs::write(folder.join("offers"), apt(folder, "apt-cache", &asked)?)?;
    Ok(())
}

fn apt(folder: &Path, program: &str, words: &[&str]) -> Result<String> {
    let said = Command::new(program)
        .args(options(folder))
        .args(words)
        .output()
        .with_context(|| format!("cannot start {program}, which reads Debian's lists"))?;
    if !said.status.success() {
        let why = String::from_utf8_lossy(&said.stderr);
        bail!("{program} cannot read Debian's lists: {}", why.trim());
    }
    String::from_utf8(said.stdout).with_context(|| format!("the output of {program}"))
}

/// Reads a line of `apt-cache madison`: `NAME | VERSION | ARCHIVE SUITE/main amd64 Packages`.
fn offer(line: &str) -> Option<Offer> {
    let mut parts = line.split(" | ").map(str::trim);
    let (name, version, place) = (parts.next()?, parts.next()?, parts.next()?);
    let suite = place.split_whitespace().nth(1)?.split('/').next()?;
    Some(Offer {
        name: name.to_owned(),
        version: version.to_owned(),
        suite: suite.to_owned(),
    })
}

/// Returns the newest kernel that fits. Prefers the flavour for virtual machines.
fn newest_kernel(offers: &[Offer], version: &str) -> Result<Offer> {
    let flavour = |offer: &Offer, cloud: bool| {
        // The names without a version belong to packages without files.
        let name = offer.name.strip_prefix("linux-image-")?;
        let name = name.strip_suffix("-amd64")?;
        let (name, is_cloud) = match name.strip_suffix("-cloud") {
            Some(name) => (name, true),
            None => (name, false),
        };
        let is_image = name.starts_with(|first: char| first.is_ascii_digit());
        (is_image && is_cloud == cloud && !name.ends_with("-rt")).then_some(())
    };
    let of = |cloud| -> Vec<&Offer> {
        let fits = |offer: &&Offer| flavour(offer, cloud).is_some();
        offers.iter().filter(fits).collect()
    };
    let found = newest(&of(true), version).or_else(|| newest(&of(false), version));
    found.with_context(|| lacks("kernels", &of(true)))
}

/// Returns the package that holds a kernel: `linux-image-*`, or for newer ones `linux-binary-*`.
fn holder(offers: &[Offer], image: Offer) -> Offer {
    let name = image.name.replacen("linux-image-", "linux-binary-", 1);
    let same = |one: &&Offer| one.name == name && one.version == image.version;
    offers.iter().find(same).cloned().unwrap_or(image)
}

/// Returns the newest C library that fits, and the other libraries of its suite.
fn libraries(offers: &[Offer], version: &str) -> Result<Vec<Offer>> {
    let all: Vec<_> = offers.iter().filter(|one| one.name == "libc6").collect();
    let libc = newest(&all, version).with_context(|| lacks("C libraries", &all))?;
    let others = LIBRARIES.iter().map(|name| {
        let same = |one: &&Offer| one.name == *name && one.suite == libc.suite;
        let same: Vec<_> = offers.iter().filter(same).collect();
        let missing = || format!("{} has no package {name}", libc.suite);
        newest(&same, "").with_context(missing)
    });
    others.collect()
}

/// Says which versions there are: the newest of each pair of first numbers.
fn lacks(what: &str, offers: &[&Offer]) -> String {
    let mut versions = BTreeMap::new();
    for offer in offers {
        let numbers = numbers(&offer.version);
        let pair = numbers.iter().take(2).copied().collect::<Vec<_>>();
        let newest = versions.entry(pair).or_insert((vec![], ""));
        *newest = newest.clone().max((numbers, &offer.version));
    }
    let versions: Vec<_> = versions.values().map(|newest| newest.1).collect();
    format!("Debian's lists have these {what}: {}", versions.join(", "))
}

fn newest(offers: &[&Offer], version: &str) -> Option<Offer> {
    let fits = offers.iter().filter(|one| begins(&one.version, version));
    let place = |offer: &Offer| SUITES.iter().position(|suite| suite.1 == offer.suite);
    let key = |offer: &&&Offer| {
        let place = std::cmp::Reverse(place(offer).unwrap_or(usize::MAX));
        (numbers(&offer.version), place)
    };
    Some((*fits.max_by_key(key)?).clone())
}

/// Returns whether a full version begins with the numbers of `prefix`: 7.3.4-1 with 7.3, not with
/// 7.
fn begins(full: &str, prefix: &str) -> bool {
    let rest = full.strip_prefix(prefix);
    rest.is_some_and(|rest| prefix.is_empty() || !rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn numbers(version: &str) -> Vec<u64> {
    let parts = version.split(|c: char| !c.is_ascii_digit());
    parts.filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MADISON: &str = "\
     libc6 |     2.43-7 | http://deb.debian.org/debian sid/main amd64 Packages
     libc6 |     2.43-7 | http://deb.debian.org/debian forky/main amd64 Packages
     libc6 | 2.41-12+deb13u5 | http://deb.debian.org/debian trixie/main amd64 Packages
 libgcc-s1 |   16.2.0-4 | http://deb.debian.org/debian sid/main amd64 Packages
 libgcc-s1 |   16.2.0-3 | http://deb.debian.org/debian forky/main amd64 Packages
libstdc++6 |   16.2.0-3 | http://deb.debian.org/debian forky/main amd64 Packages
linux-image-cloud-amd64 | 7.9.1-1 | http://deb.debian.org/debian sid/main amd64 Packages
linux-image-7.0.9+deb13-cloud-amd64 | 7.0.9-1~bpo13+1 | http://d/debian trixie-backports/main amd64 Packages
linux-image-7.0.13+deb13-cloud-amd64 | 7.0.13-1~bpo13+1 | http://d/debian trixie-backports/main amd64 Packages
linux-image-7.0.14+deb13-rt-amd64 | 7.0.14-1 | http://d/debian sid/main amd64 Packages
linux-image-7.0.14+deb13-amd64 | 7.0.14-1 | http://d/debian sid/main amd64 Packages
linux-image-7.4.1+deb14-amd64 | 7.4.1-1 | http://d/debian sid/main amd64 Packages";

    fn offers() -> Vec<Offer> {
        MADISON.lines().filter_map(offer).collect()
    }

    #[test]
    fn the_newest_kernel_of_a_version_is_chosen_and_cloud_kernels_are_preferred() {
        let name = |version| newest_kernel(&offers(), version).map(|offer| offer.name);
        let cloud = "linux-image-7.0.13+deb13-cloud-amd64";
        assert_eq!(name("7.0").unwrap(), cloud);
        assert_eq!(name("7.4").unwrap(), "linux-image-7.4.1+deb14-amd64");
        let error = name("7.9").unwrap_err().to_string();
        assert!(error.ends_with("kernels: 7.0.13-1~bpo13+1"), "{error}");
        assert!(name("7.0.1").is_err());
        let image = newest_kernel(&offers(), "7.0").unwrap();
        assert_eq!(holder(&offers(), image.clone()), image);
        let mut binary = image.clone();
        binary.name = cloud.replace("image", "binary");
        assert_eq!(holder(&[image.clone(), binary.clone()], image), binary);
    }

    #[test]
    fn libraries_come_from_one_suite() {
        let found = libraries(&offers(), "2.43").unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|one| (&*one.version, &*one.suite))
            .collect();
        let gcc = ("16.2.0-3", "forky");
        assert_eq!(found, [("2.43-7", "forky"), gcc, gcc]);
        let error = libraries(&offers(), "2.4").unwrap_err().to_string();
        assert!(error.contains("2.41-12+deb13u5, 2.43-7"), "{error}");
        let error = libraries(&offers(), "2.41").unwrap_err().to_string();
        assert_eq!(error, "trixie has no package libgcc-s1");
    }
}
