//! `pinfold`, `counted` and `shared-counted`: pages of an arena. `pinfold` leaves policies to the
//! arena, without reference counts. The others have policies as the kernel had them before and
//! after its change of 2008.
//!
//! A range's policy is an object with a reference count. A counted allocation finds the object,
//! takes a reference, follows the policy, and drops the reference. All threads write the count,
//! which is one cache line.
//!
//! - Anonymous memory: the policy hangs on the mapping and is found without a lock. `counted`
//!   counts a reference. `shared-counted` does not: the kernel's change left that count out,
//!   because the fault holds the mapping's lock, which keeps the policy.
//! - Shared memory: the policies are in an ordered map under a spinlock, and both subjects count a
//!   reference. The kernel's map is a red-black tree, this one a sorted array. An empty map is not
//!   looked at.
//!
//! All ranges share one object, as if one range had been split. The system's default policy is not
//! counted.

use super::table::Table;
use super::{Subject, SubjectName, place, ranges, take};
use crate::Padded;
use crate::bench::Spinlock;
use crate::bench::pft::{Kind, Memory};
use anyhow::Result;
use pinfold::mempolicy::{Mempolicy, Mode};
use pinfold::pages::Pages;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

pub struct InArena {
    name: SubjectName,
    table: Table,
    /// The ranges whose policies are the arena's.
    ranges: Vec<Range<u64>>,
    policies: Policies,
    zero: bool,
}

enum Policies {
    None,
    OfMapping(Arc<Mempolicy>),
    OfFile(Padded<Shared>),
}

/// The policies of shared memory.
struct Shared {
    lock: Spinlock,
    /// In ascending order. Accessed only under the lock.
    ranges: Vec<(Range<u64>, Arc<Mempolicy>)>,
}

impl Shared {
    fn lookup(&self, place: u64) -> Option<Arc<Mempolicy>> {
        self.lock.with(|| {
            let behind = self
                .ranges
                .partition_point(|(range, _)| range.start <= place);
            let (range, policy) = self.ranges.get(behind.checked_sub(1)?)?;
            range.contains(&place).then(|| Arc::clone(policy))
        })
    }
}

impl InArena {
    /// `name` is not `kernel`.
    pub fn new(name: SubjectName, kind: Kind, pages: usize, zero: bool) -> InArena {
        let (table, ranges) = (Table::new(pages), ranges(kind, pages));
        let mut subject = InArena {
            name,
            table,
            ranges,
            policies: Policies::None,
            zero,
        };
        if name == SubjectName::Pinfold || subject.ranges.is_empty() {
            return subject;
        }
        let policy = Arc::new(Mempolicy::local());
        let ranges = subject.ranges.drain(..);
        let ranges: Vec<_> = ranges.map(|range| (range, Arc::clone(&policy))).collect();
        subject.policies = match kind.0 {
            Memory::Anon => Policies::OfMapping(policy),
            Memory::Shmem => Policies::OfFile(Padded(Shared {
                lock: Spinlock::default(),
                ranges,
            })),
        };
        subject
    }
}

/// Allocates a page by a policy, or by the system's default. The arena has no policy of its own, so
/// both give a page of the node that asks.
#[inline(always)]
fn alloc(
    arena: &Pages,
    page: usize,
    policy: Option<&Mempolicy>,
    zero: bool,
) -> Option<NonNull<u8>> {
    match policy.map_or(Mode::Default, Mempolicy::mode) {
        Mode::Default | Mode::Local => take(arena, place(page), zero),
        _ => None,
    }
}

/// Fills a slice of anonymous memory. Each allocation counts a reference to the mapping's policy.
///
/// This function and the next two are not inlined, so that their sizes are in the symbol table.
#[inline(never)]
fn fill_counted(
    table: &Table,
    slice: Range<usize>,
    policy: &Arc<Mempolicy>,
    zero: bool,
) -> Result<()> {
    table.fill(slice, |arena, page| {
        let counted = Arc::clone(policy);
        alloc(arena, page, Some(&counted), zero)
    })
}

/// Fills a slice of anonymous memory by the mapping's policy, without counting.
#[inline(never)]
fn fill_uncounted(
    table: &Table,
    slice: Range<usize>,
    policy: &Mempolicy,
    zero: bool,
) -> Result<()> {
    table.fill(slice, |arena, page| alloc(arena, page, Some(policy), zero))
}

/// Fills a slice of shared memory. Each allocation looks its policy up under the lock, and counts a
/// reference.
#[inline(never)]
fn fill_shared(table: &Table, slice: Range<usize>, shared: &Shared, zero: bool) -> Result<()> {
    table.fill(slice, |arena, page| {
        let counted = shared.lookup(place(page));
        alloc(arena, page, counted.as_deref(), zero)
    })
}

impl Subject for InArena {
    fn prepare(&mut self) -> Result<()> {
        let name = format!("pft-{}", self.name);
        self.table.open(&name, &self.ranges)
    }

    fn touch(&self, slice: Range<usize>) -> Result<()> {
        let (table, zero) = (&self.table, self.zero);
        match &self.policies {
            Policies::None => table.fill_by_arena(slice, zero),
            Policies::OfMapping(policy) => match self.name {
                SubjectName::SharedCounted => fill_uncounted(table, slice, policy, zero),
                _ => fill_counted(table, slice, policy, zero),
            },
            Policies::OfFile(shared) => fill_shared(table, slice, &shared.0, zero),
        }
    }

    fn release(&mut self) {
        self.table.close();
    }
}
