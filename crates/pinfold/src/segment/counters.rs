//! The program's own counters in the segment, by name.
//!
//! A reader in another process cannot sum a counter, because the counter's words are private
//! memory. So the process copies the values of the counters that it shows into the segment, at
//! every tick of its shepherd. A process without a shepherd's thread ticks in slow paths.
//!
//! One lock guards the table of shown counters. A tick only tries the lock, so it never waits. It
//! reads counters without their locks, and interrupts no CPU.

use super::Segment;
use super::{COUNTERS, CounterRow, Parts, current, files, part};
use crate::account::Account;
use crate::counter::{EventCounter, PerCpuCounter, outlast_fork};
use crate::fork;
use crate::lock::{Guard, Hooks, Lock, Rank};
use crate::shepherd::{self, Reach};
use crate::sys::Text;
use crate::vmstat::{Item, VmEvents, VmStat};
use core::fmt::Write;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{Relaxed, Release};

/// What the value of a shown counter is.
///
/// ```
/// use pinfold::export::CounterKind;
///
/// assert_eq!((CounterKind::Events as u32, CounterKind::Level as u32), (0, 1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CounterKind {
    /// A number of events, which only grows, modulo 2^64.
    Events = 0,
    /// A signed number, which goes up and down.
    Level = 1,
}

mod sealed {
    /// Reads value `nth` of a counter or set. Takes no lock and makes no system call.
    pub trait Read: Sync + 'static {
        const KIND: super::CounterKind;
        fn read(&self, nth: usize) -> u64;
    }
}
use sealed::Read;

/// A counter that [`show`] takes: [`EventCounter`] or [`PerCpuCounter`].
///
/// ```
/// fn is_counted<C: pinfold::export::Counted>(_: &C) {}
///
/// is_counted(&pinfold::counter::PerCpuCounter::new());
/// ```
pub trait Counted: Read {}

/// A set of counters that [`show_set`] takes: [`VmEvents`] or [`VmStat`]. The value of a `VmStat`
/// item is its sum over all zones.
///
/// ```
/// pinfold::vmstat_items! {
///     pub enum Fault { Minor = "pgfault" }
/// }
/// fn is_set<S: pinfold::export::CountedSet>(_: &S) {}
///
/// is_set(&pinfold::vmstat::VmStat::<Fault>::new());
/// ```
pub trait CountedSet: Read {
    #[doc(hidden)]
    const NAMES: &'static [&'static str];
}

impl Read for EventCounter {
    const KIND: CounterKind = CounterKind::Events;
    fn read(&self, _: usize) -> u64 {
        self.tally()
    }
}
impl Counted for EventCounter {}

impl Read for PerCpuCounter {
    const KIND: CounterKind = CounterKind::Level;
    fn read(&self, _: usize) -> u64 {
        between(self.bounds()) as u64
    }
}
impl Counted for PerCpuCounter {}

impl Read for Account {
    const KIND: CounterKind = CounterKind::Level;
    fn read(&self, _: usize) -> u64 {
        self.held() as u64
    }
}

impl<I: Item> Read for VmEvents<I> {
    const KIND: CounterKind = CounterKind::Events;
    fn read(&self, nth: usize) -> u64 {
        self.sum_of(nth)
    }
}
impl<I: Item> CountedSet for VmEvents<I> {
    const NAMES: &'static [&'static str] = I::NAMES;
}

impl<I: Item> Read for VmStat<I> {
    const KIND: CounterKind = CounterKind::Level;
    fn read(&self, nth: usize) -> u64 {
        let zones = self.of_nth(nth).map(|zone| between(zone.bounds()));
        zones.fold(0i64, i64::wrapping_add) as u64
    }
}
impl<I: Item> CountedSet for VmStat<I> {
    const NAMES: &'static [&'static str] = I::NAMES;
}

/// Returns the middle of two bounds. They are equal if no thread adds meanwhile.
fn between((low, high): (i64, i64)) -> i64 {
    low.wrapping_add(high.wrapping_sub(low) / 2)
}

/// Why a counter cannot be shown.
///
/// ```
/// use pinfold::counter::EventCounter;
/// use pinfold::export::{ShowError, show};
///
/// static HITS: EventCounter = EventCounter::new();
/// assert_eq!(show("cache hits", &HITS), Err(ShowError::Name));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShowError {
    /// The process has no segment: it does not run on Pinfold's malloc, or the segment was turned
    /// off or refused.
    NoSegment,
    /// A name is empty, longer than 32 bytes, or has other characters than ASCII letters, digits
    /// and `_.:-/`.
    Name,
    /// Another counter has the name.
    Taken,
    /// The process shows as many counters as the segment has room for.
    Full,
    /// The caller is a signal handler that interrupted another such call, or a fork.
    Busy,
    /// The shepherd has no room for another drain (see [`register`](crate::shepherd::register)).
    NoDrain,
}

