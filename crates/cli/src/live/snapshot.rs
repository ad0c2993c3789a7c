//! What a statistics segment says at one moment.

use super::calls::Calls;
use pinfold::internal::kmalloc;
use pinfold::internal::segment::{
    CACHES, COUNTERS, CacheRow, CounterKind, CounterRow, EVENTS, ISOLATED, IsolatedRow, MAGIC,
    NODES, NodeEvents, NodeMemory, SETTINGS, SPLITS, Segment, SlabEvent, SplitRow, VERSION,
};
use pinfold::vmstat::Item;
use std::fmt;
use std::io;
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
    pub metadata: u64,
    /// Bytes of mapped runs, without huge blocks.
    pub mapped: u64,
    pub page_size: u64,
    pub shepherd: Shepherd,
    pub nodes: Vec<Memory>,
    pub caches: Vec<Cache>,
    /// The counters that the program shows.
    pub counters: Vec<Counter>,
    /// When the counters were written, in nanoseconds of the system's clock.
    pub counted_ns: u64,
    /// The present values of the settings, by their numbers.
    pub settings: Vec<u64>,
    /// The CPUs that threads of the process have isolated.
    pub isolated: Vec<Isolated>,
    /// What was counted at each call, if the process counts calls.
    pub calls: Option<Calls>,
}

/// What the shepherds of a process have done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shepherd {
    /// The number of threads at the last tick. Without a thread, slow paths tick.
    pub threads: u32,
    pub ticks: u64,
    /// When the last tick was, in nanoseconds of the system's clock; 0 before the first.
    pub ticked_ns: u64,
    /// Nanoseconds in ticks, without the last one.
    pub in_ticks_ns: u64,
    /// Shards of counters that were folded.
    pub folds: u64,
}

impl Shepherd {
    fn parse(bytes: &Bytes<'_>) -> Result<Shepherd, Refused> {
        Ok(Shepherd {
            threads: bytes.half(offset_of!(Segment, shepherds))?,
            ticks: bytes.word(offset_of!(Segment, ticks))?,
            ticked_ns: bytes.word(offset_of!(Segment, ticked_ns))?,
            in_ticks_ns: bytes.word(offset_of!(Segment, in_ticks_ns))?,
            folds: bytes.word(offset_of!(Segment, folds))?,
        })
    }
}

/// A CPU that a thread of the process has isolated, and how often other threads of the process may
/// have disturbed it.
#[derive(Debug, PartialEq, Eq)]
pub struct Isolated {
    pub cpu: u64,
    pub fences: u64,
    pub given_back: u64,
    pub folds: u64,
    pub drains: u64,
}

fn isolated(bytes: &Bytes<'_>) -> Result<Vec<Isolated>, Refused> {
    let row = |nth: usize| {
        let at = offset_of!(Segment, isolated) + nth * size_of::<IsolatedRow>();
        let cpu = bytes.word(at + offset_of!(IsolatedRow, cpu))?;
        let count = |kind: usize| bytes.word(at + offset_of!(IsolatedRow, counts) + 8 * kind);
        let row = |cpu| {
            Ok(Isolated {
                cpu,
                fences: count(0)?,
                given_back: count(1)?,
                folds: count(2)?,
                drains: count(3)?,
            })
        };
        cpu.checked_sub(1).map(row).transpose()
    };
    (0..ISOLATED)
        .map(row)
        .filter_map(Result::transpose)
        .collect()
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

/// Why a file is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The process has not filled it in, or it is another file.
    NotASegment,
    /// It has another version of the layout.
    Version(u32),
    /// It ends before its parts do, or has more rows than a process can make.
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
pub(super) struct Bytes<'b>(&'b [u8]);

impl Bytes<'_> {
    pub(super) fn word(&self, at: usize) -> Result<u64, Refused> {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        bytes
            .map(|&bytes| u64::from_le_bytes(bytes))
            .ok_or(Refused::Broken)
    }

    pub(super) fn half(&self, at: usize) -> Result<u32, Refused> {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        bytes
            .map(|&bytes| u32::from_le_bytes(bytes))
            .ok_or(Refused::Broken)
    }

    pub(super) fn place(&self, at: usize) -> Result<usize, Refused> {
        Ok(self.half(at)? as usize)
    }

    /// Returns the name of at most 32 bytes at `at`, which is inside the file.
    fn name(&self, at: usize) -> String {
        let name = self.0.get(at..at + 32).unwrap_or_default();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    }

    /// Returns where element `nth` of an array at `start` is, if the whole element is in the file.
    pub(super) fn element(&self, start: usize, nth: usize, size: usize) -> Result<usize, Refused> {
        let at = nth
            .checked_mul(size)
            .and_then(|offset| offset.checked_add(start));
        at.filter(|at| at.checked_add(size).is_some_and(|end| end <= self.0.len()))
            .ok_or(Refused::Broken)
    }
}

