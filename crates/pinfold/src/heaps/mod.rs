//! Heaps: blocks of any size that belong together, are counted and limited together, and can be
//! freed all at once.
//!
//! A server that works for several tenants wants to know what each tenant uses, to limit it, and to
//! give everything of a tenant back at once. One malloc for the whole process can do none of these.
//! A [`Heap`] can:
//!
//! ```
//! use pinfold::heaps::Heap;
//!
//! let tenant = Heap::builder("tenant-7").limit(1 << 20).build()?;
//! let block = tenant.alloc(100).expect("memory");
//! assert!(tenant.held() >= 100 && tenant.alloc(2 << 20).is_none());
//! // SAFETY: the block came from this heap and is not used afterwards.
//! unsafe { tenant.free(block) };
//! # Ok::<(), pinfold::heaps::HeapError>(())
//! ```
//!
//! # What serves a block
//!
//! | size | what serves it | charged |
//! |---|---|---|
//! | up to 64 KiB | the heap's cache of one of [`CLASSES`] size classes | slabs of the cache |
//! | below 62 MiB | a run of the arena | the run, a multiple of 64 KiB |
//! | 62 MiB and more, or aligned to more than 64 KiB | a mapping of its own | the mapping |
//!
//! The caches are [`KmemCache`](crate::slab::KmemCache)s, made when their class is first used. So
//! on the common path an allocation and a free cost one critical section, and count nothing. The
//! heap's account is charged when a cache takes a slab (`account`). Memory that a heap holds but
//! does not use counts too: free objects in slabs, and in the sheaves of the CPUs.
//!
//! # Numbers
//!
//! A heap has a number, which is the number of a cache that has no objects. The page map's entry
//! for a large block of the heap is this number. `HEAP_OF` has the heap's number for each number
//! of the heap's caches, and for its own. So the free of any address finds the heap by one load.
//!
//! | who | may write `HEAP_OF[n]` and `STATES``[n]` |
//! |---|---|
//! | the maker of a heap or cache | after it got the number, before there is a block |
//! | the thread that destroys the heap | after it freed the blocks, before it gives the number back |
//!
//! # Destroying a heap with its blocks
//!
//! No thread uses the heap any more. But a tick of any thread may be moving a sheaf of one of the
//! heap's caches, and the sheaf's objects would go to slabs that do not exist any more. So:
//!
//! 1. Stop all CPUs' units, fence, and move the sheaves of the heap's caches to the barns. A tick
//!    holds the same lock while it has a sheaf in hand. After this step no sheaf of the heap is
//!    anywhere but in a barn. A tick that empties a barn does so under the node's lock.
//! 2. Each cache drops its barns and its lists of slabs, under the nodes' locks.
//! 3. Walk the page map, and free each run whose entry belongs to the heap: slabs and large blocks.
//! 4. Free the heap's mappings.
//! 5. Give the numbers back.
//!
//! # Scopes
//!
//! In a scope (`heap/scope.rs`), the calling thread's malloc allocates from a heap. The thread's
//! *tag* has the heap's number.

mod classes;
mod heap;
mod state;

#[cfg(feature = "allocator-api2")]
mod allocator;

pub use classes::CLASSES;
pub use heap::{Builder, Heap, HeapError, Statistics};
pub(crate) use heap::{tag, untag};
pub(crate) use state::{Refusal, State, free_any, here, state_of, usable_size};
