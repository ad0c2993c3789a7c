//! Single pages by memory policy: per-CPU page lists in front of each node's pages.
//!
//! What the kernel does when a page is touched first, for programs that hand out pages themselves (buffer pools, rings, arenas of
//! their own): find the effective policy of the page's place, the node by the policy, and a page of that node.
//!
//! # Vocabulary
//!
//! * A [`Pages`] is an arena of pages with a policy of its own. A page is asked for by its **place**, a number of the caller's: the
//!   page's offset in a file or region. Policies hold for ranges of places ([`SharedPolicy`]).
//! * The **effective policy** of a place is its range's; else the one that the process was started with; else the page comes from
//!   the node that the thread runs on.
//! * For each node there is a **page list** on each CPU: the sheaf of a [cache](crate::slab) of pages that is bound to the node. It is
//!   refilled and spilled by a batch, its high mark follows use and a budget, and the shepherd drains it when idle.
//!
//! # What an allocation touches
//!
//! The ranges, if any was given a policy, which nobody writes but who sets one; the words of the thread's CPU; the page list's top. No counter, lock or
//! line that another CPU writes, whatever the policy: policies are not reference-counted, as ranges hold them by value.
//! When the list is empty: the node's lock, once a batch.
//!
//! # When a node is full
//!
//! Pages come from the next node that the policy lets give some, by distance; a bound one gives nothing more. A node is
//! full when less than 1/64 of its memory, or twice its share of `vm.min_free_kbytes`, is free or files' pages, and other nodes have
//! more; that is looked up ten times a second.

mod lists;

pub use lists::List;

use crate::mempolicy::{Mempolicy, Mode, Placement, RangeError, SharedPolicy};
use crate::page::{self, Ask, NumaItem};
use crate::slab::{CacheError, KmemCache};
use crate::topology::{NodeId, NodeSet};
use crate::vmstat::{VmStat, Zone};
use crate::{nodes, sys};
use core::alloc::Layout;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// An arena of pages, with policies for ranges of places.
///
/// ```
/// use pinfold::mempolicy::Mempolicy;
/// use pinfold::pages::Pages;
///
/// let pool = Pages::new("buffers")?;
/// pool.set_policy(0..1024, Some(&Mempolicy::parse("interleave")?))?;
/// let page = pool.alloc(7).expect("memory");
/// // SAFETY: the page is ours, and `page_size` bytes large.
/// unsafe { page.write_bytes(0xff, pool.page_size()) };
/// assert!(pool.policy_of(7).is_some() && pool.policy_of(1024).is_none());
/// // SAFETY: it came from this arena and is not used afterwards.
/// unsafe { pool.free(page) };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pages {
    /// One for each node, the kernel's too.
    caches: [Option<KmemCache>; nodes::MAX_NODES],
    policy: SharedPolicy,
    /// What an allocation has to do besides, if anything: [`LOOKS_UP`] and [`COUNTS`].
    duties: AtomicU8,
    stat: VmStat<NumaItem>,
}

/// Bytes in full page lists that a node keeps: what comes from there costs the others the node's lock for a moment only, and what
/// comes from slabs ten times as long. Given back when nobody needed it for a second, as all that is idle.
const BARN_BYTES: usize = 32 << 20;

/// Ranges may have policies.
const LOOKS_UP: u8 = 1 << 0;
/// `stat` counts.
const COUNTS: u8 = 1 << 1;

impl Pages {
    /// An arena without policies. Its page lists bear `name` in slabinfo, followed by the node's number.
    ///
    /// Takes a cache's descriptor for each node.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: too many caches, or no memory.
    pub fn new(name: &str) -> Result<Pages, CacheError> {
        page::init();
        let mut pages = Pages {
            caches: [const { None }; nodes::MAX_NODES],
            policy: SharedPolicy::new(),
            duties: AtomicU8::new(0),
            stat: VmStat::new(),
        };
        let size = sys::page_size();
        // SAFETY: a page's size is a power of two.
        let layout = unsafe { Layout::from_size_align_unchecked(size, size) };
        for (node, cache) in pages.caches.iter_mut().enumerate().take(nodes::count()) {
            let mut text = [0; 32];
            let builder = KmemCache::builder(lists::name(name, node, &mut text), layout);
            let builder = builder.placed(Placement::only(node)).barn_bytes(BARN_BYTES);
            *cache = Some(builder.build()?);
        }
        Ok(pages)
    }

