//! The profile of this very process, and the names of its functions.
//!
//! Collectors ask for a profile every few seconds, and its call stacks hardly change. So the names
//! that were found stay in memory: only the files of new addresses are read again.

use crate::Error;
use crate::internal::elf::{self, Debug, Elf};
use crate::internal::maps::Mapping;
use crate::internal::names::{Found, Names, Place};
use crate::internal::profile::Profile;
use crate::internal::raw::Raw;
use pinfold::internal::profile::{self, Head};
use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Whether the functions of a profile get names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Functions,
    BuildIds,
}

/// Returns this process's profile. One thread at a time makes one, so that many requests at once
/// take the memory of one.
pub(crate) fn profile(naming: Naming) -> Result<Profile, Error> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    let raw = raw()?;
    Ok(Profile::of(&raw, |mappings, places| {
        known.find(mappings, places, naming)
    }))
}

/// Copies the records, and reads the mappings.
fn raw() -> Result<Raw, Error> {
    let mut bytes = Vec::new();
    let used = profile::copy_out(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
    let used = used.ok_or(Error::NotStarted)?;
    // The copied head may count records that were begun during the copy.
    let at = offset_of!(Head, used);
    bytes[at..at + 4].copy_from_slice(&used.to_ne_bytes());
    let maps = File::open("/proc/self/maps").and_then(|mut maps| maps.read_to_end(&mut bytes));
    maps.map_err(Error::Mappings)?;
    Raw::parse(&bytes).map_err(Error::Damaged)
}

/// A file: its device, inode and path.
type Key = ((u32, u32), u64, Vec<u8>);

/// What was found in the files so far.
#[derive(Default)]
struct Known(HashMap<Key, OfFile>);

#[derive(Default)]
struct OfFile {
    /// The build id. `None` until the file was read.
    build_id: Option<String>,
    /// The names of each position that was looked for. A position without a name has empty ones.
    names: HashMap<u64, Names>,
}

impl Known {
    fn find(&mut self, mappings: &[Mapping], places: &[Place], naming: Naming) -> Found {
        let mut found = Found::default();
        let mut of: HashMap<Key, Vec<(usize, Place)>> = HashMap::new();
        for &place in places {
            let Some(nth) = place.mapping else {
                continue;
            };
            let mapping = &mappings[nth];
            let key = (mapping.device, mapping.inode, mapping.path.clone());
            of.entry(key).or_default().push((nth, place));
        }
        for (key, places) in of {
            let file = self.0.entry(key.clone()).or_default();
            let is_new = |(_, place): &&(usize, Place)| {
                naming == Naming::Functions && !file.names.contains_key(&place.position)
            };
            let fresh: Vec<u64> = places
                .iter()
                .filter(is_new)
                .map(|(_, place)| place.position)
                .collect();
            if file.build_id.is_none() || !fresh.is_empty() {
                file.read(&key, &fresh);
            }
            let build_id = file.build_id.clone().unwrap_or_default();
            for (nth, place) in places {
                found.build_ids.insert(nth, build_id.clone());
                if naming == Naming::Functions
                    && let Some(names) = file.names.get(&place.position)
                {
                    found.names.insert(place.number, names.clone());
                }
            }
        }
        found
    }
}

impl OfFile {
    /// Reads the build id, and the names of these positions.
    fn read(&mut self, key: &Key, positions: &[u64]) {
        // A file that cannot be opened is tried again: the process may have too many files open.
        let Some(elf) = open(key).map(Elf::new) else {
            return;
        };
        // What has no name in the file is not looked for again.
        let nameless = positions
            .iter()
            .map(|&position| (position, Names::default()));
        self.names.extend(nameless);
        let parsed = elf.parse();
        self.build_id = Some(parsed.as_ref().map_or_else(String::new, elf::build_id));
        let (Some(parsed), false) = (parsed, positions.is_empty()) else {
            return;
        };
        let places: Vec<(u32, u64)> = (0..).zip(positions.iter().copied()).collect();
        let mut found = Found::default();
        let mut add = |number, names| -> Result<(), Infallible> {
            found.add(number, names);
            Ok(())
        };
        let Ok(()) = elf::name_symbols(parsed, &Packages, &places, &mut add);
        let Ok(()) = elf::name_lines(&elf, &Packages, &places, &mut add);
        for (number, names) in found.names {
            self.names.insert(positions[number as usize], names);
        }
    }
}

/// Opens a mapped file. Returns `None` if another file has taken its path. The program's own file
/// is found even then.
fn open((_, inode, path): &Key) -> Option<File> {
    let candidates = [
        Path::new(OsStr::from_bytes(path)),
        Path::new("/proc/self/exe"),
    ];
    candidates.into_iter().find_map(|path| {
        let file = regular(path)?;
        // The list of mappings shows the devices of some file systems differently from `stat`.
        (file.metadata().ok()?.ino() == *inode).then_some(file)
    })
}

/// Opens a regular file. Does not wait for a pipe's writer.
fn regular(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// Finds the debug information that packages have installed.
struct Packages;

impl Debug for Packages {
    fn by_build_id(&self, id: &[u8]) -> Option<File> {
        elf::debug_files(id).iter().find_map(|path| regular(path))
    }

    fn by_name(&self, _: &[u8]) -> Vec<File> {
        Vec::new()
    }
}
