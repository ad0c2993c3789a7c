//! The C API of counts by zone and item, and of sets of event counters.
//!
//! In Rust, the number of items belongs to the type. A C handle has one of a few numbers: the power
//! of two that is at least as large as the number that the program asked for.

use super::support::{answer, boxed, failed, methods, null_with, unboxed};
use core::ffi::c_int;
use pinfold::internal::set_errno;
use pinfold::vmstat::{Item, VmEvents, VmStat, Zone};

/// The item with this number, of `N` items.
#[derive(Clone, Copy, Debug)]
struct Nth<const N: usize>(usize);

impl<const N: usize> Item for Nth<N> {
    const NAMES: &'static [&'static str] = &[""; N];
    #[inline(always)]
    fn index(self) -> usize {
        self.0
    }
}

/// Defines an enum of a set for each number of items, and a macro that runs an expression on it.
macro_rules! by_size {
    ($name:ident of $set:ident, $with:ident, $d:tt: $($variant:ident = $n:literal),*) => {
        #[derive(Debug)]
        enum $name {
            $($variant($set<Nth<$n>>)),*
        }

        impl $name {
            /// Returns a set of at least `items` items, or `None` if that is too many.
            fn new(items: usize) -> Option<$name> {
                Some(match items {
                    0 => return None,
                    $(_ if items <= $n => $name::$variant($set::new()),)*
                    _ => return None,
                })
            }
        }

        macro_rules! $with {
            ($d this:expr, |$d set:ident| $d body:expr) => {
                match $d this {
                    $($name::$variant($d set) => $d body),*
                }
            };
        }
    };
}

by_size! { Stat of VmStat, with_stat, $:
To4 = 4, To8 = 8, To16 = 16, To32 = 32, To64 = 64, To128 = 128, To256 = 256 }
by_size! { Events of VmEvents, with_events, $:
To4 = 4, To8 = 8, To16 = 16, To32 = 32, To64 = 64, To128 = 128, To256 = 256 }

/// Counts by zone and item.
#[derive(Debug)]
pub struct CVmStat {
    items: usize,
    set: Stat,
}

/// A set of event counters.
#[derive(Debug)]
pub struct CVmEvents {
    items: usize,
    set: Events,
}

/// Returns the zone that `PINFOLD_ZONE_NORMAL` or `PINFOLD_ZONE_HUGE` names. A negative number
/// names a zone that does not exist.
fn zone_of(zone: c_int) -> Zone {
    let zone = usize::try_from(zone).unwrap_or(usize::MAX);
    match zone % 2 {
        0 => Zone::normal(zone / 2),
        _ => Zone::huge(zone / 2),
    }
}

/// Returns whether there is an item `item`. Sets errno to EINVAL otherwise.
#[inline]
fn has(items: usize, item: usize) -> bool {
    if item >= items {
        set_errno(libc::EINVAL);
    }
    item < items
}

/// Creates counts of `items` items in each zone, with `threshold`, or with the kernel's thresholds
/// if it is 0. Returns null with EINVAL or ENOMEM if it fails.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_vmstat_create(items: usize, threshold: u64) -> *mut CVmStat {
    let Some(set) = Stat::new(items) else {
        return null_with(libc::EINVAL);
    };
    if !with_stat!(&set, |stat| stat.init()) {
        return null_with(libc::ENOMEM);
    }
    if threshold != 0 && answer(with_stat!(&set, |stat| stat.set_threshold(threshold))) != 0 {
        return core::ptr::null_mut();
    }
    boxed(CVmStat { items, set })
}

/// Ends counts. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_vmstat_create` and has not been destroyed. It is not used
/// any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_vmstat_destroy(this: *mut CVmStat) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}

impl CVmStat {
    #[inline]
    fn add(&self, zone: c_int, item: usize, delta: i64) {
        if has(self.items, item) {
            with_stat!(&self.set, |stat| stat.add(zone_of(zone), Nth(item), delta));
        }
    }
}

