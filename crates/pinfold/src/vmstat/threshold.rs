//! Thresholds: how much a CPU may keep to itself before its counts are folded.
//!
//! A threshold follows from the zone's memory and from the number of CPUs that are online. CPUs may
//! come and go. A shepherd's thread notices that. The next add that folds raises the thresholds.
//! The shepherd's tick raises and lowers those of watched counts ([`follow`](super::follow)). An
//! add never lowers a threshold, because lowering interrupts other CPUs.

use super::follow::{self, Table};
use super::open::memory_of;
use super::{Item, VmStat, Zone};
use crate::counter::{CounterError, PerCpuCounter};
use crate::topology::facts;
use core::sync::atomic::Ordering::Relaxed;

/// The largest threshold that [`normal_threshold`] and [`pressure_threshold`] return. It is the
/// kernel's, where a difference is one signed byte.
pub const MAX_THRESHOLD: u64 = 125;

/// Stands for the number of CPUs while the program has chosen the thresholds.
pub(super) const FIXED: usize = usize::MAX;

impl<I: Item> VmStat<I> {
    /// Returns the threshold of a zone: how much a CPU may count before it folds. Returns 0 if the
    /// zone does not exist, and if there is no memory for the counters.
    pub fn threshold(&self, zone: Zone) -> u64 {
        let counters = self.open().unwrap_or_default();
        Self::one_of(counters, zone.0, 0).map_or(0, PerCpuCounter::batch)
    }

    /// Sets the threshold of every zone and item. It stays until the program sets another one.
    ///
    /// A program may lower the threshold for a time when it needs closer totals. The kernel lowers
    /// its thresholds under memory pressure.
    ///
    /// Lowering the threshold interrupts each CPU that runs a thread of this process, once for each
    /// zone and item that other CPUs have counted. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`PerCpuCounter::set_batch`]. The thresholds that were set
    /// before the error stay set.
    pub fn set_threshold(&self, threshold: u64) -> Result<(), CounterError> {
        let mut counters = self.open_all()?.iter();
        // The shepherd chooses no threshold meanwhile.
        let _choosing = follow::hold();
        self.chosen_for(FIXED);
        counters.try_for_each(|counter| counter.set_batch(threshold))
    }

    /// Sets the threshold of every zone and item to what [`normal_threshold`] returns for the CPUs
    /// that are online now. Reads a file. Not for signal handlers.
    ///
    /// From then on, thresholds follow the CPUs that are online, as they do before the program sets
    /// a threshold. This needs a thread that
    /// [`Shepherd::start`](crate::shepherd::Shepherd::start) started. The thread notices within
    /// seconds that CPUs came or went.
    ///
    /// * Thresholds rise at the next add that folds.
    /// * If a shepherd [watches](crate::shepherd::watch) the counts, its next tick raises
    ///   or lowers the thresholds. Lowering interrupts the CPUs that count, once for each zone and
    ///   item. It never interrupts an isolated CPU: the threshold of an item that such a CPU has
    ///   counted falls only by a call of this function.
    ///
    /// # Errors
    ///
    /// [`CounterError::OutOfMemory`] without memory for the counters, and [`CounterError::Fence`]
    /// if a threshold must be lowered and the fence for it failed. The thresholds that were set
    /// before the error stay set.
    pub fn set_normal_threshold(&self) -> Result<(), CounterError> {
        let counters = self.open_all()?;
        // The shepherd chooses no threshold meanwhile.
        let _choosing = follow::hold();
        let cpus = facts::look_at_cpus();
        self.chosen_for(cpus);
        with_normal(counters, Self::EACH, cpus)
            .try_for_each(|(counter, normal)| counter.set_batch(normal))
    }

    /// Sets the threshold of every zone and item to what [`pressure_threshold`] returns for the
    /// CPUs that are online now and for a quarter of `distance`. Costs as much as
    /// [`set_threshold`](Self::set_threshold), and reads a file. Not for signal handlers.
    ///
    /// A read is off by at most four thresholds for each CPU that counts. So it is within
    /// `distance` of the total, if `distance` is at least four times the number of CPUs.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`set_normal_threshold`](Self::set_normal_threshold).
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::vmstat::{VmStat, Zone};
    ///
    /// pinfold::vmstat_items! {
    ///     pub enum Pool { Free = "nr_free" }
    /// }
    ///
    /// static POOL: VmStat<Pool> = VmStat::new();
    /// // Below 4096 free buffers the pool is trimmed, and below 4000 requests wait. The total must
    /// // be closer than the 96 between the two marks.
    /// if POOL.set_pressure_threshold(96).is_ok() {
    ///     assert!(POOL.threshold(Zone::normal(0)) <= 96);
    /// }
    /// ```
    pub fn set_pressure_threshold(&self, distance: u64) -> Result<(), CounterError> {
        // A read is off by at most four thresholds for each CPU.
        self.set_threshold(pressure_threshold(facts::look_at_cpus(), distance / 4))
    }

