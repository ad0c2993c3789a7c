//! The library that the command contains, for a command that was installed alone, as by `cargo
//! install`.
//!
//! The dynamic loader takes a library from a file. Programs that the started program starts take it
//! from there too, after this command has ended. So the command writes the library to the user's
//! cache folder, under a name that depends on its content, and leaves it there.
//!
//! Whoever can change that file, or a folder above it, can run code in the user's programs. So all
//! of them must belong to the user or to root, and nobody else may write there.

use crate::foreign::open_own;
use anyhow::{Context, Result, bail};
use pinfold_malloc::settings::LIBRARY;
use std::env;
use std::fs::{self, DirBuilder, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The library, in a command that was built by a release profile.
pub const CONTENT: Option<&[u8]> = content();

#[cfg(contains_library)]
const fn content() -> Option<&'static [u8]> {
    Some(include_bytes!(env!("PINFOLD_CONTAINED")))
}

/// A test build's library lies beside the command. Two copies would only make it slow to build.
#[cfg(not(contains_library))]
const fn content() -> Option<&'static [u8]> {
    None
}

/// Returns the path of a file with `content` in the user's cache folder. Writes the file if it is
/// missing or differs.
pub fn laid_out(content: &[u8]) -> Result<PathBuf> {
    let cache = cache_folder().with_context(|| {
        format!("neither XDG_CACHE_HOME nor HOME is an absolute path; set one of them, {OTHERWISE}")
    })?;
    laid_out_in(&cache, content)
        .with_context(|| format!("cannot keep libpinfold.so in {}", cache.display()))
}

/// The remedy that always works.
const OTHERWISE: &str = "or install the library by `cargo xtask install`";

/// Returns the folder of the XDG base directory specification.
fn cache_folder() -> Option<PathBuf> {
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    let named = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(absolute(env::var_os("HOME")?.into())?.join(".cache"));
    named.and_then(absolute).or_else(home)
}

fn laid_out_in(cache: &Path, content: &[u8]) -> Result<PathBuf> {
    let mut sum = flate2::Crc::new();
    sum.update(content);
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("{version}-{:08x}", sum.sum());
    if !cache.exists() {
        make(cache, 0o700)?;
    }
    // The path is used for as long as programs start others, so it has no symbolic link.
    let cache = cache.canonicalize()?;
    for above in cache.ancestors() {
        check(above, &fs::symlink_metadata(above)?, Whose::TheirsOrRoots)?;
    }
    let mut folder = cache;
    for name in ["pinfold", &name] {
        folder.push(name);
        make(&folder, 0o700)?;
        check(&folder, &fs::symlink_metadata(&folder)?, Whose::Theirs)?;
    }
    let file = folder.join("libpinfold.so");
    let is_there = match fs::symlink_metadata(&file) {
        Ok(found) => {
            check(&file, &found, Whose::Theirs)?;
            let mut old = Vec::new();
            open_own(&file)?
                .take(content.len() as u64 + 1)
                .read_to_end(&mut old)?;
            old == content
        }
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(error.into()),
    };
    if !is_there {
        pinfold_lab::output::write("the library", &file, content)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Makes a folder, unless there is one.
fn make(folder: &Path, mode: u32) -> Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Who may own a file or folder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// The user of this command.
    Theirs,
    TheirsOrRoots,
}

/// Fails if another user could replace what `about` describes, or what is in it.
fn check(path: &Path, about: &Metadata, whose: Whose) -> Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let owner = about.uid();
    if owner != user && (whose == Whose::Theirs || owner != 0) {
        bail!(
            "{} belongs to user {owner}; set XDG_CACHE_HOME to a folder of your own, {OTHERWISE}",
            path.display()
        );
    }
    if about.is_symlink() {
        bail!("{} is a symbolic link; remove it", path.display());
    }
    // In a sticky folder like /tmp, others cannot replace what is the user's.
    let is_sticky = about.is_dir() && about.mode() & 0o1000 != 0;
    // Many systems give each user a group of the same number, which has no other member.
    let others = if about.gid() == user { 0o002 } else { 0o022 };
    if about.mode() & others != 0 && !is_sticky {
        bail!(
            "others may write to {}; forbid it by `chmod go-w`, or set {LIBRARY}",
            path.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::symlink;

    fn refusal(cache: &Path) -> String {
        format!("{:#}", laid_out_in(cache, b"library").unwrap_err())
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_library_is_written_once_and_again_if_it_differs() {
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().join("cache");
        let file = laid_out_in(&cache, b"library").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"library");
        assert_eq!((mode(&cache), mode(file.parent().unwrap())), (0o700, 0o700));
        let written = fs::metadata(&file).unwrap().ino();
        assert_eq!(laid_out_in(&cache, b"library").unwrap(), file);
        assert_eq!(fs::metadata(&file).unwrap().ino(), written);
        assert_ne!(laid_out_in(&cache, b"newer").unwrap(), file);
        // A disk that was full, for example.
        fs::write(&file, "libr").unwrap();
        assert_eq!(laid_out_in(&cache, b"library").unwrap(), file);
        assert_eq!(fs::read(&file).unwrap(), b"library");
        fs::write(&file, "LIBRARY").unwrap();
        laid_out_in(&cache, b"library").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"library");
    }

    #[test]
    fn what_others_may_change_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().join("cache");
        let file = laid_out_in(&cache, b"library").unwrap();
        for open in [
            &*cache,
            &cache.join("pinfold"),
            file.parent().unwrap(),
            &file,
        ] {
            let before = mode(open);
            fs::set_permissions(open, Permissions::from_mode(before | 0o002)).unwrap();
            let said = refusal(&cache);
            assert!(
                said.contains("others may write to") && said.contains("chmod"),
                "{said}"
            );
            assert!(said.contains(&*open.to_string_lossy()), "{said}");
            fs::set_permissions(open, Permissions::from_mode(before)).unwrap();
        }
        laid_out_in(&cache, b"library").unwrap();
    }

    #[test]
    fn links_in_the_folder_are_refused() {
        let home = tempfile::tempdir().unwrap();
        let (cache, elsewhere) = (home.path().join("cache"), home.path().join("elsewhere"));
        fs::create_dir(&elsewhere).unwrap();
        fs::create_dir(&cache).unwrap();
        symlink(&elsewhere, cache.join("pinfold")).unwrap();
        assert!(refusal(&cache).contains("symbolic link"));
        fs::remove_file(cache.join("pinfold")).unwrap();
        let file = laid_out_in(&cache, b"library").unwrap();
        fs::rename(&file, elsewhere.join("mine")).unwrap();
        symlink(elsewhere.join("mine"), &file).unwrap();
        assert!(refusal(&cache).contains("symbolic link"));
        assert_eq!(fs::read(elsewhere.join("mine")).unwrap(), b"library");
    }

    #[test]
    fn another_users_folder_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().join("cache");
        fs::create_dir(&cache).unwrap();
        std::os::unix::fs::chown(&cache, Some(12345), None).unwrap();
        assert!(refusal(&cache).contains("belongs to user 12345"));
        assert!(!cache.join("pinfold").exists());
    }
}
