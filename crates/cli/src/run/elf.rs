//! What an ELF file's headers tell: whether glibc's loader of this machine loads the program, and so would a library.

use super::program::Obstacle;

#[cfg(target_arch = "aarch64")]
const MACHINE: u64 = 183;
#[cfg(not(target_arch = "aarch64"))]
const MACHINE: u64 = 62;
/// The kind of program header that names the loader.
const PT_INTERP: u64 = 3;

/// Judges a program by the beginning of its file. `None` also where the bytes do not tell: the kernel will.
pub fn obstacle(bytes: &[u8]) -> Option<Obstacle> {
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    let (class, order) = (bytes.get(4)?, bytes.get(5)?);
    // 64 bits, little-endian.
    if (*class, *order) != (2, 1) || number(bytes, 18, 2)? != MACHINE {
        return Some(Obstacle::OtherMachine);
    }
    let table = number(bytes, 32, 8)?;
    let (size, count) = (number(bytes, 54, 2)?, number(bytes, 56, 2)?);
    for nth in 0..count {
        let header = table.checked_add(nth * size)?;
        if number(bytes, header, 4)? == PT_INTERP {
            let start = number(bytes, header.checked_add(8)?, 8)?;
            let length = number(bytes, header.checked_add(32)?, 8)?;
            return loader_obstacle(field(bytes, start, length)?);
        }
    }
    Some(Obstacle::Static)
}

fn loader_obstacle(name: &[u8]) -> Option<Obstacle> {
    let name = String::from_utf8_lossy(name);
    let name = name.trim_end_matches('\0');
    (!is_glibc_loader(name)).then(|| Obstacle::OtherLoader(name.to_owned()))
}

/// Whether a path is glibc's loader, by its name on every machine. It needs no loader itself, but preloads.
pub fn is_glibc_loader(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.starts_with("ld-linux") || name.starts_with("ld.so")
}

fn field(bytes: &[u8], at: u64, length: u64) -> Option<&[u8]> {
    let range = usize::try_from(at).ok()?..usize::try_from(at.checked_add(length)?).ok()?;
    bytes.get(range)
}

/// A little-endian number of `size` bytes.
fn number(bytes: &[u8], at: u64, size: u64) -> Option<u64> {
    let bytes = field(bytes, at, size)?.iter().rev();
    Some(bytes.fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn this_program() -> Vec<u8> {
        std::fs::read("/proc/self/exe").unwrap()
    }

    #[test]
    fn this_program_can_be_preloaded_into() {
        assert_eq!(obstacle(&this_program()), None);
    }

    #[test]
    fn headers_tell() {
        let mut elf = this_program();
        elf[18] ^= 1;
        assert_eq!(obstacle(&elf), Some(Obstacle::OtherMachine));
        elf[18] ^= 1;
        elf[4] = 1;
        assert_eq!(obstacle(&elf), Some(Obstacle::OtherMachine));
        elf[4] = 2;
        elf[56..58].fill(0);
        assert_eq!(obstacle(&elf), Some(Obstacle::Static));
        assert_eq!(obstacle(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn loaders_tell() {
        assert_eq!(loader_obstacle(b"/lib64/ld-linux-x86-64.so.2\0"), None);
        assert_eq!(
            loader_obstacle(b"/nix/store/x-glibc-2.40/lib/ld-linux-aarch64.so.1\0"),
            None
        );
        let musl = "/lib/ld-musl-x86_64.so.1";
        assert_eq!(
            loader_obstacle(musl.as_bytes()),
            Some(Obstacle::OtherLoader(musl.to_owned()))
        );
    }

    #[test]
    fn nothing_breaks_it() {
        let whole = this_program();
        for cut in 0..1000 {
            let _ = obstacle(&whole[..cut]);
        }
        // Every byte of the header and the table at its largest, one by one.
        for at in 4..1000 {
            let mut broken = whole[..4096].to_vec();
            broken[at] = 0xff;
            let _ = obstacle(&broken);
        }
        let mut broken = whole[..4096].to_vec();
        broken[32..40].fill(0xff);
        assert_eq!(obstacle(&broken), None);
    }
}
