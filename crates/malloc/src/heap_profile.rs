//! Heap profiles: which call stacks hold the program's memory, by a sample of the allocations.
//!
//! ```
//! use pinfold_malloc::heap_profile;
//!
//! assert!(heap_profile::start(heap_profile::DEFAULT_INTERVAL));
//! assert!(heap_profile::is_on());
//! assert!(heap_profile::stop());
//! ```
//!
//! While no profile is on, it costs no instruction of an allocation or a free. While it is on, an
//! allocation costs a few more instructions, and a free costs nothing more. A sampled allocation,
//! one in half a MiB by default, also walks the call stack. The default grows while it would give
//! more than some 4,000 samples a second.
//!
//! `pinfold heap` reads the profile of a running process, and adds the names of functions.

use core::ffi::{CStr, c_int};
pub use pinfold::internal::heap::sampling::VARIABLE;
use pinfold::internal::heap::{self, fragments, lost, sampling};
use pinfold::internal::profile;
#[doc(hidden)]
pub use pinfold::internal::profile::forbid_walks;
pub use pinfold::internal::profile::{DEFAULT_INTERVAL, MAX_INTERVAL, Totals};
use pinfold::internal::{keep_errno, set_errno};
use pinfold_rseq::env;

/// The environment variable that names the file to which the profile is written when the process
/// ends. The process's PID is appended.
pub const FILE_VARIABLE: &str = "PINFOLD_HEAP_FILE";

/// Turns the profile on, or changes the mean bytes from one sample to the next: 1 to
/// [`MAX_INTERVAL`].
///
/// Returns false if the system has no memory, or if another thread is starting or stopping the
/// profile. The first start makes a few system calls, and may load the unwinder's library, so a
/// signal handler must not be the first to call this.
pub fn start(interval: u64) -> bool {
    heap::ready();
    sampling::start(interval)
}

/// Turns the profile off. Blocks that were sampled are still known, so their frees still count, and
/// a later start goes on with them.
///
/// Returns false if another thread is starting or stopping the profile.
pub fn stop() -> bool {
    sampling::stop()
}

/// Returns whether the profile is on. Costs one load.
pub fn is_on() -> bool {
    sampling::is_profiling()
}

/// Returns whether there was ever a profile. Costs a load.
pub(crate) fn exists() -> bool {
    profile::has_records()
}

/// Returns whether allocations are sampled: for a profile, or for a tracer that is attached to the
/// probes. Costs one load.
pub fn is_sampling() -> bool {
    heap::is_sampling()
}

/// Returns the sums over all call stacks. Reads every call stack's counts.
///
/// ```
/// use pinfold_malloc::heap_profile;
///
/// let totals = heap_profile::totals();
/// assert!(totals.freed_bytes <= totals.bytes);
/// ```
pub fn totals() -> Totals {
    profile::totals()
}

/// Writes the profile to a file for `pinfold heap`: the samples so far, and the process's mappings.
///
/// Allocates nothing. Returns false if there was never a profile, or if the system refuses to write
/// the file; errno says why. Replaces an existing regular file of this user once the new one is
/// whole. Refuses anything else at that path: a symbolic link, a FIFO, a device, another user's
/// file.
///
/// ```
/// use pinfold_malloc::heap_profile;
///
/// assert!(heap_profile::start(1 << 20));
/// let path = std::env::temp_dir().join(format!("profile-{}", std::process::id()));
/// let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
/// assert!(heap_profile::write(&name));
/// assert!(std::fs::metadata(&path).unwrap().len() > 4096);
/// # std::fs::remove_file(&path).unwrap();
/// ```
pub fn write(path: &CStr) -> bool {
    profile::has_records() && {
        fragments::look();
        dump::write(path).map_err(set_errno).is_ok()
    }
}

/// Writes the profile to an open file, at the file's position: what [`write`](write()) writes to a
/// path. A pipe or a socket will do, if it blocks.
///
/// Allocates nothing. Returns false if there was never a profile, or if the system refuses to write
/// it; errno says why. A pipe without a reader raises SIGPIPE.
///
/// ```
/// use pinfold_malloc::heap_profile;
/// use std::os::fd::AsRawFd;
///
/// assert!(heap_profile::start(1 << 20));
/// let file = tempfile::tempfile()?;
/// assert!(heap_profile::write_to(file.as_raw_fd()));
/// assert!(file.metadata()?.len() > 4096);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write_to(file: c_int) -> bool {
    profile::has_records() && {
        fragments::look();
        dump::fill(file).map_err(set_errno).is_ok()
    }
}

/// Starts the profile if the environment asks for it.
pub(crate) fn start_as_asked() {
    if let Some(interval) = env::parsed(VARIABLE, sampling::parse) {
        keep_errno(|| start(interval));
    }
}

/// Writes the profile to the file that the environment names, at the end of the process.
pub(crate) fn write_as_asked() {
    if profile::has_records() && env::is_set(FILE_VARIABLE) {
        lost::look();
        fragments::look();
        dump::write_as_asked();
    }
}

pub(crate) use dump::PATH;

mod dump {
    use super::{FILE_VARIABLE, env, profile};
    use core::ffi::CStr;
    use core::mem::offset_of;
    use core::ptr::slice_from_raw_parts;
    use core::sync::atomic::AtomicU64;
    use core::sync::atomic::Ordering::Relaxed;
    use pinfold::internal::decimal;
    use pinfold::internal::profile::Head;
    use pinfold_rseq::kernel::{self, Answer};

    /// Bytes for the path of the file.
    pub(crate) const PATH: usize = 1024;

