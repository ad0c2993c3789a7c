//! The names of the allocator's metrics. `pinfold serve` uses the same.

/// A family of metrics, without the suffixes that its unit and its type add to the name.
///
/// ```
/// assert_eq!(pinfold_bridges::families::HELD.name, "pinfold_held");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// The name, which begins with `pinfold_`.
    pub name: &'static str,
    /// What the numbers mean.
    pub help: &'static str,
}

macro_rules! families {
    ($($(#[doc = $doc:literal])* $family:ident = $name:literal, $help:literal;)*) => {
        $(
            $(#[doc = $doc])*
            pub const $family: Family = Family { name: $name, help: $help };
        )*
    };
}

families! {
    /// A gauge, in bytes.
    ALLOCATED = "pinfold_allocated",
        "Bytes of objects that are not free in their slab, and of large blocks";
    /// A gauge, in bytes.
    ACTIVE = "pinfold_active", "Bytes of slabs and large blocks";
    /// A gauge, in bytes.
    DIRTY = "pinfold_dirty", "Bytes of free runs that are kept for the next use";
    /// A gauge, in bytes.
    HELD = "pinfold_held", "Bytes taken from the system and not given back";
    /// A gauge, in bytes.
    HELD_PEAK = "pinfold_held_peak", "The largest value of pinfold_held_bytes";
    /// A gauge, in bytes.
    METADATA = "pinfold_metadata", "Bytes mapped for the allocator's own structures";
    /// A gauge, in bytes.
    RESIDENT = "pinfold_resident", "Bytes of the allocator that can be in memory, at most";
    /// A gauge, in bytes.
    MAPPED = "pinfold_mapped", "Bytes of addresses that the allocator has mapped";
    /// A counter, in bytes.
    RETURNED = "pinfold_returned", "Bytes given back to the system";
    /// A gauge with the labels `cache` and `state`.
    CACHE_OBJECTS = "pinfold_cache_objects", "Objects in all slabs of a cache";
    /// A gauge with the label `cache`.
    CACHE_SLABS = "pinfold_cache_slabs", "Slabs of a cache";
    /// A counter with the label `cache`.
    CACHE_REFILLS = "pinfold_cache_refills", "Objects moved from slabs to sheaves";
    /// A counter with the label `cache`.
    CACHE_FLUSHES = "pinfold_cache_flushes", "Objects moved from sheaves to slabs";
    /// A counter with the label `cache`.
    CACHE_SLOW_CALLS = "pinfold_cache_slow_calls",
        "Allocations and frees that the fast path did not serve";
    /// A counter with the label `cache`.
    CACHE_REMOTE_FREES = "pinfold_cache_remote_frees",
        "Objects freed on another node than their own";
}
