//! The output of all measurements: the machine, and the figures as a table, as JSON or as an SVG
//! file.

mod json;
mod machine;
mod number;
mod plot;
mod progress;
mod sheet;
mod table;

pub use json::json;
pub use machine::Machine;
pub use number::rounds;
use plot::cannot_write;
pub use plot::{Bars, Panels, Plot, Series, check_writable};
pub use progress::{Progress, can_move_cursor};
pub use sheet::Sheet;
pub use table::{Table, note, print, print_more};
