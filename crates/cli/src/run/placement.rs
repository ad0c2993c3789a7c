//! The memory policy that a program is started with.
//!
//! It is set for the thread that starts the program. Threads and child processes inherit it, so the
//! program itself need not set anything. This works even where the library cannot be preloaded.

use crate::policy::{self, Machine};
use anyhow::{Context, Error, Result, anyhow, bail};
use pinfold::mempolicy::{self, Mempolicy};
use pinfold_malloc::settings::POLICY;
use std::ffi::OsStr;
use std::path::Path;

/// Sets the policy of `--policy`, or else of the environment variable, for the calling thread, so
/// that the variable also applies to programs without the library. Returns `None` if there is no
/// policy.
///
/// # Errors
///
/// The policy is wrong, or the kernel rejects it.
pub fn place(argument: Option<&OsStr>) -> Result<Option<Placed>> {
    if let Some(text) = argument {
        let placed = policy::parse(text).and_then(|policy| Placed::set(&policy));
        return placed.map(Some).map_err(|error| {
            anyhow!("--policy: {error:#}\nNothing was started; without --policy the program runs with the policy that it inherits.")
        });
    }
    let unstarted =
        |error: Error| anyhow!("{error:#}\nNothing was started; correct {POLICY} or unset it.");
    let Some(policy) = policy::of_variable().map_err(unstarted)? else {
        return Ok(None);
    };
    let placed = Placed::set(&policy).context(POLICY);
    placed.map(Some).map_err(unstarted)
}

/// A policy in effect in the calling thread. Dropping it restores the thread's former policy.
pub struct Placed {
    before: Option<Mempolicy>,
}

impl Placed {
    fn set(policy: &Mempolicy) -> Result<Placed> {
        if let Some(fault) = Machine::read(Path::new("/"))?.program_fault(policy) {
            bail!(fault);
        }
        let before = mempolicy::thread().ok();
        mempolicy::set_for_thread(policy)?;
        Ok(Placed { before })
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // A failure does not matter: this thread now only waits and reports, wherever its
            // memory is.
            let _ = mempolicy::set_for_thread(before);
        }
    }
}
