//! Parts: the CPUs of a node share a cache's slabs, or each has its own.
//!
//! At first a cache has one part on each node: a barn and slabs under one lock (`part`). If several
//! CPUs exchange sheaves all the time, they wait for each other at this lock. Worse, the barn and
//! the slabs mix the objects of all CPUs. So a CPU often gets an object that another CPU has used,
//! and has to fetch the object's cache lines from there. So once threads have had to wait for a
//! part's lock often, the cache is *split*: from then on, each CPU has a part of its own on each
//! node. (With more than [`MAX_PARTS`] CPUs, and if CPUs came online after the start, several CPUs
//! share a part.) A cache stays split.
//!
//! # Which part an object is of
//!
//! A slab stays in the lists of the part that made it, and has that part's number
//! (`Slab::part`). The number is written before the slab's objects are handed out. So a thread that
//! holds an object reads the right number, without a lock. The part of an object never changes.
//!
//! # How objects move
//!
//! 1. A sheaf may hold objects of any parts of a node. A free pushes the object on a sheaf of its
//!    CPU, and a full sheaf goes to the barn of the CPU's part, whichever objects it holds.
//! 2. If that barn has enough sheaves, the oldest leaves it. The part's own objects go to their
//!    slabs. The sheaf then goes to the part of its first object: to the barn, if that one has
//!    room, or else that part's objects go to their slabs, and so on ([`Descriptor::hand_over`]).
//!    So objects that one CPU allocates and another one frees go back by sheaves.
//! 3. A part whose barn and slabs have no free object takes objects of a part that has
//!    [many](Slabs::has_many_free) before it makes a slab. So the slabs of all parts together have
//!    few more free objects than those of one part would have. [`Rich`] says which parts have many,
//!    so that the search reads no cache lines of the others.
//! 4. A thread that empties a barn, in a tick or because the cache is destroyed, holds the lock of
//!    the barn's part. It sets the objects of other parts aside there (`handler_frees`), because a
//!    thread holds the lock of one part at a time.
//!
//! Caches of heaps are not split, because the end of a heap abandons one part after the other.
//! Caches that check are not split either.

use super::part::{Node, Stock};
use crate::arena::{self, NodeRequest};
use crate::cache_units::{MAX_PARTS, most_parts};
use crate::slab::cache::descriptor::{Descriptor, registry_try_lock};
use crate::slab::cpu::sheaf::Sheaf;
use crate::slab::node::slabs::slab_of;
use crate::sys;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const WORDS: usize = MAX_PARTS / u64::BITS as usize;

/// Which CPUs' parts have [many](Slabs::has_many_free) free objects: a bit for the parts of a CPU
/// on all nodes. The holder of a part's lock changes the bit, when the part gets many or has no
/// longer many. So CPUs that look for such a part find these words in their own cache, as long as
/// no part changes. A hint: with several nodes, a bit may be missing until the part's next change.
#[repr(align(64))]
pub(crate) struct Rich([AtomicU64; WORDS]);

impl Rich {
    pub(crate) const fn none() -> Rich {
        Rich([const { AtomicU64::new(0) }; WORDS])
    }

    /// Sets or clears the bit of CPU `nth`, if that changes it.
    fn set(&self, nth: usize, is_rich: bool) {
        let (word, bit) = (&self.0[nth / 64], 1u64 << (nth % 64));
        match (word.load(Relaxed) & bit != 0, is_rich) {
            (false, true) => word.fetch_or(bit, Relaxed),
            (true, false) => word.fetch_and(!bit, Relaxed),
            _ => 0,
        };
    }

    /// Iterates over the numbers of the CPUs whose bits are set.
    fn iter(&self) -> impl Iterator<Item = usize> {
        let words = self.0.iter().enumerate();
        words.flat_map(|(at, word)| {
            let mut bits = word.load(Relaxed);
            core::iter::from_fn(move || {
                let nth = bits.checked_ilog2()?;
                bits &= !(1 << nth);
                Some(64 * at + nth as usize)
            })
        })
    }
}

impl Descriptor {
    /// Returns whether each CPU has a part of its own.
    pub(crate) fn is_split(&self) -> bool {
        // Acquire pairs with the release in `split`: a thread that sees the mark sees the parts.
        self.split.load(Acquire)
    }

