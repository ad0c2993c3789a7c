//! A file that a process has mapped as code, from which the names of functions are read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinfold_pprof::internal::elf::{self, Elf, Lines, Symbols};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::Write;

/// Addresses in the functions of the seeds, and some that no function has.
const ADDRESSES: [u64; 6] = [0, 0x1008, 0x1048, 0x1088, 0x40_1008, u64::MAX];

fuzz_target!(|data: &[u8]| {
    let mut file: File = memfd_create("elf", MemfdFlags::CLOEXEC).expect("room").into();
    file.write_all(data).expect("room");
    let elf = Elf::new(file);
    let (Some(parsed), Some(again)) = (elf.parse(), elf.parse()) else {
        return;
    };
    let id = elf::build_id(&parsed);
    assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let symbols = Symbols::of(again);
    for address in ADDRESSES {
        let _ = elf::address(&parsed, address);
        if let Some(name) = symbols.name(address) {
            let _ = elf::demangled(&name);
        }
    }
    let sections = elf::sections(&parsed);
    if let Some(lines) = Lines::of(&parsed, &sections, None) {
        for address in ADDRESSES {
            let _ = lines.frames(address).len();
        }
    }
});
