//! Checks the environment variables that the library reads, before a program is started with them.

use anyhow::{Result, bail};
use pinfold::mempolicy;
use pinfold_malloc::settings::SETTINGS;
use std::env::var_os;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub const SLAB_DEBUG: &str = "PINFOLD_SLAB_DEBUG";
pub const HARDENED: &str = "PINFOLD_HARDENED";

/// Refuses values that the library would ignore. `placement` checks the policy.
pub fn check() -> Result<()> {
    for setting in &SETTINGS {
        let name = setting.name();
        if let Some(value) = var_os(name).filter(|_| name != mempolicy::VARIABLE)
            && let Err(wrong) = setting.check(value.as_bytes())
        {
            bail!("{name}={}: {wrong}", value.display());
        }
    }
    let name = super::statistics::VARIABLE;
    if let Some(directory) = var_os(name).filter(|directory| !directory.is_empty())
        && !Path::new(&directory).is_dir()
    {
        bail!(
            "{name}={}: this is not a directory; name an existing one for the statistics, or unset the variable",
            directory.display()
        );
    }
    Ok(())
}
