//! The keys of a hardened cache's free objects, and the secret order in which it hands out fresh
//! objects.
//!
//! A program may read a free object by mistake: through a pointer that it kept, or by an
//! uninitialised read. Then the program sees the object's key. If the key were a simple function of
//! a secret and the object's address, one such read would reveal the secret, and with it every key
//! of the process. So keys come from SipHash-1-3, a keyed hash. Its outputs for known addresses
//! tell nothing about the secret, or about the output for another address.
//!
//! # Generations
//!
//! A forked child draws a new secret. So the keys that one child reveals are of no use against its
//! parent or its siblings. Objects that were freed before the fork keep their keys of older
//! secrets, and the child accepts these keys. Each secret has a number, its *generation*, which
//! stands in the key:
//!
//! ```text
//!  bits 63 … 59   58 … 56      55 … 0
//!  ┌────────────┬────────────┬──────────────────────────┐
//!  │    mark    │ generation │ the hash's upper 56 bits │   a key
//!  └────────────┴────────────┴──────────────────────────┘
//! ```
//!
//! The mark and the generation are not secret. They save time: a word without the mark is no key,
//! and for a word with the mark, only one secret has to be tried. A process has at most
//! [`GENERATIONS`] secrets: its own and those of its ancestors. If the parent has that many
//! already, the child keeps the parent's secret.
//!
//! # Who writes the secrets
//!
//! 1. [`init`] writes the first secret before there is a hardened cache, under the lock of the
//!    caches' registry.
//! 2. [`fork_child`] writes the next secret while the child has one thread. Then it makes that
//!    secret current with one store. So a signal handler sees either the old secret or the new one,
//!    never a part of one.

use crate::sys;
use core::sync::atomic::Ordering::{Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};

/// Secrets that a process keeps at most.
const GENERATIONS: usize = 8;
/// Bits of a key that come from the hash.
const HASHED: u32 = 56;
/// The highest byte of a key of generation 0. Its upper five bits are the mark. The highest byte of
/// a small number, pointer, text or common floating-point number does not have these bits.
const MARK: u64 = 0x90;

const _: () = assert!(GENERATIONS == 8 && MARK.is_multiple_of(8));

/// The environment variable that hardens all caches if its value is 1.
pub const HARDENED_VARIABLE: &str = "PINFOLD_HARDENED";
/// Reads a value of [`HARDENED_VARIABLE`]: 0 or 1. Returns `None` for anything else.
pub fn parse_hardened(value: &[u8]) -> Option<bool> {
    match value {
        b"0" => Some(false),
        b"1" => Some(true),
        _ => None,
    }
}

/// Returns whether the environment variable is 1, which asks for hardening. Ignores a wrong value,
/// because it is reported when the program starts.
pub(crate) fn wanted() -> bool {
    static ANSWER: AtomicU8 = AtomicU8::new(UNREAD);
    const UNREAD: u8 = 2;
    let answer = ANSWER.load(Relaxed);
    if answer != UNREAD {
        return answer == 1;
    }
    let answer = pinfold_rseq::env::parsed(HARDENED_VARIABLE, parse_hardened) == Some(true);
    ANSWER.store(u8::from(answer), Relaxed);
    answer
}

/// A 128-bit secret. Holds the state with which SipHash begins for that secret.
struct Secret([AtomicU64; 4]);

static SECRETS: [Secret; GENERATIONS] =
    [const { Secret([const { AtomicU64::new(0) }; 4]) }; GENERATIONS];
/// The generation of this process: the index of its own secret in [`SECRETS`].
static CURRENT: AtomicUsize = AtomicUsize::new(0);
/// Whether the first secret has been drawn.
static DRAWN: AtomicBool = AtomicBool::new(false);

/// The purpose of a hash. The purpose is added to the address. Objects begin at multiples of 8, so
/// the sums of different purposes and addresses differ.
#[derive(Clone, Copy)]
enum Use {
    Key = 0,
    Link = 1,
    Order = 2,
    Child = 3,
}