pinfold_rseq::error_texts! { ShowError:
    ShowError::NoSegment => "this process has no statistics segment: run it on Pinfold's malloc, \
        without PINFOLD_SEGMENT=off";
    ShowError::Name =>
        "bad name for a counter: give 1 to 32 ASCII letters, digits, or characters of _.:-/";
    ShowError::Taken => "another counter has this name: give another name";
    ShowError::Full => "{COUNTERS} counters are shown already: hide one first";
    ShowError::NoDrain => "16 drains are registered with the shepherd: register fewer";
    ShowError::Busy => "this signal handler interrupted a fork, or a call that shows or hides a \
        counter: call again after the handler";
}

/// A name, filled up with zero bytes.
type Name = [u64; 4];

/// A counter that is shown.
#[derive(Clone, Copy)]
struct Entry {
    name: Name,
    /// The address of the counter or set.
    counter: usize,
    /// The item's number in the set.
    nth: usize,
    kind: CounterKind,
    /// Reads a counter of the type that `counter` has.
    read: unsafe fn(usize, usize) -> u64,
}

type Table = [Option<Entry>; COUNTERS];

static TABLE: Lock<Table> = Lock::new(Rank::Shown, [None; COUNTERS]);
/// Whether this process, or one that it was forked from, has ever shown a counter.
static EVER_SHOWN: AtomicBool = AtomicBool::new(false);

/// Takes the table's lock. Returns `None` if a fork cannot be made to wait for the lock, or in a
/// signal handler that may not wait for the lock.
fn table() -> Option<Guard<'static, Table>> {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Shown, |visit| visit(TABLE.word()))];
    outlast_fork(|| fork::register(&HOOKS).then_some(()))?;
    TABLE.lock()
}

/// Shows `counter` to other processes under `name`, from now on. `pinfold vmstat PID` prints it.
///
/// The value in the segment is that of the last tick: with a shepherd's thread mostly at most a
/// second old, or the shepherd's interval if that is longer. Without one, slow paths of allocations
/// and frees tick, at most every half second. The value is off by at most the adds that were under
/// way while it was read.
///
/// After a fork, the child goes on showing the counter.
///
/// Costs a walk over the table of [`COUNTERS`] entries, under a lock. A tick reads one word, or
/// four for a [`PerCpuCounter`], for each counter and CPU.
///
/// # Errors
///
/// See [`ShowError`]. If the call fails, it changes nothing.
///
/// # Examples
///
/// ```
/// use pinfold::counter::EventCounter;
/// use pinfold::export::{ShowError, show};
///
/// static REQUESTS: EventCounter = EventCounter::new();
/// // This test does not run on Pinfold's malloc.
/// assert_eq!(show("requests", &REQUESTS), Err(ShowError::NoSegment));
/// ```
pub fn show<C: Counted>(name: &str, counter: &'static C) -> Result<(), ShowError> {
    enter(&[name], counter)
}

/// Shows each counter of `set` under the item's name. Costs and fails as [`show`] does.
///
/// ```
/// use pinfold::export::{ShowError, show_set};
/// use pinfold::vmstat::VmEvents;
///
/// pinfold::vmstat_items! {
///     pub enum Fault { Minor = "pgfault", Major = "pgmajfault" }
/// }
/// static FAULTS: VmEvents<Fault> = VmEvents::new();
/// // This test does not run on Pinfold's malloc.
/// assert_eq!(show_set(&FAULTS), Err(ShowError::NoSegment));
/// ```
pub fn show_set<S: CountedSet>(set: &'static S) -> Result<(), ShowError> {
    enter(S::NAMES, set)
}

/// Shows what a heap holds as the counter `heap/NAME`, until [`hide_at`] hides it.
pub(crate) fn show_heap(heap: &str, account: &'static Account) -> Result<(), ShowError> {
    let mut name = Text::<33>::new();
    // A name that is too long is cut.
    let _ = write!(name, "heap/{heap}");
    enter(&[name.as_str()], account)
}

fn enter<R: Read>(names: &[&str], counter: &'static R) -> Result<(), ShowError> {
    for (nth, name) in names.iter().enumerate() {
        let word = checked(name)?;
        if names[..nth].iter().any(|other| checked(other) == Ok(word)) {
            return Err(ShowError::Taken);
        }
    }
    let segment = current().ok_or(ShowError::NoSegment)?;
    if !shepherd::register(publish) {
        return Err(ShowError::NoDrain);
    }
    let mut table = table().ok_or(ShowError::Busy)?;
    let is_taken = |name: &&str| {
        let mut shown = table.iter().flatten();
        shown.any(|entry| Ok(entry.name) == checked(name))
    };
    if names.iter().any(is_taken) {
        return Err(ShowError::Taken);
    }
    if table.iter().filter(|entry| entry.is_none()).count() < names.len() {
        return Err(ShowError::Full);
    }
    EVER_SHOWN.store(true, Relaxed);
    let mut free = table.iter_mut().enumerate().filter(|(_, e)| e.is_none());
    for (nth, name) in names.iter().enumerate() {
        if let Some((at, place)) = free.next() {
            let entry = Entry {
                name: checked(name)?,
                counter: core::ptr::from_ref(counter) as usize,
                nth,
                kind: R::KIND,
                // SAFETY: `publish` passes the address above, of a counter that is never dropped.
                read: |counter, nth| unsafe { &*(counter as *const R) }.read(nth),
            };
            *place = Some(entry);
            write(segment, at, &entry);
        }
    }
    Ok(())
}

