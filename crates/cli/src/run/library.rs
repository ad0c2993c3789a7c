//! Finds the shared library.

use super::contained;
use super::trust::Rule;
use anyhow::{Context, Result, bail};
use pinfold_malloc::settings::LIBRARY;
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The name of the installed library.
pub const FILE: &str = "libpinfold.so.0";

/// Finds the library: at the path in `PINFOLD_LIBRARY`, in `../lib` beside an installed command,
/// beside a built command, or in the command itself.
pub fn find() -> Result<PathBuf> {
    let library = look()?;
    if ends_early(&library) {
        bail!(
            "{} has a space or a colon in its path, which the dynamic loader takes for the end of the path; put the library elsewhere and set {LIBRARY} to its path",
            library.display()
        );
    }
    Ok(library)
}

/// Returns whether the dynamic loader would take a character of the path for its end.
pub fn ends_early(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes.iter().any(|byte| b" :".contains(byte))
}

fn look() -> Result<PathBuf> {
    if let Some(path) = env::var_os(LIBRARY) {
        let path = PathBuf::from(path);
        return match path.canonicalize() {
            Ok(path) if path.is_file() => Ok(path),
            _ => bail!(
                "{LIBRARY} is {}, which is not a file; set it to the path of {FILE}, or unset it",
                path.display()
            ),
        };
    }
    let command = env::current_exe().and_then(|command| command.canonicalize());
    let command = command.with_context(|| {
        format!(
            "cannot look for {FILE} beside the command; mount /proc by `mount -t proc proc /proc`, or set {LIBRARY} to the library's path"
        )
    })?;
    let here = command.parent().unwrap_or(Path::new("/"));
    let places = [
        here.join("../lib").join(FILE),
        here.join("../lib/x86_64-linux-gnu").join(FILE),
        here.join("../lib/aarch64-linux-gnu").join(FILE),
        here.join("../lib64").join(FILE),
        here.join(FILE),
        // Cargo puts the shared library of a dependency here.
        here.join("deps/libpinfold_preload.so"),
        here.join("libpinfold_preload.so"),
    ];
    let rule = Rule::owner_of(&command)?;
    let mut why = String::new();
    for place in places {
        if !place.exists() {
            continue;
        }
        // The command may lie in a folder like /tmp, beside what another user has put there.
        match checked(rule, &place) {
            Ok(found) => return Ok(found),
            Err(error) => why += &format!(" ({error})"),
        }
    }
    match contained::content() {
        Some(content) => contained::written_out(content),
        None => bail!(
            "{FILE} is neither in {} nor beside the command{why}; install it with the command, or set {LIBRARY} to its path",
            here.join("../lib").display()
        ),
    }
}

/// Returns the path without symbolic links of the library at `place`. Fails if another user can
/// replace the library, or put a link to another one in its place.
fn checked(rule: Rule, place: &Path) -> Result<PathBuf> {
    let folder = |path: &Path| path.parent().unwrap_or(path).canonicalize();
    let found = place.canonicalize()?;
    for path in [&folder(place)?, &folder(&found)?, &found] {
        rule.check(path)?;
    }
    Ok(found)
}

/// Returns `LD_PRELOAD` with the library first. The library of a sanitizer that the program is
/// linked with comes before it, because these libraries refuse to start behind another allocator.
pub fn preload(library: &Path, sanitizer: Option<String>) -> OsString {
    let mut list = OsString::new();
    if let Some(sanitizer) = sanitizer {
        list.push(sanitizer);
        list.push(":");
    }
    list.push(library);
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn what_another_user_has_put_beside_the_command_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["command", "real.so"] {
            fs::write(at(name), "").unwrap();
        }
        let rule = Rule::owner_of(&at("command")).unwrap();
        symlink("real.so", at("link.so")).unwrap();
        for name in ["real.so", "link.so"] {
            assert_eq!(
                checked(rule, &at(name)).unwrap().file_name().unwrap(),
                "real.so"
            );
        }
        // Everybody may make files here, as in /tmp.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        assert!(checked(rule, &at("link.so")).is_err());
        assert!(checked(rule, &at("real.so")).is_err());
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        if !rustix::process::geteuid().is_root() {
            return;
        }
        chown(at("real.so"), Some(12345), None).unwrap();
        assert!(checked(rule, &at("real.so")).is_err());
    }
}
