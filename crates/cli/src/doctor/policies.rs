//! Whether memory can be placed by policies, and which policy this process has.

use super::{Check, State, check};
use crate::policy::{listed, of_variable};
use pinfold::mempolicy;
use pinfold::topology::NodeSet;
use pinfold_malloc::settings::POLICY;

pub fn policies(with_memory: &NodeSet) -> Check {
    let works = mempolicy::available();
    let mut found = match &works {
        Ok(()) => "can be set".to_owned(),
        Err(error) => error.to_string(),
    };
    // Each fact is reported if the kernel tells it: a filter may forbid only the other calls.
    if let Ok(own) = mempolicy::thread() {
        found += &format!("; this process's policy is {own}");
    }
    if let Ok(allowed) = mempolicy::mems_allowed() {
        found += &format!("; it may use {}", listed(&allowed.and(with_memory)));
    }
    let mut state = State::ok_or(works.is_ok(), State::Note);
    match of_variable() {
        Ok(None) => {}
        Ok(Some(policy)) => found += &format!("; {POLICY} is understood: {policy}"),
        Err(_) => {
            state = State::Problem;
            found += &format!("; {POLICY} is not understood: run `pinfold policy` to see why");
        }
    }
    let follows = match works {
        Ok(()) if with_memory.len() > 1 => {
            "`pinfold run --policy` places a program's memory; `pinfold policy` explains a policy"
        }
        Ok(()) => "with one node there is nothing to choose",
        Err(_) => {
            "the kernel chooses where memory comes from; `pinfold run --policy` refuses to start a program"
        }
    };
    check("memory policies", state, found, follows)
}
