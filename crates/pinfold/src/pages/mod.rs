//! Single pages by memory policy: per-CPU page lists in front of each node's pages.
//!
//! The kernel chooses a node for a page when a thread first touches the page. This module does the
//! same for programs that hand out pages themselves, such as buffer pools and rings: it finds the
//! effective policy of a page's place, the node that the policy means, and a page of that node.
//!
//! # Vocabulary
//!
//! * A [`Pages`] is a **pool** of pages with policies of its own.
//! * A **place** is a number that the caller asks for a page with: the page's offset in a file or
//!   region. Policies hold for ranges of places ([`SharedPolicy`]).
//! * The **effective policy** of a place is the policy of the place's range. If the range has no
//!   policy, it is the pool's default policy. If the pool has none, it is the policy that the
//!   calling thread has set by a call that Pinfold sees
//!   ([`thread_changed`](crate::mempolicy::thread_changed)), and else the policy that the process
//!   was started with. Without any policy, the page comes from the node that the thread runs on.
//! * A **page list** holds free pages of one node on one CPU. It is the sheaf of a
//!   [cache](crate::slab) that is bound to the node. Pages move to and from the list in batches.
//!   The list's capacity adapts to use, within a budget. The shepherd empties idle lists.
//!
//! # What an allocation touches
//!
//! 1. The map of ranges, if any range was given a policy. Only a thread that sets a policy writes
//!    the map.
//! 2. The words of the thread's CPU.
//! 3. The top of the page list.
//!
//! Under every policy, an allocation touches no counter, lock or cache line that another CPU
//! writes. Ranges hold policies by value, so the allocation counts no reference. Only if the list
//! is empty, once a batch, the allocation takes the node's lock.
//!
//! # When a node is full
//!
//! If a node is full, pages come from the next node that the policy permits, by distance. A `bind`
//! policy permits only its own nodes.
//!
//! A node is full if fresh memory would leave it less than its reserve, and another node has more
//! room. The reserve is 1/64 of the node's memory, or twice the node's share of
//! `vm.min_free_kbytes` if that is more. The free memory includes file pages that the kernel can
//! drop. It is an estimate. The process reads it at the start. From then on, the allocator adds and
//! subtracts the memory that it gives back and takes. A shepherd that the program started reads it
//! again.

mod lists;

pub use lists::List;

use crate::arena::{self, NodeRequest, NumaItem};
use crate::mempolicy::{self, Mempolicy, Mode, Placement, RangeError, SharedPolicy};
use crate::slab::{CacheError, KmemCache};
use crate::topology::{NodeId, NodeSet};
use crate::vmstat::{VmStat, Zone};
use crate::{nodes, sys};
use core::alloc::Layout;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// A pool of pages, with policies for ranges of places.
///
/// ```
/// use pinfold::mempolicy::Mempolicy;
/// use pinfold::pages::Pages;
///
/// let pool = Pages::new("buffers")?;
/// pool.set_policy(0..1024, Some(&Mempolicy::parse("interleave")?))?;
/// let page = pool.alloc(7).expect("there is memory for a page");
/// // SAFETY: `alloc` returned the page, which is `page_size` bytes large, to this thread alone.
/// unsafe { page.write_bytes(0xff, pool.page_size()) };
/// assert!(pool.policy_of(7).is_some() && pool.policy_of(1024).is_none());
/// // SAFETY: the page came from this pool and is not used afterwards.
/// unsafe { pool.free(page) };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pages {
    /// A cache for each node, including the kernel's node.
    caches: [Option<KmemCache>; nodes::MAX_NODES],
    policy: SharedPolicy,
    /// What an allocation does besides taking a page: a set of [`LOOKS_UP`], [`COUNTS`]
    /// and [`ASKS`].
    duties: AtomicU8,
    stat: VmStat<NumaItem>,
}

/// Bytes of the full page lists that a node keeps in its barn, for CPUs whose list is empty.
///
/// To take a full list from the barn, a thread holds the node's lock for a moment. To fill a list
/// from slabs, it holds the lock ten times as long. Lists that were not needed for about a second
/// go back, like all idle memory.
const BARN_BYTES: usize = 32 << 20;

/// Some range may have a policy.
const LOOKS_UP: u8 = 1 << 0;
/// Allocations are counted in `stat`.
const COUNTS: u8 = 1 << 1;
/// The kernel is asked for the calling thread's policy at each place without a policy.
const ASKS: u8 = 1 << 2;

