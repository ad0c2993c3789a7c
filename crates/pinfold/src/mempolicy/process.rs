//! The policy that the process was started with, and what follows for the allocator.

use super::{Mempolicy, Mode, calls};
use crate::nodes;

/// The environment variable with the policy of a starting process.
pub const VARIABLE: &str = "PINFOLD_POLICY";

/// The longest text in the variable that is looked at.
const LONGEST: usize = 4096;

/// Learns of the machine's nodes and of the process's policy, once, before anything is allocated; the variable's policy becomes the
/// calling thread's, and so that of the threads that it starts.
pub(crate) fn init() {
    nodes::init(|| calls::mems_allowed().ok(), is_set);
}

/// Whether the process's memory is placed by a policy of its own.
fn is_set() -> bool {
    let mut buffer = [0; LONGEST];
    let text = pinfold_rseq::env::read(VARIABLE, &mut buffer);
    let wanted = text.and_then(|text| Mempolicy::parse(core::str::from_utf8(text).ok()?).ok());
    if let Some(policy) = wanted {
        // A kernel that refuses leaves the policy as it was; the command says why before it starts a program.
        let _ = calls::set_for_thread(&policy);
    }
    let now = calls::thread().map(|policy| policy.mode());
    !matches!(now, Ok(Mode::Default | Mode::Local) | Err(_))
}
