//! `cargo xtask install`: installs the command with its manual pages and completions, the
//! libraries, the headers, and what build systems read.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
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
const HEADERS: [&str; 5] = [
    "pinfold.h",
    "pinfold_percpu.h",
    "pinfold_show.h",
    "pinfold_policy.h",
    "pinfold.hpp",
];
/// What cargo builds below target/release, where it is installed, and its mode.
const BUILT: [(&str, &str, u32); 3] = [
    ("pinfold", "bin/pinfold", 0o755),
    ("libpinfold_preload.so", "lib/libpinfold.so", 0o755),
    ("libpinfold_names.a", "lib/libpinfold.a", 0o644),
];
/// The shells, and where they look for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/pinfold"),
    ("zsh", "share/zsh/site-functions/_pinfold"),
    ("fish", "share/fish/vendor_completions.d/pinfold.fish"),
];
const MANUAL: &str = "share/man/man1";
const PKG_CONFIG: &str = "lib/pkgconfig/pinfold.pc";
const CMAKE: &str = "lib/cmake/pinfold";
const LICENSES: &str = "share/doc/pinfold";

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
    let release = crate::target().join("release");
    for (built, installed, mode) in BUILT {
        copy(&release.join(built), &to.join(installed), mode)?;
    }
    for header in HEADERS {
        let source = Path::new("crates/malloc/include").join(header);
        copy(&source, &to.join("include").join(header), 0o644)?;
    }
    for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
        copy(Path::new(license), &to.join(LICENSES).join(license), 0o644)?;
    }
    write(&to.join(PKG_CONFIG), &pkg_config(&prefix))?;
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
    crate::run(Command::new(&command).arg("man").arg(to.join(MANUAL)))?;
    println!("installed in {}", to.display());
    Ok(())
}

/// Removes what [`main`] installs, and folders that are Pinfold's own or empty then.
fn remove(to: &Path) -> Result<()> {
    let headers = HEADERS.map(|header| format!("include/{header}"));
    let mut files: Vec<PathBuf> = headers.iter().map(PathBuf::from).collect();
    files.extend(BUILT.map(|(_, place, _)| place.into()));
    files.extend(COMPLETIONS.map(|(_, place)| place.into()));
    files.push(PKG_CONFIG.into());
    for folder in [CMAKE, LICENSES] {
        match fs::remove_dir_all(to.join(folder)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error)?,
            _ => files.push(Path::new(folder).join("removed")),
        }
    }
    for page in fs::read_dir(to.join(MANUAL)).into_iter().flatten() {
        let name = page?.file_name();
        if name
            .to_str()
            .is_some_and(|name| name == "pinfold.1" || name.starts_with("pinfold-"))
        {
            files.push(Path::new(MANUAL).join(name));
        }
    }
    for file in files {
        match fs::remove_file(to.join(&file)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| to.join(&file).display().to_string());
            }
            _ => {}
        }
        // Fails for a folder that is not empty.
        for folder in file
            .ancestors()
            .skip(1)
            .filter(|folder| folder.parent().is_some())
        {
            let _ = fs::remove_dir(to.join(folder));
        }
    }
    println!("removed from {}", to.display());
    Ok(())
}

fn build() -> Result<()> {
    let flags = flags_without_paths(&crate::target())?;
    for package in ["pinfold-preload", "pinfold-names", "pinfold-cli"] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "-p", package]);
        crate::run(cargo.env("CARGO_ENCODED_RUSTFLAGS", &flags))?;
    }
    Ok(())
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
    fs::write(to, text).with_context(|| to.display().to_string())
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
    IMPORTED_LOCATION "${_pinfold}/lib/libpinfold.so"
    IMPORTED_SONAME libpinfold.so
    INTERFACE_INCLUDE_DIRECTORIES "${_pinfold}/include")
  add_library(pinfold::static STATIC IMPORTED)
  set_target_properties(pinfold::static PROPERTIES
    IMPORTED_LOCATION "${_pinfold}/lib/libpinfold.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_pinfold}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m;gcc_eh;c")
  unset(_pinfold)
endif()
"#;
    // Before version 1.0, a new minor version may break programs.
    let version = format!(
        r#"set(PACKAGE_VERSION {})
string(REGEX MATCH "^[0-9]+\.[0-9]+" _pinfold_here "${{PACKAGE_VERSION}}")
string(REGEX MATCH "^[0-9]+\.[0-9]+" _pinfold_wanted "${{PACKAGE_FIND_VERSION}}")
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION OR NOT _pinfold_here STREQUAL _pinfold_wanted)
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
         Libs: -L${{libdir}} -lpinfold\nLibs.private: -lgcc_eh -lm -ldl -pthread -lc\nCflags: -I${{includedir}}\n",
        prefix.display(),
        env!("CARGO_PKG_VERSION")
    )
}
