//! The environment variables that the library reads: their help, and the check of their values
//! before a program is started with them.

use anyhow::{Result, bail};
use pinfold_malloc::settings::{POLICY, SETTINGS, STATS, Wrong, find};
use std::env::{var_os, vars_os};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Refuses values that the library would ignore. `placement` checks the policy.
pub fn check() -> Result<()> {
    for setting in SETTINGS.iter().filter(|setting| setting.name() != POLICY) {
        let name = setting.name();
        if let Some(value) = var_os(name)
            && let Err(wrong) = setting.check(value.as_bytes())
        {
            bail!("{name}={}: {wrong}", value.display());
        }
    }
    if let Some(directory) = var_os(STATS).filter(|directory| !directory.is_empty())
        && !Path::new(&directory).is_dir()
    {
        bail!(
            "{STATS}={}: this is not a directory; name an existing one for the statistics, or unset the variable",
            directory.display()
        );
    }
    Ok(())
}

/// Returns a note for each variable whose name is nearly that of a setting: the library does not
/// read it.
pub fn misspelt() -> Vec<String> {
    let near = |wrong: &str| {
        let names = SETTINGS.iter().map(|setting| setting.name());
        let all = names.map(|name| (strsim::osa_distance(wrong, name), name));
        // Short names are near to many words.
        let most = |name: &str| {
            if name.len() > "PINFOLD_LONG".len() {
                2
            } else {
                1
            }
        };
        all.min()
            .filter(|(distance, name)| (1..=most(name)).contains(distance))
    };
    let names = vars_os().map(|(name, _)| name);
    let ours = names.filter(|name| name.len() < 64 && name.as_bytes().starts_with(b"PINFOLD_"));
    let note = |name: OsString| {
        let name = name.into_string().ok()?;
        let (_, meant) = near(&name)?;
        Some(format!(
            "Pinfold does not read {name}; did you mean {meant}? `pinfold run --help` lists the variables"
        ))
    };
    ours.filter_map(note).collect()
}

/// Checks the value of an option that sets the variable `name` for the program.
pub fn option(name: &str, value: &str) -> Result<String, String> {
    match find(name).map(|setting| setting.check(value.as_bytes())) {
        Some(Err(Wrong::Values(values))) => Err(format!("give {values}")),
        Some(Err(wrong)) => Err(wrong.to_string()),
        _ => Ok(value.to_owned()),
    }
}

/// Lists the variables, for the long help.
pub fn help() -> String {
    let mut text = "Environment variables (docs/environment.md says more):\n".to_owned();
    for setting in &SETTINGS {
        let (name, help) = (setting.name(), setting.help());
        let (values, default) = (setting.values(), setting.default());
        text += &format!("  {name}\n          {help}\n          {values} [default: {default}]\n");
    }
    text
}