impl Pages {
    /// Makes a pool without policies. Its caches appear in slabinfo as `name:NODE`.
    ///
    /// Takes a cache descriptor for each node.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if there are too many caches, or no memory.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::pages::Pages;
    ///
    /// let _pool = Pages::new("frames")?;
    /// assert!(pinfold::slab::slabinfo().to_string().contains("frames:0 "));
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub fn new(name: &str) -> Result<Pages, CacheError> {
        arena::init();
        let mut pages = Pages {
            caches: [const { None }; nodes::MAX_NODES],
            policy: SharedPolicy::new(),
            duties: AtomicU8::new(0),
            stat: VmStat::new(),
        };
        let size = sys::page_size();
        // SAFETY: a page's size is a power of two, so it is a valid alignment, and a multiple of
        // itself.
        let layout = unsafe { Layout::from_size_align_unchecked(size, size) };
        for (node, cache) in pages.caches.iter_mut().enumerate().take(nodes::count()) {
            let text = lists::name(name, node);
            let builder = KmemCache::builder(text.as_str(), layout);
            let builder = builder.placed(Placement::only(node)).barn_bytes(BARN_BYTES);
            *cache = Some(builder.build()?);
        }
        Ok(pages)
    }

    /// Returns the number of bytes in a page.
    pub fn page_size(&self) -> usize {
        sys::page_size()
    }

    /// Sets the policy of the places in `range`. `None`, or a `default` policy, removes their
    /// policy.
    ///
    /// Ranges that overlap `range` are trimmed, split or replaced. Pages that are allocated already
    /// stay where they are. Takes a lock. O(n) in the number of ranges.
    ///
    /// # Errors
    ///
    /// After an error, no policy has changed. But later allocations look up their ranges.
    ///
    /// * [`RangeError::Empty`] if the range does not begin below its end.
    /// * [`RangeError::NoNodes`] if none of the policy's nodes is usable.
    /// * [`RangeError::Busy`] if the caller is a signal handler that interrupted a change of
    ///   policies.
    /// * [`RangeError::OutOfMemory`] if there is no memory.
    pub fn set_policy(
        &self,
        range: Range<u64>,
        policy: Option<&Mempolicy>,
    ) -> Result<(), RangeError> {
        // A `default` policy is the same as no policy, as in the kernel. So it must not cost a
        // lookup.
        self.policy.set(range, self.before_use(policy)?)
    }

