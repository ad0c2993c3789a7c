//! Files with symbols and debug information that a compiler would not make.

/// Where the code begins, in the file and in memory.
pub const CODE: u64 = 0x1000;
/// Bytes of a function.
pub const FUNCTION: u64 = 64;

/// What the debug information is.
#[derive(Clone, Copy)]
pub enum Debug<'d> {
    /// All functions have their lines in a file of this name.
    File(&'d [u8]),
    /// A compressed section claims to have this many bytes.
    Claims(u64),
}

/// A section: its name, its kind, its flags, its content, and the section that it refers to.
struct Section<'s> {
    name: &'s [u8],
    kind: u32,
    flags: u64,
    content: Vec<u8>,
    link: u32,
    entry: u64,
}

const PROGBITS: u32 = 1;
const SYMTAB: u32 = 2;
const STRTAB: u32 = 3;
const ALLOCATED: u64 = 2 | 4;
const COMPRESSED: u64 = 0x800;

fn plain(name: &[u8], content: Vec<u8>) -> Section<'_> {
    let (kind, flags, link, entry) = (PROGBITS, 0, 0, 0);
    Section {
        name,
        kind,
        flags,
        content,
        link,
        entry,
    }
}

/// Returns a shared library for this machine with one function for each name.
pub fn library(functions: &[&[u8]], debug: Debug<'_>) -> Vec<u8> {
    let code_bytes = functions.len() as u64 * FUNCTION;
    let (mut symbols, mut names) = (vec![0; 24], vec![0]);
    for (nth, name) in functions.iter().enumerate() {
        symbols.extend((names.len() as u32).to_le_bytes());
        // A global function in section 1.
        symbols.extend([0x12, 0, 1, 0]);
        symbols.extend((CODE + nth as u64 * FUNCTION).to_le_bytes());
        symbols.extend(FUNCTION.to_le_bytes());
        names.extend_from_slice(name);
        names.push(0);
    }
    let mut sections = vec![
        Section {
            flags: ALLOCATED,
            ..plain(b".text", vec![0xc3; code_bytes as usize])
        },
        Section {
            kind: SYMTAB,
            link: 3,
            entry: 24,
            ..plain(b".symtab", symbols)
        },
        Section {
            kind: STRTAB,
            ..plain(b".strtab", names)
        },
    ];
    match debug {
        Debug::File(name) => {
            sections.push(plain(b".debug_abbrev", ABBREVIATIONS.into()));
            sections.push(plain(b".debug_info", unit(name, code_bytes)));
            sections.push(plain(b".debug_line", lines(name, code_bytes)));
        }
        Debug::Claims(bytes) => {
            // The head of a compressed section: zlib, a reserved word, the size and the alignment.
            let mut content = vec![1, 0, 0, 0, 0, 0, 0, 0];
            content.extend(bytes.to_le_bytes());
            content.extend(1u64.to_le_bytes());
            // An empty stream.
            content.extend([0x78, 0x9c, 3, 0, 0, 0, 0, 1]);
            sections.push(plain(b".debug_abbrev", ABBREVIATIONS.into()));
            for name in [&b".debug_info"[..], b".debug_line"] {
                sections.push(Section {
                    flags: COMPRESSED,
                    ..plain(name, content.clone())
                });
            }
        }
    }
    assemble(sections)
}

/// Puts the heads and the sections into one file. `.text` is the first section.
fn assemble(mut sections: Vec<Section<'_>>) -> Vec<u8> {
    sections.push(Section {
        kind: STRTAB,
        ..plain(b".shstrtab", Vec::new())
    });
    let mut names = vec![0];
    let mut name_at = Vec::new();
    for section in &sections {
        name_at.push(names.len() as u32);
        names.extend_from_slice(section.name);
        names.push(0);
    }
    sections.last_mut().unwrap().content = names;
    let mut file = vec![0; CODE as usize];
    // The first head of a section is empty.
    let mut heads = vec![0; 64];
    for (section, name) in sections.iter().zip(name_at) {
        let at = file.len() as u64;
        let address = if section.flags & 2 != 0 { at } else { 0 };
        heads.extend(name.to_le_bytes());
        heads.extend(section.kind.to_le_bytes());
        for word in [section.flags, address, at, section.content.len() as u64] {
            heads.extend(word.to_le_bytes());
        }
        heads.extend(section.link.to_le_bytes());
        heads.extend(1u32.to_le_bytes());
        heads.extend(8u64.to_le_bytes());
        heads.extend(section.entry.to_le_bytes());
        file.extend_from_slice(&section.content);
        file.resize(file.len().next_multiple_of(8), 0);
    }
    let heads_at = file.len() as u64;
    file.extend(heads);
    let machine: u16 = if cfg!(target_arch = "x86_64") {
        62
    } else {
        183
    };
    let mut head = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
    head.extend(machine.to_le_bytes());
    head.extend(1u32.to_le_bytes());
    for word in [0, 64, heads_at] {
        head.extend(word.to_le_bytes());
    }
    head.extend([0; 4]);
    let sizes = [
        64u16,
        56,
        1,
        64,
        sections.len() as u16 + 1,
        sections.len() as u16,
    ];
    head.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
    // One segment: the whole file, readable and executable.
    head.extend(1u32.to_le_bytes());
    head.extend(5u32.to_le_bytes());
    let size = file.len() as u64;
    for word in [0, 0, 0, size, size, 4096] {
        head.extend(word.to_le_bytes());
    }
    file[..head.len()].copy_from_slice(&head);
    file
}

/// A compilation unit with a name, a folder, its lines, and the range of its code.
const ABBREVIATIONS: &[u8] = &[
    1, 0x11, 0, 0x03, 0x08, 0x1b, 0x08, 0x10, 0x17, 0x11, 0x01, 0x12, 0x01, 0, 0, 0,
];

/// Prefixes a part of DWARF with its length.
fn sized(content: &[u8]) -> Vec<u8> {
    let mut part = (content.len() as u32).to_le_bytes().to_vec();
    part.extend_from_slice(content);
    part
}

fn unit(name: &[u8], code_bytes: u64) -> Vec<u8> {
    // Version 4, the abbreviations at 0, addresses of 8 bytes, abbreviation 1.
    let mut unit = vec![4, 0, 0, 0, 0, 0, 8, 1];
    for text in [name, name] {
        unit.extend_from_slice(text);
        unit.push(0);
    }
    unit.extend([0; 4]);
    unit.extend(CODE.to_le_bytes());
    unit.extend((CODE + code_bytes).to_le_bytes());
    sized(&unit)
}

fn lines(name: &[u8], code_bytes: u64) -> Vec<u8> {
    let mut head = vec![1, 1, 1, 0xfb, 14, 13, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0];
    head.extend_from_slice(name);
    // No folder, no time, no size; then the end of the files.
    head.extend([0, 0, 0, 0, 0]);
    let mut all = vec![4, 0];
    all.extend(sized(&head));
    // Sets the address, and emits line 1.
    all.extend([0, 9, 2]);
    all.extend(CODE.to_le_bytes());
    all.push(1);
    // Goes on to the end of the code.
    all.push(2);
    let mut rest = code_bytes;
    while rest >= 128 {
        all.push(rest as u8 | 128);
        rest >>= 7;
    }
    all.extend([rest as u8, 0, 1, 1]);
    sized(&all)
}
