//! The file that the report is written to.

use anyhow::{Context, Result, bail};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file that the report can be written to.
pub struct Report {
    /// The file, without symbolic links.
    file: PathBuf,
    /// A new file beside it, which becomes the file at once.
    new: PathBuf,
}

impl Report {
    /// Fails if `file` cannot be written, so that the user learns this before minutes of measuring.
    /// Leaves the file system unchanged.
    pub fn check(file: &Path) -> Result<Report> {
        let why = || {
            format!(
                "cannot write the report to {}; give a file in a folder that you may write to",
                file.display()
            )
        };
        let file = match fs::canonicalize(file) {
            Err(error) if error.kind() == ErrorKind::NotFound => file.to_owned(),
            found => found.with_context(why)?,
        };
        if let Ok(metadata) = fs::metadata(&file) {
            if !metadata.is_file() {
                bail!("{}: this is not a regular file", why());
            }
            let opened = OpenOptions::new().write(true).open(&file);
            opened.with_context(why)?;
        }
        let Some(name) = file.file_name() else {
            bail!("{}: this names no file", why());
        };
        let new = format!(".{}.{}.new", name.to_string_lossy(), std::process::id());
        let new = file.with_file_name(new);
        create(&new)
            .and_then(|_| fs::remove_file(&new))
            .with_context(why)?;
        Ok(Report { file, new })
    }

    /// Writes the report. Until it is complete, the file keeps what it had.
    pub fn write(&self, text: &str) -> Result<()> {
        let written = create(&self.new)
            .and_then(|mut new| new.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&self.new, &self.file));
        if written.is_err() {
            // The error that matters is the first one.
            let _ = fs::remove_file(&self.new);
        }
        written.with_context(|| format!("cannot write the report to {}", self.file.display()))
    }

    /// Returns the file's name for people.
    pub fn shown(&self) -> String {
        self.file.display().to_string()
    }
}

fn create(file: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(file)
}
