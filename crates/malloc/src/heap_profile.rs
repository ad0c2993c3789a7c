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

pub use crate::profiled::VARIABLE;
use crate::{heap, profiled};
use core::ffi::CStr;
use pinfold::profile;
#[doc(hidden)]
pub use pinfold::profile::forbid_walks;
pub use pinfold::profile::{DEFAULT_INTERVAL, MAX_INTERVAL, Totals};
use pinfold_rseq::env;

/// The environment variable that names the file to which the profile is written when the process
/// ends. The process's number is appended.
pub const FILE_VARIABLE: &str = "PINFOLD_HEAP_FILE";

/// Turns the profile on, or changes the mean bytes from one sample to the next: 1 to
/// [`MAX_INTERVAL`].
///
/// Returns false if the system has no memory, or if another thread is starting or stopping the
/// profile. The first start makes a few system calls, and may load the unwinder's library, so a
/// signal handler must not be the first to call this.
pub fn start(interval: u64) -> bool {
    profiled::start(interval)
}

/// Turns the profile off. Blocks that were sampled are still known, so their frees still count, and
/// a later start goes on with them.
///
/// Returns false if another thread is starting or stopping the profile.
pub fn stop() -> bool {
    profiled::stop()
}

/// Returns whether the profile is on. Costs one load.
pub fn is_on() -> bool {
    profiled::is_profiling()
}

/// Returns whether there was ever a profile. Costs a load.
pub(crate) fn exists() -> bool {
    profile::has_records()
}

/// Returns whether a thread is starting or stopping the profile.
pub(crate) fn is_busy() -> bool {
    profiled::is_busy()
}

/// Returns whether allocations are sampled: for a profile, or for a tracer that is attached to the
/// probes. Costs one load.
pub fn is_sampling() -> bool {
    profiled::is_on()
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
    profile::has_records() && dump::write(path)
}

/// Starts the profile if the environment asks for it.
pub(crate) fn start_as_asked() {
    if let Some(interval) = env::parsed(VARIABLE, profiled::parse) {
        heap::keep_errno(|| start(interval));
    }
}

/// Writes the profile to the file that the environment names.
pub(crate) fn write_as_asked() {
    if profile::has_records() {
        heap::keep_errno(dump::write_as_asked);
    }
}

mod dump {
    use super::{FILE_VARIABLE, env, heap, profile};
    use core::ffi::CStr;

    /// Bytes for the path of the file.
    const PATH: usize = 1024;

