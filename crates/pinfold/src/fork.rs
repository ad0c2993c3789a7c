//! Takes every lock before a fork, and gives it back afterwards in the parent and in the child.
//!
//! A child has one thread, the one that forked. Without care, the child would inherit locks whose
//! holders it does not have, and data that those holders had changed in part. So the forking thread
//! takes every lock first. The child then finds all locks free and the data under them consistent.
//!
//! Critical sections need no lock, because each one takes effect completely or not at all. At the
//! moment of the fork, another thread of the parent may be moving a sheaf (an array of free
//! objects) between a CPU's unit and a node's store. The child loses the objects in that sheaf, a
//! few kilobytes for each such thread.
//!
//! # The table
//!
//! A module with locks registers its `Hooks` before it first uses them. The table has one entry for
//! each `Rank`. A fork takes the locks in the order of the ranks, outermost first.
//!
//! # Why a fork does not deadlock
//!
//! * First, the forking thread waits for holders of Pinfold's locks. These holders wait only for
//!   other locks of Pinfold.
//! * A handler may interrupt a holder and then allocate. A thread that allocates or frees through
//!   malloc never waits for the forking thread: it takes the other way that handlers take (module
//!   `lock`). So the handler returns, and the holder goes on.
//! * Next, the forking thread waits for locks of the C library and of the program. A thread that
//!   holds such a lock never waits for the fork in malloc, so it goes on and gives the lock back.
//! * A thread that holds a lock never finds an inner lock held by the forking thread. The forking
//!   thread takes the outermost lock first, and gives the innermost lock back first.
//! * Objects of a [`KmemCache`](crate::slab::KmemCache) have no other way: allocating and freeing
//!   them waits until the fork is over.
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
//! Another thread may be forking at that moment. That thread waits for the frame's lock, so the
//! handler must not wait for that thread. Instead, the handler's fork takes no lock. Its child may
//! inherit locks whose holders it does not have, and would wait for such a lock without end. So the
//! child should call `exec` or `_exit`.
//!
//! In a program that keeps the C library's `malloc`, a forking thread takes Pinfold's locks first,
//! and then waits for the lock of `malloc`. A handler may have interrupted the holder of that lock.
//! If the handler then waits for one of Pinfold's locks, neither thread goes on. So a handler that
//! has interrupted the C library's `malloc` must not use caches while another thread forks.

use crate::lock::{FORKS, Guard, Lock, Word};
use crate::sys;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, fence};
use core::time::Duration;

/// What a fork takes, in this order. Of the locks, this is the lock order: a thread that holds a
/// lock may wait for the locks below it. No thread but the forking one holds two locks of a kind.
#[derive(Clone, Copy)]
pub enum Rank {
    /// The thresholds that follow the online CPUs. A holder takes counters' shards.
    Thresholds,
    /// The counters' shards. No thread holds them together with a lock below.
    Shards,
    /// The blocks in the per-CPU units. Code that holds this takes no other lock, but a handler may
    /// interrupt a holder of this or of a lock below, and take the other one.
    Units,
    /// Readers of per-CPU lists and rings.
    Readers,
    /// The memory pools.
    Pools,
    /// Grace periods. This lock is only tried.
    Grace,
    /// `STOPPING`, for stopping CPUs.
    Stopping,
    /// The registry of caches.
    Registry,
    /// The caches' pending sheaves.
    Pending,
    /// The caches' parts on the nodes.
    Nodes,
    /// The pool of sheaves' blocks.
    Sheaves,
    /// The nodes' arenas.
    Arenas,
    /// The regions.
    Regions,
    /// The memory for metadata.
    Metadata,
    /// The buffer for reading the cgroup's files.
    Cgroup,
    /// The policies that several ranges share.
    Policies,
    /// The counters that other processes can see. A holder takes no other lock.
    Shown,
    /// The counters' gates, which are no locks. A fork waits here until no other thread keeps a
    /// gate closed, and must already hold the locks then (module `counter::gates`).
    Gates,
    /// The shepherd's threads, which a child does not have.
    Shepherd,
    /// The program's threads, which `pinfold-malloc` counts. A child has one.
    Threads,
}

const RANKS: usize = Rank::Threads as usize + 1;

