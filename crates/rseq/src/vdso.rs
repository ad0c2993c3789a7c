//! Reads clocks through the vDSO, the kernel's code that is mapped into the process.
//!
//! The C library's `clock_gettime` calls the vDSO too, but another library may have replaced
//! `clock_gettime` by a function that allocates, or that is not ready yet.
#![allow(
    unsafe_code,
    reason = "reads the image of the vDSO and calls its function"
)]

use crate::syscall;
use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU64, AtomicUsize};

#[cfg(target_arch = "x86_64")]
const NAME: &CStr = c"__vdso_clock_gettime";
#[cfg(target_arch = "aarch64")]
const NAME: &CStr = c"__kernel_clock_gettime";
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const NAME: &CStr = c"__vdso_clock_gettime";

type Function = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> c_int;

/// The function's address. 0 before the first search, and [`NONE`] if the kernel offers none.
static FUNCTION: AtomicUsize = AtomicUsize::new(0);
const NONE: usize = 1;

/// Returns the time of a clock. Makes no system call where the kernel offers a vDSO that can read
/// that clock.
///
/// If a sandbox refuses the system call, a monotonic clock goes on from its last reading, by a
/// millisecond for each call. So a caller that waits for a time does not wait without end. Another
/// clock is then 0.
#[inline(never)]
pub fn clock(clock: libc::clockid_t) -> libc::timespec {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // Relaxed is enough: the kernel mapped the function before the program started.
    let at = match FUNCTION.load(Relaxed) {
        0 => search(),
        at => at,
    };
    if at != NONE {
        // SAFETY: `search` found the kernel's function of this type. `now` is writable.
        let error = unsafe { core::mem::transmute::<usize, Function>(at)(clock, &raw mut now) };
        if error == 0 {
            return now;
        }
    }
    let arguments = [clock as usize, (&raw mut now) as usize];
    // SAFETY: `now` is writable.
    let answer = unsafe { syscall(libc::SYS_clock_gettime, arguments) };
    if matches!(clock, libc::CLOCK_MONOTONIC | libc::CLOCK_MONOTONIC_COARSE) {
        return LAST.next(answer.ok().map(|_| now));
    }
    now
}

/// The last reading of a monotonic clock by a system call.
static LAST: Last = Last(AtomicU64::new(0));

/// The last reading of a clock, in milliseconds.
struct Last(AtomicU64);

impl Last {
    /// Notes a reading, and returns it. `None` is a refused reading: returns a millisecond more
    /// than the last one.
    fn next(&self, read: Option<libc::timespec>) -> libc::timespec {
        // Relaxed is enough: no other data depends on the time.
        match read {
            Some(now) => {
                let milliseconds = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
                self.0.fetch_max(milliseconds, Relaxed);
                now
            }
            None => {
                let next = self.0.fetch_add(1, Relaxed) + 1;
                libc::timespec {
                    tv_sec: (next / 1000) as _,
                    tv_nsec: (next % 1000 * 1_000_000) as libc::c_long,
                }
            }
        }
    }
}

#[cold]
fn search() -> usize {
    // SAFETY: getauxval reads the auxiliary vector, and sets errno, which is the thread's own, if
    // there is no vDSO. The address is 0, or that of the vDSO.
    let at = unsafe {
        let errno = *libc::__errno_location();
        let image = libc::getauxval(libc::AT_SYSINFO_EHDR) as usize;
        *libc::__errno_location() = errno;
        if image == 0 { None } else { find(image, NAME) }
    };
    let at = at.unwrap_or(NONE);
    FUNCTION.store(at, Relaxed);
    at
}

/// The tables of an image that a search needs.
#[derive(Default)]
struct Tables {
    symbols: usize,
    strings: usize,
    hash: usize,
    gnu_hash: usize,
}

