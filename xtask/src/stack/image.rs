//! The parts of a shared library that the analysis needs: code, functions, and what pointers point
//! to.

use anyhow::{Context, Result, bail};
use object::read::elf::{ElfFile64, FileHeader, SectionHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionKind, elf};
use std::collections::{BTreeMap, HashMap};

/// The target of a call, a jump or a pointer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Code of the library, by address.
    Own(u64),
    /// A function of another library, by name.
    Import(String),
}

/// A function of the library.
#[derive(Clone, Debug)]
pub struct Function {
    pub name: String,
    pub end: u64,
}

/// The parts of a library that were read.
#[derive(Default)]
pub struct Image {
    /// Sections with bytes: first address, whether it holds code, and the bytes.
    sections: Vec<(u64, bool, Vec<u8>)>,
    /// The functions, by their first address.
    functions: BTreeMap<u64, Function>,
    /// The addresses of functions that other libraries may call, by name.
    exports: HashMap<String, u64>,
    /// The sections of the global offset table: each one's first address, and the address one past
    /// its end.
    tables: Vec<(u64, u64)>,
    /// Words that the dynamic linker fills in with a function's address.
    pointers: HashMap<u64, Target>,
}

impl Image {
    /// Reads a shared library for x86-64.
    pub fn parse(bytes: &[u8]) -> Result<Image> {
        let file = ElfFile64::<Endianness>::parse(bytes).context("not a 64-bit ELF file")?;
        if file.elf_header().e_machine(file.endian()) != elf::EM_X86_64 {
            bail!("the library is not for x86-64");
        }
        let mut image = Image::default();
        for section in file.sections() {
            let code = section.kind() == SectionKind::Text;
            if [".got", ".got.plt"].contains(&section.name()?) {
                image.table(section.address(), section.size());
            }
            if section.address() != 0 && section.kind() != SectionKind::UninitializedData {
                image.section(section.address(), code, section.data()?.to_vec());
            }
        }
        for symbol in file.symbols().chain(file.dynamic_symbols()) {
            if symbol.kind() == object::SymbolKind::Text && symbol.size() > 0 {
                let name = format!("{:#}", rustc_demangle::demangle(symbol.name()?));
                image.function(symbol.address(), symbol.size(), &name);
            }
        }
        for symbol in file
            .dynamic_symbols()
            .filter(|symbol| symbol.is_definition())
        {
            image
                .exports
                .insert(symbol.name()?.into(), symbol.address());
        }
        // Packed relocations list addresses only. The word at each address holds the target.
        for section in file.elf_section_table().iter() {
            for at in section.relr(file.endian(), bytes)?.into_iter().flatten() {
                let word = image.data(at).and_then(|rest| rest.first_chunk::<8>());
                if let Some(word) = word.copied() {
                    image.pointer(at, Target::Own(u64::from_le_bytes(word)));
                }
            }
        }
        let Some(dynamic) = file.dynamic_relocations() else {
            return Ok(image);
        };
        let table = file.dynamic_symbol_table().context("no dynamic symbols")?;
        for (at, relocation) in dynamic {
            let target = match relocation.target() {
                RelocationTarget::Symbol(index) => {
                    use object::ObjectSymbolTable;
                    let symbol = table.symbol_by_index(index)?;
                    match symbol.is_definition() {
                        true => Target::Own(symbol.address()),
                        false => Target::Import(symbol.name()?.into()),
                    }
                }
                _ => Target::Own(relocation.addend() as u64),
            };
            image.pointer(at, target);
        }
        Ok(image)
    }

    /// Adds a section.
    pub fn section(&mut self, start: u64, code: bool, bytes: Vec<u8>) {
        self.sections.push((start, code, bytes));
    }

    /// Adds a part of the global offset table.
    pub fn table(&mut self, start: u64, size: u64) {
        self.tables.push((start, start + size));
    }

    /// Returns whether `address` lies in the global offset table.
    pub fn is_in_table(&self, address: u64) -> bool {
        let mut tables = self.tables.iter();
        tables.any(|&(start, end)| (start..end).contains(&address))
    }

    /// Adds a function.
    pub fn function(&mut self, start: u64, size: u64, name: &str) {
        self.exports.entry(name.into()).or_insert(start);
        self.functions.entry(start).or_insert_with(|| Function {
            name: name.into(),
            end: start + size,
        });
    }

    /// Adds a word with a function's address.
    pub fn pointer(&mut self, at: u64, target: Target) {
        self.pointers.insert(at, target);
    }

    /// Returns the address of the function that other libraries know as `name`.
    pub fn export(&self, name: &str) -> Option<u64> {
        self.exports.get(name).copied()
    }

    /// Returns the function that begins at `address`.
    pub fn function_at(&self, address: u64) -> Option<&Function> {
        self.functions.get(&address)
    }

    /// Returns the functions whose names match `pattern` (see [`matches()`]).
    pub fn functions_named(&self, pattern: &str) -> Vec<u64> {
        let named = self.functions.iter();
        named
            .filter(|(_, function)| matches(pattern, &function.name))
            .map(|(start, _)| *start)
            .collect()
    }

    /// Returns what the word at `address` points to.
    pub fn pointed(&self, address: u64) -> Option<&Target> {
        self.pointers.get(&address)
    }

    /// Returns the name of the code at `address`.
    pub fn name(&self, address: u64) -> String {
        let before = self.functions.range(..=address).next_back();
        match before.filter(|(start, function)| **start == address || address < function.end) {
            Some((start, function)) if *start == address => function.name.clone(),
            Some((start, function)) => format!("{}+{:#x}", function.name, address - start),
            None => format!("code at {address:#x}"),
        }
    }

    /// Returns the code from `address` to the end of its section.
    pub fn code(&self, address: u64) -> Option<&[u8]> {
        self.bytes(address, true)
    }

    /// Returns the data from `address` to the end of its section.
    pub fn data(&self, address: u64) -> Option<&[u8]> {
        self.bytes(address, false)
    }

    fn bytes(&self, address: u64, of_code: bool) -> Option<&[u8]> {
        self.sections.iter().find_map(|(start, code, bytes)| {
            let at = usize::try_from(address.checked_sub(*start)?).ok()?;
            bytes
                .get(at..)
                .filter(|rest| *code == of_code && !rest.is_empty())
        })
    }
}

/// Returns whether `name` equals `pattern`. A pattern that ends with `*` matches every name that
/// begins with the rest.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    }
}
