//! The memory policy that a program is started with.
//!
//! It is set for the thread that starts the program. Threads and child processes inherit it, so the
//! program itself need not set anything. This works even where the library cannot be preloaded.

use crate::policy::{self, Machine};
use anyhow::{Context, Error, Result, anyhow};
use pinfold::mempolicy::{self, Mempolicy};
use std::ffi::OsStr;
use std::path::Path;

/// Returns the policy of `--policy` or else of PINFOLD_POLICY, so that the variable also applies to
/// programs without the library.
///
/// # Errors
///
/// The policy is wrong, or the kernel rejects it. It is tried here, before anything is started.
pub fn chosen(argument: Option<&OsStr>) -> Result<Option<Mempolicy>> {
    if let Some(text) = argument {
        let policy = policy::parse(text).and_then(tried);
        return policy.map(Some).map_err(|error| {
            anyhow!("--policy: {error:#}\nNothing was started; without --policy the program runs with the policy that it inherits.")
        });
    }
    let unstarted = |error: Error| {
        let name = mempolicy::VARIABLE;
        anyhow!("{error:#}\nNothing was started; correct {name} or unset it.")
    };
    let Some(policy) = policy::of_variable().map_err(unstarted)? else {
        return Ok(None);
    };
    let policy = tried(policy).context(mempolicy::VARIABLE);
    policy.map(Some).map_err(unstarted)
}

fn tried(policy: Mempolicy) -> Result<Mempolicy> {
    Machine::read(Path::new("/"))?.for_program(&policy)?;
    Ok(policy)
}

/// A policy in effect in the calling thread. Dropping it restores the thread's former policy.
pub struct Placed {
    before: Option<Mempolicy>,
}

impl Placed {
    pub fn set(policy: &Mempolicy) -> Result<Placed> {
        let before = mempolicy::thread().ok();
        mempolicy::set_for_thread(policy).context("setting the program's policy")?;
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
