//! The C API, as `pinfold.h` and `pinfold_policy.h` declare it. The headers say what each function
//! promises to a C program. A function that fails sets errno, unless its documentation says
//! otherwise.
//!
//! | module | part of the API |
//! |---|---|
//! | `malloc`, whose items are listed below | the malloc family, under prefixed names |
//! | `sizes`, whose items are listed below | the size that a block really has |
//! | [`data`] | the malloc family for blocks without pointers, in Rust only |
//! | [`cache`] | object caches; `align` computes the alignment of their objects |
//! | [`reserve`] | prefilled sheaves, and memory pools |
//! | [`grace`] | readers, and frees that wait for readers |
//! | [`slabinfo`] | the state of caches |
//! | [`report`] | reports of the debugging checks, and the handler of reports |
//! | [`heap`] | heap profiles |
//! | [`heaps`] | heaps that are counted, limited and destroyed as one |
//! | [`guard`] | guarded blocks |
//! | [`counter`] | counters, event counters and histograms |
//! | [`counter_show`] | counters that other processes can see |
//! | [`defrag`] | moving blocks out of slabs that are mostly free |
//! | [`vmstat`] | counts by zone and item, and sets of event counters |
//! | [`percpu`] | per-CPU words, pairs, lists, arrays and rings |
//! | [`reference`](mod@reference) | reference counts per CPU |
//! | [`shepherd`] | shepherds |
//! | [`isolate`] | CPUs that a thread has left alone |
//! | [`policy`] | memory policies as values |
//! | [`kernel_policy`] | the kernel's policies of threads and ranges of addresses |
//! | [`shared_policy`] | policies of ranges of pages |
//! | [`pages`] | pools of pages |
//!
//! The program promises that a handle which may not be null is live and of the right type, so it is
//! a reference in the signature here. A handle that may be null is an `Option` of a reference. Only
//! functions that end a handle take a pointer.
//!
//! Several parts use `support` (C handles, errors as errno values) and `text` (C strings).

mod align;
pub mod cache;
pub mod counter;
mod counter_shared;
pub mod counter_show;
pub mod data;
pub mod defrag;
pub mod grace;
pub mod guard;
pub mod heap;
pub mod heaps;
pub mod isolate;
pub mod kernel_policy;
mod malloc;
pub mod node_order;
pub mod pages;
pub mod percpu;
pub mod policy;
pub mod reference;
pub mod report;
pub mod reserve;
pub mod shared_policy;
pub mod shepherd;
mod sizes;
pub mod slabinfo;
pub mod statistics;
mod support;
mod text;
pub mod vmstat;

pub use malloc::*;
pub use sizes::*;
pub use statistics::*;
