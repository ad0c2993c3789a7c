//! The subjects: their names, the C functions of the allocators, and the object pools.

mod c;
mod loaded;
pub mod pools;

use crate::runner::LARGEST_OF_MANY;
use clap::ValueEnum;
use std::str::FromStr;

pub use c::{Glibc, Jemalloc, Mimalloc, Rpmalloc, Snmalloc, Tcmalloc, tcmalloc_is_percpu};

pinfold_lab::names! {
    /// The subjects. The command line and the rows use these names.
    pub enum SubjectName {
        /// `KmemCache`, inlined.
        PinfoldCache = "pinfold-cache",
        /// `pinfold_malloc` and `pinfold_free`.
        PinfoldMalloc = "pinfold-malloc",
        /// `mi_malloc` and `mi_free`.
        Mimalloc = "mimalloc",
        /// jemalloc's `malloc` and `free`, prefixed.
        Jemalloc = "jemalloc",
        /// `sn_malloc` and `sn_free`.
        Snmalloc = "snmalloc",
        /// `rpmalloc` and `rpfree`.
        Rpmalloc = "rpmalloc",
        /// `__libc_malloc` and `__libc_free`.
        Glibc = "glibc",
        /// tcmalloc by default: glibc owns the thread's rseq area, so tcmalloc keeps caches per
        /// thread.
        Tcmalloc = "tcmalloc",
        /// tcmalloc in a process where glibc leaves rseq to it, so that tcmalloc keeps caches per
        /// CPU.
        TcmallocPercpu = "tcmalloc-percpu",
        /// Pinfold's `Cache` of a type, by its handles.
        PinfoldTyped = "pinfold-typed",
        /// sharded-slab's `Pool`.
        ShardedSlab = "sharded-slab",
        /// lockfree-object-pool's `LinearObjectPool`.
        LockfreeObjectPool = "lockfree-object-pool",
        /// crossbeam's `ArrayQueue` as a list of free objects.
        ArrayQueue = "array-queue",
        /// A vector of free objects in each thread.
        ThreadLocal = "thread-local",
        /// `std::pmr::synchronized_pool_resource`.
        Pmr = "pmr-synchronized",
        /// `boost::singleton_pool`.
        BoostSingleton = "boost-singleton",
        /// `boost::lockfree::stack` as a list of free objects.
        BoostLockfree = "boost-lockfree",
        /// DPDK's `rte_mempool`.
        DpdkMempool = "dpdk-mempool",
    }
}

impl SubjectName {
    /// The allocators, and Pinfold's cache.
    pub const ALLOCATORS: &'static [SubjectName] = SubjectName::ALL.split_at(9).0;
    /// The object pools, without Pinfold's cache, which has objects of any size.
    pub const POOLS: &'static [SubjectName] = SubjectName::ALL.split_at(9).1;

    /// Returns whether the subject is one of Pinfold's own.
    pub fn is_pinfold(self) -> bool {
        matches!(
            self,
            SubjectName::PinfoldCache | SubjectName::PinfoldMalloc | SubjectName::PinfoldTyped
        )
    }

    /// Returns whether the subject is an object pool, which has objects of few sizes.
    pub fn is_pool(self) -> bool {
        SubjectName::POOLS.contains(&self)
    }

    /// Returns whether the subject has objects of `size` bytes.
    pub fn has_size(self, size: usize) -> bool {
        match self {
            SubjectName::PinfoldCache => size <= LARGEST_OF_MANY,
            _ => !self.is_pool() || pools::SIZES.contains(&size),
        }
    }

    /// Returns whether the subject needs a process of its own: because of its environment, or
    /// because it may be missing, and DPDK changes the process that it is in.
    pub fn needs_process(self) -> bool {
        let is_loaded = matches!(
            self,
            SubjectName::Pmr
                | SubjectName::BoostSingleton
                | SubjectName::BoostLockfree
                | SubjectName::DpdkMempool
        );
        is_loaded || self.environment().is_some()
    }

    /// Returns the environment variable that the subject's process must be started with, and its
    /// value.
    pub fn environment(self) -> Option<(&'static str, &'static str)> {
        (self == SubjectName::TcmallocPercpu).then_some(("GLIBC_TUNABLES", "glibc.pthread.rseq=0"))
    }
}

/// An element of `slab --subjects`: one subject, or the name of a group.
#[derive(Clone, Debug)]
pub struct Group(pub Vec<SubjectName>);

impl FromStr for Group {
    type Err = String;

    fn from_str(text: &str) -> Result<Group, String> {
        Ok(Group(match text {
            "allocators" => SubjectName::ALLOCATORS.to_vec(),
            "pools" => [&[SubjectName::PinfoldCache], SubjectName::POOLS].concat(),
            name => {
                let all = SubjectName::ALL.map(SubjectName::name).join(", ");
                let found = SubjectName::from_str(name, false);
                vec![found.map_err(|_| format!("give allocators, pools, or some of {all}"))?]
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `memory` measures the allocators, so no pool may be among them.
    #[test]
    fn groups_contain_what_their_names_say() {
        let of = |text: &str| text.parse::<Group>().unwrap().0;
        assert_eq!(of("allocators").last(), Some(&SubjectName::TcmallocPercpu));
        let pools = of("pools");
        assert_eq!(
            pools[..2],
            [SubjectName::PinfoldCache, SubjectName::PinfoldTyped]
        );
        assert_eq!(
            pools.len() + SubjectName::ALLOCATORS.len(),
            SubjectName::ALL.len() + 1
        );
        assert_eq!(of("glibc"), [SubjectName::Glibc]);
        assert!("nosuch".parse::<Group>().unwrap_err().contains("pools"));
    }
}
