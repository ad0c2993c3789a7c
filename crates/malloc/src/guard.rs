//! Guarded blocks: they find accesses beyond a block and after its free, while the program serves
//! its users.
//!
//! ```
//! use pinfold_malloc::guard;
//!
//! assert!(guard::start(guard::DEFAULT_INTERVAL));
//! assert!(guard::is_on());
//! assert!(guard::stop());
//! ```
//!
//! A few of the blocks of up to a page, at most a thousand a second, get a page of their own beside
//! pages that no code may access. An access to such a page raises SIGSEGV, and a report on standard
//! error says what was accessed, and which call stacks accessed, allocated and freed the block.
//! Then the program's own action for SIGSEGV follows. If a free finds that bytes beside the block
//! were overwritten, it writes a report and ends the process.
//!
//! While no blocks are guarded, this costs no instruction of an allocation or a free of up to
//! 512 KiB. While they are, an allocation costs a few more instructions. See
//! docs/guarded-blocks.md for what is found.

use pinfold::internal::guarded;
use pinfold::internal::heap::{self, sampling};
use pinfold::internal::keep_errno;
pub use pinfold::internal::profile::{DEFAULT_INTERVAL, MAX_INTERVAL};
use pinfold_rseq::env;

/// The environment variable that turns guarded blocks on at the start: `on`, or the mean bytes from
/// one sample to the next.
pub const VARIABLE: &str = "PINFOLD_GUARD";

/// Guards some blocks from now on. On average, one allocation in `interval` bytes (1 to
/// [`MAX_INTERVAL`]) is sampled. A sample becomes a guarded block if none was guarded in this
/// millisecond. A heap profile that is on keeps its own interval.
///
/// Installs a handler for SIGSEGV when it guards the first block. Takes 4 MiB of address space with
/// pages of 4 KiB, and at most 2.3 MiB of memory.
///
/// Returns false if the system has no memory, or if another thread is starting or stopping samples.
/// The first start may load the unwinder's library, so a signal handler must not be the first to
/// call this.
pub fn start(interval: u64) -> bool {
    heap::ready();
    sampling::start_guarding(interval)
}

/// Guards no further blocks. Blocks that are guarded stay so, and their reports still come.
///
/// Returns false if another thread is starting or stopping samples.
pub fn stop() -> bool {
    sampling::stop_guarding()
}

/// Returns whether blocks are being guarded. Costs one load.
pub fn is_on() -> bool {
    sampling::is_guarding()
}

/// Returns how many blocks were guarded so far, and how many of these were freed.
///
/// ```
/// let (guarded, freed) = pinfold_malloc::guard::counts();
/// assert!(freed <= guarded);
/// ```
pub fn counts() -> (u64, u64) {
    guarded::counts()
}

/// Starts guarding if the environment asks for it.
pub(crate) fn start_as_asked() {
    if let Some(interval) = env::parsed(VARIABLE, sampling::parse) {
        keep_errno(|| start(interval));
    }
}
