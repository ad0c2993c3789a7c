//! Finds the command to run, and checks whether a library can be preloaded into it.

use crate::foreign::open_regular;
use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader};
use object::read::{Object, ObjectSymbol, ReadCache};
use rustix::process::{getegid, geteuid};
use std::ffi::{CString, OsStr};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of `#!` interpreters in a row: the first, and the four recursions that execve(2)
/// allows.
const SCRIPTS_DEEP: usize = 5;
/// Bytes read of a file: more than any program header table takes.
const HEAD: u64 = 16 << 10;

pub struct Program {
    /// The file to execute.
    pub path: PathBuf,
    /// The file that the kernel will load: the interpreter if the command is a script.
    pub binary: PathBuf,
}

/// Why no library can be preloaded into a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Obstacle {
    Static,
    Privileged,
    OtherMachine,
    /// The program's loader, and the C library for which Pinfold's library is built.
    OtherLoader(String, CLibrary),
}

/// A C library, with its loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CLibrary {
    Glibc,
    Musl,
}

impl CLibrary {
    /// Returns the C library that a shared library needs. It is glibc if the file does not tell.
    pub fn of(library: &Path) -> CLibrary {
        let needed = needed(library).unwrap_or_default();
        let is_musl = |name: &String| name == "libc.so" || name.starts_with("libc.musl-");
        match needed.iter().any(is_musl) {
            true => CLibrary::Musl,
            false => CLibrary::Glibc,
        }
    }

    /// Returns whether `loader`, an interpreter that a program names, loads this C library.
    fn has_loader(self, loader: &str) -> bool {
        match self {
            // Nix has its loaders in folders of its own.
            CLibrary::Glibc => ["/ld-linux", "/ld.so", "/nix/"]
                .iter()
                .any(|part| loader.contains(part)),
            CLibrary::Musl => loader.contains("/ld-musl"),
        }
    }
}

impl fmt::Display for CLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CLibrary::Glibc => "glibc",
            CLibrary::Musl => "musl",
        })
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Static => {
                f.write_str("is statically linked, so no library can be preloaded into it")
            }
            Obstacle::Privileged => f.write_str(
                "gains privileges when it starts (setuid, setgid or capabilities), so the system ignores LD_PRELOAD",
            ),
            Obstacle::OtherMachine => {
                f.write_str("is built for another processor architecture than Pinfold's library")
            }
            Obstacle::OtherLoader(loader, library) => write!(
                f,
                "is loaded by {loader}, but Pinfold's library is built for the loader of {library}"
            ),
        }
    }
}

