//! The environment variables that the library reads, checked before a program is started with them.

use anyhow::{Result, bail};
use pinfold::slab::debug::check_settings;

pub const SLAB_DEBUG: &str = "PINFOLD_SLAB_DEBUG";
pub const HARDENED: &str = "PINFOLD_HARDENED";
const RSEQ: &str = "PINFOLD_RSEQ";

/// Refuses what the library would refuse or not understand, while there is somebody to tell. The policy is `placement`'s to look at.
pub fn check() -> Result<()> {
    let value = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if let Some(settings) = value(SLAB_DEBUG)
        && let Err(error) = check_settings(&settings)
    {
        bail!("{SLAB_DEBUG}={settings}: {error}");
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