    /// Sets the policy of all places whose range has no policy. `None`, or a `default` policy,
    /// removes it; then these places take the thread's policy, or the one that the process was
    /// started with. See [`SharedPolicy::set_default`]. O(n) in the number of ranges.
    ///
    /// # Errors
    ///
    /// After an error, no policy has changed. But later allocations look up their ranges.
    ///
    /// * [`RangeError::NoNodes`] if none of the policy's nodes is usable.
    /// * [`RangeError::Busy`] if the caller is a signal handler that interrupted a change of
    ///   policies.
    /// * [`RangeError::OutOfMemory`] if there is no memory.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::pages::Pages;
    ///
    /// let pool = Pages::new("file")?;
    /// pool.set_default_policy(Some(&Mempolicy::parse("interleave")?))?;
    /// assert!(pool.policy_of(7).is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_default_policy(&self, policy: Option<&Mempolicy>) -> Result<(), RangeError> {
        self.policy.set_default(self.before_use(policy)?)
    }

    /// Makes sure that allocations look policies up. Returns the policy, or `None` for a `default`
    /// policy.
    fn before_use<'p>(
        &self,
        policy: Option<&'p Mempolicy>,
    ) -> Result<Option<&'p Mempolicy>, RangeError> {
        let policy = policy.filter(|policy| policy.mode() != Mode::Default);
        if let Some(policy) = policy {
            if !Placement::is_possible(policy) {
                return Err(RangeError::NoNodes);
            }
            // The flag is never cleared again. To find out whether a policy is left would cost more
            // than it saves.
            self.duties.fetch_or(LOOKS_UP, Relaxed);
        }
        Ok(policy)
    }

    /// Returns the map from ranges to policies, for reading and for setting. From this call on,
    /// allocations look up their ranges.
    pub fn policies(&self) -> &SharedPolicy {
        // The caller may set policies through the reference.
        self.duties.fetch_or(LOOKS_UP, Relaxed);
        &self.policy
    }

    /// Returns a copy of the policy of a place's range, or else of the pool's default policy, or
    /// `None`. O(log n) in the number of ranges.
    pub fn policy_of(&self, place: u64) -> Option<Mempolicy> {
        self.policy.lookup(place)
    }

    /// Binds the policies of all ranges again after the allowed nodes have changed; see
    /// [`Mempolicy::rebind`]. The kernel binds the policies of threads; the next allocations ask
    /// for them again. O(n) in the number of ranges.
    ///
    /// The allocator knows only the nodes that the process could use when it started. Other nodes
    /// of a policy give no pages.
    ///
    /// # Errors
    ///
    /// After an error, nothing has changed.
    ///
    /// * [`RangeError::UnknownNodes`] if the allocator knows none of a policy's new nodes.
    /// * [`RangeError::Busy`] if the caller is a signal handler that interrupted a change of
    ///   policies.
    pub fn rebind(&self, allowed: &NodeSet) -> Result<(), RangeError> {
        self.policy.rebind_if(allowed, Placement::is_possible)?;
        // The kernel has bound the threads' policies again.
        if nodes::may_threads_differ() {
            mempolicy::thread_changed();
        }
        Ok(())
    }

    /// Allocates a page for a place, by the place's effective policy. Returns `None` if no node
    /// that the policy permits has memory.
    ///
    /// The page holds what its last user left there. Costs a pop from the CPU's page list, and a
    /// lookup of the range if any range was given a policy. If the list is empty, takes the node's
    /// lock. If the node has no free page, makes a system call.
    #[inline]
    pub fn alloc(&self, place: u64) -> Option<NonNull<u8>> {
        if self.duties.load(Relaxed) != 0 || nodes::may_threads_differ() {
            return self.alloc_by_policy(place);
        }
        let node = nodes::current();
        match self.caches[node].as_ref().and_then(KmemCache::alloc) {
            None => self.alloc_elsewhere(NodeRequest::only(node), None),
            page => page,
        }
    }

    /// Allocates a page if there are policies or counters. Not inlined, because every caller of
    /// `alloc` would then save registers.
    #[inline(never)]
    fn alloc_by_policy(&self, place: u64) -> Option<NonNull<u8>> {
        let placement = self.policy.placement(place);
        let placement = placement.or_else(|| self.placement_of_thread());
        let node = self.node_for(place, placement);
        let page = self.caches[node].as_ref().and_then(KmemCache::alloc);
        if page.is_some() && self.duties.load(Relaxed) & COUNTS == 0 {
            return page;
        }
        let request = NodeRequest {
            in_turn: placement.is_some_and(Placement::interleaves),
            ..NodeRequest::only(node)
        };
        if page.is_none() {
            return self.alloc_elsewhere(request, placement);
        }
        self.count_always(request);
        page
    }

    /// Allocates a page as [`alloc`](Self::alloc) does, and fills it with zeroes.
    pub fn alloc_zeroed(&self, place: u64) -> Option<NonNull<u8>> {
        let page = self.alloc(place)?;
        // SAFETY: `alloc` returned the page to this thread alone, and it is `page_size` bytes
        // large.
        unsafe { page.write_bytes(0, sys::page_size()) };
        Some(page)
    }

    /// Returns the node to ask for a place's page under a placement.
    #[inline]
    fn node_for(&self, place: u64, placement: Option<Placement>) -> usize {
        match placement {
            None => nodes::current(),
            Some(_) if nodes::count() == 1 => 0,
            Some(placement) => placement.target(place, nodes::of_this_cpu()),
        }
    }

    /// Returns how the allocator follows the policy that the calling thread has set, if any.
    #[inline]
    fn placement_of_thread(&self) -> Option<Placement> {
        if self.duties.load(Relaxed) & ASKS == 0 {
            return mempolicy::placement_of_thread();
        }
        Placement::of_thread()
    }

    /// Asks other nodes for a page, because the node that was asked first has none.
    #[cold]
    #[inline(never)]
    fn alloc_elsewhere(
        &self,
        request: NodeRequest,
        placement: Option<Placement>,
    ) -> Option<NonNull<u8>> {
        let (page, request) = match placement {
            Some(placement) => self.find_on(request, placement.fallback(request.node)),
            None => self.find_on(request, nodes::fallback(request.node)),
        }?;
        self.count(request);
        Some(page)
    }

    /// Counts a page, if counting is on.
    #[inline(always)]
    fn count(&self, request: NodeRequest) {
        if self.duties.load(Relaxed) & COUNTS != 0 {
            self.count_always(request);
        }
    }

    #[inline(never)]
    fn count_always(&self, request: NodeRequest) {
        if !nodes::is_the_kernels(request.node) {
            arena::for_each_item(request, nodes::of_this_cpu(), |node, item| {
                self.stat.inc(Zone::normal(node), item);
            });
        }
    }

    fn find_on(
        &self,
        request: NodeRequest,
        mut others: impl Iterator<Item = usize>,
    ) -> Option<(NonNull<u8>, NodeRequest)> {
        others.find_map(|node| {
            let other = request.instead(node);
            let page = self.caches[node].as_ref()?.alloc_as(other)?;
            Some((page, other))
        })
    }

    /// Frees a page: puts it on the CPU's list of its node's pages.
    ///
    /// # Safety
    ///
    /// `page` came from this pool, was not freed since, and is not used any more.
    #[inline]
    pub unsafe fn free(&self, page: NonNull<u8>) {
        let node = match nodes::count() {
            1 => 0,
            count => arena::node_of(page.as_ptr() as usize).min(count - 1),
        };
        if let Some(cache) = &self.caches[node] {
            // SAFETY: the caller promises that the page came from this pool and is not used any
            // more. The pool's pages of node `node` come from this cache only.
            unsafe { cache.free(page) };
        }
    }

    /// Returns the node from which this pool asked for the memory of a page. Returns `None` if the
    /// kernel placed the page by the process's policy. Only computes.
    ///
    /// The kernel may have placed the page on another node, if the node had less memory than the
    /// estimate said, or if the page was moved. [`node_at`](crate::mempolicy::node_at) asks the
    /// kernel.
    pub fn node_of(&self, page: NonNull<u8>) -> Option<NodeId> {
        let node = arena::node_of(page.as_ptr() as usize);
        (!nodes::is_the_kernels(node)).then(|| NodeId(nodes::id(node)))
    }

    /// Turns counting on or off. While counting is on, every allocation counts hits, misses and the
    /// other items of the kernel's `numastat`, by node.
    ///
    /// Costs at least two more adds on the thread's own CPU for each page.
    pub fn set_counting(&self, counting: bool) {
        match counting {
            true => self.duties.fetch_or(COUNTS, Relaxed),
            false => self.duties.fetch_and(!COUNTS, Relaxed),
        };
    }

    /// Sets whether each allocation of a place without a policy asks the kernel for the policy that
    /// the calling thread has at that moment. Off at the start.
    ///
    /// Without this, the pool follows a thread's policy that was set by a call that Pinfold sees
    /// (see [`thread_changed`](crate::mempolicy::thread_changed)). It does not notice other system
    /// calls, or a cpuset that changes.
    ///
    /// While this is on, each of these allocations makes a system call, `get_mempolicy`, which
    /// takes several times as long as zeroing the page. If the kernel refuses the call, or the
    /// thread has no policy, the page comes from the node that the thread runs on, or by the policy
    /// that the process was started with. Under an interleaving policy, the place decides whose
    /// turn it is, not the kernel's count of the thread's pages.
    pub fn set_following_threads(&self, following: bool) {
        match following {
            true => self.duties.fetch_or(ASKS, Relaxed),
            false => self.duties.fetch_and(!ASKS, Relaxed),
        };
    }

    /// Returns the counts that were made while [counting](Self::set_counting) was on: pages, in the
    /// [`Zone::normal`] of each node.
    pub fn numa_stat(&self) -> &VmStat<NumaItem> {
        &self.stat
    }

    /// Returns the page lists of each node. Reads the words of all CPUs, and takes each node's
    /// lock.
    pub fn lists(&self) -> impl Iterator<Item = List> + '_ {
        let caches = self.caches.iter().flatten().enumerate();
        caches.map(|(node, cache)| List::of(node, cache))
    }

    /// Empties the CPUs' lists, and gives all empty slabs back to the arena. Returns the
    /// number of these slabs.
    ///
    /// Interrupts the CPUs that run this process's threads. The arena gives the memory back to
    /// the system when its budgets require it.
    ///
    /// # Errors
    ///
    /// [`FenceError`](pinfold_rseq::FenceError) if the kernel cannot fence (interrupt the other
    /// CPUs for this process). Then the CPUs' lists keep their pages.
    pub fn shrink(&self) -> Result<usize, pinfold_rseq::FenceError> {
        let mut all = Ok(0);
        for cache in self.caches.iter().flatten() {
            // If one cache cannot be drained, the other caches are shrunk all the same.
            let slabs = cache.shrink();
            all = all.and_then(|all| Ok(all + slabs?));
        }
        all
    }
}
