//! How far a measurement is, as one line on a terminal.

use crate::output;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::{IsTerminal, stderr};

/// The line's form. It has no colours.
const LINE: &str = "{prefix}  [{bar:30}] {percent:>3} %, {elapsed} gone{left}";

/// A line on standard error that a measurement redraws between its rounds.
///
/// No thread redraws the line by itself, so that nothing is drawn while a round is timed. The line
/// disappears when the value is dropped. Nothing is drawn if standard error is no terminal, or a
/// terminal that cannot move its cursor (`TERM=dumb`).
pub struct Progress(ProgressBar);

impl Progress {
    /// Makes the line for a measurement called `what`. With `quiet` nothing is drawn, for results
    /// that programs read.
    pub fn new(what: &str, quiet: bool) -> Progress {
        let target = match quiet || !can_redraw() {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(0), target).with_prefix(what.to_owned());
        // The form is a constant, so the test below shows whether it is right.
        let style = ProgressStyle::with_template(LINE)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .with_key("left", write_left)
            .progress_chars("## ");
        bar.set_style(style);
        Progress(bar)
    }

    /// Sets the number of steps, and draws the line at 0 %.
    pub fn begin(&self, steps: usize) {
        self.0.set_length(steps as u64);
        self.0.reset();
        self.0.tick();
    }

    /// Prints a remark to standard error, above the line.
    pub fn note(&self, text: &str) {
        self.0.suspend(|| output::note(text));
    }

    /// Notes that one step is over. Draws the line if the last drawing is some 50 ms ago.
    pub fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Writes how long the measurement still takes, if a step is over, by which this can be told.
fn write_left(state: &ProgressState, line: &mut dyn Write) {
    if state.pos() > 0 {
        // An error would be the line's, and is only a line that is not drawn.
        let _ = write!(line, ", about {:#} left", HumanDuration(state.eta()));
    }
}

fn can_redraw() -> bool {
    output::can_move_cursor() && stderr().is_terminal()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_the_line_is_right() {
        ProgressStyle::with_template(LINE).unwrap();
    }
}
