//! Caches, and what a program makes of them.

#[cfg(feature = "allocator-api2")]
pub(crate) mod allocator;
pub(crate) mod builder;
pub(crate) mod bundle;
pub(crate) mod descriptor;
pub(crate) mod heap_caches;
pub(crate) mod kmalloc;
pub(crate) mod kmem_cache;
pub(crate) mod lifetime;
pub(crate) mod mempool;
pub(crate) mod prefilled;
pub(crate) mod reclaim;
pub(crate) mod registry;
pub(crate) mod tune;
pub(crate) mod typed;
