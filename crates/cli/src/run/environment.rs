//! The environment variables that the library reads, checked before a program is started with them.

use anyhow::{Result, bail};
use pinfold::mempolicy;
use pinfold_malloc::settings::SETTINGS;
use std::env::var_os;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub const SLAB_DEBUG: &str = "PINFOLD_SLAB_DEBUG";
pub const HARDENED: &str = "PINFOLD_HARDENED";

/// Refuses what the library would ignore. The policy is `placement`'s to look at.
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
            "{name}={}: this is no directory; name one for the statistics, or unset it",
            directory.display()
        );
    }
    Ok(())
}