    /// Bytes in a page.
    pub fn page_size(&self) -> usize {
        sys::page_size()
    }

    /// Sets the policy of the places in `range`, or with `None` or a default one takes it away. Ranges that it overlaps are cut, split or
    /// replaced. Pages that were allocated stay where they are.
    ///
    /// Takes a lock and copies the list of ranges.
    ///
    /// # Errors
    ///
    /// [`RangeError`]: a range that ends before it begins, a policy none of whose nodes can be used here, no memory, or a signal handler
    /// that interrupted a set.
    pub fn set_policy(
        &self,
        range: Range<u64>,
        policy: Option<&Mempolicy>,
    ) -> Result<(), RangeError> {
        // As in the kernel: a default policy is none, and costs what none costs.
        let policy = policy.filter(|policy| policy.mode() != Mode::Default);
        if let Some(policy) = policy {
            if !Placement::is_possible(policy) {
                return Err(RangeError::NoNodes);
            }
            // Stays: whether any range is left is not worth knowing.
            self.duties.fetch_or(LOOKS_UP, Relaxed);
        }
        self.policy.set(range, policy)
    }

    /// The policies by ranges.
    pub fn policies(&self) -> &SharedPolicy {
        // Whoever has them may set some.
        self.duties.fetch_or(LOOKS_UP, Relaxed);
        &self.policy
    }

    /// The policy of a place's range, if it has one: a copy.
    pub fn policy_of(&self, place: u64) -> Option<Mempolicy> {
        self.policy.lookup(place)
    }

    /// Follows a change of the nodes that the process may use, as the flags of each range's policy say.
    ///
    /// The allocator knows the nodes that the process could use when it started. As for
    /// [`set_policy`](Self::set_policy), other nodes of a policy give no pages, and a policy needs
    /// at least one node that does.
    ///
    /// # Errors
    ///
    /// [`RangeError::UnknownNodes`] when a policy would come to other nodes only;
    /// [`RangeError::Busy`] and [`RangeError::OutOfMemory`]. Nothing has changed then.
    pub fn rebind(&self, allowed: &NodeSet) -> Result<(), RangeError> {
        self.policy.rebind_if(allowed, Placement::is_possible)
    }

    /// A page for a place, by its effective policy. What it holds is left from its last use. `None` when no node that the
    /// policy lets give memory has any.
    ///
    /// A lookup of the range, where any was given a policy, and a pop off the CPU's page list; when that is empty the node's lock, and a
    /// system call when the node has no free page.
    #[inline]
    pub fn alloc(&self, place: u64) -> Option<NonNull<u8>> {
        if self.duties.load(Relaxed) != 0 {
            return self.alloc_by_policy(place);
        }
        let node = nodes::current();
        match self.caches[node].as_ref().and_then(KmemCache::alloc) {
            None => self.alloc_elsewhere(Ask::only(node), None),
            page => page,
        }
    }

    /// The same where there are policies or counters. Not inlined: it would have every caller save registers.
    #[inline(never)]
    fn alloc_by_policy(&self, place: u64) -> Option<NonNull<u8>> {
        let (ask, placement) = self.ask(place);
        match self.caches[ask.node].as_ref().and_then(KmemCache::alloc) {
            None => self.alloc_elsewhere(ask, placement),
            page => {
                self.count(ask);
                page
            }
        }
    }

    /// As [`alloc`](Self::alloc), a page of zeroes.
    pub fn alloc_zeroed(&self, place: u64) -> Option<NonNull<u8>> {
        let page = self.alloc(place)?;
        // SAFETY: the page is ours, and so large.
        unsafe { page.write_bytes(0, sys::page_size()) };
        Some(page)
    }

