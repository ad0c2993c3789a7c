//! What a statistics segment says at one moment.

use pinfold::segment::{
    CLASSES, CacheRow, Call, CounterRow, EVENTS, Kind, MAGIC, NodeEvents, NodeMemory, Segment,
    SlabEvent, VERSION,
};
use pinfold::vmstat::Item;
use std::fmt;
use std::mem::offset_of;

/// The numbers of one process.
#[derive(Debug)]
pub struct Snapshot {
    /// The process's number, as the process itself sees it.
    pub pid: u32,
    pub backend: u32,
    /// Nanoseconds of the system's clock.
    pub started_ns: u64,
    pub held: u64,
    pub held_peak: u64,
    pub returned: u64,
    pub huge: u64,
    pub page_size: u64,
    pub nodes: Vec<Memory>,
    pub caches: Vec<Cache>,
    /// The counters that the program shows.
    pub counters: Vec<Counter>,
    /// When the counters were written, in nanoseconds of the system's clock.
    pub counted_ns: u64,
    /// What was counted at each call, if the process counts calls.
    pub calls: Option<Calls>,
}

/// The memory of one node, in bytes.
#[derive(Debug)]
pub struct Memory {
    pub used: u64,
    pub dirty: u64,
}

#[derive(Debug)]
pub struct Cache {
    /// The cache's position; that of a size class is the class's number.
    pub nth: usize,
    pub name: String,
    pub object: u64,
    pub size: u64,
    pub per_slab: u64,
    pub slab: u64,
    pub sheaf_capacity: u64,
    /// The counts of each node, by [`SlabEvent`].
    pub nodes: Vec<[u64; EVENTS]>,
}

/// A counter of the program's own.
#[derive(Debug)]
pub struct Counter {
    pub name: String,
    pub value: u64,
    /// Whether the value is a signed number, which may fall.
    pub is_level: bool,
}

/// The counts of calls, of all CPUs.
#[derive(Debug)]
pub struct Calls(Vec<u64>);

/// Why a file is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The process has not filled it in, or it is another file.
    NotASegment,
    /// It has another version of the layout.
    Version(u32),
    /// It ends before its parts do.
    Broken,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::NotASegment => f.write_str("it has not filled in its statistics"),
            Refused::Version(version) => write!(
                f,
                "its statistics have layout {version}, and this command reads layout {VERSION}; use the command of the same release as its library"
            ),
            Refused::Broken => f.write_str("its statistics are damaged"),
        }
    }
}

impl std::error::Error for Refused {}

/// Numbers in a file that may hold anything. Only numbers are read, and only from inside the file.
struct Bytes<'b>(&'b [u8]);

impl Bytes<'_> {
    fn word(&self, at: usize) -> Result<u64, Refused> {
        let bytes = at.checked_add(8).and_then(|end| self.0.get(at..end));
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or(Refused::Broken)
    }

    fn half(&self, at: usize) -> Result<u32, Refused> {
        let bytes = at.checked_add(4).and_then(|end| self.0.get(at..end));
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or(Refused::Broken)
    }

    fn place(&self, at: usize) -> Result<usize, Refused> {
        Ok(self.half(at)? as usize)
    }

    /// Returns the name of at most 32 bytes at `at`, which is inside the file.
    fn name(&self, at: usize) -> String {
        let name = self.0.get(at..at + 32).unwrap_or_default();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    }

    /// Returns where element `nth` of an array at `start` is, if the whole element is in the file.
    fn element(&self, start: usize, nth: usize, size: usize) -> Result<usize, Refused> {
        let at = nth
            .checked_mul(size)
            .and_then(|offset| offset.checked_add(start));
        at.filter(|at| at.checked_add(size).is_some_and(|end| end <= self.0.len()))
            .ok_or(Refused::Broken)
    }
}

