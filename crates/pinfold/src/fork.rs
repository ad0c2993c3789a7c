//! Takes every lock before a fork, and gives it back afterwards in the parent and in the child.
//!
//! A child has one thread, the one that forked. Without care, the child would inherit locks whose
//! holders it does not have, and data that those holders had changed in part. So the forking thread
//! takes every lock first. The child then finds all locks free and the data under them consistent.
//!
//! Critical sections need no lock, because each one takes effect completely or not at all. At the
//! moment of the fork, another thread of the parent may be moving a sheaf (an array of free
//! objects) between a CPU's unit and a node's store. The child loses the objects in that sheaf, a
//! few kilobytes for each such thread, or a large block that the thread frees or allocates.
//!
//! A module with locks registers its `Hooks` before it first takes one. A fork takes the locks in
//! the order of their `Rank`, outermost first.
//!
//! # Why a fork does not deadlock
//!
//! * First, the forking thread waits for holders of Pinfold's locks. These holders wait only for
//!   other locks of Pinfold, and for threads that fold a counter's shard, which wait for nothing.
//! * A handler may interrupt a holder and then allocate. A thread that allocates or frees through
//!   malloc never waits long for the forking thread: it does without the lock, as handlers do
//!   (module `lock`). So the handler returns, and the holder goes on.
//! * Next, the forking thread waits for locks of the C library and of the program. A thread that
//!   holds such a lock never waits for the fork in malloc, so it goes on and gives the lock back.
//! * A thread that holds a lock never finds an inner lock taken for a fork. The forking thread
//!   takes the outermost lock first, and gives the innermost lock back first.
//! * Objects of a [`KmemCache`](crate::slab::KmemCache) cannot be allocated or freed without the
//!   lock, so these calls wait until the fork is over.
//!
//! # Callers
//!
//! The C library calls `before`, and then `in_parent` or `in_child`. `listen` has registered them
//! by `pthread_atfork` when the library was loaded, or at the latest when the first module
//! registered.
//!
//! `pthread_atfork` may allocate. So an allocator with the C library's names calls [`handle`]
//! first, and then calls [`prepare`], [`parent`] and [`child`] itself.
//!
//! # Forks from signal handlers
//!
//! A handler may fork while the frame that it interrupted holds a lock. The frame keeps that lock,
//! in the parent and in the child.
//!
//! Another thread may wait for the frame's lock and hold a lock that the handler's fork needs. That
//! thread may also be forking.
//!
//! 1. So the handler's fork first marks the locks of its thread's frames. A thread that can do
//!    without such a lock does not wait for it. Calls that cannot do without the lock learn from
//!    [`has_forked_since`] that a fork may be the reason, and try again ([`retry`]).
//! 2. The fork then takes the locks. It gives up if one thread keeps a lock for a tenth of a
//!    second, and does not wait for another thread's fork at all.
//! 3. If it has given up, it goes on without locks. Its child may inherit locks whose holders it
//!    does not have, and would wait for such a lock without end. So the child should call `exec` or
//!    `_exit`.
//!
//! A handler may also interrupt [`prepare`] and fork. The same holds for its child.
//!
//! In a program that keeps the C library's `malloc`, a forking thread takes Pinfold's locks first,
//! and then waits for the lock of `malloc`. A handler may have interrupted the holder of that lock.
//! If the handler then waits for one of Pinfold's locks, neither thread goes on. So a handler that
//! has interrupted the C library's `malloc` must not use caches while another thread forks.

pub use crate::lock::{Hooks, Rank};
use crate::lock::{Lock, Patience, Word, enter, is_any_held, me, modules};
use crate::sys;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, fence};
use core::time::Duration;

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
/// The C library calls `before`, `in_parent` and `in_child`.
const REGISTERED: u8 = 2;
/// An allocator calls `prepare`, `parent` and `child`.
const HANDLED: u8 = 3;

/// Allows one fork at a time. Held from `prepare` until `parent` or `child`.
static ONE: Lock<()> = Lock::new(Rank::Fork, ());
/// Whether [`before`] took the locks for the fork under way. An allocator may begin to handle forks
/// on another thread before that fork ends. The end of the fork must give the locks back
/// nevertheless. Accessed by the holder of [`ONE`].
static IS_OURS: AtomicBool = AtomicBool::new(false);
/// The number of forks by signal handlers that interrupted the fork under way, in its own thread.
static NESTED: AtomicU32 = AtomicU32::new(0);
/// Changes when a fork takes or marks locks, and when it gives them back. Odd while a fork is under
/// way that takes the locks.
static TURNS: AtomicU32 = AtomicU32::new(0);
/// The threads that have marked locks for a fork that is under way. A slot is 0, or a thread
/// pointer. Its lowest bits ([`DEPTH`]) have the number of that thread's forks under way, which
/// handlers may nest.
static MARKING: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];
/// Thread pointers are aligned to at least 8 bytes.
const DEPTH: u64 = 7;

