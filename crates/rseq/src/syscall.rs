//! System calls by the processor's instruction.
//!
//! A library that is preloaded, or a sanitizer in the program, may replace the C library's `mmap`,
//! `close` and even `syscall`. Its function may allocate, take a lock, or wait until it is
//! initialised. Each of these may need the allocator. So the allocator calls the kernel itself.
//! Such a call is no cancellation point, and leaves errno alone.
#![allow(unsafe_code, reason = "calls the kernel")]

use core::ffi::{c_int, c_long};

/// Makes a system call with up to six arguments. Returns the kernel's answer, or the error number.
///
/// # Safety
///
/// The call does no harm: it is one that the kernel knows under `number`, its arguments are valid
/// for it, and what it does to the process's memory breaks no code.
#[inline]
pub unsafe fn syscall<const N: usize>(
    number: c_long,
    arguments: [usize; N],
) -> Result<usize, c_int> {
    const { assert!(N <= 6, "the kernel takes six arguments") };
    let mut six = [0; 6];
    six[..N].copy_from_slice(&arguments);
    // SAFETY: the caller promises a call that does no harm.
    let answer = unsafe { call(number, six) };
    // The kernel's error numbers are below 4096.
    match answer {
        -4095..0 => Err(-answer as c_int),
        _ => Ok(answer as usize),
    }
}

/// Makes a system call. Returns the kernel's answer: an error number is negative.
///
/// # Safety
///
/// As [`syscall`] requires.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer;
    // SAFETY: the caller promises a call that does no harm. The instruction changes the three
    // registers that are named as outputs, and memory.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes a system call. Returns the kernel's answer: an error number is negative.
///
/// # Safety
///
/// As [`syscall`] requires.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer;
    // SAFETY: the caller promises a call that does no harm. The instruction changes the register
    // that is named as output, and memory.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number as isize,
            inlateout("x0") a => answer,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    answer
}

/// Makes a system call by the C library, on other architectures. Keeps errno.
///
/// # Safety
///
/// As [`syscall`] requires.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    // SAFETY: the caller promises a call that does no harm. The C library returns the address of
    // this thread's errno, which no other thread accesses.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let answer = libc::syscall(number, a, b, c, d, e, f);
        let error = core::mem::replace(&mut *errno, before);
        if answer == -1 {
            -error as isize
        } else {
            answer as isize
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_and_errors_are_told_apart() {
        // SAFETY: `getpid` takes no arguments. `close` closes no descriptor of that number. `mmap`
        // with a length of 0 maps nothing.
        unsafe {
            assert_eq!(
                syscall(libc::SYS_getpid, []),
                Ok(std::process::id() as usize)
            );
            assert_eq!(syscall(libc::SYS_close, [usize::MAX]), Err(libc::EBADF));
            assert_eq!(
                syscall(libc::SYS_mmap, [0, 0, 0, 0x22, usize::MAX, 0]),
                Err(libc::EINVAL)
            );
        }
    }

    #[test]
    fn all_six_arguments_arrive() {
        let mut bytes = [0u8; 16];
        // SAFETY: the file is this test's own, and `bytes` is writable for its length.
        let got = unsafe {
            let name = c"syscall".as_ptr() as usize;
            let file = syscall(libc::SYS_memfd_create, [name, 0]).unwrap();
            syscall(
                libc::SYS_pwrite64,
                [file, c"0123456789".as_ptr() as usize, 10, 4],
            )
            .unwrap();
            let protection = libc::PROT_READ as usize;
            let at = syscall(
                libc::SYS_mmap,
                [0, 4096, protection, libc::MAP_SHARED as usize, file, 0],
            );
            bytes.copy_from_slice(core::slice::from_raw_parts(at.unwrap() as *const u8, 16));
            syscall(libc::SYS_munmap, [at.unwrap(), 4096]).unwrap();
            syscall(libc::SYS_close, [file])
        };
        assert_eq!((got, &bytes), (Ok(0), b"\0\0\0\x000123456789\0\0"));
    }
}
