//! The system calls of Pinfold, under names of their own.
//!
//! Each function does what the C library's function of the same purpose does, with three
//! differences: it calls the kernel itself (`syscall`), it leaves errno alone, and it is no
//! cancellation point. Each returns the kernel's answer, or the error number. [`page_size`] reads
//! the auxiliary vector, and [`clock`] calls the vDSO where it can, so both usually make no system
//! call.
#![allow(unsafe_code, reason = "calls the kernel")]

use crate::syscall;
pub use crate::vdso::clock;
use core::ffi::{CStr, c_int};

/// The kernel's answer, or the error number.
pub type Answer<T> = Result<T, c_int>;

const HERE: usize = libc::AT_FDCWD as usize;

fn address(path: &CStr) -> usize {
    path.as_ptr() as usize
}

/// Opens the file at `path`. Returns its descriptor.
pub fn open(path: &CStr, flags: c_int, mode: libc::mode_t) -> Answer<c_int> {
    let arguments = [HERE, address(path), flags as usize, mode as usize];
    // SAFETY: a `CStr` is NUL-terminated, and lives until the call returns.
    unsafe { syscall(libc::SYS_openat, arguments) }.map(|file| file as c_int)
}

/// Makes an anonymous file (`memfd_create`). Returns its descriptor.
pub fn memory_file(name: &CStr, flags: libc::c_uint) -> Answer<c_int> {
    // SAFETY: a `CStr` is NUL-terminated, and lives until the call returns.
    unsafe { syscall(libc::SYS_memfd_create, [address(name), flags as usize]) }
        .map(|file| file as c_int)
}

/// Closes a descriptor that the caller owns.
pub fn close(file: c_int) -> Answer<()> {
    // SAFETY: the call uses no memory of the process.
    unsafe { syscall(libc::SYS_close, [file as usize]) }.map(drop)
}

/// Makes `file`, a descriptor that the caller owns, refer to the open file of `by` (`dup3`), and
/// closes the file that it referred to before. The two descriptors must differ.
pub fn replace(file: c_int, by: c_int, flags: c_int) -> Answer<()> {
    let arguments = [by as usize, file as usize, flags as usize];
    // SAFETY: the call uses no memory of the process.
    unsafe { syscall(libc::SYS_dup3, arguments) }.map(drop)
}

/// Reads from a file. Returns the number of bytes, 0 at the end of the file.
pub fn read(file: c_int, to: &mut [u8]) -> Answer<usize> {
    let arguments = [file as usize, to.as_mut_ptr() as usize, to.len()];
    // SAFETY: `to` is writable for its length.
    unsafe { syscall(libc::SYS_read, arguments) }
}

/// Reads from a file at `offset`, and keeps the file's position. Returns the number of bytes, 0 at
/// the end of the file.
pub fn read_at(file: c_int, to: &mut [u8], offset: usize) -> Answer<usize> {
    let arguments = [file as usize, to.as_mut_ptr() as usize, to.len(), offset];
    // SAFETY: `to` is writable for its length.
    unsafe { syscall(libc::SYS_pread64, arguments) }
}

/// Writes to a file. Returns the number of bytes.
pub fn write(file: c_int, bytes: &[u8]) -> Answer<usize> {
    // SAFETY: `bytes` is readable for its length.
    unsafe { write_from(file, bytes) }
}

/// Writes bytes that other threads may change during the call. Returns the number of bytes.
///
/// # Safety
///
/// The bytes stay mapped during the call.
pub unsafe fn write_from(file: c_int, bytes: *const [u8]) -> Answer<usize> {
    let arguments = [file as usize, bytes.cast::<u8>() as usize, bytes.len()];
    // SAFETY: the caller promises mapped bytes, which the kernel reads.
    unsafe { syscall(libc::SYS_write, arguments) }
}

/// Writes to a file at `offset`, and keeps the file's position. Returns the number of bytes.
pub fn write_at(file: c_int, bytes: &[u8], offset: usize) -> Answer<usize> {
    let arguments = [file as usize, bytes.as_ptr() as usize, bytes.len(), offset];
    // SAFETY: `bytes` is readable for its length.
    unsafe { syscall(libc::SYS_pwrite64, arguments) }
}

