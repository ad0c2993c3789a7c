//! Names the functions of one ELF file, by its symbol table and its debug information.
//!
//! The file's bytes may be anything, and may change while they are read. Nothing here maps a file,
//! and nothing opens a file by a name that another file holds: [`Debug`] finds those.

use crate::internal::names::{Frame, MOST_INLINED, Names};
use addr2line::Context;
use addr2line::gimli::{DwarfSections, EndianSlice, RunTimeEndian, SectionId};
use object::read::ReadCache;
use object::{CompressedData, CompressionFormat, Object, ObjectSection, ObjectSegment};
use object::{ObjectSymbol, ObjectSymbolTable, SymbolKind};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The most bytes that compressed data takes when it is unpacked. The largest programs have less
/// than this in a section.
const MOST_UNPACKED: u64 = 2 << 30;

/// zlib packs at most 1,032 bytes into one, so a stated size beyond that is false.
const MOST_PACKED: u64 = 1032;

/// Where packages put debug information.
pub const DEBUG_FOLDERS: [&str; 2] = ["/usr/lib/debug", "/lib/debug"];

type Bytes = ReadCache<File>;
/// The head of a file.
pub type Parsed<'f> = object::File<'f, &'f Bytes>;
type Reader<'f> = EndianSlice<'f, RunTimeEndian>;
type Sections<'f> = DwarfSections<Cow<'f, [u8]>>;

/// Where the debug information of a file can be besides the file itself.
pub trait Debug {
    /// Opens the file with this build id.
    fn by_build_id(&self, id: &[u8]) -> Option<File>;
    /// Opens the files with this name, which a file refers to.
    fn by_name(&self, name: &[u8]) -> Vec<File>;
}

/// A file that may be a program or a library.
#[derive(Debug)]
pub struct Elf(Bytes);

impl Elf {
    /// Takes an open file.
    pub fn new(file: File) -> Elf {
        Elf(ReadCache::new(file))
    }

    /// Reads the file's head. Returns `None` if it is no program or library.
    pub fn parse(&self) -> Option<Parsed<'_>> {
        object::File::parse(&self.0).ok()
    }
}

/// Names addresses by the symbol tables of a file, which are small. `places` holds the number of
/// each address, and its position in the file. Calls `found` for each address that has a name.
///
/// # Errors
///
/// Returns the first error of `found`.
pub fn name_symbols<E>(
    file: Parsed<'_>,
    debug: &impl Debug,
    places: &[(u32, u64)],
    mut found: impl FnMut(u32, Names) -> Result<(), E>,
) -> Result<(), E> {
    let separate = separate(&file, debug);
    let separate = separate.as_ref().and_then(Elf::parse).map(Symbols::of);
    let addresses = addresses(&file, places);
    let symbols = Symbols::of(file);
    for (number, address) in addresses {
        let name = |symbols: &Symbols<'_>| symbols.name(address);
        let name = separate.as_ref().and_then(name).or_else(|| name(&symbols));
        if let Some(name) = name {
            let names = Names {
                symbol: demangled(&name),
                frames: Vec::new(),
            };
            found(number, names)?;
        }
    }
    Ok(())
}

/// Names addresses by the debug information of a file. The arguments are those of [`name_symbols`].
///
/// # Errors
///
/// Returns the first error of `found`.
pub fn name_lines<E>(
    elf: &Elf,
    debug: &impl Debug,
    places: &[(u32, u64)],
    mut found: impl FnMut(u32, Names) -> Result<(), E>,
) -> Result<(), E> {
    let Some(file) = elf.parse() else {
        return Ok(());
    };
    let separate = separate(&file, debug);
    let with_lines = match separate.as_ref().and_then(Elf::parse) {
        Some(separate) => separate,
        None => match elf.parse() {
            Some(file) => file,
            None => return Ok(()),
        },
    };
    let own = sections(&with_lines);
    let shared = shared(&with_lines, debug);
    let shared = shared.as_ref().and_then(Elf::parse);
    let shared = shared.as_ref().map(sections);
    let Some(lines) = Lines::of(&with_lines, &own, shared.as_ref()) else {
        return Ok(());
    };
    for (number, address) in addresses(&file, places) {
        let mut frames = lines.frames(address);
        if frames.is_empty() {
            continue;
        }
        for frame in &mut frames {
            frame.function = demangled(&frame.function);
        }
        let names = Names {
            symbol: String::new(),
            frames,
        };
        found(number, names)?;
    }
    Ok(())
}

/// Returns the numbers of a file's addresses, and where each is in the file's own addresses.
fn addresses(file: &Parsed<'_>, places: &[(u32, u64)]) -> Vec<(u32, u64)> {
    let converted = places.iter().filter_map(|&(number, position)| {
        // A return address is behind its call, which may be the function's last instruction. So
        // this looks for the byte before it.
        Some((number, address(file, position.checked_sub(1)?)?))
    });
    converted.collect()
}

