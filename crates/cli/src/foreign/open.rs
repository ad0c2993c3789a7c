//! Opens a file that another process has mapped.
//!
//! The path of a mapping says where the file was. Since then, the process may have put another file
//! there, or a link to a file that only this command may read, or a device or a pipe, whose mere
//! opening acts or waits. So a file is opened in three steps:
//!
//! 1. It is found without being opened (`O_PATH`). The kernel's link to the mapping's own file in
//!    `map_files` is the surest way, where this process may use it. Otherwise the path is walked
//!    below the process's root, and no link is followed.
//! 2. What was found must be a regular file, and have the device and the inode of the mapping.
//! 3. That very file is opened for reading, through this process's descriptor.

use super::{Mapping, Process, deadline};
use rustix::fs::{
    CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, major, minor, openat, openat2,
};
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Why a mapped file was not opened.
#[derive(Debug)]
pub enum Unopened {
    /// The mapping has no file.
    NoFile,
    /// Another file stands at the mapping's path, and this user may not use `map_files`.
    Replaced,
    /// It is a device, a pipe, a socket or a directory.
    NotRegular,
    System(io::Error),
}

impl fmt::Display for Unopened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unopened::NoFile => f.write_str("it is no file"),
            Unopened::Replaced => f.write_str("another file has replaced it"),
            Unopened::NotRegular => f.write_str("it is not a regular file"),
            Unopened::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Unopened {}

impl From<io::Error> for Unopened {
    fn from(error: io::Error) -> Unopened {
        Unopened::System(error)
    }
}

impl From<rustix::io::Errno> for Unopened {
    fn from(error: rustix::io::Errno) -> Unopened {
        Unopened::System(error.into())
    }
}

/// Opens the file of a mapping for reading.
pub fn open_mapped(process: &Process, mapping: &Mapping) -> Result<File, Unopened> {
    if mapping.inode == 0 || !mapping.path.starts_with(b"/") {
        return Err(Unopened::NoFile);
    }
    match find(process.folder(), &mapping.map_file()) {
        // The kernel itself says that this is the mapped file. Some file systems show other devices
        // in the list of mappings than elsewhere, so these are not compared.
        Ok(found) => open_found(found.as_fd()),
        Err(_) => beneath_root(process, mapping),
    }
}

/// Opens a regular file behind a link of the kernel's in a process's folder, as `fd/7`. `is_it`
/// returns whether the file that was found is the wanted one.
pub fn regular(
    process: &Process,
    link: &str,
    is_it: impl FnOnce(&Stat) -> bool,
) -> Result<File, Unopened> {
    let found = find(process.folder(), link)?;
    if !is_it(&fstat(&found)?) {
        return Err(Unopened::Replaced);
    }
    open_found(found.as_fd())
}

/// Opens the regular file at a path that another process chose, below the folder `root`. Follows no
/// link.
pub fn open_beneath(root: BorrowedFd<'_>, path: &Path) -> Result<File, Unopened> {
    open_found(find_beneath(root, path)?.as_fd())
}

/// Opens the regular file at a path that no other process chose. Follows links.
pub fn open_regular(path: &Path) -> Result<File, Unopened> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    open_found(openat(CWD, path, flags, Mode::empty())?.as_fd())
}

/// Finds what a path leads to, and does not open it.
fn find(at: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    deadline::check()?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(openat(at, path, flags, Mode::empty())?)
}

/// Opens what was found for reading, if it is a regular file.
fn open_found(found: BorrowedFd<'_>) -> Result<File, Unopened> {
    if FileType::from_raw_mode(fstat(found)?.st_mode) != FileType::RegularFile {
        return Err(Unopened::NotRegular);
    }
    Ok(reopen(found, OFlags::RDONLY)?)
}

/// Opens the file behind a descriptor once more, with `access`.
fn reopen(found: BorrowedFd<'_>, access: OFlags) -> io::Result<File> {
    // Without `NONBLOCK`, opening a leased file would wait for the lease's holder.
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let own = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(openat(CWD, own, flags, Mode::empty())?.into())
}

