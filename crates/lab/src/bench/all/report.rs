//! The file that the report is written to.

use crate::output;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// A file that the report can be written to.
pub struct Report(PathBuf);

const WHAT: &str = "the report";

impl Report {
    /// Fails if `file` cannot be written, so that the user learns this before minutes of measuring.
    /// Leaves the file system unchanged.
    pub fn check(file: &Path) -> Result<Report> {
        if file.file_name().is_none() {
            bail!(
                "cannot write the report to {}: this names no file",
                file.display()
            );
        }
        output::check_writable(WHAT, file)?;
        Ok(Report(file.to_owned()))
    }

    /// Writes the report. Until it is complete, the file keeps what it had.
    pub fn write(&self, text: &str) -> Result<()> {
        output::write(WHAT, &self.0, text.as_bytes())
    }

    /// Returns the file's name for people.
    pub fn shown(&self) -> String {
        self.0.display().to_string()
    }
}
