//! Finds the probes in the test program.
#![allow(dead_code, reason = "each test uses a part")]

/// A probe in this program's file: the address of its `nop` before the file is loaded, the place of
/// that, and the same for its semaphore.
#[derive(Clone, Copy)]
pub struct Probe {
    pub address: u64,
    pub at: u64,
    pub semaphore: u64,
    pub semaphore_at: u64,
}

pub fn number(file: &[u8], at: u64, bytes: usize) -> u64 {
    let mut word = [0; 8];
    word[..bytes].copy_from_slice(&file[at as usize..at as usize + bytes]);
    u64::from_le_bytes(word)
}

/// Returns the file's place of an address, by the program headers.
fn place(file: &[u8], address: u64) -> u64 {
    let (first, size, count) = (
        number(file, 32, 8),
        number(file, 54, 2),
        number(file, 56, 2),
    );
    let headers = (0..count).map(|nth| first + nth * size);
    let found = headers
        .filter(|&header| number(file, header, 4) == 1)
        .find_map(|header| {
            let (offset, start) = (number(file, header + 8, 8), number(file, header + 16, 8));
            let within = address.checked_sub(start)?;
            (within < number(file, header + 32, 8)).then_some(offset + within)
        });
    found.expect("an address in the file")
}

/// Finds the probe `otel_memory:name` by the file's notes.
pub fn find(file: &[u8], name: &str) -> Probe {
    // The provider, the name and the beginning of the arguments, behind three addresses.
    let text = format!("otel_memory\0{name}\08@");
    let mut windows = file.windows(text.len());
    let strings = windows.position(|bytes| bytes == text.as_bytes());
    let strings = strings.expect("a note for the probe") as u64;
    let address = number(file, strings - 24, 8);
    let semaphore = number(file, strings - 8, 8);
    Probe {
        address,
        at: place(file, address),
        semaphore,
        semaphore_at: place(file, semaphore),
    }
}

/// Returns by how much the program's addresses differ from those in its file.
pub fn loaded(file: &[u8]) -> u64 {
    // SAFETY: the call only reads the auxiliary vector.
    let headers = unsafe { libc::getauxval(libc::AT_PHDR) };
    headers - number(file, 32, 8)
}
