//! A process's memory as a sum that adds up line by line.

use crate::live::snapshot::Snapshot;
use serde::Serialize;

/// The memory of a process, in bytes:
///
/// * `requested + rounding = live`
/// * `live + in_sheaves + in_barns + free_in_slabs + dirty + metadata = resident`
/// * `resident + returned = reserved`
///
/// The parts are read one after another while the process runs. So the last line of each sum is
/// computed from the others.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sum {
    /// What only a process that counts every call knows.
    #[serde(flatten)]
    pub counted: Option<Counted>,
    /// The blocks in use, and the free objects in the CPUs' sheaves.
    #[serde(rename = "live_and_sheaves_bytes")]
    pub live_and_sheaves: u64,
    /// Free objects in the barns' sheaves.
    #[serde(rename = "in_barns_bytes")]
    pub in_barns: u64,
    /// The rest of the slabs.
    #[serde(rename = "free_in_slabs_bytes")]
    pub free_in_slabs: u64,
    /// Free runs that are kept.
    #[serde(rename = "dirty_bytes")]
    pub dirty: u64,
    /// The allocator's own structures, without the CPUs' units.
    #[serde(rename = "metadata_bytes")]
    pub metadata: u64,
    /// The most that can be in memory. Pages that the program has not touched yet are not.
    #[serde(rename = "resident_bytes")]
    pub resident: u64,
    /// Mapped, and given back or never touched.
    #[serde(rename = "returned_or_untouched_bytes")]
    pub returned: u64,
    /// Mapped addresses.
    #[serde(rename = "reserved_bytes")]
    pub reserved: u64,
    #[serde(rename = "held_bytes")]
    pub held: u64,
    #[serde(rename = "held_peak_bytes")]
    pub peak: u64,
    /// Given back so far, of which the program may have taken some again.
    #[serde(rename = "returned_bytes")]
    pub returned_so_far: u64,
}

/// The parts of a sum that only a process that counts every call knows.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counted {
    /// What the program asked for, by the mean request of each size class. Blocks that are larger
    /// than the largest class count whole.
    #[serde(rename = "requested_bytes")]
    pub requested: u64,
    #[serde(rename = "rounding_bytes")]
    pub rounding: u64,
    /// Objects in use and large blocks.
    #[serde(rename = "live_bytes")]
    pub live: u64,
    /// Free objects in the CPUs' sheaves.
    #[serde(rename = "in_sheaves_bytes")]
    pub in_sheaves: u64,
}

impl Sum {
    pub fn of(snapshot: &Snapshot) -> Sum {
        let slabs = snapshot.of_caches(|cache| cache.slabs().saturating_mul(cache.slab));
        let objects = snapshot.of_caches(|cache| cache.out().saturating_mul(cache.size));
        let objects = objects.min(slabs);
        let in_barns = snapshot.of_caches(|cache| cache.in_barns().saturating_mul(cache.size));
        let in_barns = in_barns.min(objects);
        let (used, dirty) = (snapshot.used(), snapshot.dirty());
        let large = used.saturating_sub(slabs);
        let live_and_sheaves = large.saturating_add(objects - in_barns);
        let free_in_slabs = slabs - objects;
        let mapped = snapshot.mapped.saturating_add(snapshot.huge);
        let resident = [in_barns, free_in_slabs, dirty, snapshot.metadata]
            .into_iter()
            .fold(live_and_sheaves, u64::saturating_add);
        let returned = mapped.saturating_sub(snapshot.held);
        Sum {
            counted: Counted::of(snapshot, objects - in_barns, large),
            live_and_sheaves,
            in_barns,
            free_in_slabs,
            dirty,
            metadata: snapshot.metadata,
            resident,
            returned,
            reserved: resident.saturating_add(returned),
            held: snapshot.held,
            peak: snapshot.held_peak,
            returned_so_far: snapshot.returned,
        }
    }
}

impl Counted {
    /// `objects` are the bytes of objects in use and in the CPUs' sheaves.
    fn of(snapshot: &Snapshot, objects: u64, large: u64) -> Option<Counted> {
        let calls = snapshot.calls.as_ref()?;
        let (mut in_use, mut requested) = (0u64, 0u64);
        for cache in &snapshot.caches {
            let Some(class) = snapshot.class_of(cache) else {
                continue;
            };
            let count = calls.in_use(class);
            let mean = calls.mean_request(class).unwrap_or(0.0);
            let mean = mean.min(cache.size as f64);
            in_use = in_use.saturating_add(count.saturating_mul(cache.size));
            requested = requested.saturating_add((count as f64 * mean) as u64);
        }
        let in_use = in_use.min(objects);
        let requested = requested.min(in_use);
        Some(Counted {
            requested: requested.saturating_add(large),
            rounding: in_use - requested,
            live: in_use.saturating_add(large),
            in_sheaves: objects - in_use,
        })
    }
}