methods! { &CVmStat, "`this` came from `pinfold_vmstat_create`, and has not been destroyed.":
    /// Adds `delta` to an item of a zone.
    pinfold_vmstat_add(zone: c_int, item: usize, delta: i64) = |stat| stat.add(zone, item, delta);
    /// Adds 1 to an item of a zone.
    pinfold_vmstat_inc(zone: c_int, item: usize) = |stat| stat.add(zone, item, 1);
    /// Subtracts 1 from an item of a zone.
    pinfold_vmstat_dec(zone: c_int, item: usize) = |stat| stat.add(zone, item, -1);
    /// Returns an item's total over all zones, off by at most the error bound.
    pinfold_vmstat_read(item: usize) -> i64 = |this|
        if has(this.items, item) { with_stat!(&this.set, |stat| stat.read(Nth(item))) } else { 0 };
    /// Returns an item's total in a zone, off by at most the threshold for each CPU that counts.
    pinfold_vmstat_read_zone(zone: c_int, item: usize) -> i64 = |this|
        if has(this.items, item) {
            with_stat!(&this.set, |stat| stat.read_zone(zone_of(zone), Nth(item)))
        } else {
            0
        };
    /// Returns by how much a read of an item may be off.
    pinfold_vmstat_error_bound(item: usize) -> u64 = |this|
        if has(this.items, item) {
            with_stat!(&this.set, |stat| stat.error_bound(Nth(item)))
        } else {
            0
        };
    /// Returns an item's exact total over all zones.
    pinfold_vmstat_sum(item: usize) -> i64 = |this|
        if has(this.items, item) { with_stat!(&this.set, |stat| stat.sum(Nth(item))) } else { 0 };
    /// Returns an item's exact total in a zone.
    pinfold_vmstat_sum_zone(zone: c_int, item: usize) -> i64 = |this|
        if has(this.items, item) {
            with_stat!(&this.set, |stat| stat.sum_zone(zone_of(zone), Nth(item)))
        } else {
            0
        };
    /// Returns the number of zones.
    pinfold_vmstat_zones() -> usize = |this| with_stat!(&this.set, |stat| stat.zones());
    /// Returns the threshold of a zone, or 0 if the zone does not exist.
    pinfold_vmstat_threshold(zone: c_int) -> u64 = |this|
        with_stat!(&this.set, |stat| stat.threshold(zone_of(zone)));
    /// Sets the threshold of every zone and item, or the kernel's if it is 0. Returns 0, or −1 with
    /// errno.
    pinfold_vmstat_set_threshold(threshold: u64) -> c_int = |this| match threshold {
        0 => answer(with_stat!(&this.set, |stat| stat.set_normal_threshold())),
        _ => answer(with_stat!(&this.set, |stat| stat.set_threshold(threshold))),
    };
    /// Folds what every CPU has counted into the totals. Returns how many shards had moved.
    pinfold_vmstat_fold() -> usize = |this| with_stat!(&this.set, |stat| stat.fold());
    /// Returns how many adds were not counted, because their zone does not exist.
    pinfold_vmstat_lost() -> u64 = |this| with_stat!(&this.set, |stat| stat.lost());
}

/// Stores the exact totals of the first `count` items. Returns 0, or −1 with EINVAL if there are
/// fewer items.
///
/// # Safety
///
/// `this` came from `pinfold_vmstat_create`, and has not been destroyed. `values` is writable for
/// `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_vmstat_snapshot(
    this: &CVmStat,
    values: *mut i64,
    count: usize,
) -> c_int {
    if count > this.items {
        return failed(libc::EINVAL);
    }
    for item in 0..count {
        let sum = with_stat!(&this.set, |stat| stat.sum(Nth(item)));
        // SAFETY: the caller promises room for `count` numbers.
        unsafe { values.add(item).write(sum) };
    }
    0
}

/// Creates counters of `items` kinds of events. Returns null with EINVAL or ENOMEM if it fails.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_vmevents_create(items: usize) -> *mut CVmEvents {
    match Events::new(items) {
        Some(set) => boxed(CVmEvents { items, set }),
        None => null_with(libc::EINVAL),
    }
}

/// Ends event counters. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_vmevents_create` and has not been destroyed. It is not
/// used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_vmevents_destroy(this: *mut CVmEvents) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}

methods! { &CVmEvents, "`this` came from `pinfold_vmevents_create`, and has not been destroyed.":
    /// Counts `n` events of `item`.
    pinfold_vmevents_add(item: usize, n: u64) = |this| if has(this.items, item) {
        with_events!(&this.set, |events| events.add(Nth(item), n));
    };
    /// Counts one event of `item`.
    pinfold_vmevents_inc(item: usize) = |this| if has(this.items, item) {
        with_events!(&this.set, |events| events.inc(Nth(item)));
    };
    /// Returns how often `item` occurred.
    pinfold_vmevents_sum(item: usize) -> u64 = |this|
        if has(this.items, item) {
            with_events!(&this.set, |events| events.sum(Nth(item)))
        } else {
            0
        };
    /// Returns how many adds were not counted, because there was no memory.
    pinfold_vmevents_lost() -> u64 = |this| with_events!(&this.set, |events| events.lost());
}

/// Stores how often the first `count` items occurred. Returns 0, or −1 with EINVAL if there are
/// fewer items.
///
/// # Safety
///
/// `this` came from `pinfold_vmevents_create`, and has not been destroyed. `values` is writable for
/// `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_vmevents_snapshot(
    this: &CVmEvents,
    values: *mut u64,
    count: usize,
) -> c_int {
    if count > this.items {
        return failed(libc::EINVAL);
    }
    for item in 0..count {
        let sum = with_events!(&this.set, |events| events.sum(Nth(item)));
        // SAFETY: the caller promises room for `count` numbers.
        unsafe { values.add(item).write(sum) };
    }
    0
}