/// Registers before `main`, or when the library is loaded. Registering with the first use of a
/// counter could deadlock: `pthread_atfork` takes a lock of the C library, the first use may be in
/// a signal handler, and the handler may have interrupted the holder of that lock.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    listen();
}

/// Enters `hooks` into the table. If no earlier call has done so, registers this module with the C
/// library, which then calls it at each fork.
///
/// Returns false while another thread, or a frame that the caller interrupted, is still registering
/// this module with the C library. Also returns false while another thread forks, because that fork
/// may have read the table before the hooks were in it. Until then, the caller must not make
/// anything that a fork could copy half made.
pub fn register(hooks: &'static [Hooks]) -> bool {
    hooks.iter().for_each(enter);
    // Pairs with the fence in `take_all`: either the fork finds the hooks, or this thread sees that
    // the fork is under way.
    fence(SeqCst);
    listen() && !is_under_way(turn())
}

/// Returns whether another thread forks and takes the locks, if [`turn`] has returned `turn`.
fn is_under_way(turn: u32) -> bool {
    !turn.is_multiple_of(2) && !ONE.is_held()
}

fn listen() -> bool {
    if let Err(stage) = STAGE.compare_exchange(NOT_YET, UNDER_WAY, Acquire, Acquire) {
        return stage != UNDER_WAY;
    }
    // SAFETY: the three functions take no arguments and stay loaded. If the call fails for lack of
    // memory, this module does not protect forks, and nothing else changes.
    sys::keep_errno(|| unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
    });
    // If `handle` has changed `STAGE` meanwhile, the exchange fails. The allocator itself calls
    // `prepare`, `parent` and `child` then.
    let _ = STAGE.compare_exchange(UNDER_WAY, REGISTERED, AcqRel, Relaxed);
    true
}

/// Tells this module that the caller will call [`prepare`], [`parent`] and [`child`] itself.
///
/// For an allocator under which `pthread_atfork` could allocate. A fork on another thread
/// that has taken the locks ends as it began.
#[doc(hidden)]
pub fn handle() {
    STAGE.store(HANDLED, Release);
}

pub(crate) extern "C" fn before() {
    if is_ours() {
        prepare();
        if ONE.is_held() {
            IS_OURS.store(true, Relaxed);
        }
    }
}

pub(crate) extern "C" fn in_parent() {
    if is_ours() {
        parent();
    }
}

extern "C" fn in_child() {
    if is_ours() {
        child();
    }
}

/// Returns whether the three functions above serve the fork under way, and not the allocator.
fn is_ours() -> bool {
    STAGE.load(Acquire) == REGISTERED || ONE.is_held() && IS_OURS.load(Relaxed)
}

/// Takes all locks, if that is possible. Call it in the parent before the fork.
#[doc(hidden)]
pub fn prepare() {
    if ONE.is_held() {
        // A handler interrupted a fork of this thread and forks too.
        NESTED.fetch_add(1, Relaxed);
        return;
    }
    let patience = match is_any_held(Rank::Fork) {
        false => Patience::Endless,
        // A handler interrupted a holder.
        true => {
            mark();
            Patience::Short
        }
    };
    let Some(one) = ONE.lock() else {
        // Another thread forks, and may wait for the holder that the handler interrupted.
        return;
    };
    core::mem::forget(one);
    // `ONE` is not held any more in the child of a handler that interrupted `take_all` and forked.
    // If that handler returns, this thread goes on here.
    if !take_all(patience) || !ONE.is_held() {
        give_back();
    }
}

/// Takes the locks of all modules. The caller holds [`ONE`]. Returns false if `patience` ends
/// first.
fn take_all(patience: Patience) -> bool {
    TURNS.fetch_add(1, Release);
    // Pairs with the fence in `register`.
    fence(SeqCst);
    modules().all(|hooks| hooks.before(patience))
}

/// Calls `f` with the word of each lock that an interrupted frame of this thread holds.
fn each_held(f: fn(&Word)) {
    modules().for_each(|hooks| {
        hooks.each_word(|word| {
            if word.holder() == me() {
                f(word);
            }
        });
    });
}

