//! What a cache knows of its objects: where they lie, how a slab's objects are prepared, and how
//! addresses that cannot be freed are recognised.

use super::geometry::Geometry;
use super::slabs::Slab;
use crate::account::Account;
use crate::cache_units::CacheId;
use crate::slab::checks::debug::{self, DebugFlags, Kind, Report, SlotLayout, Track, raise};
use crate::slab::checks::guard;
use crate::slab::checks::key::{self, Hardening};
use crate::{arena, sanitizer, sys};
use core::alloc::Layout;
use core::ffi::c_void;
use core::fmt;
use core::ptr::null;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

/// A constructor, in Rust or C: a function that initialises an object when its slab is made.
#[derive(Clone, Copy)]
pub(crate) enum Constructor {
    Rust(unsafe fn(*mut u8)),
    C(unsafe extern "C" fn(*mut c_void)),
}

impl Constructor {
    /// Initialises the object at `object`.
    ///
    /// # Safety
    ///
    /// No other thread uses the object, and the object has the layout that the constructor is for.
    unsafe fn make(self, object: *mut u8) {
        match self {
            // SAFETY: the caller promises an unused object of the right layout.
            Constructor::Rust(constructor) => unsafe { constructor(object) },
            // SAFETY: the caller promises an unused object of the right layout.
            Constructor::C(constructor) => unsafe { constructor(object.cast()) },
        }
        sanitizer::release(object);
    }
}

/// Objects of at most this many bytes are small ([`Objects::is_small`]): a page, and a cache line
/// for malloc's class of that size.
const MAX_SMALL: usize = 4096 + 64;

/// How a cache treats its objects.
#[derive(Clone, Copy)]
pub(crate) struct Treatment {
    pub(crate) constructor: Option<Constructor>,
    /// The checks that the program asks for. The environment may ask for more.
    pub(crate) debug: DebugFlags,
    /// Whether the cache is hardened; `None` to follow the environment. A debugged cache is not
    /// hardened.
    pub(crate) hardened: Option<bool>,
    /// Whether the first object of each slab lies at the slab's start, so that the cache has one
    /// color.
    pub(crate) one_color: bool,
    /// The account of the heap that the cache belongs to, if it belongs to one.
    pub(crate) account: Option<&'static Account>,
}

/// A cache's name, cut to 32 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Name([u8; 32]);

impl Name {
    fn new(name: &str) -> Name {
        let mut text = [0; 32];
        let length = name.len().min(text.len());
        text[..length].copy_from_slice(&name.as_bytes()[..length]);
        Name(text)
    }

