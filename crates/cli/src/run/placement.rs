//! The policy that a program is started with.
//!
//! It is set for the thread that starts the program, and threads and processes inherit it from there: nothing has to be done in the
//! program, not even where the library cannot be preloaded.

use crate::policy::{self, Machine};
use anyhow::{Context, Error, Result, anyhow};
use pinfold::mempolicy::{self, Mempolicy};
use std::ffi::OsStr;
use std::path::Path;

/// The policy of `--policy`; without that the variable's, so that it also holds in a program that the library is not in.
///
/// It is tried, so that whoever asked hears of what is wrong before anything is started.
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

/// A policy in effect in the calling thread, until this is dropped.
pub struct Placed {
    before: Option<Mempolicy>,
}

impl Placed {
    pub fn set(policy: &Mempolicy) -> Result<Placed> {
        let before = mempolicy::thread().ok();
        mempolicy::set_for_thread(policy).context("the program's policy")?;
        Ok(Placed { before })
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // What is left to do is to wait and to report, wherever that memory is.
            let _ = mempolicy::set_for_thread(before);
        }
    }
}
