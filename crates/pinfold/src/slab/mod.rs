//! Object caches: objects of one layout, kept ready on each CPU.
//!
//! Allocating each object under a lock, or with an atomic instruction, is slow and does not scale.
//! So each CPU keeps arrays of pointers to free objects, and moves whole arrays to and from shared
//! stores.
//!
//! ```text
//!  alloc ◄── main sheaf ◄── spare sheaf ◄── barn ◄── partial slabs ◄── arena
//!  free  ──►  per CPU   ──►   per CPU   ──► per part ──►  per part  ──► per node
//!          no lock         no lock        part's lock  part's lock   arena's lock
//! ```
//!
//! * A **sheaf** is an array of pointers to free objects (`sheaf`). Each CPU has a main sheaf and a
//!   spare sheaf (`cache_units`). The fast paths pop from the main sheaf, or push to it, in one
//!   **critical section**: a restartable sequence, or a short lock where the kernel offers none.
//! * A **barn** is a store of full and empty sheaves. CPUs exchange sheaves there (`part`).
//! * A **part** is a barn and slabs under one lock. A cache has one on each node, or one for each
//!   CPU if CPUs wait for each other (`parts`).
//! * A **slab** is a run of memory from the node's arena, cut into objects (`slabs`). The
//!   run's record has a bit for each object, set while the object is free. So allocating and
//!   freeing do not touch the objects.
//! * A **deferred** free is for an object that other threads may still read. The object becomes
//!   free after a grace period, when all these readers have left (`deferred`, [`grace`]).
//! * A caller can reserve objects: for code that must not fail halfway ([`Prefilled`]), or for
//!   times when the system has no memory ([`MemPool`]).
//! * A cache that **checks** is debugged (`debug`) or hardened (`harden`), and has no main sheaf.
//!
//! `lock::Rank` defines the order in which slow paths take locks. Fast paths take none.
//!
//! # Floors
//!
//! The folders `cpu`, `node`, `checks`, `cache` and `report` group the modules by subject. Each
//! module stands on a floor by itself: it uses only modules of its own floor and of those below.
//! `cargo xtask tidy` checks this.
//!
//! | floor | modules |
//! |---|---|
//! | views and types | `typed`, `allocator`; `info`, `attributes`, `blocks`, `slabinfo` |
//! | caches | `kmem_cache`, `builder`, `lifetime`; `kmalloc`; `bundle`, `prefilled`, `mempool` |
//! | the process | `fork` |
//! | the protocol of CPUs | `sheaf_units`, `remote`, `idle`, `reclaim`; `in_flight`, `deferred`; `harden`, `debugged` |
//! | a cache on a node | `place`, `registry`, `descriptor`, `part`, `parts`, `survey` |
//! | | `handler_frees`, `debugged_node`, `events`, `refuse` |
//! | slabs and sheaves | `objects`, `slabs`, `slab_bits`, `purge`, `look`, `guard`; `sheaf` |
//! | plain facts | `geometry`, `tune`, `key`, `debug` |
//! | beside | [`grace`] |
//!
//! The modules listed under "the protocol of CPUs" depend on each other, because together they
//! implement one protocol: how sheaves move. At every moment, a sheaf is in one of these states:
//!
//! | state | who may touch the sheaf | how it leaves |
//! |---|---|---|
//! | in a unit: main, spare, held or deferred | operations on the unit's CPU | a thread exchanges the unit's word for another, or takes it out of a stopped unit |
//! | in hand | the thread that took it | the thread installs it in a unit, puts it into a barn, seals or discards it |
//! | in a barn | the holder of the part's lock | a CPU gets it, or its objects go to slabs |
//! | sealed, pending | the thread that takes the list; the holder of the lock `pending` | its grace period ends, and a thread takes it in hand |
//! | in the pool of blocks, without objects | the holder of the pool's lock | a thread takes it in hand |

mod cache;
mod checks;
mod cpu;
mod fork;
pub mod grace;
mod node;
mod report;

pub use crate::cache_units::MAX_CACHES;
#[cfg(feature = "allocator-api2")]
pub use cache::allocator::Kmalloc;
pub use cache::builder::Builder;
pub use cache::descriptor::{CacheError, MAX_OBJECT_SIZE, set_sheaf_budget};
pub(crate) use cache::heap_caches;
pub(crate) use cache::kmalloc;
pub use cache::kmem_cache::KmemCache;
pub use cache::lifetime::{Inconsistency, Leak};
pub use cache::mempool::MemPool;
pub use cache::prefilled::{OutOfMemory, Prefilled};
pub use cache::reclaim::shrink_all;
pub(crate) use cache::reclaim::{make_room, or_reclaim, or_reclaim_for};
#[doc(hidden)]
pub use cache::reclaim::{trim_everywhere, trim_here};
pub use cache::tune::{sheaf_budget, sheaf_bytes};
pub use cache::typed::{
    Cache, Handle, Kept, ObjectCache, Reusable, Shared, SharedCache, TryAllocError, UninitHandle,
};
pub use checks::debug;
pub use checks::debug::DebugFlags;
#[doc(hidden)]
pub use checks::key::{HARDENED_VARIABLE, parse_hardened};
pub(crate) use cpu::idle::empty_here;
pub(crate) use cpu::place::make_units_resident;
pub(crate) use cpu::sheaf_units::tick;
pub use node::look::Usage;
pub use report::attributes::Attributes;
#[doc(hidden)]
pub use report::blocks::{Blocks, for_each_blocks};
pub(crate) use report::events::show_all;
pub use report::info::{Info, Statistics, caches};
pub use report::slabinfo::{Slabinfo, slabinfo};
