//! Makes what a run needs, and keeps it in a cache folder: libraries, loads, input.

use super::programs::Program;
use anyhow::{Context, Result, bail, ensure};
use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The cache folder.
#[derive(Debug)]
pub struct Cache {
    /// The launcher and the loads.
    pub bin: PathBuf,
    /// The subjects' libraries.
    pub lib: PathBuf,
    /// The input of programs.
    pub input: PathBuf,
    /// The folder in which programs run and write.
    pub work: PathBuf,
    /// Locked while this run uses the cache folder.
    _lock: File,
}

impl Cache {
    /// Makes the folders: below `folder`, or else below `target/whole`.
    pub fn open(folder: Option<&Path>) -> Result<Cache> {
        let root = match folder {
            Some(folder) => folder.to_owned(),
            None => target_folder().join("whole"),
        };
        let made = |name: &str| -> Result<PathBuf> {
            let path = root.join(name);
            fs::create_dir_all(&path)
                .with_context(|| format!("cannot make {}; give another --cache", path.display()))?;
            Ok(fs::canonicalize(path)?)
        };
        let work = made("work")?;
        let lock = File::create(root.join("lock"))?;
        ensure!(
            lock.try_lock().is_ok(),
            "another run uses {}; wait until it has ended, or give another --cache",
            root.display()
        );
        Ok(Cache {
            bin: made("bin")?,
            lib: made("lib")?,
            input: made("input")?,
            work,
            _lock: lock,
        })
    }

    /// Writes an input file, unless the file exists with the same text.
    pub fn write_input(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.input.join(name);
        if fs::read_to_string(&path).ok().as_deref() != Some(text) {
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(path)
    }
}

/// Returns Cargo's target folder: the one that holds this program, or else the workspace's.
fn target_folder() -> PathBuf {
    let program = env::current_exe().unwrap_or_default();
    let found = program
        .ancestors()
        .find(|path| path.join("CACHEDIR.TAG").is_file());
    found.map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"),
        Path::to_owned,
    )
}

/// Prepares each program. Leaves out a program that cannot be prepared, with a note.
pub fn programs(cache: &Cache, programs: Vec<Program>) -> Vec<Program> {
    (programs.into_iter())
        .filter(|program| match program.prepare(cache) {
            Ok(()) => true,
            Err(error) => {
                eprintln!("note: {} is left out: {error:#}", program.name);
                false
            }
        })
        .collect()
}

/// Compiles a load and returns its path.
pub fn compile_load(cache: &Cache, name: &str, source: &str, defines: &[&str]) -> Result<PathBuf> {
    let loads = Path::new(env!("CARGO_MANIFEST_DIR")).join("loads");
    let compiler = if source.ends_with(".cc") {
        "clang++"
    } else {
        "clang"
    };
    let mut arguments = vec![compiler.to_owned()];
    arguments.extend(["-O2", "-fno-builtin", "-pthread"].map(str::to_owned));
    if compiler == "clang++" {
        arguments.push("-fsized-deallocation".to_owned());
    }
    arguments.extend(defines.iter().map(|define| format!("-D{define}")));
    arguments.push(loads.join(source).display().to_string());
    if name == "launch" {
        arguments.push("-static".to_owned());
    }
    let output = cache.bin.join(name);
    compile(&arguments, &output)?;
    Ok(output)
}

/// Runs a compiler, unless the same arguments and sources made `output` before.
pub fn compile(arguments: &[String], output: &Path) -> Result<()> {
    let stamp = output.with_extension("made-by");
    let mut made_by = arguments.join(" ");
    for source in arguments
        .iter()
        .filter(|argument| Path::new(argument).is_file())
    {
        let mut hash = DefaultHasher::new();
        fs::read(source)?.hash(&mut hash);
        if let Some(folder) = Path::new(source).parent() {
            fs::read(folder.join("load.h"))
                .unwrap_or_default()
                .hash(&mut hash);
        }
        made_by += &format!(" {:x}", hash.finish());
    }
    if output.is_file() && fs::read_to_string(&stamp).ok().as_ref() == Some(&made_by) {
        return Ok(());
    }
    let tool = tool_or_install(&arguments[0], arguments[0].trim_end_matches('+'))?;
    eprintln!(
        "building {}",
        output.file_name().unwrap_or_default().display()
    );
    let result = Command::new(tool)
        .args(&arguments[1..])
        .arg("-o")
        .arg(output)
        .output()?;
    ensure!(
        result.status.success(),
        "{} failed: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&result.stderr).trim()
    );
    fs::write(stamp, made_by)?;
    Ok(())
}

