//! The results of measurements: the machine, JSON, SVG plots, and how far a measurement is.

mod json;
mod number;
mod plot;
mod progress;
mod sheet;

pub use json::{Figures, json};
pub use number::{date, rounds};
pub use plot::{Bars, Panels, Plot, Series};
pub use progress::Progress;
pub use sheet::{Output, Sheet};