impl Secret {
    /// Replaces the secret.
    fn set(&self, key: [u64; 2]) {
        let state = initial_state(key);
        for (word, value) in self.0.iter().zip(state) {
            word.store(value, Relaxed);
        }
    }

    /// Returns the hash of an address, or of another multiple of 8, for one purpose.
    #[inline(always)]
    fn hash(&self, at: usize, for_use: Use) -> u64 {
        let [a, b, c, d] = &self.0;
        // Relaxed, because a thread sees a secret as current only after it was written: see "Who
        // writes the secrets" above.
        let state = [
            a.load(Relaxed),
            b.load(Relaxed),
            c.load(Relaxed),
            d.load(Relaxed),
        ];
        // Hashes a message of seven bytes, which can hold any address of a program.
        siphash_1_3(state, (at as u64 + for_use as u64) | (7 << 56))
    }
}

/// Returns the state with which SipHash begins for a key.
fn initial_state(key: [u64; 2]) -> [u64; 4] {
    // The paper's constants: "somepseudorandomlygeneratedbytes".
    [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ]
}

/// Returns the SipHash-1-3 of a message of at most seven bytes, given as the message's only block:
/// the bytes, and their number in the highest byte. About 60 instructions.
///
/// J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012; with one
/// round for a block and three at the end, as in the standard library's hash maps.
#[inline(always)]
fn siphash_1_3(mut state: [u64; 4], block: u64) -> u64 {
    state[3] ^= block;
    state = sip_round(state);
    state[0] ^= block;
    state[2] ^= 0xff;
    for _ in 0..3 {
        state = sip_round(state);
    }
    state[0] ^ state[1] ^ state[2] ^ state[3]
}

#[inline(always)]
fn sip_round([mut a, mut b, mut c, mut d]: [u64; 4]) -> [u64; 4] {
    a = a.wrapping_add(b);
    c = c.wrapping_add(d);
    b = b.rotate_left(13) ^ a;
    d = d.rotate_left(16) ^ c;
    a = a.rotate_left(32);
    c = c.wrapping_add(b);
    a = a.wrapping_add(d);
    b = b.rotate_left(17) ^ c;
    d = d.rotate_left(21) ^ a;
    [a, b, c.rotate_left(32), d]
}

/// Draws the process's first secret, unless an earlier call has drawn it. The caller holds the lock
/// of the caches' registry, and enters its hardened cache there afterwards.
fn init() {
    if !DRAWN.load(Relaxed) {
        SECRETS[0].set([sys::random(), sys::random()]);
        // Relaxed, because a thread reads the secret only after it has found a hardened cache in
        // the registry. It then sees the secret, because the registry's entry is stored with
        // release order.
        DRAWN.store(true, Relaxed);
    }
}

/// Gives a forked child a secret of its own. The child has one thread. Makes no system call except
/// `getrandom`, and none if the process never had a hardened cache.
pub(crate) fn fork_child() {
    let current = CURRENT.load(Relaxed);
    if !DRAWN.load(Relaxed) || current + 1 == GENERATIONS {
        return;
    }
    // Mixes in a hash of the parent's secret. If the kernel gives no randomness, the new secret is
    // as hard to guess as the parent's.
    let draw = |nth: usize| sys::random() ^ SECRETS[current].hash(8 * nth, Use::Child);
    SECRETS[current + 1].set([draw(0), draw(1)]);
    // Release, so that a signal handler that sees the new generation sees the whole secret. The
    // child has only this thread.
    CURRENT.store(current + 1, Release);
}

/// Returns the key that a free object has in one generation.
#[inline(always)]
fn key_of(generation: usize, object: *mut u8) -> u64 {
    let hash = SECRETS[generation % GENERATIONS].hash(object as usize, Use::Key);
    hash >> (64 - HASHED) | (MARK + generation as u64) << HASHED
}

/// Returns the key that this process gives to a free object.
#[inline(always)]
fn key(object: *mut u8) -> u64 {
    key_of(CURRENT.load(Relaxed), object)
}

