//! Heap profiles as processes write them: in their memory, and in the files that they leave.
//!
//! The bytes may hold anything: a process can be killed while it writes its file.

use super::ParseError;
use crate::internal::maps::Mapping;
use pinfold::internal::profile::{
    Counts, FRAMES, HEAP_MAGIC, HEAP_VERSION, Head, MAX_RECORDS, RECORDS_AT, Record,
};
use std::convert::Infallible;
use std::mem::offset_of;
use std::time::{SystemTime, UNIX_EPOCH};

/// A call stack, by addresses.
#[derive(Debug)]
pub struct Row {
    /// Return addresses, innermost first.
    pub frames: Vec<u64>,
    /// The number of samples.
    pub samples: u64,
    /// The number of samples that were freed.
    pub freed_samples: u64,
    /// The estimated number of blocks allocated so far.
    pub objects: f64,
    /// The estimated bytes allocated so far.
    pub bytes: f64,
    /// The part of `objects` that was freed.
    pub freed_objects: f64,
    /// The part of `bytes` that was freed.
    pub freed_bytes: f64,
    /// The part of `objects` to which no pointer of the process led at its end.
    pub lost_objects: f64,
    /// The part of `bytes` to which none led.
    pub lost_bytes: f64,
    /// The free bytes that the blocks in use keep in slabs.
    pub fragment_bytes: f64,
}

/// A heap profile without names.
#[derive(Debug)]
pub struct Raw {
    /// The process's PID.
    pub pid: u32,
    /// The program's name, if it is known.
    pub program: String,
    /// The mean bytes from one sample to the next.
    pub interval: u64,
    /// How many samples were dropped.
    pub dropped: u64,
    /// Whether the process has looked for lost blocks, at its end.
    pub has_looked: bool,
    /// Whether the process has told who keeps free bytes in slabs.
    pub has_fragments: bool,
    /// The call stacks.
    pub rows: Vec<Row>,
    /// The process's executable mappings of files, by their addresses. None overlaps another.
    pub mappings: Vec<Mapping>,
    /// When the profile was read, or its file written, in nanoseconds since the epoch.
    pub time_ns: i64,
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    let half = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(half.try_into().ok()?))
}

impl Raw {
    /// Reads the head and the records, and the text behind them.
    ///
    /// # Errors
    ///
    /// Fails if the head is not that of a heap profile of this version.
    pub fn parse(bytes: &[u8]) -> Result<Raw, ParseError> {
        if word(bytes, offset_of!(Head, magic)) != Some(HEAP_MAGIC) {
            return Err(ParseError::NotRaw);
        }
        let version = half(bytes, offset_of!(Head, version)).unwrap_or(0);
        if version != HEAP_VERSION {
            return Err(ParseError::Version(version));
        }
        let half = |at| half(bytes, at).unwrap_or(0);
        let size = half(offset_of!(Head, record_bytes)) as usize;
        if size < size_of::<Record>() {
            return Err(ParseError::Damaged(size));
        }
        let used = (half(offset_of!(Head, used)) as usize).min(MAX_RECORDS);
        let rest = bytes.get(RECORDS_AT..).unwrap_or_default();
        let rows = rest.chunks_exact(size).take(used).filter_map(row).collect();
        let text = rest.get(used.saturating_mul(size)..).unwrap_or_default();
        let lines = text.split(|&byte| byte == b'\n');
        // The text may be damaged, or be cut in the middle of a line.
        let maps = lines.filter_map(|line| Mapping::parse(line).map(Ok));
        let Ok((program, mappings)) = mapped::<Infallible>(maps);
        let looks = half(offset_of!(Head, weighed));
        let raw = Raw {
            pid: half(offset_of!(Head, pid)),
            program,
            interval: word(bytes, offset_of!(Head, interval)).unwrap_or(0).max(1),
            dropped: word(bytes, offset_of!(Head, dropped)).unwrap_or(0),
            has_looked: half(offset_of!(Head, looked)) == 1,
            has_fragments: looks != 0 && looks % 2 == 0,
            rows,
            mappings,
            time_ns: nanoseconds(SystemTime::now()),
        };
        Ok(raw)
    }
}

/// Returns the nanoseconds since the epoch.
pub fn nanoseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// The most mappings of a process that are kept: as many as Linux allows by default.
const MAPPINGS: usize = 65_536;

/// Returns the name of the program with these mappings, or nothing, and those mappings that can
/// hold functions. The kernel maps the program's file below its libraries, so the first file is the
/// program's.
///
/// # Errors
///
/// Returns the first error of the list.
pub fn mapped<E>(
    maps: impl Iterator<Item = Result<Mapping, E>>,
) -> Result<(String, Vec<Mapping>), E> {
    let mut program = None;
    let mut mappings: Vec<Mapping> = Vec::new();
    for mapping in maps {
        let mapping = mapping?;
        if !mapping.path.starts_with(b"/") {
            continue;
        }
        program.get_or_insert_with(|| {
            let name = mapping.path.rsplit(|&byte| byte == b'/').next();
            String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
        });
        if mapping.is_executable() && mapping.start < mapping.end && mappings.len() < MAPPINGS {
            mappings.push(mapping);
        }
    }
    // A file that a process has left may list them in any order, or more than one at an address.
    mappings.sort_by_key(|mapping| mapping.start);
    let mut end = 0;
    mappings.retain(|mapping| {
        let is_apart = mapping.start >= end;
        if is_apart {
            end = mapping.end;
        }
        is_apart
    });
    Ok((program.unwrap_or_default(), mappings))
}

