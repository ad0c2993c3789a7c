//! What the fuzz targets in `fuzz/` call. They compile the command as a library.

pub use crate::foreign::{Mapping, Process, open_mapped};
pub use crate::heap::report;
pub use crate::live::Snapshot;
pub use crate::output::escaped;
pub use crate::policy::Checked;
pub use crate::run::statistics;