    /// Returns the parts that a split cache has besides the first one of each node.
    pub(crate) fn more(&self) -> &[Node] {
        // Acquire pairs with the release in `split`.
        match NonNull::new(self.more.load(Acquire)) {
            // SAFETY: `split` made this many parts here. They are never freed.
            Some(first) => unsafe {
                core::slice::from_raw_parts(first.as_ptr(), self.more_count())
            },
            None => &[],
        }
    }

    fn more_count(&self) -> usize {
        (most_parts() - 1) * self.nodes().len()
    }

    /// Iterates over all parts. The first part of each node comes first, in the order of the nodes.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Node> {
        self.nodes().iter().chain(self.more())
    }

    /// Iterates over the parts that are looked after in round `round`: all of a cache that is not
    /// split, and one of a split cache.
    pub(crate) fn parts_in_turn(&self, round: usize) -> impl Iterator<Item = &Node> {
        let (nodes, more) = (self.nodes().len(), self.more().len());
        let (skip, take) = match self.is_split() {
            true => (round % (nodes + more), 1),
            false => (0, nodes),
        };
        self.parts().skip(skip).take(take)
    }

    /// Returns part `number`: of the first parts of the nodes, or of those that `split` has made.
    fn part(&self, number: usize) -> Option<&Node> {
        let nodes = self.nodes();
        let others = || self.more().get(number - nodes.len());
        nodes.get(number).or_else(others)
    }

    /// Returns the part on node `node` that serves the current CPU.
    pub(crate) fn part_here(&self, node: usize) -> &Node {
        if !self.is_split() {
            return &self.nodes()[node];
        }
        let nth = pinfold_rseq::current() % most_parts();
        let part = self.part(nth * self.nodes().len() + node);
        part.unwrap_or(&self.nodes()[node])
    }

    /// Iterates over the parts on node `node`.
    pub(crate) fn parts_of(&self, node: usize) -> impl Iterator<Item = &Node> {
        self.parts().skip(node).step_by(self.nodes().len())
    }

    /// Returns the number of the node whose memory holds `object`, which is an object of this
    /// cache.
    pub(crate) fn node_of(&self, object: *mut u8) -> usize {
        arena::node_of(object as usize).min(self.nodes().len() - 1)
    }

    /// Returns the part that `object` is of, which is an object of this cache. The caller holds the
    /// object.
    pub(crate) fn home(&self, object: *mut u8) -> &Node {
        if !self.is_split() || !self.contains(object) {
            return &self.nodes()[self.node_of(object)];
        }
        // SAFETY: `contains` found that the object lies in a slab of the cache. The slab stays
        // while the caller holds the object. This accesses an atomic only.
        let number = unsafe { slab_of(object) }.part.load(Relaxed);
        let wrong = || {
            sys::die(format_args!(
                "{object:p} is of no part of cache {}",
                self.name()
            ))
        };
        self.part(number.into()).unwrap_or_else(wrong)
    }

    /// Exchanges `empty` for a sheaf with objects of the node that `request` names: at `part`,
    /// which serves the current CPU, or at another one. See [`Node::exchange_for_full`].
    pub(crate) fn exchange_for_full(
        &self,
        request: NodeRequest,
        part: &Node,
        empty: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        if self.is_split() {
            return self.exchange_at_parts(request, part, empty);
        }
        if part.is_crowded() {
            self.split();
        }
        part.exchange_for_full(self, request, empty, true)
    }

    // Not inlined, so that its variables take no stack of a cache that is never split.
    #[inline(never)]
    fn exchange_at_parts(
        &self,
        request: NodeRequest,
        part: &Node,
        mut empty: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        let others = self.rich_parts_of(request.node);
        let others = others.filter(|&other| !core::ptr::eq(other, part));
        for part in core::iter::once(part).chain(others) {
            match part.exchange_for_full(self, request, empty, false) {
                Err(other) => empty = other,
                full => return full,
            }
        }
        match part.exchange_for_full(self, request, empty, true) {
            Err(other) => empty = other,
            full => return full,
        }
        // The node has no memory for a slab.
        for part in self.parts_of(request.node) {
            match part.exchange_for_full(self, request, empty, false) {
                Err(other) => empty = other,
                full => return full,
            }
        }
        Err(empty)
    }

    /// Fills `objects` from slabs of the node that `request` names: of the current CPU's part, and
    /// before that one makes a slab, of others. If the node has no memory for a slab, takes what
    /// any part has. Returns how many objects it took.
    // Not inlined, so that its variables take no stack of a cache that is never split.
    #[inline(never)]
    pub(crate) fn take_objects(&self, request: NodeRequest, objects: &mut [*mut u8]) -> usize {
        let here = self.part_here(request.node);
        if !self.is_split() {
            return here.take_objects(self, request, objects, true);
        }
        let others = self.parts_of(request.node).map(|part| (part, false));
        let rich = self.rich_parts_of(request.node).map(|part| (part, false));
        let steps = core::iter::once((here, false)).chain(rich);
        let steps = steps.chain([(here, true)]).chain(others);
        let mut got = 0;
        for (part, grows) in steps {
            if got == objects.len() {
                break;
            }
            got += part.take_objects(self, request, &mut objects[got..], grows);
        }
        got
    }

    /// Iterates over the parts on node `node` that seem to have many free objects.
    fn rich_parts_of(&self, node: usize) -> impl Iterator<Item = &Node> {
        let nodes = self.nodes().len();
        let of_cpu = move |nth| self.part(nth * nodes + node);
        let parts = self.rich.iter().filter_map(of_cpu);
        parts.filter(|part| part.is_rich())
    }

    /// Notes whether a part has many free objects. The caller holds the part's lock, and has moved
    /// objects to or from its slabs.
    pub(crate) fn note_free(&self, part: &Node, stock: &Stock) {
        if !self.is_split() {
            return;
        }
        let is_rich = stock.slabs.has_many_free(self, part.is_rich());
        part.set_rich(is_rich);
        let (nth, nodes) = (part.number() / self.nodes().len(), self.nodes().len());
        let of_cpu = (nth * nodes..(nth + 1) * nodes).filter_map(|number| self.part(number));
        self.rich.set(nth, is_rich || { of_cpu }.any(Node::is_rich));
    }

    /// Gives a cache whose CPUs wait for each other a part for each CPU. Does nothing if there is
    /// no memory, or another thread makes or retires a cache, or splits one.
    #[cold]
    #[inline(never)]
    fn split(&self) {
        if self.checks() || self.account.is_some() || most_parts() == 1 {
            return;
        }
        // A fork holds this lock while it takes those of all parts, so it meets either none of the
        // new parts or all of them.
        let Some(_registry) = registry_try_lock() else {
            return;
        };
        if self.is_split() {
            return;
        }
        if self.more.load(Relaxed).is_null() {
            let Some(parts) = Node::make(self.nodes().len(), self.more_count()) else {
                return;
            };
            self.more.store(parts.cast().as_ptr(), Release);
        }
        self.split.store(true, Release);
        self.show_more();
    }

    /// Gives the objects of a sheaf to the parts that they are of: the whole sheaf to the barn of
    /// the first object's part, if that has room, or else each object to its slab. Returns an empty
    /// sheaf.
    pub(crate) fn hand_over(&self, mut sheaf: Sheaf) -> Sheaf {
        while let Some(&first) = sheaf.objects().first() {
            sheaf = self.home(first).take_in(self, sheaf, 0);
        }
        sheaf
    }

    /// Exchanges a full sheaf for an empty one: at `part`, which serves the current CPU, or at the
    /// part of the sheaf's objects if they seem to be of one other part. See
    /// [`Node::exchange_for_empty`].
    pub(crate) fn exchange_for_empty(
        &self,
        part: &Node,
        full: Option<Sheaf>,
    ) -> Result<Sheaf, Option<Sheaf>> {
        if !self.is_split() {
            if part.is_crowded() {
                self.split();
            }
            return part.exchange_for_empty(self, full);
        }
        match full {
            Some(mut sheaf) => match self.only_home(sheaf.objects()) {
                Some(home) if !core::ptr::eq(home, part) => {
                    let rest = home.take_in(self, sheaf, 1);
                    Ok(self.hand_over(rest))
                }
                _ => part.exchange_for_empty(self, Some(sheaf)),
            },
            None => part.exchange_for_empty(self, None),
        }
    }

    /// Returns the part of the first, the middle and the last object, if it is the same.
    fn only_home(&self, objects: &[*mut u8]) -> Option<&Node> {
        let [first, .., last] = objects else {
            return None;
        };
        let home = self.home(*first);
        let others = [objects[objects.len() / 2], *last].map(|object| self.home(object));
        others
            .iter()
            .all(|other| core::ptr::eq(*other, home))
            .then_some(home)
    }

    /// Sets free objects aside, each at its part. Takes no lock.
    pub(crate) fn set_all_aside(&self, objects: &[*mut u8]) {
        for &object in objects {
            self.home(object).set_aside(self, object);
        }
    }

    /// Gives objects to their slabs, of whichever part and node.
    ///
    /// # Safety
    ///
    /// The caller owns the objects, which are free.
    pub(crate) unsafe fn give_home(&self, objects: &mut [*mut u8]) {
        let mut left = objects;
        while let Some(&first) = left.first() {
            // SAFETY: the caller owns the objects, and `home` returns the first one's part.
            let others = unsafe { self.home(first).give_objects(self, left) };
            left = &mut left[..others];
        }
    }

    /// Moves the objects of all barns to their slabs, and gives all empty slabs back to the arena.
    /// Returns how many went back. Waits for a fork.
    pub(crate) fn shrink(&self) -> usize {
        self.twice_if_split(|part| part.shrink(self))
    }

    /// Does what [`shrink`](Self::shrink) does, but leaves out what it would have to wait for
    /// because of a fork.
    pub(crate) fn give_all(&self) {
        self.twice_if_split(|part| {
            part.give_all(self);
            0
        });
    }

    /// Calls `f` with each part. Calls it again for a split cache, because a barn may hold objects
    /// of parts that were called before.
    fn twice_if_split(&self, f: impl Fn(&Node) -> usize) -> usize {
        let rounds = 1 + usize::from(self.is_split());
        (0..rounds).flat_map(|_| self.parts()).map(f).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::KmemCache;
    use core::alloc::Layout;
    use core::time::Duration;
    use std::thread::sleep;
    use std::time::Instant;
    use std::vec::Vec;

    #[test]
    fn the_parts_with_many_free_objects_are_listed() {
        let rich = Rich::none();
        let set = [0, 1, 63, 64, 130, MAX_PARTS - 1];
        set.into_iter().for_each(|nth| rich.set(nth, true));
        rich.set(64, true);
        let mut listed: Vec<_> = rich.iter().collect();
        listed.sort_unstable();
        assert_eq!(listed, set);
        set.into_iter().for_each(|nth| rich.set(nth, false));
        assert_eq!(rich.iter().count(), 0);
    }

    /// Takes `count` objects from the slabs of one part.
    fn take(cache: &KmemCache, part: &Node, count: usize) -> Vec<*mut u8> {
        let mut objects = std::vec![core::ptr::null_mut(); count];
        let request = NodeRequest::only(part.number() % cache.descriptor.nodes().len());
        let taken = part.take_objects(cache.descriptor, request, &mut objects, true);
        assert_eq!(taken, count);
        objects
    }

    /// Returns a split cache, or `None` on a machine with one CPU.
    fn split_cache(name: &str) -> Option<KmemCache> {
        let cache = KmemCache::new(name, Layout::new::<[u64; 8]>()).unwrap();
        while !cache.descriptor.is_split() && most_parts() > 1 {
            // Another test may hold the registry's lock.
            cache.descriptor.split();
        }
        cache.descriptor.is_split().then_some(cache)
    }

    #[test]
    fn an_object_goes_back_to_its_part() {
        let Some(cache) = split_cache("homes") else {
            return;
        };
        let mut objects = Vec::new();
        for part in cache.descriptor.parts() {
            let taken = take(&cache, part, 300);
            let is_home = |&object: &*mut u8| core::ptr::eq(cache.descriptor.home(object), part);
            assert!(taken.iter().all(is_home));
            objects.extend(taken);
        }
        // Objects of all parts lie beside each other in every sheaf.
        let half = objects.len() / 2;
        let mixed: Vec<_> = (0..half)
            .flat_map(|at| [objects[at], objects[half + at]])
            .collect();
        for object in mixed {
            // SAFETY: the object was taken above, and is not used any more.
            unsafe { cache.free(NonNull::new(object).unwrap()) };
        }
        cache.validate().unwrap();
        assert_eq!(cache.usage().active, 0);
        cache.shrink().unwrap();
        assert_eq!(cache.usage().slabs, 0);
    }

    #[test]
    fn a_sheaf_of_another_part_goes_there_whole() {
        let Some(cache) = split_cache("sheaves") else {
            return;
        };
        let descriptor = cache.descriptor;
        let other = &descriptor.more()[0];
        let capacity = descriptor.capacity();
        let mut sheaf = Sheaf::new(capacity).unwrap();
        sheaf
            .slots()
            .copy_from_slice(&take(&cache, other, capacity));
        sheaf.set_len(capacity);
        let empty = descriptor.hand_over(sheaf);
        assert!(empty.is_empty());
        empty.discard();
        assert_eq!(cache.usage().barn_objects, capacity);
        assert_eq!(cache.usage().active, 0);
        let full = other.exchange_for_full(descriptor, NodeRequest::only(0), None, false);
        let full = full.unwrap();
        assert_eq!(full.len(), capacity);
        descriptor.put(other, full);
    }

    #[test]
    fn a_part_takes_what_another_has_before_it_makes_a_slab() {
        let Some(cache) = split_cache("growing") else {
            return;
        };
        let descriptor = cache.descriptor;
        let other = &descriptor.more()[0];
        let mut objects = take(&cache, other, 100_000);
        let mut freed: Vec<_> = objects.iter().copied().step_by(2).collect();
        let mut kept: Vec<_> = objects.drain(..).skip(1).step_by(2).collect();
        // SAFETY: the objects were taken above, and are not used any more.
        unsafe { descriptor.give_home(&mut freed) };
        let before = cache.usage().slabs;
        let here = &descriptor.nodes()[0];
        let request = NodeRequest::only(0);
        for _ in 0..100 {
            let mut full = descriptor.exchange_for_full(request, here, None).unwrap();
            kept.extend_from_slice(full.objects());
            full.set_len(0);
            full.discard();
        }
        assert_eq!(cache.usage().slabs, before);
        // SAFETY: as above.
        unsafe { descriptor.give_home(&mut kept) };
        assert_eq!(cache.usage().active, 0);
    }

    #[test]
    fn a_crowded_cache_is_split_and_its_number_serves_again() {
        let cache = KmemCache::new("crowded", Layout::new::<[u64; 8]>()).unwrap();
        if most_parts() == 1 {
            return;
        }
        let (number, descriptor) = (cache.descriptor.id, cache.descriptor);
        let part = &descriptor.nodes()[0];
        let begin = Instant::now();
        let goes_on = || !descriptor.is_split() && begin.elapsed().as_secs() < 60;
        // One thread holds the lock again and again, until the other one has waited often enough.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while goes_on() {
                    let full = descriptor.exchange_for_full(NodeRequest::only(0), part, None);
                    descriptor.put(part, full.unwrap());
                }
            });
            while goes_on() {
                let stock = part.stock_after_fork();
                sleep(Duration::from_millis(1));
                drop(stock);
                sleep(Duration::from_micros(100));
            }
        });
        assert!(cache.descriptor.is_split());
        cache.validate().unwrap();
        assert_eq!(cache.usage().active, 0);
        cache.destroy().unwrap();
        // A new cache with the number begins without a split, and can be split again.
        let again = split_cache("again").unwrap();
        if again.descriptor.id == number {
            assert!(again.descriptor.parts().all(Node::is_bare));
        }
        for part in again.descriptor.parts() {
            let mut objects = take(&again, part, 10);
            // SAFETY: the objects were taken above, and are not used any more.
            unsafe { again.descriptor.give_home(&mut objects) };
        }
        again.destroy().unwrap();
    }
}