/// Returns a name as words, if it may be the name of a counter.
fn checked(name: &str) -> Result<Name, ShowError> {
    let is_allowed = |&byte: &u8| byte.is_ascii_alphanumeric() || b"_.:-/".contains(&byte);
    let bytes = name.as_bytes();
    if !(1..=32).contains(&bytes.len()) || !bytes.iter().all(is_allowed) {
        return Err(ShowError::Name);
    }
    let mut words = [0; 4];
    for (at, &byte) in bytes.iter().enumerate() {
        words[at / 8] |= u64::from(byte) << (8 * (at % 8));
    }
    Ok(words)
}

/// Ends the showing of the counter `name`. Returns false if no counter is shown by this name, or if
/// the call is in a signal handler that interrupted such a call. Costs a walk over the table.
///
/// ```
/// assert!(!pinfold::export::hide("requests"));
/// ```
pub fn hide(name: &str) -> bool {
    checked(name).is_ok_and(|name| remove(|entry| entry.name == name) == Some(true))
}

/// Ends the showing of the counter or set at address `counter`, before it is destroyed. Returns
/// false if the counter may still be shown: the caller must not free it then. This happens in a
/// signal handler that interrupted a call of this module or a fork.
#[doc(hidden)]
#[must_use]
pub fn hide_at(counter: *const ()) -> bool {
    remove(|entry| entry.counter == counter as usize).is_some()
}

/// Removes entries. Returns whether there were any, or `None` without the table's lock.
fn remove(is_wanted: impl Fn(&Entry) -> bool) -> Option<bool> {
    if !EVER_SHOWN.load(Relaxed) {
        return Some(false);
    }
    let mut table = table()?;
    let mut found = false;
    for (at, place) in table.iter_mut().enumerate() {
        if place.as_ref().is_some_and(&is_wanted) {
            *place = None;
            found = true;
            if let Some(row) = row(at) {
                row.state.store(0, Relaxed);
            }
        }
    }
    Some(found)
}

/// Copies the values of all shown counters to the segment. The shepherd's ticks call it.
fn publish(_: Reach) {
    let (Some(segment), Some(table)) = (current(), TABLE.try_lock()) else {
        return;
    };
    for (at, entry) in table.iter().enumerate() {
        if let Some(entry) = entry {
            write(segment, at, entry);
        }
    }
}

/// Writes a row and the time. The caller holds the table's lock.
///
/// Writes the whole row each time, because the child of a fork may have got a new segment.
fn write(segment: &Segment, at: usize, entry: &Entry) {
    let Some(row) = row(at) else {
        return;
    };
    // SAFETY: `counter` is the address of a counter of the type that `read` reads. It has not been
    // dropped: it is static, or `hide_at` removes the entry before.
    let value = unsafe { (entry.read)(entry.counter, entry.nth) };
    for (word, name) in row.name.iter().zip(entry.name) {
        word.store(name, Relaxed);
    }
    row.kind.store(entry.kind as u32, Relaxed);
    row.value.store(value, Relaxed);
    // Release pairs with the acquire of a process that reads the row: it sees the name.
    row.state.store(2, Release);
    segment.counters_used.fetch_max(at as u32 + 1, Relaxed);
    segment.counted_ns.store(files::now_ns(), Relaxed);
}

/// Returns row `nth`, or `None` if there is no segment.
fn row(nth: usize) -> Option<&'static CounterRow> {
    let at = Parts::here().counters + nth * size_of::<CounterRow>();
    // SAFETY: the segment has `COUNTERS` rows, and stays mapped. `nth` is the place of an entry in
    // a table of as many. All words are atomics.
    part(at).map(|row| unsafe { &*row.cast() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_of_printable_characters() {
        assert_eq!(checked("ab"), Ok([0x6261, 0, 0, 0]));
        let longest = "x".repeat(32);
        assert_eq!(checked(&longest), Ok([0x7878_7878_7878_7878; 4]));
        let bad = ["", "a b", "a\n", "ä", "a\"", &"x".repeat(33)];
        assert!(bad.iter().all(|name| checked(name) == Err(ShowError::Name)));
    }
}