/// Finds a command as `execvp` does: along `PATH`, unless the name contains a slash.
///
/// # Errors
///
/// `NotFound`, or `PermissionDenied` if all files of that name are directories or not executable.
pub fn find(name: &OsStr) -> io::Result<Program> {
    if name.as_bytes().contains(&b'/') {
        return Program::at(Path::new(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut answer = io::Error::from(io::ErrorKind::NotFound);
    if name.is_empty() {
        return Err(answer);
    }
    for directory in std::env::split_paths(&path) {
        match Program::at(&directory.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => answer = error,
            Err(_) => {}
            found => return found,
        }
    }
    Err(answer)
}

impl Program {
    fn at(path: &Path) -> io::Result<Program> {
        let executable = |path: &Path| -> io::Result<bool> {
            let metadata = fs::metadata(path)?;
            Ok(metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
        };
        if !executable(path)? {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut binary = path.to_owned();
        for _ in 0..SCRIPTS_DEEP {
            match interpreter(&binary) {
                Some(next) => binary = next,
                None => break,
            }
        }
        Ok(Program {
            path: path.to_owned(),
            binary,
        })
    }

    /// Returns why a library for this C library cannot be preloaded, or `None` if it can.
    pub fn obstacle(&self, library: CLibrary) -> Option<Obstacle> {
        if gains_privileges(&self.binary) {
            return Some(Obstacle::Privileged);
        }
        // If the file is unreadable or malformed, the kernel decides.
        elf_obstacle(&head(&self.binary).ok()?, library)
    }
}

impl Program {
    /// Returns the name of the sanitizer's library that the program is linked with.
    pub fn sanitizer(&self) -> Option<String> {
        needed(&self.binary)?
            .into_iter()
            .find(|name| is_sanitizer(name))
    }

    /// Returns the name of the allocator's library that the program is linked with.
    pub fn allocator(&self) -> Option<String> {
        const NAMES: [&str; 5] = ["jemalloc", "tcmalloc", "mimalloc", "snmalloc", "hoard"];
        needed(&self.binary)?
            .into_iter()
            .find(|name| NAMES.iter().any(|part| name.contains(part)))
    }
}

/// Returns whether a program or a library defines a `malloc` that other files see. `None` if the
/// file is neither, or cannot be read.
pub fn defines_malloc(file: &Path) -> Option<bool> {
    let file = ReadCache::new(open_regular(file).ok()?);
    let file = object::File::parse(&file).ok()?;
    let mut symbols = file.dynamic_symbols();
    Some(symbols.any(|symbol| symbol.is_definition() && symbol.name() == Ok("malloc")))
}

/// Returns whether an ELF file is for the processor that this command runs on.
pub fn is_for_this_machine(file: &Path) -> bool {
    let head = head(file);
    head.is_ok_and(|head| elf_obstacle(&head, CLibrary::of(file)) != Some(Obstacle::OtherMachine))
}

/// Returns the names of the libraries that a file is linked with.
fn needed(file: &Path) -> Option<Vec<String>> {
    #[expect(clippy::disallowed_methods, reason = "the user names the file")]
    let file = ReadCache::new(File::open(file).ok()?);
    let header = FileHeader64::<Endianness>::parse(&file).ok()?;
    let order = header.endian().ok()?;
    let sections = header.sections(order, &file).ok()?;
    let (entries, link) = sections.dynamic(order, &file).ok()??;
    let strings = sections.strings(order, &file, link).ok()?;
    let needed = entries
        .iter()
        .filter(|entry| entry.d_tag(order) == DT_NEEDED)
        .filter_map(|entry| str::from_utf8(entry.string(order, strings).ok()?).ok());
    Some(needed.map(str::to_owned).collect())
}

/// Returns whether a library of this name is a sanitizer's that brings an allocator. Refuses a name
/// with a space or a colon, which the dynamic loader takes for the name's end, and a path.
fn is_sanitizer(name: &str) -> bool {
    const NAMES: [&str; 6] = [
        "libasan.",
        "libhwasan.",
        "libtsan.",
        "libclang_rt.asan",
        "libclang_rt.hwasan",
        "libclang_rt.tsan",
    ];
    NAMES.iter().any(|start| name.starts_with(start)) && !name.contains([' ', ':', '/'])
}

#[expect(clippy::disallowed_methods, reason = "the user names the program")]
fn head(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(HEAD).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the interpreter that a script's first line names.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let bytes = head(path).ok()?;
    let line = bytes
        .strip_prefix(b"#!")?
        .split(|&byte| byte == b'\n')
        .next()?;
    let mut words = line
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|word| !word.is_empty());
    let first = PathBuf::from(OsStr::from_bytes(words.next()?));
    if first.file_name() == Some(OsStr::new("env")) {
        // `env NAME` searches PATH for NAME.
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return find(OsStr::from_bytes(name))
            .ok()
            .map(|program| program.binary);
    }
    Some(first)
}

/// Returns whether the kernel will run the file with other ids or more capabilities than this
/// process has.
fn gains_privileges(path: &Path) -> bool {
    let Ok(metadata) = fs::metadata(path) else {
        return false;
    };
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let setuid = metadata.mode() & 0o4000 != 0 && metadata.uid() != uid;
    let setgid = metadata.mode() & 0o2010 == 0o2010 && metadata.gid() != gid;
    let capabilities = uid != 0
        && CString::new(path.as_os_str().to_owned().into_vec())
            .is_ok_and(|path| crate::run::signals::has_capabilities(&path));
    setuid || setgid || capabilities
}

/// Checks the ELF header and the program headers. A library can be preloaded into a 64-bit file of
/// this architecture whose interpreter is the loader of the library's C library.
fn elf_obstacle(bytes: &[u8], library: CLibrary) -> Option<Obstacle> {
    const MACHINE: u16 = if cfg!(target_arch = "aarch64") {
        183
    } else {
        62
    };
    const PT_INTERP: u64 = 3;
    let number = |at: usize, size: usize| -> Option<u64> {
        let field = bytes.get(at..at.checked_add(size)?)?;
        Some(
            field
                .iter()
                .rev()
                .fold(0, |sum, &byte| sum << 8 | u64::from(byte)),
        )
    };
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    let (class, order) = (bytes.get(4)?, bytes.get(5)?);
    if (*class, *order) != (2, 1) || number(18, 2)? != u64::from(MACHINE) {
        return Some(Obstacle::OtherMachine);
    }
    let table = usize::try_from(number(32, 8)?).ok()?;
    let (size, count) = (number(54, 2)? as usize, number(56, 2)? as usize);
    for header in (0..count).filter_map(|nth| table.checked_add(nth * size)) {
        if number(header, 4)? == PT_INTERP {
            let start = usize::try_from(number(header.checked_add(8)?, 8)?).ok()?;
            let length = usize::try_from(number(header.checked_add(32)?, 8)?).ok()?;
            let text = bytes.get(start..start.checked_add(length)?)?;
            let loader = String::from_utf8_lossy(text)
                .trim_end_matches('\0')
                .to_owned();
            return (!library.has_loader(&loader))
                .then_some(Obstacle::OtherLoader(loader, library));
        }
    }
    Some(Obstacle::Static)
}

#[cfg(test)]
mod tests {
    use super::CLibrary::{Glibc, Musl};
    use super::*;

    #[test]
    fn a_library_can_be_preloaded_into_this_program() {
        let me = std::env::current_exe().unwrap();
        assert_eq!(elf_obstacle(&head(&me).unwrap(), Glibc), None);
    }

    #[test]
    fn elf_headers_tell_why_nothing_can_be_preloaded() {
        let mut elf = head(&std::env::current_exe().unwrap()).unwrap();
        elf[18] ^= 1;
        assert_eq!(elf_obstacle(&elf, Glibc), Some(Obstacle::OtherMachine));
        elf[18] ^= 1;
        elf[56] = 0;
        assert_eq!(elf_obstacle(&elf, Glibc), Some(Obstacle::Static));
        assert_eq!(elf_obstacle(b"#!/bin/sh\n", Glibc), None);
        assert_eq!(elf_obstacle(b"\x7fELF", Glibc), None);
        for cut in 0..400 {
            let _ = elf_obstacle(&elf[..cut], Glibc);
        }
    }

    #[test]
    fn a_library_goes_only_into_programs_with_its_c_library() {
        let me = std::env::current_exe().unwrap();
        let obstacle = elf_obstacle(&head(&me).unwrap(), Musl).unwrap();
        assert!(matches!(&obstacle, Obstacle::OtherLoader(_, Musl)));
        assert!(obstacle.to_string().ends_with("for the loader of musl"));
        assert!(Musl.has_loader("/lib/ld-musl-x86_64.so.1"));
        assert!(!Glibc.has_loader("/lib/ld-musl-x86_64.so.1"));
        assert_eq!(CLibrary::of(&me), Glibc);
    }

    #[test]
    fn only_sanitizers_with_an_allocator_are_found() {
        for (name, is_one) in [
            ("libtsan.so.2", true),
            ("libasan.so.8", true),
            ("libclang_rt.asan-x86_64.so", true),
            ("libubsan.so.1", false),
            ("libc.so.6", false),
            ("libasan.so:/tmp/x.so", false),
        ] {
            assert_eq!(is_sanitizer(name), is_one, "{name}");
        }
        assert_eq!(find(OsStr::new("sh")).unwrap().sanitizer(), None);
    }

    #[test]
    fn names_are_searched_as_execvp_does() {
        assert!(find(OsStr::new("sh")).unwrap().path.is_absolute());
        assert_eq!(
            find(OsStr::new("")).err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
        assert_eq!(
            find(OsStr::new("/")).err().unwrap().kind(),
            io::ErrorKind::PermissionDenied
        );
        assert_eq!(
            find(OsStr::new("/no/such")).err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
    }
}