/// Returns whether a word has the mark of a key.
#[inline(always)]
fn has_mark(word: u64) -> bool {
    word >> HASHED & !7 == MARK
}

/// Returns whether a word is the object's key, from the secret of this process or of an ancestor.
#[cold]
#[inline(never)]
fn is_key(object: *mut u8, word: u64) -> bool {
    let generation = (word >> HASHED & 7) as usize;
    has_mark(word) && generation <= CURRENT.load(Relaxed) && word == key_of(generation, object)
}

/// Returns the masks with which a link in `object` may be encoded, one for each secret. The mask of
/// this process's own secret is first.
pub(crate) fn link_masks(object: *mut u8) -> impl Iterator<Item = usize> {
    let secrets = SECRETS[..=CURRENT.load(Relaxed) % GENERATIONS].iter();
    secrets
        .rev()
        .map(move |secret| secret.hash(object as usize, Use::Link) as usize)
}

/// What a hardened cache knows of its objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardening {
    /// The offset of the key in an object.
    key_at: usize,
    /// Bytes that a free zeroes.
    zeroed: usize,
    /// Bytes of an object with its key.
    pub(crate) room: usize,
}

impl Hardening {
    /// Returns what a hardened cache of objects of `size` bytes knows. If the cache has a
    /// constructor, a free keeps the first `kept` bytes. The caller holds the lock of the caches'
    /// registry.
    pub(crate) fn new(size: usize, kept: Option<usize>) -> Hardening {
        let key_at = kept.map_or(0, |kept| kept.next_multiple_of(8));
        init();
        Hardening {
            key_at,
            zeroed: if kept.is_some() {
                0
            } else {
                size.next_multiple_of(8)
            },
            room: size.max(key_at + 8),
        }
    }

    /// Returns how many bytes of an object its user may write to.
    pub(crate) fn usable(&self) -> usize {
        if self.zeroed == 0 {
            self.key_at
        } else {
            self.zeroed
        }
    }

    /// Returns the address of the key of a free object.
    pub(crate) fn word(&self, object: *mut u8) -> *mut u64 {
        object.wrapping_add(self.key_at).cast()
    }

    /// Gives a free object its key again, after a link has overwritten the object's first word.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    pub(crate) unsafe fn unlink(&self, object: *mut u8) {
        if self.key_at == 0 {
            // SAFETY: the key lies in the object, and the caller promises that no other thread uses
            // the object.
            unsafe { self.rearm(object) };
        }
    }

    /// Writes the key into an object that was taken from its slab. Returns false if the object was
    /// written to while it was free: it held neither a valid key nor the zero of a fresh object.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    pub(crate) unsafe fn arm(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object, and the caller promises that no other thread uses the
        // object.
        unsafe {
            let (word, key) = (self.word(object), key(object));
            let fine = *word == 0 || *word == key || is_key(object, *word);
            *word = key;
            fine
        }
    }

    /// Removes the key of a free object. Returns false if the key's word holds neither 0 nor a
    /// valid key, which means that the program wrote to the object after freeing it.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    pub(crate) unsafe fn release(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object, and the caller promises that no other thread uses the
        // object.
        unsafe {
            let word = self.word(object);
            let fine = *word == 0 || is_key(object, *word);
            *word = 0;
            fine
        }
    }

    /// Gives a free object its key, whatever the object holds.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    pub(crate) unsafe fn rearm(&self, object: *mut u8) {
        // SAFETY: the key lies in the object, and the caller promises that no other thread uses the
        // object.
        unsafe { *self.word(object) = key(object) };
    }

    /// Removes the key of an object that is handed out. Returns false if the key was overwritten.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    #[inline]
    pub(crate) unsafe fn disarm(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object, and the caller promises that no other thread uses the
        // object.
        unsafe {
            let word = self.word(object);
            let fine = *word == key(object) || is_key(object, *word);
            *word = 0;
            fine
        }
    }

    /// Returns whether an object has its key, because it is free.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    pub(crate) unsafe fn is_armed(&self, object: *mut u8) -> bool {
        // SAFETY: the key lies in the object, and the caller promises that no other thread uses the
        // object.
        let word = unsafe { *self.word(object) };
        has_mark(word) && is_key(object, word)
    }

    /// Zeroes an object that was freed, unless the cache has a constructor, and writes its key.
    /// Returns false and does nothing if the object has its key already, because then it is free.
    ///
    /// # Safety
    ///
    /// The object is of this hardened cache, and no other thread uses it.
    #[inline]
    pub(crate) unsafe fn scrub(&self, object: *mut u8) -> bool {
        // SAFETY: the key and the first `zeroed` bytes lie in the object. The caller promises that
        // no other thread uses the object.
        unsafe {
            let word = self.word(object);
            if has_mark(*word) && is_key(object, *word) {
                return false;
            }
            zero(object, self.zeroed);
            *word = key(object);
        }
        true
    }
}