/// Returns where packages put the debug information of the file with this build id.
pub fn debug_files(id: &[u8]) -> Vec<PathBuf> {
    let Some((first, rest)) = id.split_first() else {
        return Vec::new();
    };
    if !(7..64).contains(&rest.len()) {
        return Vec::new();
    }
    let mut name = format!(".build-id/{first:02x}/");
    for byte in rest {
        let _ = write!(name, "{byte:02x}");
    }
    name += ".debug";
    DEBUG_FOLDERS
        .map(|folder| Path::new(folder).join(&name))
        .into()
}

/// Converts a position in the file to the address that the file gives it.
pub fn address(file: &Parsed<'_>, position: u64) -> Option<u64> {
    file.segments().find_map(|segment| {
        let (start, size) = segment.file_range();
        let inside = position.checked_sub(start).filter(|&at| at < size)?;
        Some(segment.address().wrapping_add(inside))
    })
}

/// Returns the file's build id as text, or nothing.
pub fn build_id(file: &Parsed<'_>) -> String {
    let id = file.build_id().ok().flatten().unwrap_or_default();
    id.iter()
        .take(64)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Opens the file that has the debug information of `file`, if it is another one.
pub fn separate(file: &Parsed<'_>, debug: &impl Debug) -> Option<Elf> {
    let id = file.build_id().ok().flatten();
    if let Some(found) = id.and_then(|id| debug.by_build_id(id)) {
        return Some(Elf::new(found));
    }
    let (name, sum) = file.gnu_debuglink().ok()??;
    let mut candidates = debug.by_name(name).into_iter();
    let found = candidates.find(|file| sum_of(file).is_ok_and(|found| found == sum));
    found.map(Elf::new)
}

/// Returns the checksum of a file, as the section `.gnu_debuglink` holds it.
fn sum_of(mut file: &File) -> io::Result<u32> {
    let mut crc = flate2::Crc::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(crc.sum()),
            got => crc.update(&piece[..got]),
        }
    }
}

/// Opens the file that the debug information of several files shares.
pub fn shared(file: &Parsed<'_>, debug: &impl Debug) -> Option<Elf> {
    let (_, id) = file.gnu_debugaltlink().ok()??;
    let found = Elf::new(debug.by_build_id(id)?);
    let is_it = found.parse()?.build_id().ok()? == Some(id);
    is_it.then_some(found)
}

/// The functions of a symbol table.
#[derive(Debug)]
pub struct Symbols<'f> {
    file: Parsed<'f>,
    rows: Vec<Symbol>,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u64,
    end: u64,
    /// Its index, and whether that is one of the dynamic symbols.
    at: (object::SymbolIndex, bool),
    is_global: bool,
}

impl<'f> Symbols<'f> {
    /// Reads the symbol table.
    pub fn of(file: Parsed<'f>) -> Symbols<'f> {
        let all = file.symbols().map(|symbol| (symbol, false));
        let all = all.chain(file.dynamic_symbols().map(|symbol| (symbol, true)));
        let functions = all.filter(|(symbol, _)| {
            symbol.is_definition() && matches!(symbol.kind(), SymbolKind::Text)
        });
        let rows = functions.map(|(symbol, is_dynamic)| Symbol {
            start: symbol.address(),
            end: symbol.address().saturating_add(symbol.size()),
            at: (symbol.index(), is_dynamic),
            is_global: symbol.is_global(),
        });
        let mut rows: Vec<Symbol> = rows.collect();
        // `name` takes the last of the symbols that begin at one address.
        rows.sort_by_key(|row| (row.start, row.end, row.is_global));
        Symbols { file, rows }
    }

    /// Returns the name of the function at `address`, as the compiler wrote it.
    pub fn name(&self, address: u64) -> Option<String> {
        // How many symbols to look at, because a function may lie within another one's range.
        const OUTER: usize = 8;
        let after = self.rows.partition_point(|row| row.start <= address);
        let before = self.rows[..after].iter().rev();
        let nearest = self.rows[..after].last()?.start;
        let is_at = |row: &&Symbol| {
            // Functions in assembly may have no size. They end where the next one begins.
            address < row.end || (row.start == row.end && row.start == nearest)
        };
        let (index, is_dynamic) = before.take(OUTER).find(is_at)?.at;
        let table = match is_dynamic {
            true => self.file.dynamic_symbol_table()?,
            false => self.file.symbol_table()?,
        };
        let symbol = table.symbol_by_index(index).ok()?;
        let name = symbol.name_bytes().ok()?;
        (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
    }
}

/// Reads the sections with debug information.
pub fn sections<'f>(file: &Parsed<'f>) -> Sections<'f> {
    // A section that cannot be read counts as missing.
    let read = |id: SectionId| -> Result<Cow<'f, [u8]>, ()> {
        let section = file.section_by_name(id.name());
        let data = section.and_then(|section| section.compressed_data().ok());
        Ok(data.and_then(unpacked).unwrap_or_default())
    };
    let unneeded = |id: SectionId| {
        use SectionId::*;
        matches!(
            id,
            DebugLoc | DebugLocLists | DebugMacinfo | DebugMacro | DebugNames
        )
    };
    let load = |id| match unneeded(id) {
        true => Ok(Cow::Borrowed(&[][..])),
        false => read(id),
    };
    DwarfSections::load(load).unwrap_or_else(|()| DwarfSections::default())
}