/// Finds a program. The system's folders come first, because a program in PATH may be a script that
/// chooses a version.
pub fn tool(name: &str) -> Option<PathBuf> {
    let mut folders: Vec<_> = ["/usr/bin", "/bin", "/usr/local/bin"]
        .map(PathBuf::from)
        .to_vec();
    if name == "postgres" || name == "initdb" {
        let versions = fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten()
            .flatten();
        folders.splice(0..0, versions.map(|version| version.path().join("bin")));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    folders.extend(env::split_paths(&path));
    folders
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// Finds a program, and installs its package if it is missing.
pub fn tool_or_install(name: &str, package: &str) -> Result<PathBuf> {
    if let Some(path) = tool(name) {
        return Ok(path);
    }
    install(package).with_context(|| format!("there is no {name}"))?;
    tool(name).with_context(|| format!("the package {package} has no {name}"))
}

/// Installs a package if `/usr/include` lacks its header.
pub fn header_or_install(header: &str, package: &str) -> Result<()> {
    let path = Path::new("/usr/include").join(header);
    if !path.is_file() {
        install(package).with_context(|| format!("there is no {}", path.display()))?;
    }
    Ok(())
}

/// Finds a library in the dynamic linker's cache, and installs its package if it is missing.
pub fn packaged_library(package: &str, library: &str) -> Result<PathBuf> {
    if let Some(path) = cached_library(library) {
        return Ok(path);
    }
    install(package).with_context(|| format!("there is no {library}"))?;
    cached_library(library).with_context(|| format!("the package {package} has no {library}"))
}

fn cached_library(library: &str) -> Option<PathBuf> {
    let ldconfig = ["/sbin/ldconfig", "/usr/sbin/ldconfig"]
        .into_iter()
        .find(|path| Path::new(path).is_file())?;
    let output = Command::new(ldconfig).arg("-p").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // "	libjemalloc.so.2 (libc6,x86-64) => /lib/x86_64-linux-gnu/libjemalloc.so.2"
    let architecture = match env::consts::ARCH {
        "x86_64" => "x86-64",
        "aarch64" => "AArch64",
        other => other,
    };
    let line = text.lines().find(|line| {
        line.trim_start().starts_with(&format!("{library} ")) && line.contains(architecture)
    })?;
    Some(PathBuf::from(line.split_once("=> ")?.1.trim()))
}

fn install(package: &str) -> Result<()> {
    // SAFETY: the call takes no arguments and touches no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    let Some(apt) = tool("apt-get") else {
        bail!("there is no apt-get; install the package that Debian calls {package}");
    };
    ensure!(
        is_root,
        "`apt-get install {package}` needs root; run it, or run this as root"
    );
    let run = |arguments: &[&str]| {
        let status = Command::new(&apt)
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    };
    eprintln!("installing {package}");
    let arguments = ["install", "-y", "-qq", "--no-install-recommends", package];
    let done = run(&arguments) || (run(&["update", "-qq"]) && run(&arguments));
    ensure!(done, "`apt-get install {package}` failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_its_name() {
        assert!(tool("sh").is_some());
        assert_eq!(tool("no-such-program-anywhere"), None);
    }

    /// Returns the path of a folder for one test.
    fn folder(name: &str) -> PathBuf {
        env::temp_dir().join(format!("pinfold-whole-{name}-{}", std::process::id()))
    }

    #[test]
    fn two_runs_do_not_share_a_folder() {
        let root = folder("lock");
        let first = Cache::open(Some(&root)).unwrap();
        let error = Cache::open(Some(&root)).unwrap_err().to_string();
        assert!(error.contains("--cache"), "{error}");
        drop(first);
        Cache::open(Some(&root)).unwrap();
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn unchanged_input_is_not_written_again() {
        let root = folder("input");
        let cache = Cache::open(Some(&root)).unwrap();
        let path = cache.write_input("a", "text").unwrap();
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        cache.write_input("a", "text").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), written);
        cache.write_input("a", "other").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "other");
        fs::remove_dir_all(root).unwrap();
    }
}
