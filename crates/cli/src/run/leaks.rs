//! The report of `--leaks`: what each process had not freed when it ended.
//!
//! Other users may write to the folder of the profiles, if the user has named one, as /tmp. So a
//! file counts only if it is a regular file of the user's own. This is checked before the file is
//! opened for reading.

use crate::foreign::open_own;
use crate::heap::{self, Kept, Leaks};
use crate::output::note;
use anyhow::{Context, Result};
use pinfold::memory::Limit;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The name of the profiles' files in a directory for temporary files. Statistics have other names.
pub const FILE: &str = "heap";

/// Parses the bytes that a process may leave: a number, or one with `k`, `M` or `G`.
pub fn size(text: &str) -> Result<usize, &'static str> {
    match text.parse() {
        Ok(Limit::Bytes(bytes)) => Ok(bytes),
        _ if text == "0" => Ok(0),
        _ => Err("give bytes, like 64k or 2M"),
    }
}

/// Prints a report for each profile `FILE.PID` that was written since `started`, and for the
/// profiles in `kept` of processes that have written none. Returns how many bytes the process with
/// the largest leak left. Returns `None` if there is no profile, and if one cannot be read.
pub fn print(file: &Path, started: SystemTime, kept: &[Kept]) -> Option<f64> {
    let profiles = profiles(file, started);
    let is_written = |pid| profiles.iter().any(|(written, ..)| *written == pid);
    let mut reports: Vec<(u32, Result<Leaks>)> = kept
        .iter()
        .map(|kept| (kept.process().pid(), kept))
        .filter(|(pid, _)| !is_written(*pid))
        .map(|(pid, kept)| {
            let report = heap::leaks_without_exit(kept);
            (pid, report.with_context(|| format!("process {pid}")))
        })
        .collect();
    reports.extend(profiles.iter().map(|(pid, path, profile)| {
        let report = heap::leaks(profile);
        (*pid, report.with_context(|| path.display().to_string()))
    }));
    reports.sort_by_key(|(pid, _)| *pid);
    let mut most = (!reports.is_empty()).then_some(0.0);
    if reports.is_empty() {
        note(
            "no process has left a heap profile: a forked child that is killed, or ends by _exit, \
             leaves none; nor does a process whose libgcc_s.so.1 is older than GCC 12, or its \
             glibc than 2.35",
        );
    }
    for (_, report) in reports {
        match report {
            Ok(leaks) => {
                note(leaks.text.trim_end());
                most = most.map(|most| leaks.bytes.max(most));
            }
            Err(error) => {
                note(format_args!("{error:#}"));
                most = None;
            }
        }
    }
    most
}

/// Returns whether process `pid` has written its profile `FILE.PID` since `started`.
pub fn is_written(file: &Path, pid: u32, started: SystemTime) -> bool {
    let mut path = file.as_os_str().to_owned();
    path.push(format!(".{pid}"));
    open_own(Path::new(&path)).is_ok_and(|file| is_new(&file, started))
}

/// Returns whether a file was written since `started`.
fn is_new(file: &File, started: SystemTime) -> bool {
    let modified = file.metadata().and_then(|file| file.modified());
    // File systems round times, so two seconds are allowed.
    modified.is_ok_and(|time| time + Duration::from_secs(2) >= started)
}

/// Opens the profiles that were written since `started`, in the order of their process ids.
fn profiles(file: &Path, started: SystemTime) -> Vec<(u32, PathBuf, File)> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let prefix = file.file_name().and_then(|name| name.to_str());
    let prefix = prefix.map(|name| format!("{name}."));
    let pid_of = |path: &Path| -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(prefix.as_deref()?)?.parse().ok()
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf, File)> = entries
        .filter_map(|entry| {
            let path = entry.path();
            let pid = pid_of(&path)?;
            let file = open_own(&path).ok().filter(|file| is_new(file, started))?;
            Some((pid, path, file))
        })
        .collect();
    found.sort_by_key(|(pid, ..)| *pid);
    found
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
        let found: Vec<&Path> = found.iter().map(|(_, path, _)| path.as_path()).collect();
        let mut expected = vec![at("heap.3"), at("heap.20")];
        if !is_given {
            expected.insert(1, at("heap.7"));
        }
        assert_eq!(found, expected);
    }
}