    pub(super) fn write_as_asked() {
        let mut path = [0u8; PATH];
        let Some(length) = env::read(FILE_VARIABLE, &mut path[..PATH - 16]).map(<[u8]>::len) else {
            return;
        };
        path[length] = b'.';
        decimal(kernel::process() as usize, &mut path[length + 1..]);
        if let Ok(path) = CStr::from_bytes_until_nul(&path)
            && length > 0
        {
            let _ = write(path);
        }
    }

    /// Writes the profile to a new file beside `path`, and gives the file this name once it is
    /// whole. Another user who can write to the folder could have put a symbolic link, a FIFO or a
    /// file of their own there: this function writes to none of these, and waits for no reader.
    pub(super) fn write(path: &CStr) -> Answer<()> {
        const SUFFIX: &[u8] = b".new\0";
        let mut beside = [0u8; PATH + SUFFIX.len()];
        let name = path.to_bytes();
        if name.len() > PATH {
            return Err(libc::ENAMETOOLONG);
        }
        beside[..name.len()].copy_from_slice(name);
        beside[name.len()..name.len() + SUFFIX.len()].copy_from_slice(SUFFIX);
        let beside = CStr::from_bytes_until_nul(&beside).map_err(|_| libc::EINVAL)?;
        may_replace(path)?;
        // Removes the file that a killed process has left. If that fails, `O_EXCL` below makes
        // `open` fail.
        let _ = kernel::unlink(beside);
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
        let file = kernel::open(beside, flags | libc::O_NOFOLLOW, 0o600)?;
        let done = fill(file);
        // Some file systems report only here that they have no space.
        let done = kernel::close(file).and(done);
        let done = done.and_then(|()| kernel::rename(beside, path));
        if done.is_err() {
            let _ = kernel::unlink(beside);
        }
        done
    }

    /// Succeeds if there is nothing at `path`, or a regular file of this user's. The error is ELOOP
    /// for a symbolic link, EINVAL for another file that is not regular, and EPERM for a file of
    /// another user.
    fn may_replace(path: &CStr) -> Answer<()> {
        let found = match kernel::status_of(path) {
            Err(libc::ENOENT) => return Ok(()),
            found => found?,
        };
        match found.st_mode & libc::S_IFMT {
            libc::S_IFREG if found.st_uid == kernel::effective_user()? => Ok(()),
            libc::S_IFREG => Err(libc::EPERM),
            libc::S_IFLNK => Err(libc::ELOOP),
            _ => Err(libc::EINVAL),
        }
    }

    /// Writes the profile and the mappings to `file`.
    pub(super) fn fill(file: i32) -> Answer<()> {
        const HEAD: usize = size_of::<Head>();
        let (bytes, used) = profile::bytes().ok_or(libc::ENODATA)?;
        let start = bytes.cast::<u8>();
        let mut head = [0u8; HEAD];
        for (at, word) in (0..).step_by(8).zip(head.as_chunks_mut().0) {
            // SAFETY: the memory begins with a head, whose words are accessed as atomics.
            *word = unsafe { (*start.add(at).cast::<AtomicU64>()).load(Relaxed) }.to_ne_bytes();
        }
        // The head may count records that are begun from now on.
        let at = offset_of!(Head, used);
        head[at..at + 4].copy_from_slice(&used.to_ne_bytes());
        let rest = slice_from_raw_parts(start.wrapping_add(HEAD), bytes.len() - HEAD);
        // SAFETY: the head is on this stack, and the rest stays mapped.
        unsafe { write_all(file, &raw const head[..]).and_then(|()| write_all(file, rest)) }?;
        copy_mappings(file)
    }

    /// Appends the process's mappings, which tell where the program's code is.
    fn copy_mappings(file: i32) -> Answer<()> {
        let maps = kernel::open(c"/proc/self/maps", libc::O_RDONLY | libc::O_CLOEXEC, 0)?;
        let mut bytes = [0u8; 1024];
        let done = loop {
            let copied = match kernel::read(maps, &mut bytes) {
                Ok(0) => break Ok(()),
                // SAFETY: the bytes are in the buffer.
                Ok(got) => unsafe { write_all(file, &raw const bytes[..got]) },
                Err(error) => Err(error),
            };
            if copied.is_err() {
                break copied;
            }
        };
        let _ = kernel::close(maps);
        done
    }

    /// Returns whether `bytes` more bytes would exceed the limit on the size of files. A write
    /// beyond the limit would raise SIGXFSZ, which ends the program.
    fn is_beyond_limit(file: i32, bytes: usize) -> bool {
        let limit = kernel::limit(libc::RLIMIT_FSIZE);
        let end = kernel::position(file).map(|at| at.saturating_add(bytes));
        end.is_ok_and(|end| limit.is_some_and(|limit| end as u64 > limit))
    }

    /// Writes bytes that other threads may be writing to: only the system reads them.
    ///
    /// # Safety
    ///
    /// The bytes are mapped.
    unsafe fn write_all(file: i32, bytes: *const [u8]) -> Answer<()> {
        if is_beyond_limit(file, bytes.len()) {
            return Err(libc::EFBIG);
        }
        let (mut at, mut left) = (bytes.cast::<u8>(), bytes.len());
        while left > 0 {
            let rest = slice_from_raw_parts(at, left);
            // SAFETY: the caller promises the bytes.
            match unsafe { kernel::write_from(file, rest) } {
                Ok(0) => return Err(libc::EIO),
                Err(libc::EINTR) => {}
                Err(error) => return Err(error),
                Ok(done) => (at, left) = (at.wrapping_add(done), left - done),
            }
        }
        Ok(())
    }
}
