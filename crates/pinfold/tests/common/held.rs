//! Objects filled with a pattern, so that their holder notices every changed byte.

use pinfold::slab::{DebugFlags, KmemCache, MemPool};
use std::alloc::Layout;
use std::ptr::NonNull;

/// The byte that a constructor leaves in its objects.
const MADE: u8 = 0x11;

/// The settings of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub size: usize,
    pub align: usize,
    pub constructed: bool,
    pub hardened: bool,
    pub debug: DebugFlags,
}

impl Kind {
    pub const fn plain(size: usize, align: usize) -> Kind {
        Kind {
            size,
            align,
            constructed: false,
            hardened: false,
            debug: DebugFlags::NONE,
        }
    }

    pub const fn constructed(self) -> Kind {
        Kind {
            constructed: true,
            ..self
        }
    }

    pub const fn hardened(self) -> Kind {
        Kind {
            hardened: true,
            ..self
        }
    }

    pub const fn debugged(self, debug: DebugFlags) -> Kind {
        Kind { debug, ..self }
    }
}

/// A cache and its settings.
pub struct Store {
    pub cache: KmemCache,
    pub kind: Kind,
    /// Whether fresh objects read as zeroes.
    zeroed: bool,
}

impl Store {
    pub fn new(name: &str, kind: Kind) -> Store {
        /// # Safety
        ///
        /// The caller owns the object, which has `SIZE` bytes.
        unsafe fn construct<const SIZE: usize>(object: *mut u8) {
            // SAFETY: the caller promises that the object has `SIZE` bytes.
            unsafe { object.write_bytes(MADE, SIZE) };
        }
        let layout = Layout::from_size_align(kind.size, kind.align).unwrap();
        let mut builder = KmemCache::builder(name, layout).debug(kind.debug);
        if kind.hardened {
            builder = builder.hardened(true);
        }
        if kind.constructed {
            // SAFETY: each constructor writes as many bytes as the cache's objects have.
            builder = unsafe {
                match kind.size {
                    40 => builder.constructor(construct::<40>),
                    100 => builder.constructor(construct::<100>),
                    3000 => builder.constructor(construct::<3000>),
                    size => panic!("no constructor for {size} bytes"),
                }
            };
        }
        let cache = builder.build().unwrap();
        // The environment may harden a cache too.
        let zeroed = cache.info().is_hardened() && !kind.constructed;
        Store {
            cache,
            kind,
            zeroed,
        }
    }

    /// Checks the bytes of an object that was just allocated, and fills it.
    pub fn hold(&self, at: NonNull<u8>, tag: u64) -> Held {
        assert_eq!(
            at.as_ptr() as usize % self.kind.align,
            0,
            "{:?}: {at:p} is not aligned",
            self.kind
        );
        if self.kind.constructed {
            self.expect(at, self.kind.size, MADE, "not as constructed");
        }
        if self.zeroed {
            self.expect(at, self.cache.object_size(), 0, "not zeroed");
        }
        let held = Held { at, tag };
        for (nth, bytes) in self.bytes(at).chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&held.word(nth)[..bytes.len()]);
        }
        held
    }

    /// Checks that an object is unchanged, and leaves it as a free object must be.
    pub fn give_up(&self, held: &Held) -> NonNull<u8> {
        self.check(held);
        if self.kind.constructed {
            self.bytes(held.at)[..self.kind.size].fill(MADE);
        }
        held.at
    }

    /// Checks that an object is unchanged.
    pub fn check(&self, held: &Held) {
        for (nth, bytes) in self.bytes(held.at).chunks(8).enumerate() {
            let word = held.word(nth);
            assert!(
                bytes == &word[..bytes.len()],
                "{:?}: object {:p}, tag {:#x}: at offset {} {bytes:02x?} instead of {word:02x?}",
                self.kind,
                held.at,
                held.tag,
                nth * 8
            );
        }
    }

    /// Frees an object.
    pub fn free(&self, held: Held) {
        let object = self.give_up(&held);
        // SAFETY: the object came from this cache, and `held` gave it up.
        unsafe { self.cache.free(object) };
    }

    fn expect(&self, at: NonNull<u8>, size: usize, byte: u8, what: &str) {
        let bytes = &self.bytes(at)[..size];
        if let Some(wrong) = bytes.iter().position(|&found| found != byte) {
            let end = size.min(wrong + 16);
            panic!(
                "{:?}: object {at:p} is {what}: at offset {wrong} {:02x?}",
                self.kind,
                &bytes[wrong..end]
            );
        }
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "the bytes are the object's, not the store's"
    )]
    fn bytes(&self, at: NonNull<u8>) -> &mut [u8] {
        // SAFETY: the caller owns the object, which is of this cache and has this many bytes.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), self.cache.object_size()) }
    }
}

/// An object filled with a pattern that its tag and its address determine.
#[derive(Debug)]
pub struct Held {
    pub at: NonNull<u8>,
    tag: u64,
}

// SAFETY: a `Held` owns its object, which any thread may use.
unsafe impl Send for Held {}

impl Held {
    /// Returns the content of the `nth` word.
    fn word(&self, nth: usize) -> [u8; 8] {
        let place = self.at.as_ptr() as u64;
        (self.tag ^ place)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(nth as u64)
            .to_ne_bytes()
    }
}

/// Returns an object that [`Store::hold`] filled, by its address and the tag.
pub fn found_again(at: NonNull<u8>, tag: u64) -> Held {
    Held { at, tag }
}

/// A memory pool, and the number of the store that it belongs to.
pub struct Pool {
    pub pool: MemPool<'static>,
    pub of: usize,
}
