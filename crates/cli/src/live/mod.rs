//! What other processes show of themselves: `pinfold list`, `pinfold stat`, `pinfold slabinfo`,
//! `pinfold top`, `pinfold serve`, `pinfold vmstat`; and what they are asked to do: `pinfold trim`,
//! `pinfold set`. `doctor` and `heap` read processes by this module too.

mod behind;
mod calls;
pub mod control;
pub mod list;
mod mail;
mod repeat;
pub mod serve;
pub mod slabinfo;
mod snapshot;
mod source;
pub mod stat;
mod status;
pub mod top;
pub mod vmstat;

pub use calls::Calls;
pub use control::{Ask, patience};
#[cfg(test)]
pub use snapshot::tests::{segment, set_call};
pub use snapshot::{Cache, Snapshot};
pub use source::{Source, Unreadable, memory_file, name, own_file};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Returns what a lock protects, also after a thread that held it has panicked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// Returns how much a count grew a second. Returns 0 if no time is known.
fn per_second(seconds: Option<f64>, before: u64, now: u64) -> f64 {
    seconds.map_or(0.0, |seconds| now.saturating_sub(before) as f64 / seconds)
}

pub fn backend_name(number: u32) -> &'static str {
    match number {
        1 => "rseq-cpu",
        2 => "rseq-cid",
        _ => "atomic",
    }
}

pub fn pid(text: &str) -> Result<u32, &'static str> {
    let number = crate::policy::number(text).filter(|&number| number > 0);
    number.ok_or("give a process id, like 1234")
}

pub fn interval(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|n| (0.01..=86_400.0).contains(n));
    let seconds = seconds.ok_or("give seconds from 0.01 to 86400");
    seconds.map(Duration::from_secs_f64)
}