/// Returns the position at which the next write to a file begins.
pub fn position(file: c_int) -> Answer<usize> {
    let arguments = [file as usize, 0, libc::SEEK_CUR as usize];
    // SAFETY: the call uses no memory of the process.
    unsafe { syscall(libc::SYS_lseek, arguments) }
}

/// Calls `fcntl` with a command whose argument is a number.
///
/// # Safety
///
/// `command` is one whose argument is a number, not an address.
pub unsafe fn control(file: c_int, command: c_int, argument: c_int) -> Answer<c_int> {
    let arguments = [file as usize, command as usize, argument as usize];
    // SAFETY: the caller promises that the kernel takes the argument for a number.
    unsafe { syscall(libc::SYS_fcntl, arguments) }.map(|answer| answer as c_int)
}

/// Seals a file that [`memory_file`] made.
pub fn seal(file: c_int, seals: c_int) -> Answer<()> {
    // SAFETY: this command takes a number.
    unsafe { control(file, libc::F_ADD_SEALS, seals) }.map(drop)
}

/// Sets the mode of a file.
pub fn set_mode(file: c_int, mode: libc::mode_t) -> Answer<()> {
    // SAFETY: the call uses no memory of the process.
    unsafe { syscall(libc::SYS_fchmod, [file as usize, mode as usize]) }.map(drop)
}

/// Sets the size of a file. New bytes read as zeroes, and take no space yet.
pub fn set_size(file: c_int, size: usize) -> Answer<()> {
    // SAFETY: the call uses no memory of the process.
    unsafe { syscall(libc::SYS_ftruncate, [file as usize, size]) }.map(drop)
}

/// Allocates space for `size` bytes of a file, from `offset` on. Lengthens the file if it is
/// shorter than `offset + size`, and changes no data. Fails with EOPNOTSUPP on file systems without
/// this call.
pub fn allocate(file: c_int, offset: usize, size: usize) -> Answer<()> {
    // SAFETY: the call uses no memory of the process.
    unsafe { syscall(libc::SYS_fallocate, [file as usize, 0, offset, size]) }.map(drop)
}

/// Makes an empty file `size` zero bytes long, and allocates the space for them, on any file system
/// (`posix_fallocate`). Where the file system cannot allocate, writes to each block.
pub fn fill(file: c_int, size: usize) -> Answer<()> {
    /// No file system has smaller blocks.
    const BLOCK: usize = 512;
    match allocate(file, 0, size) {
        Err(libc::EOPNOTSUPP | libc::ENOSYS) => {}
        done => return done,
    }
    set_size(file, size)?;
    (0..size)
        .step_by(BLOCK)
        .try_for_each(|offset| write_at(file, &[0], offset).map(drop))
}

/// Returns the status of an open file.
pub fn status(file: c_int) -> Answer<libc::stat> {
    status_by(file as usize, c"", libc::AT_EMPTY_PATH)
}

/// Returns the status of the file at `path`. Does not follow a symbolic link there.
pub fn status_of(path: &CStr) -> Answer<libc::stat> {
    status_by(HERE, path, libc::AT_SYMLINK_NOFOLLOW)
}

fn status_by(folder: usize, path: &CStr, flags: c_int) -> Answer<libc::stat> {
    // SAFETY: `stat` consists of integers, so zeroes are valid.
    let mut status = unsafe { core::mem::zeroed::<libc::stat>() };
    let to = (&raw mut status) as usize;
    let arguments = [folder, address(path), to, flags as usize];
    // SAFETY: a `CStr` is NUL-terminated. `status` is writable, and the C library's type is the
    // kernel's on 64-bit machines.
    unsafe { syscall(libc::SYS_newfstatat, arguments) }.map(|_| status)
}

/// Removes the name of a file.
pub fn unlink(path: &CStr) -> Answer<()> {
    // SAFETY: a `CStr` is NUL-terminated, and lives until the call returns.
    unsafe { syscall(libc::SYS_unlinkat, [HERE, address(path), 0]) }.map(drop)
}