    /// The node to ask for a place's page, and the placement that said so.
    #[inline]
    fn ask(&self, place: u64) -> (Ask, Option<Placement>) {
        let Some(placement) = self.policy.placement(place) else {
            return (Ask::only(nodes::current()), None);
        };
        let node = match nodes::count() {
            1 => 0,
            _ => placement.target(place, nodes::of_this_cpu()),
        };
        let in_turn = placement.interleaves();
        let ask = Ask {
            in_turn,
            ..Ask::only(node)
        };
        (ask, Some(placement))
    }

    /// Looks on other nodes when the one that was asked has no page.
    #[cold]
    #[inline(never)]
    fn alloc_elsewhere(&self, ask: Ask, placement: Option<Placement>) -> Option<NonNull<u8>> {
        let (page, ask) = match placement {
            Some(placement) => self.find_on(ask, placement.fallback(ask.node)),
            None => self.find_on(ask, nodes::fallback(ask.node)),
        }?;
        self.count(ask);
        Some(page)
    }

    /// Counts a page, if that is asked for.
    #[inline]
    fn count(&self, ask: Ask) {
        if self.duties.load(Relaxed) & COUNTS != 0 && !nodes::is_the_kernels(ask.node) {
            page::for_each_item(ask, nodes::of_this_cpu(), |node, item| {
                self.stat.inc(Zone::normal(node), item);
            });
        }
    }

    fn find_on(
        &self,
        ask: Ask,
        mut others: impl Iterator<Item = usize>,
    ) -> Option<(NonNull<u8>, Ask)> {
        others.find_map(|node| {
            let other = ask.instead(node);
            let page = self.caches[node].as_ref()?.alloc_as(other)?;
            Some((page, other))
        })
    }

    /// Takes a page back: to the CPU's list of its node's pages.
    ///
    /// # Safety
    ///
    /// The page came from this arena and nobody uses it any more.
    #[inline]
    pub unsafe fn free(&self, page: NonNull<u8>) {
        let node = match nodes::count() {
            1 => 0,
            count => page::node_of(page.as_ptr() as usize).min(count - 1),
        };
        if let Some(cache) = &self.caches[node] {
            // SAFETY: the caller's promise: the page is of the arena's cache for its node.
            unsafe { cache.free(page) };
        }
    }

    /// The node that a page of this arena was asked of; `None` when the kernel placed it by the process's policy. Arithmetic only.
    ///
    /// The kernel may have placed it elsewhere, when the node had less memory than it seemed or pages were moved:
    /// [`node_at`](crate::mempolicy::node_at) asks it.
    pub fn node_of(&self, page: NonNull<u8>) -> Option<NodeId> {
        let node = page::node_of(page.as_ptr() as usize);
        (!nodes::is_the_kernels(node)).then(|| NodeId(nodes::id(node)))
    }

    /// Counts every allocation from now on, or does not any more: hits, misses and the like, by node, as the kernel's
    /// `numastat`. Two more adds on the thread's own CPU for each page.
    pub fn set_counting(&self, counting: bool) {
        match counting {
            true => self.duties.fetch_or(COUNTS, Relaxed),
            false => self.duties.fetch_and(!COUNTS, Relaxed),
        };
    }

    /// What was counted while [counting](Self::set_counting) was on: pages, in the
    /// [`Zone::normal`] of each node.
    pub fn numa_stat(&self) -> &VmStat<NumaItem> {
        &self.stat
    }

    /// The page lists, one for each node. Walks the CPUs' words, and takes each node's lock.
    pub fn lists(&self) -> impl Iterator<Item = List> + '_ {
        let caches = self.caches.iter().flatten().enumerate();
        caches.map(|(node, cache)| List::of(node, cache))
    }

    /// Gives back what can be given back now: takes the CPUs' lists, and free pages go to the system. Interrupts the CPUs that run
    /// this process's threads. Returns how many bytes went back at least.
    ///
    /// # Errors
    ///
    /// [`FenceError`](pinfold_rseq::FenceError) where the kernel cannot fence: then the lists stay.
    pub fn shrink(&self) -> Result<usize, pinfold_rseq::FenceError> {
        let mut slabs = 0;
        for cache in self.caches.iter().flatten() {
            slabs += cache.shrink()?;
        }
        Ok(slabs)
    }
}