/// The bytes that are enough to tell a segment from other files.
const HEAD: usize = 4096;
const _: () = assert!(size_of::<Segment>() <= HEAD);

/// The most units that a segment can have: one for each of the 8,192 CPUs that Linux can be built
/// for, and one that all share.
const UNITS: usize = 8193;

/// Where the parts of a segment are, and how many rows are in use. The numbers of rows are within
/// the bounds of the layout, and the places may be anywhere.
#[derive(Debug)]
struct Head {
    nodes: usize,
    memory_at: usize,
    caches: usize,
    caches_at: usize,
    events_at: usize,
    counters: usize,
    counters_at: usize,
    splits: usize,
    splits_at: usize,
    units: usize,
    units_at: usize,
    unit_bytes: usize,
    calls: usize,
}

impl Head {
    fn parse(bytes: &Bytes<'_>) -> Result<Head, Refused> {
        let magic = bytes.word(offset_of!(Segment, magic));
        if magic.map_err(|_| Refused::NotASegment)? != MAGIC {
            return Err(Refused::NotASegment);
        }
        let version = bytes.half(offset_of!(Segment, version))?;
        if version != VERSION {
            return Err(Refused::Version(version));
        }
        let most = |at, most| {
            let number = bytes.place(at)?;
            (number <= most).then_some(number).ok_or(Refused::Broken)
        };
        let caches = most(offset_of!(Segment, caches), CACHES)?;
        let counters = most(offset_of!(Segment, counters), COUNTERS)?;
        let splits = most(offset_of!(Segment, splits), SPLITS)?;
        Ok(Head {
            nodes: most(offset_of!(Segment, nodes), NODES)?,
            memory_at: bytes.place(offset_of!(Segment, memory_at))?,
            caches: bytes.place(offset_of!(Segment, caches_used))?.min(caches),
            caches_at: bytes.place(offset_of!(Segment, caches_at))?,
            events_at: bytes.place(offset_of!(Segment, events_at))?,
            counters: bytes
                .place(offset_of!(Segment, counters_used))?
                .min(counters),
            counters_at: bytes.place(offset_of!(Segment, counters_at))?,
            splits: bytes.place(offset_of!(Segment, splits_used))?.min(splits),
            splits_at: bytes.place(offset_of!(Segment, splits_at))?,
            units: most(offset_of!(Segment, units), UNITS)?,
            units_at: bytes.place(offset_of!(Segment, units_at))?,
            unit_bytes: bytes.place(offset_of!(Segment, unit_bytes))?,
            calls: bytes.place(offset_of!(Segment, calls))?,
        })
    }

    /// Returns where the last row that is read ends. The rows of a process that is in order end
    /// before this, and the bytes up to there are few enough to read at once.
    fn end(&self) -> Result<usize, Refused> {
        const MOST: usize = HEAD
            + NODES * size_of::<NodeMemory>()
            + CACHES * (size_of::<CacheRow>() + NODES * size_of::<NodeEvents>())
            + COUNTERS * size_of::<CounterRow>()
            + SPLITS * size_of::<SplitRow>();
        let parts = [
            (self.memory_at, self.nodes * size_of::<NodeMemory>()),
            (self.caches_at, self.caches * size_of::<CacheRow>()),
            (
                self.events_at,
                self.caches * self.nodes * size_of::<NodeEvents>(),
            ),
            (self.counters_at, self.counters * size_of::<CounterRow>()),
            (self.splits_at, self.splits * size_of::<SplitRow>()),
        ];
        let ends = parts.map(|(start, size)| start.saturating_add(size));
        let end = ends.into_iter().max().unwrap_or(0).max(HEAD);
        (end <= MOST).then_some(end).ok_or(Refused::Broken)
    }
}

/// Returns the present values of the settings that the process shows.
fn settings(bytes: &Bytes<'_>) -> Result<Vec<u64>, Refused> {
    let used = bytes.place(offset_of!(Segment, settings_used))?;
    let word = |nth| bytes.word(offset_of!(Segment, settings) + 8 * nth);
    (0..used.min(SETTINGS)).map(word).collect()
}

impl Snapshot {
    /// Reads a segment that is in memory.
    #[cfg(any(test, fuzzing))]
    pub fn parse(bytes: &[u8]) -> Result<Snapshot, Refused> {
        let read = |at: usize, size: usize| {
            let rest = bytes.get(at..).unwrap_or_default();
            Ok(rest[..size.min(rest.len())].to_vec())
        };
        // Reading memory does not fail.
        Snapshot::read(read).unwrap_or(Err(Refused::Broken))
    }