/// Renames the file `from` to `to`. A file that had the name `to` is replaced.
pub fn rename(from: &CStr, to: &CStr) -> Answer<()> {
    let arguments = [HERE, address(from), HERE, address(to), 0];
    // SAFETY: both names are NUL-terminated, and live until the call returns.
    unsafe { syscall(libc::SYS_renameat2, arguments) }.map(drop)
}

/// Maps memory. `file` is a descriptor, or −1 for memory without a file. Returns the address.
///
/// # Safety
///
/// No code needs what the new mapping replaces.
pub unsafe fn map(
    at: usize,
    size: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: usize,
) -> Answer<usize> {
    let (protection, flags) = (protection as usize, flags as usize);
    let arguments = [at, size, protection, flags, file as usize, offset];
    // SAFETY: the caller promises that no code needs what the mapping replaces.
    unsafe { syscall(libc::SYS_mmap, arguments) }
}

/// Unmaps memory.
///
/// # Safety
///
/// `[at, at + size)` are whole pages of mappings that no code uses any more.
pub unsafe fn unmap(at: usize, size: usize) -> Answer<()> {
    // SAFETY: the caller promises that no code uses the pages.
    unsafe { syscall(libc::SYS_munmap, [at, size]) }.map(drop)
}

/// Returns the size of a page. Makes no system call.
pub fn page_size() -> usize {
    // SAFETY: getauxval only reads the auxiliary vector.
    (unsafe { libc::getauxval(libc::AT_PAGESZ) }) as usize
}

/// Returns the PID of this process. The kernel never refuses this call.
pub fn process() -> libc::pid_t {
    // SAFETY: the call takes no arguments.
    unsafe { syscall(libc::SYS_getpid, []) }.unwrap_or(0) as libc::pid_t
}

/// Calls `f` with the kernel's release, as `7.0.14-arm64`. The text is empty if a seccomp filter
/// refuses the call.
#[cold]
#[inline(never)]
pub(crate) fn release<R>(f: impl FnOnce(&[u8]) -> R) -> R {
    // SAFETY: `utsname` consists of arrays of bytes, so zeroes are valid. The call only writes to
    // it.
    let names = unsafe {
        let mut names: libc::utsname = core::mem::zeroed();
        let _ = syscall(libc::SYS_uname, [(&raw mut names) as usize]);
        names
    };
    let release = names.release.map(|byte| byte as u8);
    let length = release.iter().position(|&byte| byte == 0);
    f(&release[..length.unwrap_or(release.len())])
}

/// Returns the TID of the calling thread. The kernel never refuses this call.
pub fn thread() -> libc::pid_t {
    // SAFETY: the call takes no arguments.
    unsafe { syscall(libc::SYS_gettid, []) }.unwrap_or(0) as libc::pid_t
}

/// Returns the effective user ID of this process.
pub fn effective_user() -> Answer<libc::uid_t> {
    // SAFETY: the call takes no arguments.
    unsafe { syscall(libc::SYS_geteuid, []) }.map(|user| user as libc::uid_t)
}

/// Returns this process's soft limit, or `None` if the kernel or a seccomp filter refuses.
/// `resource` is `RLIMIT_AS` or another of these numbers, whose type differs between C libraries.
pub fn limit(resource: impl Into<i64>) -> Option<libc::rlim_t> {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    let arguments = [0, resource.into() as usize, 0, (&raw mut limit) as usize];
    // SAFETY: `limit` is a writable `rlimit`, and the null address asks for no change.
    let answer = unsafe { syscall(libc::SYS_prlimit64, arguments) };
    answer.ok().map(|_| limit.rlim_cur)
}

/// Lets another thread run on this CPU.
pub fn yield_now() {
    // SAFETY: the call takes no arguments.
    let _ = unsafe { syscall(libc::SYS_sched_yield, []) };
}

/// Changes the calling thread's signal mask, in which bit 0 stands for signal 1. `how` is as for
/// `sigprocmask`. Returns the previous mask.
pub fn block_signals(how: c_int, which: u64) -> Answer<u64> {
    let mut before = 0u64;
    let (new, old) = ((&raw const which) as usize, (&raw mut before) as usize);
    // SAFETY: both addresses are those of 64-bit words. The kernel's set of signals has 64 bits.
    unsafe { syscall(libc::SYS_rt_sigprocmask, [how as usize, new, old, 8]) }.map(|_| before)
}