    /// Raises the thresholds if more CPUs are online than when they were chosen. Needs no fence.
    /// Leaves the rest to the next call if another thread holds a counter's lock.
    #[inline]
    pub(super) fn follow_cpus(&self) {
        let Some(table) = self.table() else {
            return;
        };
        let (cpus, chosen_for) = (facts::cpus_online(), table.cpus.load(Relaxed));
        // `FIXED` is larger than any number of CPUs, so nothing rises after the program's own
        // choice.
        if cpus > chosen_for {
            self.raise_for(table, cpus, chosen_for);
        }
    }

    #[cold]
    fn raise_for(&self, table: &Table, cpus: usize, chosen_for: usize) {
        let raised = with_normal(self.counters(), Self::EACH, cpus)
            .all(|(counter, normal)| counter.try_raise_batch(normal));
        if raised {
            // Fails if the program has chosen the thresholds meanwhile.
            let _ = (table.cpus).compare_exchange(chosen_for, cpus, Relaxed, Relaxed);
        }
    }

    /// Notes for how many CPUs the thresholds are chosen, or that the program chooses them.
    fn chosen_for(&self, cpus: usize) {
        if let Some(table) = self.table() {
            table.cpus.store(cpus, Relaxed);
        }
    }
}

/// Returns each counter with its zone's normal threshold. A node has `each` of the counters.
pub(super) fn with_normal(
    counters: &[PerCpuCounter],
    each: usize,
    cpus: usize,
) -> impl Iterator<Item = (&PerCpuCounter, u64)> {
    // Without items there are no counters.
    let nodes = counters.chunks(each.max(1));
    nodes.enumerate().flat_map(move |(node, counters)| {
        let normal = normal_threshold(cpus, memory_of(node));
        counters.iter().map(move |counter| (counter, normal))
    })
}

/// Returns the kernel's threshold for a zone of a machine with `cpus` CPUs online, where the zone
/// has `memory_bytes` of memory.
///
/// The formula is min(125, 2 fls(CPUs) (1 + fls(memory / 128 MiB))), where fls is the position of
/// the highest bit, counted from 1. It is that of `calculate_normal_threshold` in the kernel's
/// mm/vmstat.c.
///
/// ```
/// // The kernel's own examples: 1 CPU and 128 MiB; 2 CPUs and 2 GiB; 64 CPUs and 64 GiB.
/// assert_eq!(pinfold::vmstat::normal_threshold(1, 128 << 20), 4);
/// assert_eq!(pinfold::vmstat::normal_threshold(2, 2 << 30), 24);
/// assert_eq!(pinfold::vmstat::normal_threshold(64, 64 << 30), 125);
/// ```
pub fn normal_threshold(cpus: usize, memory_bytes: u64) -> u64 {
    let fls = |n: u64| u64::from(u64::BITS - n.leading_zeros());
    let threshold = 2 * fls(cpus as u64) * (1 + fls(memory_bytes >> 27));
    threshold.clamp(1, MAX_THRESHOLD)
}

/// Returns the kernel's threshold under memory pressure, for a machine with `cpus` CPUs online.
///
/// `distance` lies between two marks that a total is compared with. With this threshold, the
/// kernel's CPUs together fold before they keep more than `distance` to themselves. The formula is
/// max(1, min(125, distance / CPUs)). It is that of `calculate_pressure_threshold` in the kernel's
/// mm/vmstat.c.
///
/// ```
/// use pinfold::vmstat::pressure_threshold;
///
/// assert_eq!(pressure_threshold(8, 96), 12);
/// assert_eq!(pressure_threshold(8, 5), 1);
/// assert_eq!(pressure_threshold(2, 1_000_000), 125);
/// ```
pub fn pressure_threshold(cpus: usize, distance: u64) -> u64 {
    (distance / cpus.max(1) as u64).clamp(1, MAX_THRESHOLD)
}
