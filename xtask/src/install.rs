//! `cargo xtask install`: installs the command with its manual pages and completions, the
//! libraries, the headers, and what build systems read.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds and installs the command with its manual pages and completions, the libraries, the
/// headers, and the files for pkg-config and CMake.
#[derive(clap::Args)]
pub struct Args {
    /// Where the files will be used, like /usr/local.
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    prefix: PathBuf,
    /// Copies the files below this folder instead, for a package.
    #[arg(
        long,
        value_name = "DIR",
        default_value = "",
        hide_default_value = true
    )]
    destdir: OsString,
    /// Removes the installed files instead.
    #[arg(long)]
    remove: bool,
}

/// The headers, below crates/malloc/include and below include.
const HEADERS: [&str; 6] = [
    "pinfold.h",
    "pinfold_heaps.h",
    "pinfold_percpu.h",
    "pinfold_show.h",
    "pinfold_policy.h",
    "pinfold.hpp",
];
/// What cargo builds below target/release, where it is installed, and its mode.
const BUILT: [(&str, &str, u32); 3] = [
    ("pinfold", "bin/pinfold", 0o755),
    ("libpinfold_preload.so", "lib/libpinfold.so.0", 0o755),
    ("libpinfold_names.a", "lib/libpinfold.a", 0o644),
];
/// The name that linkers look for. It leads to the library beside it.
const LINK: &str = "lib/libpinfold.so";
/// The shells, and where they look for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/pinfold"),
    ("zsh", "share/zsh/site-functions/_pinfold"),
    ("fish", "share/fish/vendor_completions.d/pinfold.fish"),
];
const MANUAL: &str = "share/man/man1";
const PKG_CONFIG: &str = "lib/pkgconfig/pinfold.pc";
const CMAKE: &str = "lib/cmake/pinfold";
/// The folder with the licenses, and with the list of the manual pages.
const OWN: &str = "share/doc/pinfold";
const LICENSES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];
const PAGES: &str = "manual-pages";

fn absolute(folder: &str) -> Result<PathBuf> {
    let folder = PathBuf::from(folder);
    if !folder.is_absolute() {
        bail!("this is not an absolute path");
    }
    Ok(folder)
}

pub fn main(args: Args) -> Result<()> {
    let prefix = args.prefix;
    let to = match args.destdir.is_empty() {
        true => prefix.clone(),
        false => Path::new(&args.destdir).join(prefix.strip_prefix("/")?),
    };
    if args.remove {
        return remove(&to);
    }
    build()?;
    install(&prefix, &to)?;
    println!("installed in {}", to.display());
    Ok(())
}

/// Puts what was built below `to`, to be used in `prefix`.
fn install(prefix: &Path, to: &Path) -> Result<()> {
    let release = crate::target().join("release");
    for (built, installed, mode) in BUILT {
        copy(&release.join(built), &to.join(installed), mode)?;
    }
    let link = to.join(LINK);
    let _ = fs::remove_file(&link);
    symlink("libpinfold.so.0", &link).with_context(|| link.display().to_string())?;
    for header in HEADERS {
        let source = Path::new("crates/malloc/include").join(header);
        copy(&source, &to.join("include").join(header), 0o644)?;
    }
    for license in LICENSES {
        copy(Path::new(license), &to.join(OWN).join(license), 0o644)?;
    }
    write(&to.join(PKG_CONFIG), &pkg_config(prefix))?;
    for (name, text) in cmake() {
        write(&to.join(CMAKE).join(name), &text)?;
    }
    let command = release.join("pinfold");
    for (shell, place) in COMPLETIONS {
        let said = Command::new(&command)
            .args(["completions", shell])
            .output()?;
        if !said.status.success() {
            bail!("cannot make the completions for {shell}: {}", said.status);
        }
        write(&to.join(place), &String::from_utf8(said.stdout)?)?;
    }
    install_manual(&command, to)
}

/// Installs the manual pages, and a list of them, by which they are removed.
fn install_manual(command: &Path, to: &Path) -> Result<()> {
    let pages = crate::target().join("manual");
    let _ = fs::remove_dir_all(&pages);
    crate::run(Command::new(command).arg("man").arg(&pages))?;
    let mut list = String::new();
    for page in fs::read_dir(&pages)? {
        let name = page?.file_name().to_string_lossy().into_owned();
        copy(&pages.join(&name), &to.join(MANUAL).join(&name), 0o644)?;
        list += &format!("{name}\n");
    }
    write(&to.join(OWN).join(PAGES), &list)
}

/// Removes what [`install`] installs. Removes Pinfold's own folders if they are empty then, and no
/// other folder.
fn remove(to: &Path) -> Result<()> {
    let mut files: Vec<String> = HEADERS.map(|header| format!("include/{header}")).into();
    files.extend(BUILT.map(|(_, place, _)| place.to_owned()));
    files.extend(COMPLETIONS.map(|(_, place)| place.to_owned()));
    files.extend(cmake().map(|(name, _)| format!("{CMAKE}/{name}")));
    files.extend(LICENSES.map(|name| format!("{OWN}/{name}")));
    files.extend([LINK, PKG_CONFIG].map(str::to_owned));
    files.push(format!("{OWN}/{PAGES}"));
    let pages = fs::read_to_string(to.join(OWN).join(PAGES)).unwrap_or_default();
    let is_page = |name: &&str| name.starts_with("pinfold") && !name.contains('/');
    files.extend(
        pages
            .lines()
            .filter(is_page)
            .map(|name| format!("{MANUAL}/{name}")),
    );
    let mut removed = 0;
    for file in files.iter().map(|file| to.join(file)) {
        match fs::remove_file(&file) {
            Ok(()) => removed += 1,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| file.display().to_string()),
        }
    }
    for folder in [CMAKE, OWN] {
        // Fails for a folder that is not empty.
        let _ = fs::remove_dir(to.join(folder));
    }
    match removed {
        0 => bail!("nothing is installed in {}", to.display()),
        _ => println!("removed {removed} files from {}", to.display()),
    }
    Ok(())
}

