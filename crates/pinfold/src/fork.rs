//! `fork`: one table of all locks, taken before a fork and given back after it on both sides.
//!
//! A child has one thread, the one that forked. Without care, the child would inherit locks whose
//! holders do not exist there, and data that those holders had changed only in part. So the forking
//! thread takes every lock first. The child then finds all locks free and everything under them
//! consistent. Critical sections need no lock: each has committed or has not. Another thread of the
//! parent may be moving a sheaf between a unit and a barn at that moment. The child loses the
//! objects in that sheaf, some kilobytes for each such thread.
//!
//! # The table
//!
//! A module with locks registers its `Hooks` before it first uses them. The table has one place
//! for each `Rank`, and a fork takes the locks in the order of the ranks, outermost first.
//!
//! # Why no thread waits for a fork that waits for it
//!
//! * The forking thread waits only for holders of our locks, and these wait for nothing else.
//! * A handler may interrupt a holder, and then allocate. A thread that allocates or frees through
//!   malloc never waits for the forking thread: it takes the way that handlers take
//!   (module `lock`). So the handler returns, and the holder goes on.
//! * For the same reason a thread that holds a lock of the C library or of the program, for which
//!   the forking thread waits next, gets through malloc to the place where it gives that lock back.
//! * A thread that holds a lock never finds an inner lock held by the forking thread: the forking
//!   thread takes the outermost lock first, and gives the innermost lock back first.
//! * Objects of a [`KmemCache`](crate::slab::KmemCache) have no such way: allocating and freeing
//!   them waits until the fork is over.
//!
//! # Who calls
//!
//! The C library calls `before`, and `in_parent` or `in_child`: `register` has asked it to, by
//! `pthread_atfork`, at the latest when the first module registered. An allocator under the C
//! library's names says [`handle`] and calls [`prepare`], [`parent`] and [`child`] itself, because
//! `pthread_atfork` may allocate.
//!
//! # Forks from signal handlers
//!
//! A handler may fork above a frame that holds a lock. That lock stays with the frame, in the
//! parent and in the child. If another thread forks at that moment, it waits for the frame, so the
//! handler must not wait for it: the handler's fork takes no lock. Its child finds locks held by
//! threads that it does not have, and may wait for them for good; it should call `exec` or `_exit`.
//!
//! The C library's own `malloc` takes its locks after these. So a program that keeps the C
//! library's `malloc` must not fork while a handler that has interrupted `malloc` uses caches.

use crate::lock::{FORKS, Guard, Lock};
use crate::sys;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32};
use core::time::Duration;

/// The modules with locks, in the order in which a fork takes these.
#[derive(Clone, Copy)]
pub(crate) enum Rank {
    /// The counters' shards.
    Shards,
    /// The places in the per-CPU units.
    Units,
    /// Memory pools, caches, nodes, sheaves.
    Slab,
    /// Arenas and metadata.
    Page,
    /// Policies that several ranges share.
    Policies,
    /// The counters' gates. Last: a thread that waits until no gate is closed may hold any lock.
    Gates,
    /// The shepherd's threads, which a child does not have.
    Shepherd,
}

const RANKS: usize = Rank::Shepherd as usize + 1;

/// What a module does about a fork.
pub(crate) struct Hooks {
    pub(crate) rank: Rank,
    /// Whether the thread with the given thread pointer holds one of the module's locks.
    pub(crate) holds: fn(u64) -> bool,
    /// Takes the module's locks, in the parent.
    pub(crate) before: fn(),
    /// Forgets the threads that the child does not have. Runs in the child before any `after`.
    pub(crate) child: fn(),
    /// Gives back what `before` took, in the parent and in the child. The modules are called in the
    /// reverse order of their ranks.
    pub(crate) after: fn(),
}

static TABLE: [AtomicPtr<Hooks>; RANKS] = [const { AtomicPtr::new(null_mut()) }; RANKS];

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
/// The C library calls the functions below.
const REGISTERED: u8 = 2;
/// An allocator calls them.
const HANDLED: u8 = 3;

/// One fork at a time; held from `prepare` until `parent` or `child`.
static ONE: Lock<()> = Lock::new(());
/// Forks of handlers that interrupted the fork under way in its own thread.
static NESTED: AtomicU32 = AtomicU32::new(0);
/// How many forks have begun or ended: odd while one is under way.
static TURNS: AtomicU32 = AtomicU32::new(0);

/// Registers before `main`, or when the library is loaded: `pthread_atfork` takes locks, and the
/// first add to a counter may be a signal handler's.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    listen();
}

/// Enters `hooks` into the table, once. Returns false while the C library does not call this module
/// yet, because another thread, or the frame that this thread interrupted, is about to register it:
/// then the caller must not make anything yet that a fork could catch half done.
pub(crate) fn register(hooks: &'static Hooks) -> bool {
    let place = &TABLE[hooks.rank as usize];
    // Release pairs with the acquire in `modules`.
    place.store(core::ptr::from_ref(hooks).cast_mut(), Release);
    listen()
}