/// Returns the address of the function `name` in an ELF image.
///
/// # Safety
///
/// `image` is the start of a shared library that the kernel or the loader has mapped.
unsafe fn find(image: usize, name: &CStr) -> Option<usize> {
    // SAFETY: the caller promises a mapped library, whose headers and tables are in place.
    unsafe {
        let header = &*(image as *const libc::Elf64_Ehdr);
        let programs = core::slice::from_raw_parts(
            (image + header.e_phoff as usize) as *const libc::Elf64_Phdr,
            header.e_phnum as usize,
        );
        let of_type = |wanted| programs.iter().find(|program| program.p_type == wanted);
        let base = image.wrapping_sub(of_type(libc::PT_LOAD)?.p_vaddr as usize);
        let mut entry =
            base.wrapping_add(of_type(libc::PT_DYNAMIC)?.p_vaddr as usize) as *const [usize; 2];
        let mut tables = Tables::default();
        // The constants are those of `elf.h`. The table ends with an entry of type 0.
        while (*entry)[0] != 0 {
            let [kind, at] = *entry;
            match kind {
                4 => tables.hash = base.wrapping_add(at),
                5 => tables.strings = base.wrapping_add(at),
                6 => tables.symbols = base.wrapping_add(at),
                0x6fff_fef5 => tables.gnu_hash = base.wrapping_add(at),
                _ => {}
            }
            entry = entry.add(1);
        }
        if tables.symbols == 0 || tables.strings == 0 {
            return None;
        }
        let symbol = |nth: usize| &*(tables.symbols as *const libc::Elf64_Sym).add(nth);
        let is_it = |&nth: &usize| {
            let text = (tables.strings + symbol(nth).st_name as usize) as *const c_char;
            symbol(nth).st_shndx != 0 && CStr::from_ptr(text) == name
        };
        let nth = if tables.gnu_hash != 0 {
            let first = hash_chain(tables.gnu_hash as *const u32, name)?;
            first.into_iter().find(is_it)
        } else if tables.hash != 0 {
            // The second word is the number of symbols.
            (0..*(tables.hash as *const u32).add(1) as usize).find(is_it)
        } else {
            None
        };
        nth.map(|nth| base.wrapping_add(symbol(nth).st_value as usize))
    }
}

/// Returns the indexes of the symbols whose hash falls into the same bucket as that of `name`.
/// Returns `None` if the bucket is empty.
///
/// # Safety
///
/// `table` is the table of type `DT_GNU_HASH` of a mapped library.
unsafe fn hash_chain(table: *const u32, name: &CStr) -> Option<core::ops::RangeInclusive<usize>> {
    let hash = |hash: u32, &byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(byte));
    let hash = name.to_bytes().iter().fold(5381, hash);
    // SAFETY: the caller promises the table. Its words are the number of buckets, the first symbol
    // that has a hash, the number of 64-bit words of a filter, and a shift. Behind them lie the
    // filter, the buckets, and the hashes of the symbols. Only the last hash of a bucket is odd.
    unsafe {
        let (buckets, from) = (*table, *table.add(1));
        let bucket = table.add(4 + 2 * *table.add(2) as usize);
        let hashes = bucket.add(buckets as usize);
        let first = *bucket.add(hash.checked_rem(buckets)? as usize);
        let mut last = first.checked_sub(from)? as usize;
        while *hashes.add(last) & 1 == 0 {
            last += 1;
        }
        Some(first as usize..=last + from as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanoseconds(time: libc::timespec) -> i64 {
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    }

    #[test]
    fn every_clock_agrees_with_the_c_librarys() {
        for id in [
            libc::CLOCK_MONOTONIC,
            libc::CLOCK_REALTIME,
            libc::CLOCK_MONOTONIC_COARSE,
            libc::CLOCK_THREAD_CPUTIME_ID,
        ] {
            let librarys = || {
                let mut now = clock(id);
                // SAFETY: `now` is writable.
                assert_eq!(unsafe { libc::clock_gettime(id, &raw mut now) }, 0);
                nanoseconds(now)
            };
            let (before, own, after) = (librarys(), nanoseconds(clock(id)), librarys());
            assert!(
                (before..=after).contains(&own),
                "{id}: {before} {own} {after}"
            );
        }
    }

    /// A caller that waits until a time has passed must not wait without end in a sandbox that
    /// refuses the clock.
    #[test]
    fn a_refused_clock_goes_on_from_its_last_reading() {
        let last = Last(AtomicU64::new(0));
        let read = libc::timespec {
            tv_sec: 7,
            tv_nsec: 999_999_999,
        };
        assert_eq!(nanoseconds(last.next(Some(read))), 7_999_999_999);
        assert_eq!(nanoseconds(last.next(None)), 8_000_000_000);
        assert_eq!(nanoseconds(last.next(None)), 8_001_000_000);
    }

    #[test]
    fn functions_of_a_loaded_image_are_found() {
        // SAFETY: getauxval only reads the auxiliary vector.
        let image = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as usize;
        if image == 0 {
            std::println!("this machine has no vDSO");
            return;
        }
        // SAFETY: the kernel has mapped the vDSO at `image`.
        unsafe {
            assert!(find(image, NAME).is_some_and(|at| at > image));
            assert_eq!(find(image, c"no_such_function"), None);
        }
    }
}
