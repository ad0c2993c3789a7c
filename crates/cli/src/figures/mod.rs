//! The common parts of all measurements: the clock, the machine, and the output as a table, as JSON
//! or as an SVG file.

pub mod cycles;
mod json;
mod machine;
mod number;
mod plot;
mod table;

pub use json::json;
pub use machine::Machine;
pub use number::{median, rounds};
pub use plot::{Bars, Panels, Plot, Series, check_writable};
pub use table::{Table, print};