impl Snapshot {
    /// Reads a segment.
    pub fn parse(bytes: &[u8]) -> Result<Snapshot, Refused> {
        let bytes = Bytes(bytes);
        let magic = bytes.word(offset_of!(Segment, magic));
        if magic.map_err(|_| Refused::NotASegment)? != MAGIC {
            return Err(Refused::NotASegment);
        }
        let version = bytes.half(offset_of!(Segment, version))?;
        if version != VERSION {
            return Err(Refused::Version(version));
        }
        let nodes = bytes.place(offset_of!(Segment, nodes))?;
        let memory_at = bytes.place(offset_of!(Segment, memory_at))?;
        let memory = |node| {
            let at = bytes.element(memory_at, node, size_of::<NodeMemory>())?;
            Ok(Memory {
                used: bytes.word(at + offset_of!(NodeMemory, used))?,
                dirty: bytes.word(at + offset_of!(NodeMemory, dirty))?,
            })
        };
        let used = bytes.place(offset_of!(Segment, caches_used))?;
        let used = used.min(bytes.place(offset_of!(Segment, caches))?);
        let caches = (0..used).map(|nth| Cache::parse(&bytes, nth, nodes));
        let shown = bytes.place(offset_of!(Segment, counters_used))?;
        let shown = shown.min(bytes.place(offset_of!(Segment, counters))?);
        let counters = (0..shown).map(|nth| Counter::parse(&bytes, nth));
        Ok(Snapshot {
            pid: bytes.half(offset_of!(Segment, pid))?,
            backend: bytes.half(offset_of!(Segment, backend))?,
            started_ns: bytes.word(offset_of!(Segment, started_ns))?,
            held: bytes.word(offset_of!(Segment, held))?,
            held_peak: bytes.word(offset_of!(Segment, held_peak))?,
            returned: bytes.word(offset_of!(Segment, returned))?,
            huge: bytes.word(offset_of!(Segment, huge))?,
            page_size: u64::from(bytes.half(offset_of!(Segment, page_size))?),
            nodes: (0..nodes).map(memory).collect::<Result<_, _>>()?,
            caches: caches
                .filter_map(Result::transpose)
                .collect::<Result<_, _>>()?,
            counters: counters
                .filter_map(Result::transpose)
                .collect::<Result<_, _>>()?,
            counted_ns: bytes.word(offset_of!(Segment, counted_ns))?,
            calls: Calls::parse(&bytes)?,
        })
    }
}

// The file may hold anything, so sums stop at the largest number.
impl Snapshot {
    /// Returns the bytes in slabs and large blocks.
    pub fn used(&self) -> u64 {
        let runs = self.nodes.iter().map(|node| node.used);
        runs.fold(self.huge, u64::saturating_add)
    }

    /// Returns the bytes in dirty free runs.
    pub fn dirty(&self) -> u64 {
        let runs = self.nodes.iter().map(|node| node.dirty);
        runs.fold(0, u64::saturating_add)
    }

    /// Returns the sum of `of` over all caches.
    pub fn of_caches(&self, of: impl Fn(&Cache) -> u64) -> u64 {
        self.caches.iter().map(of).fold(0, u64::saturating_add)
    }
}

impl Counter {
    /// Reads row `nth`. Returns `None` if no counter has the row.
    fn parse(bytes: &Bytes<'_>, nth: usize) -> Result<Option<Counter>, Refused> {
        let first = bytes.place(offset_of!(Segment, counters_at))?;
        let row = bytes.element(first, nth, size_of::<CounterRow>())?;
        if bytes.half(row + offset_of!(CounterRow, state))? != 2 {
            return Ok(None);
        }
        Ok(Some(Counter {
            name: bytes.name(row + offset_of!(CounterRow, name)),
            value: bytes.word(row + offset_of!(CounterRow, value))?,
            is_level: bytes.half(row + offset_of!(CounterRow, kind))? == Kind::Level as u32,
        }))
    }
}

impl Cache {
    /// Reads row `nth`. Returns `None` if no cache has the row. If another cache got the row while
    /// the bytes were copied, the name or the counts may be those of the old cache.
    fn parse(bytes: &Bytes<'_>, nth: usize, nodes: usize) -> Result<Option<Cache>, Refused> {
        let caches_at = bytes.place(offset_of!(Segment, caches_at))?;
        let events_at = bytes.place(offset_of!(Segment, events_at))?;
        let row = bytes.element(caches_at, nth, size_of::<CacheRow>())?;
        let field = |at: usize| bytes.half(row + at).map(u64::from);
        if field(offset_of!(CacheRow, state))? & 3 != 2 {
            return Ok(None);
        }
        let name = bytes.name(row + offset_of!(CacheRow, name));
        let events = |node| {
            let at = nth.checked_mul(nodes).and_then(|at| at.checked_add(node));
            let size = size_of::<NodeEvents>();
            let at = bytes.element(events_at, at.ok_or(Refused::Broken)?, size)?;
            let mut counts = [0; EVENTS];
            for (event, count) in counts.iter_mut().enumerate() {
                *count = bytes.word(at + 8 * event)?;
            }
            Ok(counts)
        };
        Ok(Some(Cache {
            nth,
            name,
            object: field(offset_of!(CacheRow, object))?,
            size: field(offset_of!(CacheRow, size))?,
            per_slab: field(offset_of!(CacheRow, per_slab))?,
            slab: field(offset_of!(CacheRow, slab))?,
            sheaf_capacity: field(offset_of!(CacheRow, sheaf_capacity))?,
            nodes: (0..nodes).map(events).collect::<Result<_, _>>()?,
        }))
    }