    /// Reads a segment. `read` returns a number of bytes from an offset, or fewer at the end.
    ///
    /// Reads the first page before any other, because the file can be anything, of any size.
    pub fn read(
        mut read: impl FnMut(usize, usize) -> io::Result<Vec<u8>>,
    ) -> io::Result<Result<Snapshot, Refused>> {
        let first = read(0, HEAD)?;
        let head = Head::parse(&Bytes(&first));
        let (head, end) = match head.and_then(|head| head.end().map(|end| (head, end))) {
            Ok(found) => found,
            Err(refused) => return Ok(Err(refused)),
        };
        let bytes = read(0, end)?;
        let calls = match head.units {
            0 => Ok(None),
            _ if Calls::BYTES.saturating_add(head.calls) > head.unit_bytes => Err(Refused::Broken),
            units => {
                let of_unit = |unit: usize| {
                    let unit = unit.saturating_mul(head.unit_bytes);
                    let at = head.units_at.saturating_add(unit);
                    read(at.saturating_add(head.calls), Calls::BYTES)
                };
                Calls::read(units, of_unit)?.map(Some)
            }
        };
        Ok(calls.and_then(|calls| Snapshot::of(&Bytes(&bytes), &head, calls)))
    }

    fn of(bytes: &Bytes<'_>, head: &Head, calls: Option<Calls>) -> Result<Snapshot, Refused> {
        let memory = |node| {
            let at = bytes.element(head.memory_at, node, size_of::<NodeMemory>())?;
            Ok(Memory {
                used: bytes.word(at + offset_of!(NodeMemory, used))?,
                dirty: bytes.word(at + offset_of!(NodeMemory, dirty))?,
            })
        };
        let caches = (0..head.caches).map(|nth| Cache::parse(bytes, head, nth));
        let mut caches: Vec<Cache> = caches
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        for nth in 0..head.splits {
            add_split(bytes, head, nth, &mut caches)?;
        }
        let counters = (0..head.counters).map(|nth| Counter::parse(bytes, head, nth));
        Ok(Snapshot {
            pid: bytes.half(offset_of!(Segment, pid))?,
            backend: bytes.half(offset_of!(Segment, backend))?,
            started_ns: bytes.word(offset_of!(Segment, started_ns))?,
            held: bytes.word(offset_of!(Segment, held))?,
            held_peak: bytes.word(offset_of!(Segment, held_peak))?,
            returned: bytes.word(offset_of!(Segment, returned))?,
            huge: bytes.word(offset_of!(Segment, huge))?,
            metadata: bytes.word(offset_of!(Segment, metadata))?,
            mapped: bytes.word(offset_of!(Segment, mapped))?,
            shepherd: Shepherd::parse(bytes)?,
            page_size: u64::from(bytes.half(offset_of!(Segment, page_size))?),
            nodes: (0..head.nodes).map(memory).collect::<Result<_, _>>()?,
            caches,
            counters: counters
                .filter_map(Result::transpose)
                .collect::<Result<_, _>>()?,
            counted_ns: bytes.word(offset_of!(Segment, counted_ns))?,
            settings: settings(bytes)?,
            isolated: isolated(bytes)?,
            calls,
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

    /// Returns the bytes of [`used`](Self::used) that are not in free objects of slabs.
    pub fn in_use(&self) -> u64 {
        let free = |cache: &Cache| {
            let free = cache.total().saturating_sub(cache.out());
            free.saturating_mul(cache.size)
        };
        self.used().saturating_sub(self.of_caches(free))
    }

    /// Returns the bytes in dirty free runs.
    pub fn dirty(&self) -> u64 {
        let runs = self.nodes.iter().map(|node| node.dirty);
        runs.fold(0, u64::saturating_add)
    }

    /// Returns the size class whose calls are counted for `cache`, one of [`Self::caches`]. Calls
    /// are not counted apart for a class and its twins. So they count for the class, or for the
    /// first twin if the class has no cache.
    pub fn class_of(&self, cache: &Cache) -> Option<usize> {
        let class = cache.nth % kmalloc::CLASSES;
        let all = (class..kmalloc::ALL_CLASSES).step_by(kmalloc::CLASSES);
        let mut before = all.take_while(|&nth| nth < cache.nth);
        let is_here = |nth: usize| self.caches.iter().any(|other| other.nth == nth);
        let is_first = cache.nth < kmalloc::ALL_CLASSES && !before.any(is_here);
        is_first.then_some(class)
    }

    /// Returns the sum of `of` over all caches.
    pub fn of_caches(&self, of: impl Fn(&Cache) -> u64) -> u64 {
        self.caches.iter().map(of).fold(0, u64::saturating_add)
    }
}

impl Counter {
    /// Reads row `nth`. Returns `None` if no counter has the row.
    fn parse(bytes: &Bytes<'_>, head: &Head, nth: usize) -> Result<Option<Counter>, Refused> {
        let row = bytes.element(head.counters_at, nth, size_of::<CounterRow>())?;
        if bytes.half(row + offset_of!(CounterRow, state))? != 2 {
            return Ok(None);
        }
        Ok(Some(Counter {
            name: bytes.name(row + offset_of!(CounterRow, name)),
            value: bytes.word(row + offset_of!(CounterRow, value))?,
            is_level: bytes.half(row + offset_of!(CounterRow, kind))? == CounterKind::Level as u32,
        }))
    }
}

/// Reads the events whose words begin at `at`.
fn events(bytes: &Bytes<'_>, at: usize) -> Result<[u64; EVENTS], Refused> {
    let mut counts = [0; EVENTS];
    for (event, count) in counts.iter_mut().enumerate() {
        *count = bytes.word(at + 8 * event)?;
    }
    Ok(counts)
}

/// Adds the events of row `nth` of the split caches' parts to those of its cache and node. Leaves
/// out a row that no part has, or whose cache has no row.
fn add_split(
    bytes: &Bytes<'_>,
    head: &Head,
    nth: usize,
    caches: &mut [Cache],
) -> Result<(), Refused> {
    let row = bytes.element(head.splits_at, nth, size_of::<SplitRow>())?;
    let cache = bytes.half(row + offset_of!(SplitRow, cache))? as usize;
    let node = bytes.half(row + offset_of!(SplitRow, node))? as usize;
    let mut caches = caches.iter_mut();
    let cache = caches.find(|found| Some(found.nth) == cache.checked_sub(1));
    if let Some(counts) = cache.and_then(|cache| cache.nodes.get_mut(node)) {
        let more = events(bytes, row + offset_of!(SplitRow, events))?;
        for (count, more) in counts.iter_mut().zip(more) {
            *count = count.wrapping_add(more);
        }
    }
    Ok(())
}

impl Cache {
    /// Reads row `nth`. Returns `None` if no cache has the row. If another cache got the row while
    /// the bytes were copied, the name or the counts may be those of the old cache.
    fn parse(bytes: &Bytes<'_>, head: &Head, nth: usize) -> Result<Option<Cache>, Refused> {
        let row = bytes.element(head.caches_at, nth, size_of::<CacheRow>())?;
        let field = |at: usize| bytes.half(row + at).map(u64::from);
        if field(offset_of!(CacheRow, state))? & 3 != 2 {
            return Ok(None);
        }
        let name = bytes.name(row + offset_of!(CacheRow, name));
        let counts = |node| {
            let at = nth
                .checked_mul(head.nodes)
                .and_then(|at| at.checked_add(node));
            let size = size_of::<NodeEvents>();
            let at = bytes.element(head.events_at, at.ok_or(Refused::Broken)?, size)?;
            events(bytes, at)
        };
        Ok(Some(Cache {
            nth,
            name,
            object: field(offset_of!(CacheRow, object))?,
            size: field(offset_of!(CacheRow, size))?,
            per_slab: field(offset_of!(CacheRow, per_slab))?,
            slab: field(offset_of!(CacheRow, slab))?,
            sheaf_capacity: field(offset_of!(CacheRow, sheaf_capacity))?,
            nodes: (0..head.nodes).map(counts).collect::<Result<_, _>>()?,
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
        let slabs = self.nodes.iter().map(Cache::slabs_in);
        slabs.fold(0, u64::saturating_add)
    }

    /// Returns how many slabs a node with these counts has.
    pub fn slabs_in(counts: &[u64; EVENTS]) -> u64 {
        let made = counts[SlabEvent::SlabAlloc.index()];
        made.saturating_sub(counts[SlabEvent::SlabFree.index()])
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

    /// Returns how many objects are in the barns' full sheaves.
    pub fn in_barns(&self) -> u64 {
        let levels = self.nodes.iter().map(Cache::barns_in);
        levels.fold(0, u64::saturating_add)
    }

    /// Returns how many objects are in the barn of a node with these counts. A forked child that
    /// counts every call starts at 0 while its barns hold objects, so the level can be below 0.
    pub fn barns_in(counts: &[u64; EVENTS]) -> u64 {
        u64::try_from(counts[SlabEvent::BarnObjects.index()].cast_signed()).unwrap_or(0)
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

#[cfg(test)]
pub mod tests;
