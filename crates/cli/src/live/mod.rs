//! What other processes show of themselves: `pinfold list`, `pinfold stat`, `pinfold slabinfo`.

pub mod list;
pub mod slabinfo;
mod snapshot;
mod source;
pub mod stat;

pub use snapshot::{Cache, Snapshot};

/// Names the backend of a process.
fn backend(number: u32) -> &'static str {
    match number {
        1 => "rseq-cpu",
        2 => "rseq-cid",
        _ => "atomic",
    }
}

fn pid(text: &str) -> Result<u32, &'static str> {
    let number = crate::policy::number(text).filter(|&number| number > 0);
    number.ok_or("give a process id, like 1234")
}
