//! `kernel`: a mapping, of which the kernel finds each page at the fault.

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

/// Why such a region cannot be had here, if it cannot.
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
            // SAFETY: in the mapping, as the slice is of its pages, and no other thread's.
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

// SAFETY: memory that belongs to nobody in particular; who writes to it keeps to a slice.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Untouched memory: private, or of the file system that System V's shared memory is made of too.
    fn new((memory, policy): Kind, bytes: usize) -> Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let sharing = match memory {
            Memory::Anon => libc::MAP_PRIVATE,
            Memory::Shmem => libc::MAP_SHARED,
        };
        let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(null_mut(), bytes, protection, flags, -1, 0) };
        let mapped = NonNull::new(at.cast::<u8>()).filter(|_| at != libc::MAP_FAILED);
        let at = mapped.ok_or_else(|| failed("mapping the region"))?;
        let mapping = Mapping { at, bytes };
        // As pft does; kernels without huge pages refuse, and need not be told.
        // SAFETY: of the mapping, and changes nothing that is in it.
        unsafe { libc::madvise(at.as_ptr().cast(), bytes, libc::MADV_NOHUGEPAGE) };
        if policy == Policy::Range {
            mapping.prefer_local()?;
        }
        Ok(mapping)
    }

    /// What the system does anyway, but as a policy of the region's own.
    fn prefer_local(&self) -> Result<()> {
        let (at, none) = (self.at.as_ptr(), null::<u64>());
        // SAFETY: of the mapping; a policy without nodes.
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
                "mbind, which a kernel without NUMA or a container's filter refuses",
            )),
        }
    }
}

fn failed(what: &'static str) -> anyhow::Error {
    anyhow::Error::new(io::Error::last_os_error()).context(what)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nobody touches it any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
