//! The output of all measurements: the machine, and the figures as a table, as JSON or as an SVG
//! file.

mod json;
mod machine;
mod number;
mod plot;
mod table;

pub use json::json;
pub use machine::Machine;
pub use number::rounds;
pub use plot::{Bars, Panels, Plot, Series, check_writable};
pub use table::{Table, print};
