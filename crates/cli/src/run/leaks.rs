//! The report of `--leaks`: what each process that has ended by itself had not freed.
//!
//! Other users may write to the folder of the profiles, if the user has named one, as /tmp. So a
//! file counts only if it is a regular file of the user's own. This is checked before the file is
//! opened for reading.

use crate::foreign::open_own;
use crate::heap;
use crate::output::note;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The name of the profiles' files in a directory for temporary files. Statistics have other names.
pub const FILE: &str = "heap";

/// Prints a report for each profile `FILE.PID` that was written since `started`.
pub fn print(file: &Path, started: SystemTime) {
    let profiles = profiles(file, started);
    if profiles.is_empty() {
        note(
            "no process has left a heap profile: one that is killed, or ends by _exit, writes none; \
             nor does one whose libgcc_s.so.1 is older than GCC 12, or its glibc than 2.35",
        );
    }
    for (path, profile) in profiles {
        match heap::leaks(&profile) {
            Ok(text) => note(text.trim_end()),
            Err(error) => note(format_args!("{}: {error:#}", path.display())),
        }
    }
}

/// Opens the profiles that were written since `started`, in the order of their process ids.
fn profiles(file: &Path, started: SystemTime) -> Vec<(PathBuf, File)> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let prefix = file.file_name().and_then(|name| name.to_str());
    let prefix = prefix.map(|name| format!("{name}."));
    let pid_of = |path: &Path| -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(prefix.as_deref()?)?.parse().ok()
    };
    let is_new = |file: &File| {
        let modified = file.metadata().and_then(|file| file.modified());
        // File systems round times, so two seconds are allowed.
        modified.is_ok_and(|time| time + Duration::from_secs(2) >= started)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf, File)> = entries
        .filter_map(|entry| {
            let path = entry.path();
            let pid = pid_of(&path)?;
            let file = open_own(&path).ok().filter(is_new)?;
            Some((pid, path, file))
        })
        .collect();
    found.sort_by_key(|(pid, ..)| *pid);
    let found = found.into_iter();
    found.map(|(_, path, file)| (path, file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{chown, symlink};

    /// A pipe that no process writes to would make the command hang, and a link or a file of
    /// another user would have it read what that user chose.
    #[test]
    fn only_regular_files_of_the_user_are_profiles() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["heap.20", "heap.3", "heap.x", "other.5", "target"] {
            fs::write(at(name), "x").unwrap();
        }
        symlink(at("target"), at("heap.4")).unwrap();
        fs::create_dir(at("heap.5")).unwrap();
        let pipe = CString::new(at("heap.6").as_os_str().as_bytes()).unwrap();
        // SAFETY: `pipe` is a text that ends with zero.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        fs::write(at("heap.7"), "x").unwrap();
        // Only root can give a file away.
        let is_given = chown(at("heap.7"), Some(65_534), None).is_ok();
        let old = SystemTime::now() - Duration::from_secs(1000);
        File::create(at("heap.8"))
            .unwrap()
            .set_modified(old)
            .unwrap();

        let found = profiles(&at("heap"), SystemTime::now());
        let found: Vec<&Path> = found.iter().map(|(path, _)| path.as_path()).collect();
        let mut expected = vec![at("heap.3"), at("heap.20")];
        if !is_given {
            expected.insert(1, at("heap.7"));
        }
        assert_eq!(found, expected);
    }
}