/// Opens a file in a folder where other users may write too. Returns an error if it is not a
/// regular file of this user.
pub fn open_own(path: &Path) -> Result<File, Unopened> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = openat(CWD, path, flags, Mode::empty())?;
    if fstat(&found)?.st_uid != rustix::process::geteuid().as_raw() {
        return Err(Unopened::System(ErrorKind::PermissionDenied.into()));
    }
    open_found(found.as_fd())
}

/// Opens a file that is open for reading for writing, too.
pub fn reopen_for_writing(file: &File) -> io::Result<File> {
    reopen(file.as_fd(), OFlags::RDWR)
}

/// Opens the file at the mapping's path below the process's root.
fn beneath_root(process: &Process, mapping: &Mapping) -> Result<File, Unopened> {
    let root = openat(
        process.folder(),
        "root",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let path = unescaped(&mapping.path);
    let path = Path::new(OsStr::from_bytes(&path));
    // The list shows a path from the root of the file system. The root of a process can be a folder
    // below that one, so both paths are tried.
    let in_root = process.root()?;
    let shorter = path.strip_prefix(&in_root).unwrap_or(path);
    let mut failed = Unopened::Replaced;
    for path in [shorter, path] {
        match find_beneath(root.as_fd(), path) {
            Ok(found) if is_mapped_file(process, mapping, found.as_fd()) => {
                return open_found(found.as_fd());
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => failed = error.into(),
        }
    }
    Err(failed)
}

fn find_beneath(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    deadline::check()?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let beneath = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    Ok(openat2(root, path, flags, Mode::empty(), beneath)?)
}

/// Returns whether a file is the one of a mapping. Returns `false` if that cannot be told.
fn is_mapped_file(process: &Process, mapping: &Mapping, found: BorrowedFd<'_>) -> bool {
    let Ok(stat) = fstat(found) else {
        return false;
    };
    if stat.st_ino != mapping.inode {
        return false;
    }
    (major(stat.st_dev), minor(stat.st_dev)) == mapping.device
        || mount_of(process, found).is_some_and(|(device, kind)| {
            // Older kernels show the device below an overlay, which has the same inodes.
            device == mapping.device || kind == b"overlay"
        })
}

/// Returns the device and the kind of the file system that a file is on, as the list of mounts
/// shows them. Some file systems, as btrfs, show other devices in `stat`, and this one in the list
/// of mappings.
fn mount_of(process: &Process, found: BorrowedFd<'_>) -> Option<((u32, u32), Vec<u8>)> {
    const MAX_MOUNTS: usize = 4 << 20;
    let own = Process::own().ok()?;
    let info = own.fields(&format!("fdinfo/{}", found.as_raw_fd())).ok()?;
    let id = info.field("mnt_id:")?;
    let mounts = process.read("mountinfo", MAX_MOUNTS).ok()?;
    // `36 35 98:0 /root /mnt rw,noatime master:1 - ext3 /dev/root rw`
    mounts.split(|&byte| byte == b'\n').find_map(|line| {
        let mut words = line.split(|&byte| byte == b' ');
        (words.next()? == id).then_some(())?;
        let device = words.nth(1)?;
        let colon = device.iter().position(|&byte| byte == b':')?;
        let number = |bytes| super::process::number::<u32>(bytes);
        let device = (number(&device[..colon])?, number(&device[colon + 1..])?);
        words.find(|&word| word == b"-")?;
        Some((device, words.next()?.to_vec()))
    })
}

/// Returns a path of the list of mappings with its line ends, which the kernel writes as `\012`.
fn unescaped(path: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((&first, behind)) = rest.split_first() {
        if let Some(behind) = rest.strip_prefix(b"\\012") {
            plain.push(b'\n');
            rest = behind;
        } else {
            plain.push(first);
            rest = behind;
        }
    }
    plain
}

#[cfg(test)]
mod tests;