    /// Returns the count of an event on all nodes.
    pub fn count(&self, event: SlabEvent) -> u64 {
        let counts = self.nodes.iter().map(|counts| counts[event.index()]);
        counts.fold(0, u64::wrapping_add)
    }

    /// Returns how many objects went from slabs to sheaves or callers.
    pub fn refilled(&self) -> u64 {
        self.count(SlabEvent::Refilled)
    }

    /// Returns how many slabs the cache has.
    pub fn slabs(&self) -> u64 {
        let made = self.count(SlabEvent::SlabAlloc);
        made.saturating_sub(self.count(SlabEvent::SlabFree))
    }

    /// Returns how many objects the cache's slabs have.
    pub fn total(&self) -> u64 {
        self.slabs().saturating_mul(self.per_slab)
    }

    /// Returns how many objects are out of their slabs: those that the program uses, and those in
    /// the CPUs' and barns' sheaves.
    pub fn out(&self) -> u64 {
        self.refilled()
            .saturating_sub(self.count(SlabEvent::Flushed))
    }

    /// Returns how many allocations and frees the fast path did not serve.
    pub fn slow(&self) -> u64 {
        [
            SlabEvent::AllocSlowpath,
            SlabEvent::AllocLockless,
            SlabEvent::FreeSlowpath,
            SlabEvent::FreeLockless,
        ]
        .map(|event| self.count(event))
        .into_iter()
        .fold(0, u64::wrapping_add)
    }
}

impl Calls {
    /// Reads the counts in the units. Returns `None` if the process does not count calls.
    fn parse(bytes: &Bytes<'_>) -> Result<Option<Calls>, Refused> {
        let units = bytes.place(offset_of!(Segment, units))?;
        if units == 0 {
            return Ok(None);
        }
        let first = bytes.place(offset_of!(Segment, units_at))?;
        let size = bytes.place(offset_of!(Segment, unit_bytes))?;
        let calls = bytes.place(offset_of!(Segment, calls))?;
        bytes.element(first, units - 1, size)?;
        // The sum over all units of the words of one event.
        let sum = |nth: usize| {
            let at = calls + 8 * nth;
            if at.checked_add(8).is_none_or(|end| end > size) {
                return Err(Refused::Broken);
            }
            let mut words = (0..units).map(|unit| bytes.word(first + unit * size + at));
            words.try_fold(0u64, |sum, word| Ok(sum.wrapping_add(word?)))
        };
        let counts = (0..Call::NAMES.len()).map(sum);
        Ok(Some(Calls(counts.collect::<Result<_, _>>()?)))
    }

    pub fn count(&self, call: Call) -> u64 {
        self.0[call.index()]
    }

