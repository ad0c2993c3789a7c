//! Notes the policy that each thread has set after the start. Allocations of pages follow it.
//!
//! The kernel's page fault follows the policy that the thread has at that moment. An allocation
//! that asked the kernel for this policy would pay a system call for each page. Instead, each
//! thread keeps a note of the kernel's answer, and asks again only after a change.
//!
//! # The protocol
//!
//! * [`CHANGES`] counts the changes that this process has seen, of all threads: the calls of
//!   [`set_for_thread`](super::set_for_thread) and [`thread_changed`]. The first change also sets a
//!   flag in the word that holds the number of nodes (`nodes`). Without that flag, an allocation
//!   does not come here.
//! * A thread's **note** is one word: how the allocator follows the policy, and the count from
//!   before the thread asked the kernel. The note is valid while the count is the same.
//!
//! A change makes the notes of all threads invalid, and does not write the thread's own note. There
//! are two reasons:
//!
//! * A child after `vfork` shares its parent's memory, and thus the parent's note, but has a policy
//!   of its own. After the child's change, the parent asks the kernel and gets its own policy.
//! * A signal handler may change the policy while its thread asks the kernel. The thread then
//!   stores a note with the old count, which is invalid.
//!
//! A new thread has no note, so it asks the kernel, and gets the policy that it inherited.
//!
//! Notes are thread-specific data of the C library (`pthread_getspecific`), because such data takes
//! no memory of its own. The C library keeps the first [`INLINE_KEYS`] keys in the thread's
//! descriptor, and allocates memory for others. If the process has used up those keys before the
//! first change, threads keep no notes, and ask the kernel for each page.

use super::Placement;
use crate::nodes;
use core::ptr::without_provenance;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;

/// The number of changes seen. It stops at [`MOST`], and then no note is valid.
static CHANGES: AtomicU32 = AtomicU32::new(0);
const MOST: u32 = (1 << (64 - COUNT_SHIFT)) - 1;

/// One more than the key of the threads' notes, or 0 if there is no key yet.
static KEY: AtomicU32 = AtomicU32::new(0);
/// The keys below this number take no memory.
const INLINE_KEYS: libc::pthread_key_t = 32;

/// A note's lower bits: the policy's nodes. A policy with a node past these is not noted.
const MASK_BITS: u32 = 32;
/// The bits above the nodes: the policy's mode.
const COUNT_SHIFT: u32 = MASK_BITS + 4;

/// Tells Pinfold that the calling thread's policy may have changed.
///
/// A pool of [`Pages`](crate::pages::Pages) then asks the kernel for each thread's policy once.
/// [`set_for_thread`](super::set_for_thread) does this by itself, and the preloaded library does it
/// when a program calls `set_mempolicy`. Call this function after a system call that Pinfold cannot
/// see. Costs one atomic add.
///
/// ```
/// use pinfold::mempolicy;
///
/// // SAFETY: without nodes, the kernel reads no memory.
/// unsafe { libc::syscall(libc::SYS_set_mempolicy, 0, 0, 0) };
/// mempolicy::thread_changed();
/// ```
pub fn thread_changed() {
    if KEY.load(Relaxed) == 0 {
        make_key();
    }
    // Relaxed: a thread's note depends on its own changes only, and those come before it in program
    // order. A thread that is started later has no note.
    let _ = CHANGES.fetch_update(Relaxed, Relaxed, |count| {
        (count < MOST).then_some(count + 1)
    });
    super::init();
    nodes::threads_differ();
}

/// Makes the key of the threads' notes, unless another thread makes it first.
#[cold]
fn make_key() {
    let mut key = 0;
    // SAFETY: `key` is writable. Without a destructor, the C library calls nothing at a thread's
    // end.
    if unsafe { libc::pthread_key_create(&raw mut key, None) } != 0 {
        return;
    }
    // Relaxed: the key is a number, and the C library has made its data before it returned. A
    // thread that sees no key asks the kernel.
    let stored = KEY.compare_exchange(0, key + 1, Relaxed, Relaxed);
    if stored.is_err() {
        // SAFETY: `pthread_key_create` returned the key, and no other thread has seen it.
        unsafe { libc::pthread_key_delete(key) };
    }
}

/// Returns how the allocator follows the calling thread's policy. Returns `None` if no change was
/// seen, or the thread has no policy. Asks the kernel if the thread has no valid note.
#[inline(never)]
pub(crate) fn placement_of_thread() -> Option<Placement> {
    // Relaxed: see `thread_changed`.
    let count = CHANGES.load(Relaxed);
    if count == 0 {
        return None;
    }
    let key = KEY.load(Relaxed).checked_sub(1);
    let key = key.filter(|&key| key < INLINE_KEYS && count < MOST);
    let Some(key) = key else {
        return Placement::of_thread();
    };
    // SAFETY: the key was made by `pthread_key_create`, and is not deleted after it is in `KEY`.
    let note = unsafe { libc::pthread_getspecific(key) }.addr() as u64;
    if note >> COUNT_SHIFT == u64::from(count) {
        return placement_in(note);
    }
    let placement = Placement::of_thread();
    if let Some(note) = note_of(placement, count) {
        let note = without_provenance::<libc::c_void>(note as usize);
        // SAFETY: as above, the key exists. The C library does not use the pointer.
        unsafe { libc::pthread_setspecific(key, note) };
    }
    placement
}

/// Packs a note. Returns `None` if the placement has a node past the bits for nodes.
fn note_of(placement: Option<Placement>, count: u32) -> Option<u64> {
    let [mode, mask] = placement.map_or([0, 0], Placement::to_words);
    // The policy of a thread has no home node, so the first word is the mode alone.
    let fits = mask >> MASK_BITS == 0 && mode >> (COUNT_SHIFT - MASK_BITS) == 0;
    fits.then_some(u64::from(count) << COUNT_SHIFT | mode << MASK_BITS | mask)
}

fn placement_in(note: u64) -> Option<Placement> {
    let mode = note >> MASK_BITS & ((1 << (COUNT_SHIFT - MASK_BITS)) - 1);
    Placement::from_words([mode, note & ((1 << MASK_BITS) - 1)])
}

#[cfg(test)]
mod tests {
    use super::super::Mempolicy;
    use super::*;

    #[test]
    fn a_note_holds_a_placement_and_a_count() {
        for text in [
            "default",
            "local",
            "prefer:0",
            "bind:0",
            "weighted interleave",
        ] {
            let placement = Placement::of(&Mempolicy::parse(text).unwrap());
            for count in [1, MOST - 1] {
                let note = note_of(placement, count).unwrap();
                assert_eq!(placement_in(note), placement, "{text}");
                assert_eq!(note >> COUNT_SHIFT, u64::from(count), "{text}");
            }
        }
        assert!(note_of(Some(Placement::only(31)), 1).is_some());
        assert_eq!(note_of(Some(Placement::only(32)), 1), None);
    }
}