fn build() -> Result<()> {
    let flags = flags_without_paths(&crate::target())?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--release"]);
    // In one call, so that the command contains the library that is installed. A crate's features
    // depend on what else is built.
    cargo.args([
        "-p",
        "pinfold-preload",
        "-p",
        "pinfold-names",
        "-p",
        "pinfold-cli",
    ]);
    crate::run(cargo.env("CARGO_ENCODED_RUSTFLAGS", &flags))
}

/// Returns the compiler's flags with which no file names this source folder, the crates' folder or
/// the builder's home. The flags of the environment stay.
fn flags_without_paths(target: &Path) -> Result<OsString> {
    const BETWEEN: &str = "\x1f";
    let mut flags: Vec<OsString> =
        match std::env::var_os("CARGO_ENCODED_RUSTFLAGS").filter(|flags| !flags.is_empty()) {
            Some(flags) => Vec::from([flags]),
            None => {
                let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
                flags.split_whitespace().map(OsString::from).collect()
            }
        };
    let home = std::env::home_dir();
    let crates = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let crates = crates.or_else(|| Some(home.as_ref()?.join(".cargo")));
    // The compiler takes the last pair that fits, so that the innermost folder comes last.
    for (folder, name) in [
        (home, "home"),
        (crates, "cargo"),
        (Some(std::env::current_dir()?), "pinfold"),
        (Some(std::path::absolute(target)?), "target"),
    ] {
        let Some(folder) = folder.filter(|folder| folder.parent().is_some()) else {
            continue;
        };
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(folder);
        flag.push("=");
        flag.push(name);
        flags.push(flag);
    }
    Ok(flags.join(OsStr::new(BETWEEN)))
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().context("no folder")?)?;
    // A running program may have the old file mapped, so this replaces the file instead of writing
    // to it.
    let _ = fs::remove_file(to);
    fs::copy(from, to)
        .with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(())
}

fn write(to: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(to.parent().context("no folder")?)?;
    let _ = fs::remove_file(to);
    fs::write(to, text).with_context(|| to.display().to_string())?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o644))?;
    Ok(())
}

/// Returns the files that CMake's `find_package(pinfold)` reads. They find the library relative to
/// themselves.
fn cmake() -> [(&'static str, String); 2] {
    let config = r#"# The targets pinfold::pinfold, the shared library, and pinfold::static.
if(NOT TARGET pinfold::pinfold)
  include(CMakeFindDependencyMacro)
  find_dependency(Threads)
  get_filename_component(_pinfold "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(pinfold::pinfold SHARED IMPORTED)
  set_target_properties(pinfold::pinfold PROPERTIES
    IMPORTED_LOCATION "${_pinfold}/lib/libpinfold.so.0"
    IMPORTED_SONAME libpinfold.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${_pinfold}/include")
  add_library(pinfold::static STATIC IMPORTED)
  set_target_properties(pinfold::static PROPERTIES
    IMPORTED_LOCATION "${_pinfold}/lib/libpinfold.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_pinfold}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m")
  unset(_pinfold)
endif()
"#;
    // Before version 1.0, a new minor version may break programs.
    let version = format!(
        r#"set(PACKAGE_VERSION {})
string(REGEX MATCH "^[0-9]+\.[0-9]+" _pinfold_here "${{PACKAGE_VERSION}}")
string(REGEX MATCH "^[0-9]+\.[0-9]+" _pinfold_wanted "${{PACKAGE_FIND_VERSION}}")
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION OR
    NOT _pinfold_here STREQUAL _pinfold_wanted)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
"#,
        env!("CARGO_PKG_VERSION")
    );
    [
        ("pinfold-config.cmake", config.to_owned()),
        ("pinfold-config-version.cmake", version),
    ]
}

fn pkg_config(prefix: &Path) -> String {
    format!(
        "prefix={}\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
         Name: pinfold\nDescription: Memory allocation on per-CPU caches\nVersion: {}\n\
         Libs: -L${{libdir}} -lpinfold\nLibs.private: -lm -ldl -pthread\nCflags: -I${{includedir}}\n",
        prefix.display(),
        env!("CARGO_PKG_VERSION")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_leaves_what_is_not_pinfolds() {
        let to = std::env::temp_dir().join(format!("pinfold-remove-{}", std::process::id()));
        let ours = [
            "bin/pinfold".to_owned(),
            "include/pinfold.h".to_owned(),
            format!("{CMAKE}/pinfold-config.cmake"),
            format!("{MANUAL}/pinfold-run.1"),
        ];
        let theirs = [
            format!("{MANUAL}/pinfold-tools.1"),
            format!("{OWN}/copyright"),
            "lib/other.so".to_owned(),
        ];
        for file in ours.iter().chain(&theirs) {
            write(&to.join(file), "").unwrap();
        }
        write(
            &to.join(OWN).join(PAGES),
            "pinfold-run.1\n../../../lib/other.so\n",
        )
        .unwrap();
        remove(&to).unwrap();
        assert!(ours.iter().all(|file| !to.join(file).exists()));
        assert!(theirs.iter().all(|file| to.join(file).exists()));
        assert!(to.join("include").is_dir() && !to.join(CMAKE).exists());
        let error = remove(&to).unwrap_err().to_string();
        assert!(error.contains("nothing is installed"), "{error}");
        fs::remove_dir_all(to).unwrap();
    }
}
