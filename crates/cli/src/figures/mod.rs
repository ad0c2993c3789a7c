//! What measurements have in common: the clock, the machine they ran on, and how figures come out, as a table, as JSON or
//! as an SVG.

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
