//! The initial file system: busybox, the tests with their libraries, and python.

use super::arch::Arch;
use super::packages;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A folder that becomes the machine's root file system.
pub struct Root {
    folder: PathBuf,
    libraries: BTreeSet<PathBuf>,
    /// A folder with libraries that replace those of this machine.
    replacement: Option<PathBuf>,
    arch: Arch,
}

impl Root {
    pub fn new(
        folder: PathBuf,
        busybox: &Path,
        replacement: Option<PathBuf>,
        arch: Arch,
    ) -> Result<Root> {
        let _ = fs::remove_dir_all(&folder);
        for inner in ["bin", "dev", "proc", "sys", "tmp", "tests", "vm", "etc"] {
            fs::create_dir_all(folder.join(inner))?;
        }
        let mut root = Root {
            folder,
            libraries: BTreeSet::new(),
            replacement,
            arch,
        };
        root.copy(busybox, "bin/busybox")?;
        root.copy(Path::new("vm/init"), "init")?;
        for library in arch.libraries() {
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            root.copy(&library, &format!("lib/{name}"))?;
        }
        // Some programs look up their user.
        let users = "root:x:0:0::/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n";
        fs::write(root.folder.join("etc/passwd"), users)?;
        Ok(root)
    }

    /// Adds a file as it is. Returns its path on this machine.
    pub fn copy(&mut self, from: &Path, to: &str) -> Result<PathBuf> {
        let to = self.folder.join(to);
        fs::create_dir_all(to.parent().context("a path without a folder")?)?;
        fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))?;
        Ok(to)
    }

    pub fn write(&self, to: &str, text: &str) -> Result<()> {
        fs::write(self.folder.join(to), text).with_context(|| to.to_owned())
    }

    /// Adds a program or library without its debug information, and the libraries that it is linked
    /// to.
    pub fn program(&mut self, from: &Path, to: &str) -> Result<()> {
        let copied = self.copy(from, to)?;
        let mut strip = Command::new(self.arch.strip());
        crate::run(strip.arg("--strip-debug").arg(copied))?;
        self.needs(from)
    }

    /// Adds the libraries that `file` is linked to, at the paths that they have on this machine.
    fn needs(&mut self, file: &Path) -> Result<()> {
        if self.arch != Arch::X86 {
            return Ok(());
        }
        let said = Command::new("ldd")
            .arg(file)
            .output()
            .context("cannot start ldd")?;
        for library in libraries(&String::from_utf8_lossy(&said.stdout)) {
            if self.libraries.insert(library.clone()) {
                let inside = library.strip_prefix("/")?.to_string_lossy().into_owned();
                self.copy(&self.replaced(&library), &inside)?;
            }
        }
        Ok(())
    }

    /// Returns the file that takes the place of a library of this machine.
    fn replaced(&self, library: &Path) -> PathBuf {
        let name = library.file_name().unwrap_or_default();
        let replacement = self.replacement.as_ref().map(|folder| folder.join(name));
        let replacement = replacement.filter(|file| file.exists());
        replacement.unwrap_or_else(|| library.to_path_buf())
    }

    /// Adds Debian's Python, with the part of its standard library that needs no other package.
    pub fn python(&mut self, cache: &Path) -> Result<()> {
        let minimal = packages::behind("python3-minimal", "python3.")?;
        let version = minimal.trim_end_matches("-minimal").to_owned();
        let parts = [
            minimal.clone(),
            format!("lib{minimal}"),
            format!("lib{version}-stdlib"),
        ];
        let tree = packages::unpacked(&cache.join("python"), &parts)?;
        let inside = format!("usr/lib/{version}");
        self.tree(&tree.join(&inside), &inside)?;
        let program = format!("usr/bin/{version}");
        self.copy(&tree.join(&program), &program)?;
        self.needs(&tree.join(&program))?;
        for module in fs::read_dir(tree.join(&inside).join("lib-dynload"))? {
            self.needs(&module?.path())?;
        }
        symlink(format!("/{program}"), self.folder.join("usr/bin/python3"))?;
        Ok(())
    }

    fn tree(&mut self, from: &Path, to: &str) -> Result<()> {
        for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
            let path = entry?.path();
            let inside = format!(
                "{to}/{}",
                path.file_name().unwrap_or_default().to_string_lossy()
            );
            if path.is_dir() {
                self.tree(&path, &inside)?;
            } else if path.exists() {
                self.copy(&path, &inside)?;
            }
        }
        Ok(())
    }

    /// Packs the folder in the format that the kernel unpacks.
    pub fn pack(&self, to: &Path) -> Result<()> {
        let mut paths = vec![".".to_owned()];
        collect(&self.folder, ".", &mut paths)?;
        let mut cpio = Command::new("cpio")
            .args(["--quiet", "-o", "-H", "newc", "-R", "0:0"])
            .current_dir(&self.folder)
            .stdin(Stdio::piped())
            .stdout(File::create(to).with_context(|| to.display().to_string())?)
            .spawn()
            .context("cannot start cpio")?;
        let mut stdin = cpio.stdin.take().context("cpio has no input")?;
        stdin.write_all((paths.join("\n") + "\n").as_bytes())?;
        drop(stdin);
        if !cpio.wait()?.success() {
            bail!("cpio failed");
        }
        Ok(())
    }
}

/// Lists everything below `folder`. A folder comes before its content.
fn collect(folder: &Path, inside: &str, paths: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = format!("{inside}/{}", entry.file_name().to_string_lossy());
        paths.push(path.clone());
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), &path, paths)?;
        }
    }
    Ok(())
}

/// Returns the paths in the output of ldd: `libc.so.6 => /lib/x/libc.so.6 (0x…)` and
/// `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn libraries(said: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let words = line.split_whitespace();
        let path = words.rev().nth(1).filter(|word| word.starts_with('/'));
        path.map(PathBuf::from)
    };
    said.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldds_output_names_the_libraries() {
        let said = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x0000)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x0000)\n\tlibno.so => not found\n";
        let found = ["/lib/x/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(libraries(said), found);
        assert!(libraries("\tstatically linked\n").is_empty());
    }
}
