//! The environment variables that the library reads, checked before a program is started with them.

use super::placement;
use anyhow::{Context, Result, bail};
use pinfold::mempolicy;
use pinfold::slab::debug::check_settings;
use std::ffi::OsStr;

pub const SLAB_DEBUG: &str = "PINFOLD_SLAB_DEBUG";
pub const HARDENED: &str = "PINFOLD_HARDENED";
const RSEQ: &str = "PINFOLD_RSEQ";

/// Refuses what the library would refuse or not understand, while there is somebody to tell. A policy only if the program is to see it.
pub fn check(with_policy: bool) -> Result<()> {
    let value = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if let Some(settings) = value(SLAB_DEBUG)
        && let Err(error) = check_settings(&settings)
    {
        bail!("{SLAB_DEBUG}={settings}: {error}");
    }
    let policy = std::env::var_os(mempolicy::VARIABLE);
    if let Some(policy) = policy.filter(|policy| with_policy && !policy.is_empty()) {
        check_policy(&policy).context(mempolicy::VARIABLE)?;
    }
    for (name, allowed) in [
        (HARDENED, &["", "0", "1"][..]),
        (RSEQ, &["", "off", "cpu", "cid"]),
    ] {
        if let Some(value) = value(name)
            && !allowed.contains(&value.as_str())
        {
            let allowed = allowed[1..].join(", ");
            bail!("{name}={value}: give one of {allowed}, or unset it");
        }
    }
    Ok(())
}

/// The library takes no notice of a policy that is wrong, and looks at none that is longer than this.
const POLICY_MOST: usize = 4096;

fn check_policy(policy: &OsStr) -> Result<()> {
    if policy.len() > POLICY_MOST {
        bail!(
            "{} bytes are more than the library reads, {POLICY_MOST}; use ranges like 0-3",
            policy.len()
        );
    }
    placement::check(policy).map(drop)
}