    /// Returns how many blocks of class `class` were allocated, and how many were freed.
    pub fn of_class(&self, class: usize) -> (u64, u64) {
        if class >= CLASSES {
            return (0, 0);
        }
        (
            self.count(Call::alloc(class)),
            self.count(Call::free(class)),
        )
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    const NODES: usize = 2;
    const CACHES: usize = 6;
    const MEMORY_AT: usize = 128;
    const CACHES_AT: usize = MEMORY_AT + NODES * size_of::<NodeMemory>();
    const EVENTS_AT: usize = CACHES_AT + CACHES * size_of::<CacheRow>();
    const FIRST: usize = EVENTS_AT + CACHES * NODES * size_of::<NodeEvents>();
    const SIZE: usize = 2048;
    const CALLS: usize = 128;

    fn set(bytes: &mut [u8], at: usize, value: usize) {
        bytes[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
    }

    /// Returns a segment with caches of 16, 32, … bytes and `units` units.
    pub fn segment(units: usize) -> Vec<u8> {
        let mut bytes = vec![0; FIRST + units * SIZE];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        for (at, value) in [
            (offset_of!(Segment, version), VERSION as usize),
            (offset_of!(Segment, pid), 77),
            (offset_of!(Segment, units), units),
            (offset_of!(Segment, units_at), FIRST),
            (offset_of!(Segment, unit_bytes), SIZE),
            (offset_of!(Segment, calls), CALLS),
            (offset_of!(Segment, memory_at), MEMORY_AT),
            (offset_of!(Segment, caches_at), CACHES_AT),
            (offset_of!(Segment, caches), CACHES),
            (offset_of!(Segment, caches_used), CACHES),
            (offset_of!(Segment, events_at), EVENTS_AT),
            (offset_of!(Segment, nodes), NODES),
        ] {
            set(&mut bytes, at, value);
        }
        for nth in 0..CACHES {
            let row = CACHES_AT + nth * size_of::<CacheRow>();
            let name = format!("kmalloc-{}", 16 * (nth + 1));
            bytes[row..row + name.len()].copy_from_slice(name.as_bytes());
            set(&mut bytes, row + offset_of!(CacheRow, state), 6);
            set(&mut bytes, row + offset_of!(CacheRow, size), 16 * (nth + 1));
            set(&mut bytes, row + offset_of!(CacheRow, per_slab), 100);
        }
        bytes
    }

    fn set_event(bytes: &mut [u8], nth: usize, node: usize, event: SlabEvent, count: usize) {
        let at = EVENTS_AT + (nth * NODES + node) * size_of::<NodeEvents>();
        set(bytes, at + 8 * event.index(), count);
    }

    #[test]
    fn counts_of_all_units_are_added_up() {
        let mut bytes = segment(3);
        for unit in 0..3 {
            set(&mut bytes, FIRST + unit * SIZE + CALLS + 8, 7);
        }
        let calls = Snapshot::parse(&bytes).unwrap().calls.unwrap();
        assert_eq!(calls.of_class(1), (21, 0));
        assert!(Snapshot::parse(&segment(0)).unwrap().calls.is_none());
    }

    #[test]
    fn events_of_all_nodes_are_added_up() {
        let mut bytes = segment(0);
        for node in 0..NODES {
            set_event(&mut bytes, 3, node, SlabEvent::Refilled, 50);
            set_event(&mut bytes, 3, node, SlabEvent::Flushed, 20);
            set_event(&mut bytes, 3, node, SlabEvent::SlabAlloc, 1);
        }
        let snapshot = Snapshot::parse(&bytes).unwrap();
        let cache = &snapshot.caches[3];
        assert_eq!((cache.name.as_str(), cache.size), ("kmalloc-64", 64));
        assert_eq!((cache.out(), cache.slabs(), cache.total()), (60, 2, 200));
        assert_eq!(snapshot.caches[2].out(), 0);
    }

    #[test]
    fn rows_without_a_cache_and_rows_being_written_are_left_out() {
        let mut bytes = segment(0);
        for (nth, state) in [(1, 0), (2, 3), (4, 4)] {
            let at = CACHES_AT + nth * size_of::<CacheRow>() + offset_of!(CacheRow, state);
            set(&mut bytes, at, state);
        }
        let caches = Snapshot::parse(&bytes).unwrap().caches;
        assert_eq!(
            caches.iter().map(|cache| cache.nth).collect::<Vec<_>>(),
            [0, 3, 5]
        );
    }

    #[test]
    fn other_files_and_versions_are_refused() {
        let mut bytes = segment(0);
        set(&mut bytes, offset_of!(Segment, version), 4);
        assert_eq!(Snapshot::parse(&bytes).unwrap_err(), Refused::Version(4));
        bytes[0] ^= 1;
        assert_eq!(Snapshot::parse(&bytes).unwrap_err(), Refused::NotASegment);
        assert_eq!(Snapshot::parse(b"").unwrap_err(), Refused::NotASegment);
    }

    #[test]
    fn broken_segments_are_refused() {
        let whole = segment(2);
        assert!(Snapshot::parse(&whole).is_ok());
        assert!(
            (0..whole.len())
                .step_by(61)
                .all(|cut| Snapshot::parse(&whole[..cut]).is_err())
        );
        // The high half of each field.
        for at in [
            offset_of!(Segment, units),
            offset_of!(Segment, units_at),
            offset_of!(Segment, unit_bytes),
            offset_of!(Segment, calls),
            offset_of!(Segment, memory_at),
            offset_of!(Segment, caches_at),
            offset_of!(Segment, events_at),
            offset_of!(Segment, nodes),
        ] {
            let mut broken = whole.clone();
            broken[at + 2] ^= 0x40;
            assert_eq!(
                Snapshot::parse(&broken).unwrap_err(),
                Refused::Broken,
                "byte {at}"
            );
        }
    }

    #[test]
    fn random_bytes_are_never_a_panic() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..20_000 {
            let mut bytes = segment(2);
            for _ in 0..random() % 6 + 1 {
                let at = random() as usize % 640;
                bytes[at] = random() as u8;
            }
            bytes.truncate(bytes.len() - random() as usize % 2 * (random() as usize % 4096));
            let _ = Snapshot::parse(&bytes);
        }
    }
}
