//! The library that the command contains, for a command that was installed alone, as by `cargo
//! install`.
//!
//! The dynamic loader takes a library from a file. Programs that the started program starts take it
//! from there too, after this command has ended. So the command writes the library to a file in the
//! user's cache folder, and leaves it there. The path has the library's build id.
//!
//! A user who can change that file, or a folder above it, can run code in this user's programs. So
//! the command accepts only files and folders of this user, and of root above the cache folder.
#![allow(unsafe_code, reason = "the library's bytes come from assembly")]

use super::library::FILE;
use super::trust::Rule;
use anyhow::{Context, Result, bail};
use object::Object;
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::env;
use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

// `include_bytes!` would need the file when the compiler only checks the program, and then Cargo
// does not build the library.
#[cfg(contains_library)]
core::arch::global_asm!(
    ".pushsection .rodata.pinfold_contained,\"a\"",
    ".balign 16",
    ".globl pinfold_contained_start",
    ".hidden pinfold_contained_start",
    "pinfold_contained_start:",
    concat!(".incbin \"", env!("PINFOLD_CONTAINED"), "\""),
    ".globl pinfold_contained_end",
    ".hidden pinfold_contained_end",
    "pinfold_contained_end:",
    ".popsection",
    options(raw)
);

/// Returns the library. `None` unless the command was built by a release profile.
#[cfg(contains_library)]
pub fn content() -> Option<&'static [u8]> {
    unsafe extern "C" {
        static pinfold_contained_start: [u8; 0];
        static pinfold_contained_end: [u8; 0];
    }
    let (start, end) = (
        &raw const pinfold_contained_start,
        &raw const pinfold_contained_end,
    );
    // SAFETY: the assembly above places the library's bytes between the two symbols, in memory that
    // nothing writes to.
    Some(unsafe { std::slice::from_raw_parts(start.cast(), end.addr() - start.addr()) })
}

#[cfg(not(contains_library))]
pub fn content() -> Option<&'static [u8]> {
    None
}

/// Returns the path of a file with `content` in the user's cache folder. Writes the file if it is
/// missing or incomplete.
pub fn written_out(content: &[u8]) -> Result<PathBuf> {
    const REMEDY: &str = "set XDG_CACHE_HOME to a folder that only you can write to, or install \
                          the library by `cargo xtask install`";
    let Some(cache) = cache_folder() else {
        bail!("neither XDG_CACHE_HOME nor HOME is an absolute path; {REMEDY}");
    };
    written_to(&cache, content)
        .with_context(|| format!("cannot keep {FILE} in {}; {REMEDY}", cache.display()))
}

/// Returns the cache folder of the XDG base directory specification.
fn cache_folder() -> Option<PathBuf> {
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    let named = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(absolute(env::var_os("HOME")?.into())?.join(".cache"));
    named.and_then(absolute).or_else(home)
}

fn written_to(cache: &Path, content: &[u8]) -> Result<PathBuf> {
    let mut folder = checked_cache(cache)?;
    let library = object::File::parse(content).context("the contained library")?;
    let id = library.build_id().ok().flatten();
    let id = id.context("the contained library has no build id")?;
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    for name in ["pinfold", &format!("{}-{id}", env!("CARGO_PKG_VERSION"))] {
        folder.push(name);
        make(&folder)?;
        if !Rule::user_only()?.check(&folder)?.is_dir() {
            bail!("{} is not a folder", folder.display());
        }
    }
    let file = folder.join(FILE);
    let is_there = match fs::symlink_metadata(&file) {
        Ok(_) => Rule::user_only()?.check(&file)?.len() == content.len() as u64,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| file.display().to_string()),
    };
    if !is_there {
        replace(&file, content).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(file)
}

/// Makes the cache folder if it is missing, and returns its path without symbolic links. Makes
/// nothing if the user's files are not safe there, or if the loader could not use them.
fn checked_cache(cache: &Path) -> Result<PathBuf> {
    let named = |path: &Path| format!("{} cannot be used", path.display());
    let is_missing =
        fs::symlink_metadata(cache).is_err_and(|error| error.kind() == ErrorKind::NotFound);
    let (Some(above), Some(name)) = (cache.parent(), cache.file_name()) else {
        bail!("{} cannot be used", cache.display());
    };
    let real = if is_missing { above } else { cache };
    let real = real.canonicalize().with_context(|| named(real))?;
    for above in real.ancestors() {
        Rule::user_or_root()?.check(above)?;
    }
    if super::library::ends_early(&real) {
        bail!("the dynamic loader takes a space or a colon for the end of a path");
    }
    if statvfs(&real)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        bail!("{} is mounted with noexec", real.display());
    }
    if !is_missing {
        return Ok(real);
    }
    let cache = real.join(name);
    make(&cache)?;
    Rule::user_or_root()?.check(&cache)?;
    Ok(cache)
}

