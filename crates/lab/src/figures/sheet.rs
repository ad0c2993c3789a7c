//! The results of one measurement, in all forms that the command can write.

use super::{Figures, Progress};
use crate::Machine;
use crate::output::{check_writable, object, print, write};
use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How the command delivers the results of a measurement.
#[derive(Args)]
pub struct Output {
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,

    /// Draw the results into this SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// The results of one measurement.
#[derive(Serialize, Deserialize)]
pub struct Sheet {
    /// The machine and the tables, for people.
    pub text: String,
    /// One JSON object, for programs.
    pub json: String,
    /// The plot as SVG, or why it could not be drawn.
    pub picture: Result<String, String>,
}

impl Sheet {
    /// Puts the results of the measurement `bench` together: as text, as JSON and as a plot. The
    /// text begins with a line about the machine, and one with what its primitives cost.
    ///
    /// # Errors
    ///
    /// Fails if a row cannot be written as JSON.
    pub fn new<R: Serialize>(
        bench: &str,
        machine: &Machine,
        rows: &[R],
        text: &str,
        picture: Result<String>,
    ) -> Result<Sheet> {
        Ok(Sheet {
            text: format!("{machine}\n{}\n{text}", machine.primitives),
            json: object(
                &command(bench),
                Figures {
                    bench,
                    machine,
                    rows,
                },
            )?,
            picture: picture.map_err(|error| format!("{error:#}")),
        })
    }

    /// Runs the measurement `bench`, and delivers its results as `output` says.
    ///
    /// # Errors
    ///
    /// Fails if `measure` fails, or the results cannot be written. A file that cannot be written is
    /// an error before anything is measured.
    pub fn deliver(
        bench: &str,
        output: &Output,
        measure: impl FnOnce(&Progress) -> Result<Sheet>,
    ) -> Result<()> {
        if let Some(file) = &output.plot {
            check_writable("the plot", file)?;
        }
        let sheet = measure(&Progress::new(bench, output.json))?;
        print(if output.json {
            &sheet.json
        } else {
            &sheet.text
        })?;
        match (&output.plot, &sheet.picture) {
            (None, _) => Ok(()),
            (Some(file), Ok(picture)) => write("the plot", file, picture.as_bytes()),
            (Some(file), Err(why)) => bail!("cannot draw {}: {why}", file.display()),
        }
    }
}

/// Returns the words of the command that runs the measurement `bench`.
fn command(bench: &str) -> String {
    match bench {
        "jitter" => bench.to_owned(),
        _ => format!("bench {bench}"),
    }
}
