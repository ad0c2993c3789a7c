//! The policy that a program is started with.
//!
//! It is set for the thread that starts the program, and threads and processes inherit it from there: nothing has to be done in the
//! program, not even where the library cannot be preloaded.

use crate::policy::{self, Machine};
use anyhow::{Context, Result, anyhow};
use pinfold::mempolicy::{self, Mempolicy};
use std::ffi::OsStr;
use std::path::Path;

/// Reads a policy and tries it, so that whoever asked hears of it before anything is started.
pub fn check(text: &OsStr) -> Result<Mempolicy> {
    let policy = policy::parse(text)?;
    let machine = Machine::read(Path::new("/"))?;
    machine.for_program(&policy)?;
    Ok(policy)
}

/// The policy of `--policy`.
pub fn chosen(text: &OsStr) -> Result<Mempolicy> {
    check(text).map_err(|error| {
        anyhow!("--policy: {error:#}\nNothing was started; without --policy the program runs with the policy that it inherits.")
    })
}

/// A policy in effect in the calling thread, until this is dropped.
pub struct Placed {
    before: Option<Mempolicy>,
}

impl Placed {
    pub fn set(policy: &Mempolicy) -> Result<Placed> {
        let before = mempolicy::thread().ok();
        mempolicy::set_for_thread(policy).context("--policy")?;
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
