//! The output of all measurements: the machine, and the figures as a table, as JSON or as an SVG
//! file.

mod json;
mod machine;
mod number;
mod output;
mod plot;
mod progress;
mod sheet;
mod table;
mod text;

pub use json::json;
pub use machine::Machine;
pub use number::rounds;
pub use output::{check_writable, write};
pub use plot::{Bars, Panels, Plot, Series};
pub use progress::{Progress, can_move_cursor};
pub use sheet::Sheet;
pub use table::{Table, note, print, print_more, report};
pub use text::{Lines, escaped};
