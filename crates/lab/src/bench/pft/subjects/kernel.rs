//! `kernel`: a mapping whose pages the kernel allocates at the faults.

use super::{Subject, page_size, write_line};
use crate::bench::pft::{Kind, Memory, Policy};
use anyhow::{Context, Result};
use std::io;
use std::ops::Range;
use std::ptr::{NonNull, null, null_mut};

pub struct Kernel {
    kind: Kind,
    pages: usize,
    region: Option<Mapping>,
}

impl Kernel {
    pub fn new(kind: Kind, pages: usize) -> Kernel {
        Kernel {
            kind,
            pages,
            region: None,
        }
    }
}

/// Returns why this machine cannot make such a region, or `None` if it can.
pub fn missing(kind: Kind) -> Option<String> {
    Mapping::new(kind, page_size())
        .err()
        .map(|why| format!("{why:#}"))
}

impl Subject for Kernel {
    fn prepare(&mut self) -> Result<()> {
        self.region = Some(Mapping::new(self.kind, self.pages * page_size())?);
        Ok(())
    }

    fn touch(&self, slice: Range<usize>) -> Result<()> {
        let region = self.region.as_ref().context("no region was made")?;
        let page = page_size();
        for at in slice.map(|number| number * page) {
            // SAFETY: `at` is below the mapping's length, and no other thread has this slice.
            unsafe { write_line(region.at.as_ptr().add(at)) };
        }
        Ok(())
    }

    fn release(&mut self) {
        self.region = None;
    }
}

struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a `Mapping` is an address and a length. The only writes through it are in `touch`, and
// the slices of different threads do not overlap.
unsafe impl Send for Mapping {}
// SAFETY: shared references allow only `touch`, whose slices in different threads do not overlap.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps untouched memory: private, or of the file system that also backs System V shared
    /// memory.
    fn new((memory, policy): Kind, bytes: usize) -> Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let sharing = match memory {
            Memory::Anon => libc::MAP_PRIVATE,
            Memory::Shmem => libc::MAP_SHARED,
        };
        let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: maps new memory at an address that the kernel chooses, so no existing memory
        // changes.
        let at = unsafe { libc::mmap(null_mut(), bytes, protection, flags, -1, 0) };
        let mapped = NonNull::new(at.cast::<u8>()).filter(|_| at != libc::MAP_FAILED);
        let at = mapped.ok_or_else(|| failed("mapping the region"))?;
        let mapping = Mapping { at, bytes };
        // As the pft program does. The result is ignored: a kernel without huge pages refuses.
        // SAFETY: covers exactly the new mapping, and MADV_NOHUGEPAGE changes no content.
        unsafe { libc::madvise(at.as_ptr().cast(), bytes, libc::MADV_NOHUGEPAGE) };
        if policy == Policy::Range {
            mapping.prefer_local()?;
        }
        Ok(mapping)
    }

    /// Sets what the system does anyway as a policy of the region's own.
    fn prefer_local(&self) -> Result<()> {
        let (at, none) = (self.at.as_ptr(), null::<u64>());
        // SAFETY: covers exactly this mapping, changes no content, and passes no node mask to read.
        let refused = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                at,
                self.bytes,
                libc::MPOL_LOCAL,
                none,
                0,
                0,
            )
        };
        match refused {
            0 => Ok(()),
            _ => Err(failed(
                "mbind failed; kernels without NUMA and containers' seccomp filters refuse it",
            )),
        }
    }
}

fn failed(what: &'static str) -> anyhow::Error {
    anyhow::Error::new(io::Error::last_os_error()).context(what)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped these bytes, and `&mut self` shows that no thread still touches
        // them.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
