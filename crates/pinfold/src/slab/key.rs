//! The key of a hardened cache's free objects; [`harden`](super::harden) says what it is good for.

use crate::sys;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The process's secret; never 0.
fn secret() -> u64 {
    static SECRET: AtomicU64 = AtomicU64::new(0);
    let known = SECRET.load(Relaxed);
    if known != 0 {
        return known;
    }
    let fresh = sys::random() | 1;
    match SECRET.compare_exchange(0, fresh, Release, Acquire) {
        Ok(_) => fresh,
        Err(theirs) => theirs,
    }
}

/// What a hardened cache needs to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hardening {
    pub(super) secret: u64,
    /// Where in an object its key is.
    key_at: usize,
    /// Bytes that are zeroed.
    zeroed: usize,
    /// Bytes of an object with its key.
    pub(super) room: usize,
}

impl Hardening {
    /// For objects of `size` bytes, of which a constructor makes the first `kept`.
    pub(super) fn new(size: usize, kept: Option<usize>) -> Hardening {
        let key_at = kept.map_or(0, |kept| kept.next_multiple_of(8));
        Hardening {
            secret: secret(),
            key_at,
            zeroed: if kept.is_some() {
                0
            } else {
                size.next_multiple_of(8)
            },
            room: size.max(key_at + 8),
        }
    }

    /// Bytes of an object that its user may write to.
    pub(super) fn usable(&self) -> usize {
        if self.zeroed == 0 {
            self.key_at
        } else {
            self.zeroed
        }
    }

    fn key(&self, object: *mut u8) -> u64 {
        self.secret ^ (object as u64).swap_bytes()
    }

    /// The object's key or what is in its place.
    pub(super) fn word(&self, object: *mut u8) -> *mut u64 {
        object.wrapping_add(self.key_at).cast()
    }

    /// A link to `to` for the first word of `object`, which nobody can read or forge without the secret, or what it stands for.
    pub(super) fn encode(&self, object: *mut u8, to: *mut u8) -> *mut u8 {
        (to as u64 ^ self.key(object)) as *mut u8
    }

    /// Makes an object as one that its slab has, after its first word held a link.
    ///
    /// # Safety
    ///
    /// The object is the caller's, of the hardened cache.
    pub(super) unsafe fn unlink(&self, object: *mut u8) {
        if self.key_at == 0 {
            // SAFETY: the key lies in the object.
            unsafe { *self.word(object) = self.key(object) };
        }
    }

    /// Arms an object that comes from its slab: fresh ones read as zeroes, others have their key. False when it has neither.
    ///
    /// # Safety
    ///
    /// Here and below: the object is the caller's, of the hardened cache.
    pub(super) unsafe fn arm(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object.
        unsafe {
            let word = self.word(object);
            let fine = [0, self.key(object)].contains(&*word);
            *word = self.key(object);
            fine
        }
    }

    /// Takes the key out of an object if it has one. False when there is something else.
    pub(super) unsafe fn release(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object.
        unsafe {
            let word = self.word(object);
            let fine = [0, self.key(object)].contains(&*word);
            *word = 0;
            fine
        }
    }

    /// Gives an object that was taken past the sheaves its key.
    pub(super) unsafe fn rearm(&self, object: *mut u8) {
        // SAFETY: the key lies in the object.
        unsafe { *self.word(object) = self.key(object) };
    }

    /// Takes the key out of an object that is given out. False when it was overwritten.
    #[inline]
    pub(super) unsafe fn disarm(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object.
        unsafe {
            let word = self.word(object);
            let fine = *word == self.key(object);
            *word = 0;
            fine
        }
    }

    /// Zeroes an object that was freed and gives it its key. False, and nothing done, when it has that already.
    #[inline]
    pub(super) unsafe fn scrub(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object, and it is that large.
        unsafe {
            let word = self.word(object);
            if *word == self.key(object) {
                return false;
            }
            zero(object, self.zeroed);
            *word = self.key(object);
        }
        true
    }
}

/// Zeroes `size` bytes, a multiple of 8. Without a call where that would take longer than the stores.
///
/// # Safety
///
/// The bytes are the caller's, and begin at a multiple of 8.
#[inline]
unsafe fn zero(object: *mut u8, size: usize) {
    const FEW: usize = 128;
    // SAFETY: the caller's promise.
    unsafe {
        if size > FEW {
            return object.write_bytes(0, size);
        }
        let words = object.cast::<u64>();
        for nth in 0..size / 8 {
            // Volatile, or the compiler makes a call of the loop.
            words.add(nth).write_volatile(0);
        }
    }
}