    pub(super) fn write_as_asked() {
        let mut path = [0u8; PATH];
        let Some(length) = env::read(FILE_VARIABLE, &mut path[..PATH - 16]).map(<[u8]>::len) else {
            return;
        };
        // SAFETY: `getpid` has no preconditions.
        let mut rest = unsafe { libc::getpid() } as u32;
        let digits = rest.checked_ilog10().unwrap_or(0) as usize + 1;
        path[length] = b'.';
        for place in path[length + 1..length + 1 + digits].iter_mut().rev() {
            *place = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        if let Ok(path) = CStr::from_bytes_until_nul(&path)
            && length > 0
        {
            write(path);
        }
    }

    /// Writes the profile to a new file beside `path`, and gives the file this name once it is
    /// whole. Another user who can write to the folder could have put a symbolic link, a FIFO or a
    /// file of their own there: this function writes to none of these, and waits for no reader.
    pub(super) fn write(path: &CStr) -> bool {
        const SUFFIX: &[u8] = b".new\0";
        let mut beside = [0u8; PATH + SUFFIX.len()];
        let name = path.to_bytes();
        if name.len() > PATH {
            heap::set_errno(libc::ENAMETOOLONG);
            return false;
        }
        beside[..name.len()].copy_from_slice(name);
        beside[name.len()..name.len() + SUFFIX.len()].copy_from_slice(SUFFIX);
        let beside = beside.as_ptr().cast();
        if !may_replace(path) {
            return false;
        }
        // Removes what a killed process has left. O_EXCL below refuses what cannot be removed.
        // SAFETY: the name is a C string.
        heap::keep_errno(|| unsafe { libc::unlink(beside) });
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
        // SAFETY: the name is a C string.
        let file = unsafe { libc::open(beside, flags | libc::O_NOFOLLOW, 0o600) };
        if file < 0 {
            return false;
        }
        // SAFETY: both names are C strings.
        let done = fill(file) && unsafe { libc::rename(beside, path.as_ptr()) == 0 };
        if !done {
            // SAFETY: the name is a C string.
            heap::keep_errno(|| unsafe { libc::unlink(beside) });
        }
        done
    }

    /// Returns whether there is nothing at `path`, or a regular file of this user's. Otherwise sets
    /// errno: ELOOP for a symbolic link, EINVAL for another file that is not regular, and EPERM
    /// for a file of another user.
    fn may_replace(path: &CStr) -> bool {
        // SAFETY: a `stat` of zeroes is valid.
        let mut found: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: the path is a C string, and `found` is writable.
        if unsafe { libc::lstat(path.as_ptr(), &raw mut found) } != 0 {
            // SAFETY: errno is the calling thread's own.
            return unsafe { *libc::__errno_location() } == libc::ENOENT;
        }
        // SAFETY: `geteuid` has no preconditions.
        let own = unsafe { libc::geteuid() };
        let errno = match found.st_mode & libc::S_IFMT {
            libc::S_IFREG if found.st_uid == own => return true,
            libc::S_IFREG => libc::EPERM,
            libc::S_IFLNK => libc::ELOOP,
            _ => libc::EINVAL,
        };
        heap::set_errno(errno);
        false
    }

    /// Writes the profile and the mappings to `file`, and closes it.
    fn fill(file: i32) -> bool {
        let is_written = profile::bytes().is_some_and(|(bytes, used)| {
            // SAFETY: the bytes stay mapped.
            unsafe { write_all(file, bytes) && write_used(file, used) }
        });
        let is_whole = is_written && copy_mappings(file);
        // SAFETY: the caller has opened the file for this function.
        unsafe { libc::close(file) == 0 && is_whole }
    }

    /// Writes how many records the file has: threads may have begun more since they were copied.
    fn write_used(file: i32, used: u32) -> bool {
        let at = core::mem::offset_of!(profile::Head, used) as libc::off_t;
        let size = size_of::<u32>();
        // SAFETY: the pointer is to a word of this size.
        let done = unsafe { libc::pwrite(file, (&raw const used).cast(), size, at) };
        done == size as isize
    }

    /// Appends the process's mappings: the places of the program's code.
    fn copy_mappings(file: i32) -> bool {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        // SAFETY: the path is a C string.
        let maps = unsafe { libc::open(c"/proc/self/maps".as_ptr(), flags) };
        if maps < 0 {
            return false;
        }
        let mut bytes = [0u8; 1024];
        let is_whole = loop {
            // SAFETY: the buffer has so many bytes.
            let got = unsafe { libc::read(maps, bytes.as_mut_ptr().cast(), bytes.len()) };
            match got {
                0 => break true,
                // SAFETY: the bytes are in the buffer.
                1.. if unsafe { write_all(file, &raw const bytes[..got as usize]) } => {}
                _ => break false,
            }
        };
        // SAFETY: this function has opened the file.
        unsafe { libc::close(maps) };
        is_whole
    }

    /// Returns whether so many more bytes are beyond the limit on the size of files. A write beyond
    /// it would raise SIGXFSZ, which ends the program.
    fn is_beyond_limit(file: i32, bytes: usize) -> bool {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `limit` is writable, and `lseek` only asks for the position.
        let (known, at) = unsafe {
            let known = libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) == 0;
            (known, libc::lseek(file, 0, libc::SEEK_CUR))
        };
        known && at >= 0 && (at as u64).saturating_add(bytes as u64) > limit.rlim_cur
    }

    /// Writes bytes that other threads may be writing to: only the system reads them.
    ///
    /// # Safety
    ///
    /// The bytes are mapped.
    unsafe fn write_all(file: i32, bytes: *const [u8]) -> bool {
        if is_beyond_limit(file, bytes.len()) {
            heap::set_errno(libc::EFBIG);
            return false;
        }
        let (mut at, mut left) = (bytes.cast::<u8>(), bytes.len());
        while left > 0 {
            // SAFETY: the caller promises the bytes.
            let done = unsafe { libc::write(file, at.cast(), left) };
            if done <= 0 {
                return false;
            }
            at = at.wrapping_add(done as usize);
            left -= done as usize;
        }
        true
    }
}
