//! A cache's attributes, under the names that the kernel uses in `/sys/kernel/slab/<name>/`.
//!
//! docs/slabinfo.md lists them all and compares them with the kernel's. Attributes that make no
//! sense in this library are left out.

use super::info::Info;
use crate::segment::SlabEvent;
use crate::slab::node::look::{Reading, Usage};
use crate::slab::{DebugFlags, KmemCache};
use core::fmt;

/// The source of an attribute's value.
#[derive(Clone, Copy)]
enum Source {
    /// A property that this function reads from the view.
    Fixed(fn(Info) -> usize),
    /// A part of the cache's current usage, which this function picks.
    Used(fn(&Usage) -> usize),
    /// 1 if the cache makes these checks, else 0.
    Checks(DebugFlags),
    /// How often this event occurred.
    Counted(SlabEvent),
    /// How often either event occurred.
    Both(SlabEvent, SlabEvent),
}

/// All attributes, in the order in which [`Attributes`] returns them.
const ALL: [(&str, Source); 42] = {
    use Source::{Both, Checks, Counted, Fixed, Used};
    [
        ("object_size", Fixed(|info| info.object)),
        ("slab_size", Fixed(|info| info.geometry.size)),
        ("align", Fixed(|info| info.align)),
        ("objs_per_slab", Fixed(|info| info.geometry.per_slab)),
        (
            "order",
            Fixed(|info| info.pages_per_slab().ilog2() as usize),
        ),
        ("ctor", Fixed(|info| info.is_constructed.into())),
        ("sheaf_capacity", Fixed(|info| info.sheaves().0)),
        ("barn_capacity", Fixed(|info| info.sheaves().1)),
        ("objects", Used(|usage| usage.active)),
        ("objects_partial", Used(|usage| usage.objects_partial)),
        ("total_objects", Used(|usage| usage.total)),
        ("slabs", Used(|usage| usage.slabs)),
        ("partial", Used(|usage| usage.slabs_partial)),
        ("slabs_empty", Used(|usage| usage.slabs_empty)),
        ("cpu_sheaves", Used(|usage| usage.cpu_sheaves)),
        ("cpu_objects", Used(|usage| usage.cpu_objects)),
        ("barn_sheaves", Used(|usage| usage.barn_sheaves)),
        ("barn_objects", Used(|usage| usage.barn_objects)),
        ("sanity_checks", Checks(DebugFlags::CONSISTENCY)),
        ("red_zone", Checks(DebugFlags::RED_ZONE)),
        ("poison", Checks(DebugFlags::POISON)),
        ("store_user", Checks(DebugFlags::USER)),
        ("trace", Checks(DebugFlags::TRACE)),
        ("hardened", Fixed(|info| info.is_hardened().into())),
        (
            "alloc_slowpath",
            Both(SlabEvent::AllocSlowpath, SlabEvent::AllocLockless),
        ),
        (
            "free_slowpath",
            Both(SlabEvent::FreeSlowpath, SlabEvent::FreeLockless),
        ),
        ("barn_get", Counted(SlabEvent::BarnGet)),
        ("barn_get_fail", Counted(SlabEvent::BarnGetFail)),
        ("barn_put", Counted(SlabEvent::BarnPut)),
        ("barn_put_fail", Counted(SlabEvent::BarnPutFail)),
        ("sheaf_refill", Counted(SlabEvent::SheafRefill)),
        ("sheaf_flush", Counted(SlabEvent::SheafFlush)),
        ("refilled", Counted(SlabEvent::Refilled)),
        ("flushed", Counted(SlabEvent::Flushed)),
        ("alloc_slab", Counted(SlabEvent::SlabAlloc)),
        ("free_slab", Counted(SlabEvent::SlabFree)),
        ("free_add_partial", Counted(SlabEvent::FreeAddPartial)),
        ("free_remove_partial", Counted(SlabEvent::FreeRemovePartial)),
        ("alloc_node_mismatch", Counted(SlabEvent::AllocNodeMismatch)),
        ("free_remote", Counted(SlabEvent::FreeRemote)),
        ("free_rcu_sheaf", Counted(SlabEvent::FreeRcuSheaf)),
        ("free_rcu_sheaf_fail", Counted(SlabEvent::FreeRcuSheafFail)),
    ]
};

impl Source {
    /// Returns the value. Calls `reading` only if the value needs it.
    fn read(self, info: Info, reading: impl FnOnce() -> Reading) -> u64 {
        match self {
            Source::Fixed(value) => value(info) as u64,
            Source::Used(value) => value(&reading().usage) as u64,
            Source::Checks(flags) => info.debug_flags().contains(flags).into(),
            Source::Counted(event) => reading().counts[event as usize],
            Source::Both(one, other) => {
                let counts = reading().counts;
                counts[one as usize].wrapping_add(counts[other as usize])
            }
        }
    }
}

/// Iterates over a cache's attributes and their values. Displaying it writes a line `name value`
/// for each attribute.
///
/// [`KmemCache::attributes`] and [`Info::attributes`] read all numbers of the cache's usage at
/// once, before they return this.
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("session", Layout::new::<[u64; 4]>())?;
/// for (name, value) in cache.attributes().filter(|attribute| attribute.1 != 0) {
///     println!("{name}={value}");
/// }
/// assert!(cache.attributes().to_string().starts_with("object_size 32\n"));
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Attributes {
    info: Info,
    reading: Reading,
    next: usize,
}

impl Iterator for Attributes {
    type Item = (&'static str, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, source) = *ALL.get(self.next)?;
        self.next += 1;
        Some((name, source.read(self.info, || self.reading)))
    }
}

/// Writes the attributes that the iterator has yet to return.
impl fmt::Display for Attributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.clone()
            .try_for_each(|(name, value)| writeln!(f, "{name} {value}"))
    }
}

impl Info {
    /// Returns the value of the attribute that the kernel calls `name`, or `None` if there is no
    /// such attribute here.
    ///
    /// Costs as much as [`usage`](Self::usage) if the value is a part of the usage, else little.
    pub fn attribute(&self, name: &str) -> Option<u64> {
        let &(_, source) = ALL.iter().find(|attribute| attribute.0 == name)?;
        Some(source.read(*self, || match source {
            Source::Counted(_) | Source::Both(..) => Reading {
                counts: self.counts(),
                ..Reading::default()
            },
            _ => self.read(),
        }))
    }

    /// Returns all attributes. Costs as much as [`usage`](Self::usage).
    pub fn attributes(&self) -> Attributes {
        Attributes {
            info: *self,
            reading: self.read(),
            next: 0,
        }
    }
}

impl KmemCache {
    /// Returns the value of the attribute that the kernel calls `name` in
    /// `/sys/kernel/slab/<cache>/`, or `None` if there is no such attribute here.
    ///
    /// Costs as much as [`usage`](Self::usage) if the value is a part of the usage, else little.
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("point", Layout::new::<[u32; 3]>())?;
    /// assert_eq!(cache.attribute("object_size"), Some(12));
    /// assert_eq!(cache.attribute("slab_size"), Some(16));
    /// assert_eq!(cache.attribute("cache_dma"), None);
    /// print!("{}", cache.attributes());
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[doc(alias = "/sys/kernel/slab")]
    pub fn attribute(&self, name: &str) -> Option<u64> {
        self.info().attribute(name)
    }

    /// Returns all attributes, as an iterator over pairs that can also be displayed. Costs as much
    /// as [`usage`](Self::usage).
    pub fn attributes(&self) -> Attributes {
        self.info().attributes()
    }
}
