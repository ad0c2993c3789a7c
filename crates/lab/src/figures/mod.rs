//! The results of measurements: the machine, JSON, SVG plots, and how far a measurement is.

mod json;
mod machine;
mod number;
mod plot;
mod progress;
mod sheet;

pub use json::json;
pub use machine::Machine;
pub use number::rounds;
pub use plot::{Bars, Panels, Plot, Series};
pub use progress::Progress;
pub use sheet::Sheet;