    pub(crate) fn as_str(&self) -> &str {
        let length = self.0.iter().position(|&byte| byte == 0);
        let text = &self.0[..length.unwrap_or(self.0.len())];
        match core::str::from_utf8(text) {
            Ok(name) => name,
            // A long name may be cut inside a character.
            Err(error) => core::str::from_utf8(&text[..error.valid_up_to()]).unwrap_or(""),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a cache knows of its objects.
pub(crate) struct Objects {
    /// The cache's number.
    pub(crate) id: CacheId,
    pub(crate) name: Name,
    /// Bytes of an object in its layout.
    pub(crate) object: usize,
    /// Alignment of an object in bytes.
    pub(crate) align: usize,
    pub(crate) geometry: Geometry,
    pub(crate) constructor: Option<Constructor>,
    /// The layout of an object's slot, if the cache is debugged.
    pub(crate) slot_layout: Option<SlotLayout>,
    /// What a hardened cache knows of its objects. `None` for a debugged cache.
    pub(crate) hardening: Option<Hardening>,
    /// Whether pages of free objects have ever gone back to the system. The free objects in these
    /// pages have lost their keys.
    pub(crate) purged: AtomicBool,
    /// Where the cache's slabs are charged, if the cache belongs to a heap.
    pub(crate) account: Option<&'static Account>,
}

impl Objects {
    /// Describes the objects of a new cache. The caller holds the lock of the caches' registry.
    pub(crate) fn new(id: CacheId, name: &str, layout: Layout, treatment: Treatment) -> Objects {
        let constructor = treatment.constructor;
        let flags = treatment.debug | debug::for_cache(name);
        let slot_layout =
            (!flags.is_none()).then(|| SlotLayout::new(flags, layout, constructor.is_some()));
        let hardened = slot_layout.is_none() && treatment.hardened.unwrap_or_else(key::wanted);
        let kept = constructor.map(|_| layout.size());
        let hardening = hardened.then(|| Hardening::new(layout.size(), kept));
        if hardened {
            guard::init();
        }
        let align = layout.align().max(8);
        let room = hardening.map_or(layout.size().max(8), |hardening| hardening.room);
        let size = slot_layout.map_or(room.next_multiple_of(align), |slot| slot.stride);
        let one_color = treatment.one_color || slot_layout.is_some() || hardened;
        let guard = if hardened { sys::page_size() } else { 0 };
        Objects {
            id,
            name: Name::new(name),
            object: layout.size(),
            align,
            geometry: Geometry::new(size, align, guard, one_color),
            constructor,
            slot_layout,
            hardening,
            purged: AtomicBool::new(false),
            account: treatment.account,
        }
    }

    /// Returns the name that the cache was made with, cut to 32 bytes.
    pub(crate) fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns whether the objects are so small that a program which uses them touches most pages
    /// of their slabs. Guard pages would split huge pages, so a hardened cache's objects never
    /// count as small.
    pub(crate) fn is_small(&self) -> bool {
        self.geometry.size <= MAX_SMALL && self.hardening.is_none()
    }

    /// Returns the checks that the cache makes.
    pub(crate) fn debug_flags(&self) -> DebugFlags {
        let flags = self.slot_layout.map(|slot_layout| slot_layout.flags);
        flags.unwrap_or(DebugFlags::NONE)
    }

    /// Returns whether the cache is debugged or hardened.
    #[inline]
    pub(crate) fn checks(&self) -> bool {
        self.hardening.is_some() || self.slot_layout.is_some()
    }

    /// Returns how many bytes of an object its user may write to.
    pub(crate) fn room(&self) -> usize {
        match (&self.slot_layout, &self.hardening) {
            (Some(slot_layout), _) => slot_layout.object,
            (None, Some(hardening)) => hardening.usable(),
            (None, None) => self.geometry.size,
        }
    }

    /// Calls `alloc` for the run of a slab, and charges the run to the heap that the cache belongs
    /// to. Returns `None` if the heap may not hold more.
    pub(crate) fn charged<R>(&self, alloc: impl FnOnce() -> Option<R>) -> Option<R> {
        let Some(account) = self.account else {
            return alloc();
        };
        account.charged(self.geometry.granules * arena::GRANULE, alloc)
    }

    /// Gives the charge of a slab back, whose run was freed.
    pub(crate) fn uncharge(&self) {
        if let Some(account) = self.account {
            account.uncharge(self.geometry.granules * arena::GRANULE);
        }
    }

    /// Returns whether slots must be [prepared](Self::prepare) before their first use.
    pub(crate) fn prepares(&self) -> bool {
        self.constructor.is_some() || self.slot_layout.is_some()
    }

    /// Makes a slot ready for its first allocation: writes the debugging bytes, and runs the
    /// constructor.
    ///
    /// # Safety
    ///
    /// The slot is one of this cache's, and no other thread uses it.
    pub(crate) unsafe fn prepare(&self, slot: *mut u8) {
        let left = self.slot_layout.map_or(0, |slot_layout| slot_layout.left);
        if let Some(slot_layout) = &self.slot_layout {
            // SAFETY: the slot is as large as `slot_layout` says, and the caller promises that no
            // thread uses it.
            unsafe { slot_layout.prepare(slot) };
        }
        if let Some(constructor) = self.constructor {
            // SAFETY: the object begins `left` bytes into the slot. The caller promises that no
            // thread uses the slot.
            unsafe { constructor.make(slot.add(left)) };
        }
    }

    /// Returns whether no slot of an empty slab of this debugged cache was written to. The caller
    /// holds the lock of the slab's node.
    #[cold]
    #[inline(never)]
    pub(crate) fn is_intact(&self, slab: &Slab) -> bool {
        let Some(slot_layout) = &self.slot_layout else {
            return true;
        };
        let start = slab.start();
        (0..self.geometry.per_slab).all(|nth| {
            let slot = start.wrapping_add(nth * self.geometry.size);
            let position = (start.cast_const(), nth, false);
            // SAFETY: all slots of the slab are free, and the caller holds the lock.
            unsafe { slot_layout.fault(slot, position, false) }.is_none()
        })
    }

    /// Returns whether `address` lies in a slab of this cache. `address` may be any address.
    #[inline(always)]
    pub(crate) fn contains(&self, address: *const u8) -> bool {
        arena::entry(address as usize) == self.id.entry()
    }

    /// Returns the reason that the address cannot be freed to this hardened cache, or `None` if it
    /// can.
    #[inline(always)]
    pub(crate) fn objection(&self, object: *mut u8) -> Option<Kind> {
        if !self.contains(object) {
            return Some(Kind::WrongCache);
        }
        // Hardened slabs have no color: the first object begins at the run's start.
        let start = arena::start_of_run(object as usize);
        let offset = (object as usize).wrapping_sub(start as usize);
        if self.geometry.begins_at(offset).is_none() {
            return Some(Kind::NotAnObject);
        }
        let purged = self.purged.load(Relaxed) && self.is_free_without_key(object);
        purged.then_some(Kind::DoubleFree)
    }

    /// Returns whether an object is free in its slab although it has no key. Such an object lost
    /// its key when its page went back to the system (`purge`).
    #[cold]
    fn is_free_without_key(&self, object: *mut u8) -> bool {
        let keyless = |hardening: &Hardening| {
            // SAFETY: `objection` found that an object of this cache begins here. The key lies in
            // the object.
            unsafe { *hardening.word(object) == 0 }
        };
        // SAFETY: `objection` found that an object of this cache begins here.
        self.hardening.as_ref().is_some_and(keyless) && unsafe { Slab::is_free_now(self, object) }
    }

    /// Reports that a hardened cache found a fault. `other` is the name of the cache that owns the
    /// object, if it is another cache.
    #[cold]
    #[inline(never)]
    pub(crate) fn accuse(&self, object: *mut u8, kind: Kind, other: Option<&str>) {
        let free = matches!(
            kind,
            Kind::DoubleFree | Kind::WrittenAfterFree | Kind::UsedAfterFree
        );
        raise(&Report {
            kind,
            cache: self.name(),
            other,
            flags: DebugFlags::NONE,
            object,
            size: self.geometry.size,
            slab: (null(), 0, 0),
            in_use: !free,
            tracks: [Track::NOBODY; 2],
            bytes: None,
        });
    }
}
