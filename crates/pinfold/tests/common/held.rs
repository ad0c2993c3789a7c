//! Objects whose every byte is known to who holds them.

use pinfold::slab::{DebugFlags, KmemCache, MemPool};
use std::alloc::Layout;
use std::ptr::NonNull;

/// What a constructor leaves in its objects.
const MADE: u8 = 0x11;

/// What a cache is to be.
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

/// A cache and what is known of it.
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
        /// The object is `SIZE` bytes large.
        unsafe fn construct<const SIZE: usize>(object: *mut u8) {
            // SAFETY: the caller's promise.
            unsafe { object.write_bytes(MADE, SIZE) };
        }
        let layout = Layout::from_size_align(kind.size, kind.align).unwrap();
        let mut builder = KmemCache::builder(name, layout).debug(kind.debug);
        if kind.hardened {
            builder = builder.hardened(true);
        }
        if kind.constructed {
            // SAFETY: each is for objects of its size.
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
        // Also if the environment has hardened it.
        let zeroed = cache.info().is_hardened() && !kind.constructed;
        Store {
            cache,
            kind,
            zeroed,
        }
    }

    /// Fills an object that has just been allocated, after a look at what it was.
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

    /// Checks that nobody wrote to an object, and leaves it as it is to be freed.
    pub fn give_up(&self, held: &Held) -> NonNull<u8> {
        self.check(held);
        if self.kind.constructed {
            self.bytes(held.at)[..self.kind.size].fill(MADE);
        }
        held.at
    }

    /// Checks that nobody wrote to an object.
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
        // SAFETY: it came from this cache and is given up.
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
        // SAFETY: the object is the caller's, of this cache, and that large.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), self.cache.object_size()) }
    }
}

/// An object that is filled with a pattern which its tag determines.
#[derive(Debug)]
pub struct Held {
    pub at: NonNull<u8>,
    tag: u64,
}

// SAFETY: it is owned memory.
unsafe impl Send for Held {}

impl Held {
    /// What the `nth` word holds.
    fn word(&self, nth: usize) -> [u8; 8] {
        let place = self.at.as_ptr() as u64;
        (self.tag ^ place)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(nth as u64)
            .to_ne_bytes()
    }
}

/// An object as [`Store::hold`] filled it, by its address alone: all with the same tag.
pub fn found_again(at: NonNull<u8>, tag: u64) -> Held {
    Held { at, tag }
}

/// A reserve, and which store it is of.
pub struct Pool {
    pub pool: MemPool<'static>,
    pub of: usize,
}