/// Marks the locks that interrupted frames of this thread hold, so that threads that can do without
/// them do not wait for the fork. Does nothing if too many threads do so at once.
fn mark() {
    let mine = |slot: &&AtomicU64| slot.load(Relaxed) & !DEPTH == me();
    let free = |slot: &&AtomicU64| slot.compare_exchange(0, me(), AcqRel, Relaxed).is_ok();
    let Some(slot) = MARKING
        .iter()
        .find(mine)
        .or_else(|| MARKING.iter().find(free))
    else {
        return;
    };
    // Only this thread and its handlers change the slot from now on. A handler leaves it as it was.
    if slot.load(Relaxed) & DEPTH < DEPTH {
        slot.fetch_add(1, Relaxed);
    }
    TURNS.fetch_add(2, Release);
    each_held(Word::mark_below_fork);
}

/// Takes the marks back, at the end of the outermost fork that made them.
fn unmark() {
    let Some(slot) = MARKING
        .iter()
        .find(|slot| slot.load(Relaxed) & !DEPTH == me())
    else {
        return;
    };
    if slot.load(Relaxed) & DEPTH > 1 {
        slot.fetch_sub(1, Relaxed);
        return;
    }
    each_held(Word::unmark_below_fork);
    TURNS.fetch_add(2, Release);
    // Release pairs with the acquire in `has_forked_since`: a thread that does not find the slot
    // sees that `TURNS` has changed.
    slot.store(0, Release);
}

/// Gives all locks back. Call it in the parent after the fork.
#[doc(hidden)]
pub fn parent() {
    if ONE.is_held() {
        if NESTED.load(Relaxed) > 0 {
            NESTED.fetch_sub(1, Relaxed);
            return;
        }
        give_back();
    }
    unmark();
}

fn give_back() {
    // Innermost first. Otherwise a thread could get an outer lock, find an inner one still taken
    // for the fork, and give up although its caller has no other way to go on.
    modules().rev().for_each(Hooks::after);
    // In one step: a handler's child may make the number even between two.
    let _ = TURNS.fetch_update(Release, Relaxed, |turns| Some(turns + turns % 2));
    sys::wake(&TURNS);
    IS_OURS.store(false, Relaxed);
    // SAFETY: this thread holds the lock, or this is a child in which no other thread exists.
    unsafe { ONE.unlock() };
}

/// Forgets the parent's other threads and gives all locks back. Call it in the child after the
/// fork.
#[doc(hidden)]
pub fn child() {
    modules().for_each(|hooks| (hooks.child)());
    NESTED.store(0, Relaxed);
    // If a handler's fork took no lock, another thread of the parent may hold the locks for a fork
    // of its own. `give_back` gives these locks back too. The data under these locks is consistent.
    give_back();
    unmark();
    let others = |slot: &&AtomicU64| slot.load(Relaxed) & !DEPTH != me();
    MARKING
        .iter()
        .filter(others)
        .for_each(|slot| slot.store(0, Relaxed));
}

/// Returns a number that changes when a fork begins and when it ends.
pub(crate) fn turn() -> u32 {
    // Acquire pairs with the releases in this module: a thread that sees the end of a fork also
    // sees the locks given back.
    TURNS.load(Acquire)
}

/// Returns whether a lock may have been refused since [`turn`] returned `turn`, because a thread
/// forked.
pub(crate) fn has_forked_since(turn: u32) -> bool {
    // Acquire pairs with the release in `unmark`.
    let marked = MARKING.iter().any(|slot| slot.load(Acquire) != 0);
    let now = self::turn();
    marked || now != turn || is_under_way(now)
}

/// Waits until another thread's fork is over, or a millisecond has passed, if that fork may have
/// refused a lock since [`turn`] returned `turn`. The caller then tries again.
///
/// Returns false at once if there was no such fork. Returns false in the forking thread, and in a
/// signal handler that interrupted a holder: the fork may wait for that holder.
#[cold]
pub(crate) fn await_end(turn: u32) -> bool {
    if !has_forked_since(turn) || is_any_held(Rank::Fork) {
        return false;
    }
    let now = self::turn();
    if is_under_way(now) {
        sys::wait_for_change(&TURNS, now, Duration::from_millis(1));
    } else if now == turn {
        sys::sleep_microseconds(1000);
    }
    true
}

/// Calls `f` until it returns a value, or until no other thread's fork can be the reason that it
/// did not. Gives up after 1000 calls, which takes a second or more while forks are under way.
pub(crate) fn retry<T>(mut f: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..1000 {
        let turn = turn();
        let done = f();
        if done.is_some() || !await_end(turn) {
            return done;
        }
    }
    None
}