/// Unpacks data whose stated size can be true.
fn unpacked(data: CompressedData<'_>) -> Option<Cow<'_, [u8]>> {
    let size = data.uncompressed_size;
    let possible = match data.format {
        CompressionFormat::Zlib => MOST_PACKED.saturating_mul(data.data.len() as u64),
        _ => MOST_UNPACKED,
    };
    (size <= possible.min(MOST_UNPACKED)).then_some(())?;
    data.decompress().ok()
}

/// The functions and lines in debug information.
pub struct Lines<'s>(Context<Reader<'s>>);

impl<'s> Lines<'s> {
    /// Reads the debug information. Returns `None` for a file without lines.
    pub fn of(
        file: &Parsed<'_>,
        sections: &'s Sections<'_>,
        shared: Option<&'s Sections<'_>>,
    ) -> Option<Lines<'s>> {
        let order = match file.is_little_endian() {
            true => RunTimeEndian::Little,
            false => RunTimeEndian::Big,
        };
        let slice = |bytes: &'s Cow<'_, [u8]>| EndianSlice::new(&bytes[..], order);
        let mut dwarf = sections.borrow(slice);
        if let Some(shared) = shared {
            dwarf.set_sup(shared.borrow(slice));
        }
        Context::from_dwarf(dwarf).ok().map(Lines)
    }

    /// Returns the functions at `address`, innermost first. A function without a name in the debug
    /// information has an empty one.
    pub fn frames(&self, address: u64) -> Vec<Frame> {
        let mut frames = Vec::new();
        // The search computes the address behind this one, which would overflow.
        if address == u64::MAX {
            return frames;
        }
        let Ok(mut found) = self.0.find_frames(address).skip_all_loads() else {
            return frames;
        };
        while let Ok(Some(frame)) = found.next() {
            let name = frame
                .function
                .as_ref()
                .and_then(|name| name.raw_name().ok());
            let place = frame.location;
            frames.push(Frame {
                function: name.map_or_else(String::new, Cow::into_owned),
                file: place
                    .as_ref()
                    .and_then(|place| place.file)
                    .unwrap_or_default()
                    .to_owned(),
                line: place.and_then(|place| place.line).unwrap_or(0),
            });
            if frames.len() == MOST_INLINED {
                break;
            }
        }
        frames
    }
}

/// Returns the name of a function as its author wrote it. Only names that a compiler has changed
/// are decoded: a C function may be called `d`, which is C++'s code for `double`.
pub fn demangled(name: &str) -> String {
    let is_rust = name.starts_with("_R") || name.starts_with("__R") || name.starts_with("_ZN");
    if is_rust && let Ok(name) = rustc_demangle::try_demangle(name) {
        return format!("{name:#}");
    }
    if name.starts_with("_Z") || name.starts_with("__Z") {
        let symbol = cpp_demangle::Symbol::new(name).ok();
        if let Some(name) = symbol.and_then(|symbol| symbol.demangle().ok()) {
            return name;
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_names_are_decoded() {
        for name in [
            "d", "i", "Ss", "PKc", "z", "w", "main", "_Z", "_R", "", "_ZZZZ",
        ] {
            assert_eq!(demangled(name), name);
        }
        assert_eq!(demangled("_Z3fooi"), "foo(int)");
        assert_eq!(demangled("_RNvC6_123foo3bar"), "123foo::bar");
        assert_eq!(
            demangled("_ZN4core3fmt9Formatter3pad17h0123456789abcdefE"),
            "core::fmt::Formatter::pad"
        );
    }

    #[test]
    fn a_false_size_is_refused() {
        let data = CompressedData {
            format: CompressionFormat::Zlib,
            data: &[0x78, 0x9c, 3, 0, 0, 0, 0, 1],
            uncompressed_size: 1 << 46,
        };
        assert!(unpacked(data).is_none());
        assert!(
            unpacked(CompressedData {
                uncompressed_size: 0,
                ..data
            })
            .is_some()
        );
    }
}