/// The bit of `signal` in a signal mask.
const fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The signals that the kernel sends to the thread that caused them.
///
/// The kernel ends a process if a thread causes one of these signals and blocks it, even if the
/// process has a handler. A sandbox may have such a handler, which carries out the system calls
/// that a filter traps.
pub const SYNCHRONOUS: u64 = bit(libc::SIGSYS)
    | bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP);

/// Keeps the calling thread's signals blocked until this value is dropped. Leaves out the
/// [`SYNCHRONOUS`] ones and those that the C library uses itself, which stay as they are.
pub struct Signals(Option<u64>);

impl Signals {
    /// Blocks the signals. Does nothing if the system refuses.
    pub fn block() -> Signals {
        // The kernel's first real-time signal is 32. The C library keeps this one and those up to
        // SIGRTMIN for itself.
        let library = (32..libc::SIGRTMIN()).fold(0, |mask, signal| mask | bit(signal));
        Signals(block_signals(libc::SIG_BLOCK, !(SYNCHRONOUS | library)).ok())
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            let _ = block_signals(libc::SIG_SETMASK, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    #[test]
    fn a_file_is_made_written_renamed_and_removed() {
        let name = |end| {
            let path = std::env::temp_dir().join(std::format!("kernel-{}-{end}", process()));
            CString::new(path.into_os_string().into_encoded_bytes()).unwrap()
        };
        let (first, second) = (name("first"), name("second"));
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let file = open(&first, flags, 0o600).unwrap();
        assert_eq!(open(&first, flags, 0o600), Err(libc::EEXIST));
        fill(file, 5000).unwrap();
        assert_eq!(
            (write(file, b"one"), write_at(file, b"two", 4990)),
            (Ok(3), Ok(3))
        );
        assert_eq!(position(file), Ok(3));
        set_mode(file, 0o400).unwrap();
        rename(&first, &second).unwrap();
        assert_eq!(status_of(&first).err(), Some(libc::ENOENT));
        let known = status_of(&second).unwrap();
        assert_eq!((known.st_size, known.st_mode & 0o777), (5000, 0o400));
        assert_eq!(known.st_ino, status(file).unwrap().st_ino);
        assert_eq!(effective_user(), Ok(known.st_uid));
        close(file).unwrap();
        let file = open(&second, libc::O_RDONLY, 0);
        let mut bytes = [1; 4];
        if let Ok(file) = file {
            assert_eq!((read(file, &mut bytes), &bytes), (Ok(4), b"one\0"));
            close(file).unwrap();
        }
        unlink(&second).unwrap();
        assert_eq!(unlink(&second), Err(libc::ENOENT));
    }

    #[test]
    fn a_sealed_file_keeps_its_size() {
        let file = memory_file(c"kernel", libc::MFD_ALLOW_SEALING).unwrap();
        set_size(file, 100).unwrap();
        allocate(file, 0, 200).unwrap();
        seal(file, libc::F_SEAL_GROW | libc::F_SEAL_SHRINK).unwrap();
        assert_eq!(set_size(file, 300), Err(libc::EPERM));
        assert_eq!(status(file).unwrap().st_size, 200);
        close(file).unwrap();
        // Not `file`, whose number another test's file may have by now.
        assert_eq!(status(-1).err(), Some(libc::EBADF));
    }

    #[test]
    fn blocked_signals_are_returned() {
        let usr1 = 1 << (libc::SIGUSR1 - 1);
        let before = block_signals(libc::SIG_BLOCK, usr1).unwrap();
        assert_eq!(block_signals(libc::SIG_SETMASK, before), Ok(before | usr1));
    }

    #[test]
    fn numbers_and_limits() {
        assert_eq!(process() as u32, std::process::id());
        assert!(thread() > 0);
        assert!(limit(libc::RLIMIT_NOFILE).is_some_and(|files| files > 2));
        assert_eq!(limit(999), None);
    }
}
