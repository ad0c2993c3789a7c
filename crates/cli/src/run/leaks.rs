//! The report of `--leaks`: what each process that has ended by itself had not freed.

use crate::figures::note;
use crate::heap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The name of the profiles' files in a directory for temporary files. Statistics have other names.
pub const FILE: &str = "heap";

/// Prints a report for each profile `FILE.PID` that was written since `started`.
pub fn print(file: &Path, started: SystemTime) {
    let profiles = profiles(file, started);
    if profiles.is_empty() {
        note(
            "no process has left a heap profile: one that is killed, or ends by _exit, writes none",
        );
    }
    for profile in profiles {
        match heap::leaks(&profile) {
            Ok(text) => note(text.trim_end()),
            Err(error) => note(format_args!("{error:#}")),
        }
    }
}

/// Lists the profiles that were written since `started`, in the order of their process ids.
fn profiles(file: &Path, started: SystemTime) -> Vec<PathBuf> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let prefix = file.file_name().and_then(|name| name.to_str());
    let prefix = prefix.map(|name| format!("{name}."));
    let user = rustix::process::geteuid().as_raw();
    let pid_of = |path: &PathBuf| -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(prefix.as_deref()?)?.parse().ok()
    };
    let is_new = |path: &PathBuf| {
        // The folder may be one in which other users can put files and links.
        let Ok(about) = fs::symlink_metadata(path) else {
            return false;
        };
        let is_own = about.is_file() && about.uid() == user;
        // File systems round times.
        let is_recent = |time| time + std::time::Duration::from_secs(2) >= started;
        is_own && about.modified().is_ok_and(is_recent)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| pid_of(path).is_some() && is_new(path))
        .collect();
    found.sort_by_key(pid_of);
    found
}