fn listen() -> bool {
    if let Err(stage) = STAGE.compare_exchange(NOT_YET, UNDER_WAY, Acquire, Acquire) {
        return stage != UNDER_WAY;
    }
    // SAFETY: the handlers are functions without arguments, which stay loaded. A failure (no
    // memory) leaves a fork in the middle of a slow path unprotected, and nothing else.
    sys::keep_errno(|| unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
    });
    // The allocator may have come in between: it stays in charge.
    let _ = STAGE.compare_exchange(UNDER_WAY, REGISTERED, AcqRel, Relaxed);
    true
}

/// Says that the caller, an allocator under which `pthread_atfork` could allocate, calls
/// [`prepare`], [`parent`] and [`child`] itself.
#[doc(hidden)]
pub fn handle() {
    STAGE.store(HANDLED, Release);
}

/// The modules in the table, in the order of the ranks.
fn modules() -> impl DoubleEndedIterator<Item = &'static Hooks> {
    // Acquire pairs with the release in `register`.
    // SAFETY: the table holds null or addresses of statics.
    let hooks = |place: &AtomicPtr<Hooks>| unsafe { place.load(Acquire).as_ref() };
    TABLE.iter().filter_map(hooks)
}

extern "C" fn before() {
    if STAGE.load(Acquire) == REGISTERED {
        prepare();
    }
}

extern "C" fn in_parent() {
    if STAGE.load(Acquire) == REGISTERED {
        parent();
    }
}

extern "C" fn in_child() {
    if STAGE.load(Acquire) == REGISTERED {
        child();
    }
}

/// The calling thread's thread pointer.
fn me() -> u64 {
    pinfold_rseq::thread_pointer() as u64
}

/// Takes all locks. Call it in the parent before the fork.
#[doc(hidden)]
pub fn prepare() {
    if ONE.is_held_by(me()) {
        // A handler forks above a frame that forks already, and that has the locks.
        NESTED.fetch_add(1, Relaxed);
        return;
    }
    let Some(one) = ONE.try_lock().or_else(wait_for_other) else {
        return;
    };
    core::mem::forget(one);
    // Relaxed: the releases of `Word::lock_for_fork` pass this store on with each lock's word.
    FORKS.thread.store(me(), Relaxed);
    TURNS.fetch_add(1, Release);
    modules().for_each(|hooks| (hooks.before)());
}

/// Waits until the fork of another thread is over. Returns `None` if this is a handler above a
/// frame that holds a lock: the other fork waits for that frame.
#[cold]
fn wait_for_other() -> Option<Guard<'static, ()>> {
    let holds = modules().any(|hooks| (hooks.holds)(me()));
    if holds { None } else { ONE.lock() }
}

/// Gives all locks back. Call it in the parent after the fork.
#[doc(hidden)]
pub fn parent() {
    if !ONE.is_held_by(me()) {
        // `prepare` took no lock.
    } else if NESTED.load(Relaxed) > 0 {
        NESTED.fetch_sub(1, Relaxed);
    } else {
        give_back();
    }
}

fn give_back() {
    // Innermost first: a thread that gets an outer lock must not find that the forking thread still
    // holds an inner one, for it might divert where its caller knows no other way.
    modules().rev().for_each(|hooks| (hooks.after)());
    FORKS.thread.store(0, Relaxed);
    TURNS.fetch_add(TURNS.load(Relaxed) % 2, Release);
    sys::wake(&TURNS);
    // SAFETY: `prepare` took the lock in this thread, or the thread that did is not in this child.
    unsafe { ONE.unlock() };
}

/// Forgets the parent's other threads and gives all locks back. Call it in the child after the
/// fork.
#[doc(hidden)]
pub fn child() {
    modules().for_each(|hooks| (hooks.child)());
    NESTED.store(0, Relaxed);
    FORKS.waiters.store(0, Relaxed);
    // Also what another thread of the parent had taken for its own fork: under these locks
    // everything is consistent.
    give_back();
}

/// How many forks have begun or ended: odd while one is under way.
pub(crate) fn turn() -> u32 {
    // Acquire pairs with the releases of `prepare` and `finish`.
    TURNS.load(Acquire)
}

/// Waits until the fork that another thread makes is over. Returns false at once if no other thread
/// forks. Not for a thread that holds a lock.
#[cfg_attr(
    not(feature = "allocator-api2"),
    expect(dead_code, reason = "its only caller")
)]
#[cold]
pub(crate) fn await_end() -> bool {
    // Acquire pairs with the release in `prepare`: `FORKS` is seen.
    let turn = TURNS.load(Acquire);
    let forking = FORKS.thread.load(Relaxed);
    if turn.is_multiple_of(2) || forking == pinfold_rseq::thread_pointer() as u64 {
        return false;
    }
    sys::wait_for_change(&TURNS, turn, Duration::from_millis(1));
    true
}
