//! Thresholds that follow the CPUs that are online, in both directions.
//!
//! An add may run in a signal handler, so it can raise a threshold but not lower it: lowering waits
//! for locks and fences. So the shepherd lowers thresholds, at a tick after its thread has noticed
//! that CPUs went offline. It finds the tables of counters in a list. A
//! [`VmStat`](super::VmStat) enters its table when a shepherd is told to watch it, and takes the
//! table out when it is dropped.
//!
//! [`TABLES`] is the lock of the list. Its holder may wait for the locks of counters.
//!
//! Lowering interrupts the CPUs that may be in the middle of an add. An isolated CPU is never
//! interrupted: if it has counted an item, that item's threshold stays where it was.

use super::threshold::{FIXED, with_normal};
use crate::counter::{PerCpuCounter, outlast_fork, register_fork};
use crate::fork;
use crate::lock::{Guard, Hooks, Lock, Rank};
use crate::shepherd::{self, Reach};
use crate::topology::facts;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize};

/// The first table of the list.
static TABLES: Lock<AtomicPtr<Table>> = Lock::new(Rank::Thresholds, AtomicPtr::new(null_mut()));

/// The beginning of a mapping that holds the counters of a `VmStat`. The counters follow it.
#[repr(C, align(128))]
pub(super) struct Table {
    /// The number of CPUs for which the thresholds were chosen, or [`FIXED`].
    pub(super) cpus: AtomicUsize,
    /// The number of counters, and how many of them belong to each node.
    counters: usize,
    each: usize,
    /// Whether the table is in the list, and the next table there. Only a holder of [`TABLES`] uses
    /// them.
    listed: AtomicBool,
    next: AtomicPtr<Table>,
}

const _: () = assert!(align_of::<PerCpuCounter>() <= align_of::<Table>());

impl Table {
    pub(super) fn new(cpus: usize, counters: usize, each: usize) -> Table {
        Table {
            cpus: AtomicUsize::new(cpus),
            counters,
            each,
            listed: AtomicBool::new(false),
            next: AtomicPtr::new(null_mut()),
        }
    }

    /// Chooses the thresholds for `cpus` CPUs, unless the program has chosen them. The caller holds
    /// [`TABLES`].
    ///
    /// # Safety
    ///
    /// `table` is followed by its counters, all with their blocks.
    unsafe fn choose_for(table: *const Table, cpus: usize) {
        // SAFETY: the caller promises that `table` is a table with its counters.
        let (head, counters) = unsafe {
            let first = table.add(1).cast::<PerCpuCounter>();
            (
                &*table,
                core::slice::from_raw_parts(first, (*table).counters),
            )
        };
        let chosen_for = head.cpus.load(Relaxed);
        if chosen_for == FIXED || chosen_for == cpus {
            return;
        }
        for (counter, normal) in with_normal(counters, head.each, cpus) {
            if counter.batch() != normal {
                // Fails if the kernel cannot fence, or if an isolated CPU has counted. The
                // threshold then stays too high, which is within the error bound that the counter
                // reports.
                let _ = counter.set_batch_sparing(normal, facts::is_quiet_cpu);
            }
        }
        // Fails if an add has raised the thresholds meanwhile. The next tick finds that.
        let _ = head
            .cpus
            .compare_exchange(chosen_for, cpus, Relaxed, Relaxed);
    }
}

/// Locks the list, so that the shepherd chooses no threshold meanwhile. Returns `None` if a fork
/// cannot be made to wait for the lock, or in a signal handler that may not wait for the lock.
pub(super) fn hold() -> Option<Guard<'static, AtomicPtr<Table>>> {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Thresholds, |visit| visit(TABLES.word()))];
    outlast_fork(|| (fork::register(&HOOKS) && register_fork()).then_some(()))?;
    TABLES.lock()
}

/// Makes the shepherd choose the thresholds of `table` when CPUs come or go. Returns false if that
/// is impossible.
///
/// # Safety
///
/// `table` is followed by its counters, all with their blocks. It stays until [`remove`].
pub(super) unsafe fn insert(table: *mut Table) -> bool {
    // Registers [`look`] before it takes the lock, because `look` tries to take the lock at each
    // tick.
    let Some(first) = shepherd::register(look).then(hold).flatten() else {
        return false;
    };
    // SAFETY: the caller promises that `table` is a table.
    let head = unsafe { &*table };
    if !head.listed.swap(true, Relaxed) {
        head.next.store(first.load(Relaxed), Relaxed);
        first.store(table, Relaxed);
    }
    true
}

/// Takes `table` out of the list, if it is there. Returns false if the caller is a signal
/// handler that may not wait for the list's lock: the table must then stay.
///
/// # Safety
///
/// `table` is a table that was not unmapped.
pub(super) unsafe fn remove(table: *mut Table) -> bool {
    let Some(first) = TABLES.lock() else {
        return false;
    };
    let mut place: &AtomicPtr<Table> = &first;
    loop {
        let at = place.load(Relaxed);
        // SAFETY: the tables in the list stay until `remove` has taken them out, for which it holds
        // the lock.
        let Some(head) = (unsafe { at.as_ref() }) else {
            return true;
        };
        if at == table {
            place.store(head.next.load(Relaxed), Relaxed);
            return true;
        }
        place = &head.next;
    }
}

/// Sets the thresholds of the listed tables for the number of online CPUs that the shepherd's
/// thread saw last. Leaves out tables whose thresholds the program chose. Every tick calls this
/// function, which does something only with [`Reach::AllCpus`]. Costs a lock, and two loads for
/// each table, while no CPU comes or goes.
fn look(reach: Reach) {
    // With `ThisCpu`, a tick may not interrupt other CPUs. With `Everything`, it should only free
    // memory.
    if reach != Reach::AllCpus {
        return;
    }
    // If another thread holds the lock, the next tick looks again.
    let Some(first) = TABLES.try_lock() else {
        return;
    };
    let cpus = facts::cpus_online();
    let mut at = first.load(Relaxed);
    // SAFETY: the tables in the list stay until `remove` has taken them out, for which it needs the
    // lock that this thread holds. `insert` was promised the counters with their blocks.
    while let Some(head) = unsafe { at.as_ref() } {
        // SAFETY: the lock is held, so the table stays, with its counters' blocks.
        unsafe { Table::choose_for(at, cpus) };
        at = head.next.load(Relaxed);
    }
}