/// Zeroes `size` bytes, a multiple of 8. Makes no call for few bytes, because a call would take
/// longer than the stores.
///
/// # Safety
///
/// The bytes begin at a multiple of 8, and no other thread uses them.
#[inline]
unsafe fn zero(object: *mut u8, size: usize) {
    const FEW: usize = 128;
    // SAFETY: the caller promises `size` unused bytes that begin at a multiple of 8.
    unsafe {
        if size > FEW {
            return object.write_bytes(0, size);
        }
        let words = object.cast::<u64>();
        for nth in 0..size / 8 {
            // Writes are volatile, because the compiler would otherwise turn the loop into a call.
            words.add(nth).write_volatile(0);
        }
    }
}

/// Shuffles objects into an order that depends on the secret and on the first object's address.
pub(crate) fn shuffle(objects: &mut [*mut u8]) {
    let Some(&first) = objects.first() else {
        return;
    };
    let seed = SECRETS[CURRENT.load(Relaxed) % GENERATIONS].hash(first as usize, Use::Order);
    // This is an xorshift generator, and the order may reveal its seed. The seed is a hash, so it
    // does not reveal the secret.
    let mut state = seed | 1;
    for last in (1..objects.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Chooses an index by the upper half times the number of indices, divided by 2^32. The
        // result is nearly uniform, and the division is a shift.
        objects.swap(last, ((state >> 32) as usize * (last + 1)) >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The designers' vectors for SipHash-1-3: key 00 01 … 0f, messages (empty), 00, 00 01, … of up
    /// to seven bytes.
    #[test]
    fn siphash_is_as_published() {
        let published: [[u8; 8]; 8] = [
            [0xdc, 0xc4, 0x0f, 0x05, 0x58, 0x01, 0xac, 0xab],
            [0x93, 0xca, 0x57, 0x7d, 0xf3, 0x9b, 0xf4, 0xc9],
            [0x4d, 0xd4, 0xc7, 0x4d, 0x02, 0x9b, 0xcb, 0x82],
            [0xfb, 0xf7, 0xdd, 0xe7, 0xb8, 0x0a, 0xf8, 0x8b],
            [0x28, 0x83, 0xd3, 0x88, 0x60, 0x57, 0x75, 0xcf],
            [0x67, 0x3b, 0x53, 0x49, 0x2f, 0xd5, 0xf9, 0xde],
            [0xa7, 0x22, 0x9f, 0xc5, 0x50, 0x2b, 0x0d, 0xc5],
            [0x40, 0x11, 0xb1, 0x9b, 0x98, 0x7d, 0x92, 0xd3],
        ];
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        for (length, expected) in published.into_iter().enumerate() {
            let bytes = 0x0006_0504_0302_0100 & ((1u64 << (8 * length)) - 1);
            let block = bytes | (length as u64) << 56;
            let hash = siphash_1_3(initial_state(key), block);
            assert_eq!(hash.to_le_bytes(), expected, "{length} bytes");
        }
    }
}
