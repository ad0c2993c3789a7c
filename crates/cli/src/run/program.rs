//! What the command to run is: where it lies, and whether a library can be preloaded into it.

use super::elf;
use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags};
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Interpreters of interpreters that are followed, as many as the kernel follows.
const SCRIPTS_DEEP: usize = 4;
/// What is read of a file to know it: more than any program header table takes.
const HEAD: u64 = 16 << 10;

/// A command that can be executed.
pub struct Program {
    /// What to execute. Has a slash, so that nobody looks along `PATH` again.
    pub path: PathBuf,
    /// What the kernel will load: the interpreter, if the command is a script.
    pub binary: PathBuf,
}

/// Why nothing can be preloaded into a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Obstacle {
    Static,
    Privileged,
    OtherMachine,
    OtherLoader(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Static => f.write_str("is statically linked, so nothing can be preloaded into it"),
            Obstacle::Privileged => f.write_str("gains privileges when it is started (setuid, setgid or capabilities), so the system ignores what is preloaded"),
            Obstacle::OtherMachine => f.write_str("is built for another kind of machine than Pinfold's library"),
            Obstacle::OtherLoader(loader) => write!(f, "is loaded by {loader}, not by glibc, for which Pinfold's library is built"),
        }
    }
}

/// Finds a command as `execvp` does: along `PATH`, unless the name has a slash.
///
/// # Errors
///
/// `NotFound`; `PermissionDenied` or `IsADirectory` when there are only files that cannot be executed.
pub fn find(name: &OsStr) -> io::Result<Program> {
    let path = look_up(name)?;
    let mut binary = path.clone();
    for _ in 0..SCRIPTS_DEEP {
        match interpreter(&binary) {
            Some(next) => binary = next,
            None => break,
        }
    }
    Ok(Program { path, binary })
}

fn look_up(name: &OsStr) -> io::Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return executable(Path::new(name).to_owned());
    }
    let mut answer = io::Error::from(ErrorKind::NotFound);
    if name.is_empty() {
        return Err(answer);
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    for directory in std::env::split_paths(&path) {
        // An empty entry is the current directory.
        let directory = if directory.as_os_str().is_empty() {
            Path::new(".")
        } else {
            &directory
        };
        match executable(directory.join(name)) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => answer = error,
            // A directory along the way is passed over, as by shells.
            Err(_) => {}
            found => return found,
        }
    }
    Err(answer)
}

fn executable(path: PathBuf) -> io::Result<PathBuf> {
    if fs::metadata(&path)?.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    rustix::fs::accessat(CWD, &path, Access::EXEC_OK, AtFlags::EACCESS)?;
    Ok(path)
}

impl Program {
    /// Why nothing can be preloaded, if that is so.
    pub fn obstacle(&self) -> Option<Obstacle> {
        if gains_privileges(&self.binary) {
            return Some(Obstacle::Privileged);
        }
        let real = self.binary.canonicalize().ok()?;
        if elf::is_glibc_loader(&real.to_string_lossy()) {
            return None;
        }
        // An unreadable or strange file is the kernel's to judge.
        elf::obstacle(&head(&real).ok()?)
    }

    /// The interpreter or the loader that the program asks for, if it is not there.
    pub fn missing(&self) -> Option<PathBuf> {
        if !self.binary.exists() {
            return Some(self.binary.clone());
        }
        match elf::obstacle(&head(&self.binary).ok()?) {
            Some(Obstacle::OtherLoader(loader)) => Some(PathBuf::from(loader)),
            _ => None,
        }
        .filter(|loader| !loader.exists())
    }
}

fn head(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(HEAD).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The interpreter that a script's first line names.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let bytes = head(path).ok()?;
    let line = bytes.strip_prefix(b"#!")?.split(|&byte| byte == b'\n');
    let mut words = line
        .take(1)
        .flat_map(|line| line.split(u8::is_ascii_whitespace))
        .filter(|word| !word.is_empty());
    let first = PathBuf::from(OsStr::from_bytes(words.next()?));
    if first.file_name() == Some(OsStr::new("env")) {
        // `env NAME` looks along PATH itself.
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return look_up(OsStr::from_bytes(name)).ok();
    }
    Some(first)
}

/// Whether the kernel will run the file with other ids or more capabilities than ours.
fn gains_privileges(path: &Path) -> bool {
    let Ok(metadata) = fs::metadata(path) else {
        return false;
    };
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let setuid = metadata.mode() & 0o4000 != 0 && metadata.uid() != uid;
    // Without the group's right to execute, the bit once meant mandatory locking.
    let setgid = metadata.mode() & 0o2010 == 0o2010 && metadata.gid() != gid;
    (setuid || setgid || uid != 0 && has_capabilities(path)) && !privileges_are_off(path)
}

fn has_capabilities(path: &Path) -> bool {
    // An empty buffer only asks for the size.
    let mut nothing = [0u8; 0];
    rustix::fs::getxattr(path, "security.capability", &mut nothing).is_ok_and(|size| size > 0)
}

/// In sandboxes and on some mounts the kernel gives nothing, and preloading works.
fn privileges_are_off(path: &Path) -> bool {
    rustix::thread::no_new_privs().unwrap_or(false)
        || rustix::fs::statvfs(path)
            .is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::NOSUID))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn kind(name: &str) -> ErrorKind {
        find(OsStr::new(name)).err().unwrap().kind()
    }

    #[test]
    fn names_are_looked_up_as_execvp_does() {
        assert!(find(OsStr::new("sh")).unwrap().path.is_absolute());
        assert_eq!(kind(""), ErrorKind::NotFound);
        assert_eq!(kind("/"), ErrorKind::IsADirectory);
        assert_eq!(kind("/no/such"), ErrorKind::NotFound);
        assert_eq!(kind("/etc/passwd"), ErrorKind::PermissionDenied);
        assert_eq!(kind("/etc/passwd/x"), ErrorKind::NotADirectory);
    }

    #[test]
    fn scripts_lead_to_what_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, line: &str| {
            let path = folder.path().join(name);
            fs::write(&path, line).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let binary = |path: &Path| find(path.as_os_str()).unwrap().binary;
        let sh = look_up(OsStr::new("sh")).unwrap();
        let plain = script("plain", "#! /bin/sh -e\nexit\n");
        assert_eq!(binary(&plain), Path::new("/bin/sh"));
        let second = script("second", &format!("#!{}\n", plain.display()));
        assert_eq!(binary(&second), Path::new("/bin/sh"));
        assert_eq!(binary(&script("env", "#!/usr/bin/env -S A=1 sh -e\n")), sh);
        let gone = script("gone", "#!/no/such/interpreter\n");
        let missing = find(gone.as_os_str()).unwrap().missing();
        assert_eq!(missing.as_deref(), Some(Path::new("/no/such/interpreter")));
        // One that leads to itself ends.
        let circle = folder.path().join("circle");
        script("circle", &format!("#!/usr/bin/env {}\n", circle.display()));
        assert_eq!(binary(&circle), circle);
    }
}