/// What a module does about a fork.
pub struct Hooks {
    pub(crate) rank: Rank,
    pub(crate) taken: Taken,
    /// Forgets the threads that the child does not have. Runs in the child before anything is given
    /// back.
    pub(crate) child: fn(),
}

/// Calls its argument with the word of each lock of one rank.
type Visit = fn(&mut dyn FnMut(&Word));

/// What a fork takes of one rank.
pub(crate) enum Taken {
    Locks(Visit),
    /// Something else.
    Other {
        /// Returns whether the thread with the given thread pointer holds it.
        is_held_by: fn(u64) -> bool,
        /// Takes it, in the parent.
        before: fn(),
        /// Gives it back, in the parent and in the child.
        after: fn(),
    },
}

impl Hooks {
    /// Returns hooks that take locks, and do nothing else.
    pub(crate) const fn locks(rank: Rank, visit: Visit) -> Hooks {
        Hooks {
            rank,
            taken: Taken::Locks(visit),
            child: || {},
        }
    }

    /// Returns hooks that take nothing, and call `child` in the child of each fork.
    pub const fn in_child(rank: Rank, child: fn()) -> Hooks {
        Hooks {
            child,
            ..Hooks::locks(rank, |_| {})
        }
    }

    fn is_held_by(&self, thread: u64) -> bool {
        match self.taken {
            Taken::Locks(visit) => {
                let mut held = false;
                visit(&mut |word| held |= word.holder() == thread);
                held
            }
            Taken::Other { is_held_by, .. } => is_held_by(thread),
        }
    }

    fn before(&self) {
        match self.taken {
            Taken::Locks(visit) => visit(&mut |word| word.lock_for_fork(me(), &FORKS)),
            Taken::Other { before, .. } => before(),
        }
    }

    fn after(&self) {
        match self.taken {
            Taken::Locks(visit) => visit(&mut Word::unlock_after_fork),
            Taken::Other { after, .. } => after(),
        }
    }
}

static TABLE: [AtomicPtr<Hooks>; RANKS] = [const { AtomicPtr::new(null_mut()) }; RANKS];

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
/// The C library calls `before`, `in_parent` and `in_child`.
const REGISTERED: u8 = 2;
/// An allocator calls `prepare`, `parent` and `child`.
const HANDLED: u8 = 3;

/// Allows one fork at a time. Held from `prepare` until `parent` or `child`.
static ONE: Lock<()> = Lock::new(());
/// The number of forks by signal handlers that interrupted the fork under way, in its own thread.
static NESTED: AtomicU32 = AtomicU32::new(0);
/// How often a fork began or ended. Odd while a fork is under way.
static TURNS: AtomicU32 = AtomicU32::new(0);

/// Registers before `main`, or when the library is loaded. Registering with the first use of a
/// counter could deadlock: `pthread_atfork` takes a lock of the C library, the first use may be in
/// a signal handler, and the handler may have interrupted the holder of that lock.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    listen();
}

/// Returns whether the thread with thread pointer `thread` holds a lock of `rank`, or one that
/// comes after it in the lock order.
///
/// Reads a word of each such lock. So only a thread that is about to sleep, or has failed, calls
/// this function.
#[cold]
pub(crate) fn is_held_from(rank: Rank, thread: u64) -> bool {
    let mut modules = modules().filter(|hooks| hooks.rank as usize >= rank as usize);
    modules.any(|hooks| hooks.is_held_by(thread))
}

/// Enters `hooks` into the table. If no earlier call has done so, registers this module with the C
/// library, which then calls it at each fork.
///
/// Returns false while another thread, or a frame that the caller interrupted, is still registering
/// this module with the C library. Also returns false while another thread forks, because that fork
/// may have read the table before. Until then, the caller must not make anything that a fork could
/// copy half made.
pub fn register(hooks: &'static [Hooks]) -> bool {
    for hooks in hooks {
        // Release pairs with the acquire in `modules`: a fork that finds the hooks also sees what
        // they use.
        TABLE[hooks.rank as usize].store(core::ptr::from_ref(hooks).cast_mut(), Release);
    }
    // Pairs with the fence in `prepare`: either the fork finds the hooks, or this thread sees that
    // the fork is under way.
    fence(SeqCst);
    listen() && !is_another_under_way(turn())
}

