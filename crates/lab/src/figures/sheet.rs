//! The results of one measurement, in all forms that the command can write.

use crate::output::{print, write};
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The results of one measurement.
#[derive(Serialize, Deserialize)]
pub struct Sheet {
    /// The tables, for people.
    pub text: String,
    /// One JSON object, for programs.
    pub json: String,
    /// The plot as SVG, or why it could not be drawn.
    pub picture: Result<String, String>,
}

impl Sheet {
    /// Collects the forms of the results.
    pub fn new(text: String, json: String, picture: Result<String>) -> Sheet {
        Sheet {
            text,
            json,
            picture: picture.map_err(|error| format!("{error:#}")),
        }
    }

    /// Prints the tables, or the JSON object, and writes the plot into a file if one is given.
    pub fn deliver(&self, json: bool, plot: Option<&Path>) -> Result<()> {
        print(if json { &self.json } else { &self.text })?;
        let Some(file) = plot else {
            return Ok(());
        };
        match &self.picture {
            Ok(picture) => write("the plot", file, picture.as_bytes()),
            Err(why) => bail!("cannot draw {}: {why}", file.display()),
        }
    }
}
