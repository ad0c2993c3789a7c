//! Files that the user asked for.
//!
//! The folder may be one that others may write to, as `/tmp`. There, another user can have put a
//! symbolic link, a pipe or a file of his own under the name. So a file is written anew beside the
//! named one and then renamed: nothing that was there is opened. Besides:
//!
//! - `-` is standard output.
//! - A symbolic link is followed if this user or root owns it.
//! - A device or a pipe is written to if this user or root owns it. A pipe must have a reader.

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::fs::{self, File, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where bytes go.
#[derive(Debug)]
enum Place {
    Standard,
    /// A device or a pipe, with the flags that open it.
    Special(PathBuf, Metadata, OFlags),
    /// A regular file, which need not exist.
    Regular(PathBuf),
}

fn is_trusted(about: &Metadata) -> bool {
    about.uid() == 0 || about.uid() == rustix::process::geteuid().as_raw()
}

fn place(path: &Path) -> Result<Place> {
    if path == Path::new("-") {
        return Ok(Place::Standard);
    }
    let about = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Ok(Place::Regular(path.to_owned()));
        }
        about => about?,
    };
    if !about.is_symlink() {
        return existing(path, &about, OFlags::NOFOLLOW);
    }
    if !is_trusted(&about) {
        bail!("it is a symbolic link of another user");
    }
    match fs::metadata(path) {
        Ok(target) if target.is_file() => Ok(Place::Regular(fs::canonicalize(path)?)),
        Ok(target) => existing(path, &target, OFlags::empty()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("it is a symbolic link to a file that does not exist")
        }
        Err(error) => Err(error.into()),
    }
}

fn existing(path: &Path, about: &Metadata, flags: OFlags) -> Result<Place> {
    let kind = about.file_type();
    if kind.is_file() {
        return Ok(Place::Regular(path.to_owned()));
    }
    if !(kind.is_fifo() || kind.is_char_device()) {
        bail!("it is not a regular file, a pipe or a character device");
    }
    if !is_trusted(about) {
        bail!("it is a pipe or device of another user");
    }
    Ok(Place::Special(path.to_owned(), about.clone(), flags))
}

/// Opens a device or a pipe, which must have a reader.
fn open(path: &Path, about: &Metadata, flags: OFlags) -> Result<File> {
    let flags = flags | OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match openat(CWD, path, flags, Mode::empty()) {
        Err(rustix::io::Errno::NXIO) => bail!("it is a pipe that nothing reads from"),
        file => File::from(file?),
    };
    let found = file.metadata()?;
    if (found.dev(), found.ino()) != (about.dev(), about.ino()) {
        bail!("another file has replaced it");
    }
    // Only the open must not wait.
    rustix::io::ioctl_fionbio(&file, false)?;
    Ok(file)
}

fn cannot_write(what: &str, path: &Path) -> String {
    format!(
        "cannot write {what} to {}; give a file in a folder that you may write to",
        path.display()
    )
}

/// A new file beside another one. Its name is random: a process that was killed has left its file.
fn beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
    let random = RandomState::new().hash_one(std::process::id());
    let new = format!(".{}.{random:016x}.new", name.to_string_lossy());
    let new = path.with_file_name(new);
    let file = File::options().write(true).create_new(true).open(&new)?;
    Ok((new, file))
}

/// Fails if `what` cannot be written to the file, so that the user learns this before hours of
/// measuring. Leaves the file system unchanged. Does not open a pipe, because its reader would get
/// an end of file.
pub fn check_writable(what: &str, path: &Path) -> Result<()> {
    let check = || -> Result<()> {
        if let Place::Regular(path) = place(path)? {
            let (new, _) = beside(&path)?;
            fs::remove_file(new)?;
        }
        Ok(())
    };
    check().with_context(|| cannot_write(what, path))
}

/// Makes a regular file empty to which `what` is written later, so that nobody takes its earlier
/// content for that. Fails as [`check_writable`] does. Leaves a pipe and a device alone.
pub fn clear(what: &str, path: &Path) -> Result<()> {
    check_writable(what, path)?;
    match fs::metadata(path) {
        Ok(about) if about.is_file() => write(what, path, b""),
        _ => Ok(()),
    }
}

/// Writes `what`, whose content is `bytes`, to a file that the user named. Until it is complete, a
/// regular file keeps what it had.
pub fn write(what: &str, path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> Result<()> {
        match place(path)? {
            Place::Standard => {
                let mut out = io::stdout().lock();
                match out.write_all(bytes).and_then(|()| out.flush()) {
                    // A reader that closes the pipe early is no error.
                    Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error)?,
                    _ => {}
                }
            }
            Place::Special(path, about, flags) => {
                open(&path, &about, flags)?.write_all(bytes)?;
            }
            Place::Regular(path) => {
                let (new, mut file) = beside(&path)?;
                let written = file.write_all(bytes).and_then(|()| fs::rename(&new, &path));
                if written.is_err() {
                    // The error that matters is the first one.
                    let _ = fs::remove_file(&new);
                }
                written?;
            }
        }
        Ok(())
    };
    write().with_context(|| cannot_write(what, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    #[test]
    fn checking_that_a_file_is_writable_leaves_it_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.svg");
        check_writable("the plot", &file).unwrap();
        assert!(!file.exists());
        fs::write(&file, "old").unwrap();
        check_writable("the plot", &file).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "old");
        let missing = folder.path().join("none/x.svg");
        let error = format!("{:#}", check_writable("the plot", &missing).unwrap_err());
        assert!(error.contains(missing.to_str().unwrap()), "{error}");
    }

    #[test]
    fn a_file_is_replaced_and_an_own_link_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [file, other, link] = ["file", "other", "link"].map(|name| folder.path().join(name));
        fs::write(&file, "old").unwrap();
        fs::hard_link(&file, &other).unwrap();
        write("it", &file, b"new").unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"old");
        symlink(&file, &link).unwrap();
        write("it", &link, b"newer").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"newer");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        write("it", Path::new("/dev/null"), b"gone").unwrap();
    }

    #[test]
    fn pipes_do_not_wait_and_links_of_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let error = format!("{:#}", write("it", &pipe, b"").unwrap_err());
        assert!(error.contains("nothing reads"), "{error}");
        // The check does not open the pipe, which would end the reader.
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).unwrap()
        });
        std::thread::sleep(Duration::from_millis(20));
        loop {
            clear("it", &pipe).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            if write("it", &pipe, b"all").is_ok() || reader.is_finished() {
                break;
            }
        }
        assert_eq!(reader.join().unwrap(), "all");
        if !rustix::process::geteuid().is_root() {
            return;
        }
        std::os::unix::fs::chown(&pipe, Some(12_345), None).unwrap();
        let error = format!("{:#}", check_writable("it", &pipe).unwrap_err());
        assert!(error.contains("another user"), "{error}");
        let link = folder.path().join("link");
        let target = folder.path().join("target");
        fs::write(&target, "old").unwrap();
        symlink(&target, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(12_345), None).unwrap();
        let error = format!("{:#}", write("it", &link, b"new").unwrap_err());
        assert!(error.contains("another user"), "{error}");
        assert_eq!(fs::read(&target).unwrap(), b"old");
    }
}