/// Makes a folder for the user alone, unless there is one.
fn make(folder: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Writes a file for the user alone. A process that reads the file sees the old content or the new
/// one.
fn replace(file: &Path, content: &[u8]) -> Result<()> {
    let random = RandomState::new().hash_one(std::process::id());
    let new = file.with_extension(format!("{random:016x}"));
    #[expect(
        clippy::disallowed_methods,
        reason = "a new file, in the user's folder"
    )]
    let opened = {
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600).open(&new)
    };
    let mut written = opened?;
    let outcome = written
        .write_all(content)
        .and_then(|()| written.sync_data());
    let outcome = outcome.and_then(|()| fs::rename(&new, file));
    if outcome.is_err() {
        // The error that matters is the first one.
        let _ = fs::remove_file(&new);
    }
    Ok(outcome?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    /// This test program, which has a build id as the library has.
    fn library() -> Vec<u8> {
        fs::read(env::current_exe().unwrap()).unwrap()
    }

    fn refusal(cache: &Path) -> String {
        format!("{:#}", written_to(cache, &library()).unwrap_err())
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_library_is_written_once_and_again_if_it_is_incomplete() {
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().join("cache");
        let library = library();
        let file = written_to(&cache, &library).unwrap();
        assert!(fs::read(&file).unwrap() == library);
        let folder = file.parent().unwrap();
        assert_eq!([&*cache, folder, &file].map(mode), [0o700, 0o700, 0o600]);
        let written = fs::metadata(&file).unwrap().ino();
        assert_eq!(written_to(&cache, &library).unwrap(), file);
        assert_eq!(fs::metadata(&file).unwrap().ino(), written);
        // As after a full disk.
        fs::write(&file, "part").unwrap();
        written_to(&cache, &library).unwrap();
        assert!(fs::read(&file).unwrap() == library);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
    }

    #[test]
    fn what_others_may_change_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().join("cache");
        let file = written_to(&cache, &library()).unwrap();
        let folder = file.parent().unwrap();
        for open in [&*cache, &cache.join("pinfold"), folder, &file] {
            let before = mode(open);
            fs::set_permissions(open, Permissions::from_mode(before | 0o002)).unwrap();
            let said = refusal(&cache);
            assert!(said.contains("may be changed by other users"), "{said}");
            assert!(said.contains(&*open.to_string_lossy()), "{said}");
            fs::set_permissions(open, Permissions::from_mode(before)).unwrap();
        }
        written_to(&cache, &library()).unwrap();
    }

    #[test]
    fn links_are_refused() {
        let home = tempfile::tempdir().unwrap();
        let (cache, elsewhere) = (home.path().join("cache"), home.path().join("elsewhere"));
        fs::create_dir(&elsewhere).unwrap();
        fs::create_dir(&cache).unwrap();
        symlink(&elsewhere, cache.join("pinfold")).unwrap();
        assert!(refusal(&cache).contains("symbolic link"));
        fs::remove_file(cache.join("pinfold")).unwrap();
        let file = written_to(&cache, &library()).unwrap();
        fs::write(elsewhere.join("mine"), "mine").unwrap();
        fs::remove_file(&file).unwrap();
        symlink(elsewhere.join("mine"), &file).unwrap();
        assert!(refusal(&cache).contains("symbolic link"));
        assert_eq!(fs::read(elsewhere.join("mine")).unwrap(), b"mine");
        symlink(home.path().join("none"), home.path().join("dangling")).unwrap();
        assert!(refusal(&home.path().join("dangling")).contains("dangling"));
    }

    #[test]
    fn a_refusal_makes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let spaced = home.path().join("a space");
        fs::create_dir(&spaced).unwrap();
        assert!(refusal(&spaced).contains("a space or a colon"));
        assert_eq!(fs::read_dir(&spaced).unwrap().count(), 0);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let theirs = home.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        chown(&theirs, Some(12345), None).unwrap();
        for cache in [&theirs, &theirs.join(".cache")] {
            assert!(refusal(cache).contains("belongs to user 12345"));
            assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0);
        }
    }
}