/// Returns whether the fork number `turn` is under way, in another thread.
fn is_another_under_way(turn: u32) -> bool {
    !turn.is_multiple_of(2) && FORKS.thread.load(Relaxed) != me()
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
/// For an allocator under which `pthread_atfork` could allocate.
#[doc(hidden)]
pub fn handle() {
    STAGE.store(HANDLED, Release);
}

/// Returns the modules in the table, in the order of their ranks.
fn modules() -> impl DoubleEndedIterator<Item = &'static Hooks> {
    // Acquire pairs with the release in `register`: this thread also sees what the hooks use.
    // SAFETY: `register` stores only addresses of statics, and an empty entry is null.
    let hooks = |entry: &AtomicPtr<Hooks>| unsafe { entry.load(Acquire).as_ref() };
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

/// Returns the calling thread's thread pointer.
fn me() -> u64 {
    pinfold_rseq::thread_pointer() as u64
}

/// Takes all locks. Call it in the parent before the fork.
#[doc(hidden)]
pub fn prepare() {
    if ONE.is_held_by(me()) {
        // A handler interrupted a fork of this thread and forks too. The locks are taken already.
        NESTED.fetch_add(1, Relaxed);
        return;
    }
    if let Some(one) = ONE.try_lock().or_else(wait_for_other) {
        core::mem::forget(one);
        take_all();
    }
}

/// Takes the locks of all modules. The caller holds [`ONE`].
fn take_all() {
    // Relaxed, because `Word::lock_for_fork` changes each lock's word with release order after this
    // store.
    FORKS.thread.store(me(), Relaxed);
    TURNS.fetch_add(1, Release);
    // Pairs with the fence in `register`.
    fence(SeqCst);
    modules().for_each(Hooks::before);
}

/// Waits until the fork of another thread is over. Returns `None` if the caller is a handler that
/// interrupted a holder: the other fork waits for that holder.
#[cold]
fn wait_for_other() -> Option<Guard<'static, ()>> {
    let holds = modules().any(|hooks| hooks.is_held_by(me()));
    if holds { None } else { ONE.lock() }
}

/// Gives all locks back. Call it in the parent after the fork.
#[doc(hidden)]
pub fn parent() {
    if !ONE.is_held_by(me()) {
        // `prepare` took no lock, so there is none to give back.
    } else if NESTED.load(Relaxed) > 0 {
        NESTED.fetch_sub(1, Relaxed);
    } else {
        give_back();
    }
}

fn give_back() {
    // Innermost first. Otherwise a thread could get an outer lock, find an inner one still held by
    // the forking thread, and give up although its caller has no other way to go on.
    modules().rev().for_each(Hooks::after);
    FORKS.thread.store(0, Relaxed);
    TURNS.fetch_add(TURNS.load(Relaxed) % 2, Release);
    sys::wake(&TURNS);
    // SAFETY: `prepare` took the lock in this thread, or this is a child without the thread that
    // took it.
    unsafe { ONE.unlock() };
}

/// Forgets the parent's other threads and gives all locks back. Call it in the child after the
/// fork.
#[doc(hidden)]
pub fn child() {
    modules().for_each(|hooks| (hooks.child)());
    NESTED.store(0, Relaxed);
    FORKS.waiters.store(0, Relaxed);
    // If a handler's fork took no lock, another thread of the parent may hold the locks for a fork
    // of its own. `give_back` gives these locks back too. The data under these locks is consistent.
    give_back();
}

/// Returns how often a fork began or ended. The number is odd while a fork is under way.
pub(crate) fn turn() -> u32 {
    // Acquire pairs with the releases in `prepare` and `give_back`: a thread that sees the end of a
    // fork also sees the locks given back.
    TURNS.load(Acquire)
}

/// Waits until another thread's fork is over, or a millisecond has passed. Returns false at once if
/// no other thread forks. The calling thread must hold no lock.
#[cold]
pub(crate) fn await_end() -> bool {
    // Acquire pairs with the release in `prepare`: this thread sees the stored thread pointer.
    let turn = TURNS.load(Acquire);
    if !is_another_under_way(turn) {
        return false;
    }
    sys::wait_for_change(&TURNS, turn, Duration::from_millis(1));
    true
}
