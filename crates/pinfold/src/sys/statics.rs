//! The memory of this library's static variables.

use super::{make_resident, page_size};
use core::ops::Range;
use core::slice::from_raw_parts;
use core::sync::atomic::AtomicU8;
use libc::{Elf64_Ehdr, Elf64_Phdr};

unsafe extern "C" {
    /// The ELF header of the program or the shared library that contains this code. The linker
    /// defines the symbol for each of them, and hides it from the others.
    static __ehdr_start: Elf64_Ehdr;
}

/// The most bytes on each side of a static variable of this library that become resident. A program
/// that contains this library may have much larger static variables of its own.
const REACH: usize = 2 << 20;

/// The size of the smallest pages of x86-64 and aarch64. An ELF header lies at the start of a page.
const SMALLEST_PAGE: usize = 4096;

/// Makes the pages of this library's static variables resident ([`make_resident`]), and those of
/// the program's own that lie within [`REACH`]. One system call. A signal handler may call this.
#[cold]
pub(crate) fn make_statics_resident() {
    static NEAR: AtomicU8 = AtomicU8::new(0);
    let near = (&raw const NEAR) as usize;
    let Some(pages) = writable_pages(near) else {
        return;
    };
    let page = page_size();
    let start = pages.start.max(near.saturating_sub(REACH) & !(page - 1));
    let end = pages.end.min((near + REACH) & !(page - 1));
    // SAFETY: the pages belong to a writable segment around a static variable. They are private to
    // the process, and their content stays.
    unsafe { make_resident(start as *mut u8, end - start) };
}

/// Returns the pages of the segment that contains the static variable at `near`, without those that
/// the loader has made read-only. Returns `None` if the table of the segments does not follow the
/// ELF header. A program that changes files after the linker may have moved it.
fn writable_pages(near: usize) -> Option<Range<usize>> {
    let header = &raw const __ehdr_start;
    // SAFETY: the ELF header is mapped as long as this code is.
    let (offset, count) = unsafe { ((*header).e_phoff, usize::from((*header).e_phnum)) };
    let fits = size_of::<Elf64_Ehdr>() + count * size_of::<Elf64_Phdr>() <= SMALLEST_PAGE;
    if offset as usize != size_of::<Elf64_Ehdr>() || !fits {
        return None;
    }
    // SAFETY: the table follows the header on the same page, which is mapped.
    let headers = unsafe { from_raw_parts(header.add(1).cast::<Elf64_Phdr>(), count) };
    let segments = |kind| headers.iter().filter(move |header| header.p_type == kind);
    // The first bytes of the file are the ELF header.
    let first = segments(libc::PT_LOAD).find(|segment| segment.p_offset == 0)?;
    let base = (header as usize).wrapping_sub(first.p_vaddr as usize);
    let memory = |segment: &Elf64_Phdr| {
        let start = base.wrapping_add(segment.p_vaddr as usize);
        start..start + segment.p_memsz as usize
    };
    let page = page_size();
    let found = segments(libc::PT_LOAD)
        .map(memory)
        .find(|segment| segment.contains(&near))?;
    let read_only = segments(libc::PT_GNU_RELRO)
        .map(memory)
        .find(|part| found.contains(&part.start));
    // The loader protects whole pages only.
    let start = read_only.map_or(found.start, |part| part.end) & !(page - 1);
    Some(start..found.end.next_multiple_of(page))
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering::Relaxed;
    use std::println;

    /// Each element has a page of its own, if pages have 4 KiB.
    static BYTES: [[AtomicU8; 4096]; 16] = [const { [const { AtomicU8::new(0) }; 4096] }; 16];

    fn faults() -> libc::c_long {
        let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the call fills the value, and all-zero is a valid one too.
        unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
            usage.assume_init().ru_minflt
        }
    }

    /// Reads [`BYTES`], makes it resident, writes to it, and returns how many faults the writes
    /// took.
    fn faults_of_first_writes() -> libc::c_long {
        let read = BYTES.iter().map(|page| page[7].load(Relaxed));
        assert_eq!(read.max(), Some(0));
        faults();
        make_statics_resident();
        let before = faults();
        BYTES.iter().for_each(|page| page[7].store(1, Relaxed));
        faults() - before
    }

    #[test]
    fn static_variables_that_are_resident_take_no_fault() {
        let pages = writable_pages((&raw const BYTES) as usize).unwrap();
        let at = pages.start as *mut libc::c_void;
        // SAFETY: the page belongs to a writable segment of this program. Its content stays.
        if unsafe { libc::madvise(at, page_size(), libc::MADV_POPULATE_WRITE) } != 0 {
            println!("left out: the kernel is older than Linux 5.14");
            return;
        }
        // In a child, because other tests may fork, after which each first write takes a fault.
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let status = faults_of_first_writes().min(100);
            // SAFETY: the call ends the child.
            unsafe { libc::_exit(status as libc::c_int) };
        }
        let mut status = 0;
        // SAFETY: the call writes to `status`.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(
            (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
            (true, 0)
        );
    }
}