/// Returns the index of the mapping that contains `address`, in [`Raw::mappings`].
pub fn mapping_of(mappings: &[Mapping], address: u64) -> Option<usize> {
    let behind = mappings.partition_point(|mapping| mapping.start <= address);
    let nth = behind.checked_sub(1)?;
    (address < mappings[nth].end).then_some(nth)
}

/// Reads a record. Returns `None` for one that is not complete.
fn row(bytes: &[u8]) -> Option<Row> {
    let depth = half(bytes, offset_of!(Record, depth))? as usize;
    if depth == 0 || depth > FRAMES {
        return None;
    }
    let at = offset_of!(Record, frames);
    let frames = (0..depth)
        .map(|nth| word(bytes, at + 8 * nth))
        .collect::<Option<_>>()?;
    let count = |at| word(bytes, at).map(|count| count as f64);
    let one = Counts::ONE as f64;
    Some(Row {
        frames,
        samples: word(bytes, offset_of!(Record, samples))?,
        freed_samples: word(bytes, offset_of!(Record, freed_samples))?,
        objects: count(offset_of!(Record, objects))? / one,
        bytes: count(offset_of!(Record, bytes))?,
        freed_objects: count(offset_of!(Record, freed_objects))? / one,
        freed_bytes: count(offset_of!(Record, freed_bytes))?,
        lost_objects: count(offset_of!(Record, lost_objects))? / one,
        lost_bytes: count(offset_of!(Record, lost_bytes))?,
        fragment_bytes: count(offset_of!(Record, fragment_bytes))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"\
5000-6000 r-xp 00001000 fe:00 8 /lib/caf\xe9.so
1000-2000 r--p 00000000 fe:00 7 /bin/prog
2000-3000 r-xp 00001000 fe:00 7 /bin/prog
2800-3800 r-xp 00001000 fe:00 9 /lib/overlaps
3000-2000 r-xp 00001000 fe:00 9 /lib/backwards
7000-8000 rwxp 00000000 00:00 0
not a mapping
";

    fn profile() -> Vec<u8> {
        let mut bytes = vec![0; RECORDS_AT + 2 * size_of::<Record>()];
        let mut put = |at: usize, word: u64| bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        put(0, HEAP_MAGIC);
        put(
            offset_of!(Head, version),
            u64::from(HEAP_VERSION) | 77 << 32,
        );
        put(offset_of!(Head, interval), 4096);
        put(
            offset_of!(Head, used),
            2 | (size_of::<Record>() as u64) << 32,
        );
        put(RECORDS_AT + offset_of!(Record, depth), 2);
        put(RECORDS_AT + offset_of!(Record, bytes), 5000);
        put(RECORDS_AT + offset_of!(Record, frames), 0x1234);
        bytes.extend_from_slice(MAPS);
        bytes
    }

    #[test]
    fn complete_records_are_read() {
        let raw = Raw::parse(&profile()).unwrap();
        assert_eq!((raw.pid, raw.interval, raw.rows.len()), (77, 4096, 1));
        assert_eq!(
            (&raw.rows[0].frames[..], raw.rows[0].bytes),
            (&[0x1234, 0][..], 5000.0)
        );
    }

    #[test]
    fn mappings_are_in_order_and_apart() {
        let raw = Raw::parse(&profile()).unwrap();
        let starts: Vec<u64> = raw.mappings.iter().map(|mapping| mapping.start).collect();
        assert_eq!(starts, [0x2000, 0x5000]);
        assert_eq!(raw.mappings[1].path, b"/lib/caf\xe9.so");
        for (address, nth) in [
            (0x1fff, None),
            (0x2000, Some(0)),
            (0x2fff, Some(0)),
            (0x3000, None),
            (0x5800, Some(1)),
            (u64::MAX, None),
        ] {
            assert_eq!(mapping_of(&raw.mappings, address), nth, "{address:#x}");
        }
    }

    #[test]
    fn more_records_than_a_process_makes_are_left_out() {
        let mut bytes = vec![0; RECORDS_AT + (MAX_RECORDS + 9) * size_of::<Record>()];
        bytes[..RECORDS_AT].copy_from_slice(&profile()[..RECORDS_AT]);
        let at = offset_of!(Head, used);
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        for record in bytes[RECORDS_AT..].chunks_exact_mut(size_of::<Record>()) {
            record[offset_of!(Record, depth)] = 1;
        }
        assert_eq!(Raw::parse(&bytes).unwrap().rows.len(), MAX_RECORDS);
    }

    #[test]
    fn damaged_profiles_are_refused_or_read_in_part() {
        let whole = profile();
        for length in 0..whole.len() {
            if let Ok(raw) = Raw::parse(&whole[..length]) {
                assert!(raw.rows.len() <= 1);
            }
        }
        let mut random = 12345_u64;
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..20 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let at = (random >> 33) as usize % bytes.len();
                bytes[at] = (random >> 24) as u8;
            }
            let _ = Raw::parse(&bytes);
        }
    }
}
