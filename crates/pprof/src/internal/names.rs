//! The names of functions at addresses.

use std::collections::HashMap;

/// The most functions that an address can be in. Each but the outermost is inlined.
pub const MOST_INLINED: usize = 128;

/// Where an address is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The address's number.
    pub number: u32,
    /// The number of its mapping. `None` for code that is in no file.
    pub mapping: Option<usize>,
    /// Its position in the mapping's file, or the address itself.
    pub position: u64,
}

/// The names of one address.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Names {
    /// The function's name in the symbol table, or nothing.
    pub symbol: String,
    /// The functions in the debug information, innermost first.
    pub frames: Vec<Frame>,
}

/// A function at an address, and the line in it.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Frame {
    /// The function's name, or nothing.
    pub function: String,
    /// The source file, or nothing.
    pub file: String,
    /// The line's number, or 0.
    pub line: u32,
}

/// The names that were found, and why others are missing.
#[derive(Debug, Default)]
pub struct Found {
    /// The names of each address that has any.
    pub names: HashMap<u32, Names>,
    /// The build ids, by the number of the mapping.
    pub build_ids: HashMap<usize, String>,
    /// Why names are missing, for people.
    pub notes: Vec<String>,
}

impl Found {
    /// Adds names of an address. Names from debug information replace those from a symbol table,
    /// which stay as the symbol.
    pub fn add(&mut self, number: u32, mut names: Names) {
        let known = self.names.entry(number).or_default();
        if names.symbol.is_empty() {
            names.symbol = std::mem::take(&mut known.symbol);
        }
        *known = names;
    }
}
