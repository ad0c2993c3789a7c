//! Files without a name, and the mappings of files and of private memory.

use crate::segment;
use crate::sys::decimal;
use core::ffi::CStr;
use core::ptr::null_mut;
use pinfold_rseq::kernel;

/// The descriptors are moved to the first free numbers from this one on. A process with a lower
/// limit on descriptors has no segment, because it may need all of them itself.
pub(super) const HIGH: libc::rlim_t = 240;

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// An open file. Dropping it closes its descriptor.
pub(super) struct File(pub(super) libc::c_int);

impl Drop for File {
    fn drop(&mut self) {
        let _ = kernel::close(self.0);
    }
}

impl File {
    /// Makes an anonymous file. Returns `None` if the system refuses.
    pub(super) fn anonymous(name: &CStr, flags: libc::c_uint) -> Option<File> {
        // Linux 6.3 and later expect `MFD_NOEXEC_SEAL` or `MFD_EXEC`. Older kernels refuse it.
        kernel::memory_file(name, flags | libc::MFD_NOEXEC_SEAL)
            .or_else(|_| kernel::memory_file(name, flags))
            .map(File)
            .ok()
    }

    /// Creates a memfd of `size` zero bytes. Its descriptor is [`HIGH`] or above, so that the
    /// program's own `open` still gets the lowest numbers. Returns `None` if the system refuses.
    pub(super) fn make(name: &CStr, size: usize) -> Option<File> {
        // A larger file than the limit allows would get the process a signal. A forked child may
        // have a lower limit than its parent.
        if limit(libc::RLIMIT_FSIZE) < size as libc::rlim_t {
            return None;
        }
        let low = File::anonymous(name, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?;
        // The program may rely on the lowest free numbers, so the low one is closed at once.
        // SAFETY: this command takes a number.
        let high = unsafe { kernel::control(low.0, libc::F_DUPFD_CLOEXEC, HIGH as libc::c_int) };
        drop(low);
        let file = high.map(File).ok()?;
        let has_size = if segment::commits_strictly() {
            // The kernel may refuse a page later, which would be a signal.
            kernel::fill(file.0, size)
        } else {
            kernel::set_size(file.0, size)
        };
        has_size.ok().map(|()| file)
    }

    /// Maps the file, anywhere or in the place of this module's mapping at `place`. Returns `None`
    /// if the system refuses.
    pub(super) fn map(&self, place: *mut u8, size: usize) -> Option<*mut u8> {
        // SAFETY: `place` is null, or part of a mapping of this module that nothing uses.
        unsafe { map(place, size, READ_WRITE, libc::MAP_SHARED, Some(self)) }
    }

    /// Sets the file's mode and seals it. Replaces its descriptor by one that only names the file,
    /// or closes it where there is no /proc.
    pub(super) fn keep(self, mode: libc::mode_t, seals: libc::c_int) {
        let _ = kernel::set_mode(self.0, mode);
        // Kernels before 5.1 do not know the seal against later writers.
        let known = seals & !segment::F_SEAL_FUTURE_WRITE;
        let _ = kernel::seal(self.0, seals | libc::F_SEAL_SEAL)
            .or_else(|_| kernel::seal(self.0, known | libc::F_SEAL_SEAL));
        let mut path = *b"/proc/self/fd/0123456789\0";
        let end = PROC_FD + decimal(self.0 as usize, &mut path[PROC_FD..]);
        path[end] = 0;
        let named = CStr::from_bytes_until_nul(&path).ok();
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        let Some(named) = named.and_then(|path| kernel::open(path, flags, 0).ok()) else {
            return;
        };
        let named = File(named);
        if kernel::replace(self.0, named.0, libc::O_CLOEXEC).is_ok() {
            // The descriptor stays open until the process ends.
            core::mem::forget(self);
        }
    }
}

/// Where the number begins in the path of a descriptor.
const PROC_FD: usize = b"/proc/self/fd/".len();

/// Unmaps a mapping of this module that nothing uses.
pub(super) fn unmap(at: *mut u8, size: usize) {
    // SAFETY: the caller made the mapping, and nothing uses it.
    let _ = unsafe { kernel::unmap(at as usize, size) };
}

pub(super) fn limit(resource: impl Into<i64>) -> libc::rlim_t {
    kernel::limit(resource).unwrap_or(0)
}

/// Maps private memory of `size` bytes, anywhere or in the place of the mapping at `place`. Returns
/// null if the system refuses.
pub(super) fn map_private(place: *mut u8, size: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: `place` is null, or the start of a mapping of this size whose content is copied.
    unsafe { map(place, size, READ_WRITE, flags, None) }.unwrap_or(null_mut())
}

/// Maps a file, or memory without a file, anywhere or in the place of this module's mapping at
/// `place`. Returns `None` if the system refuses.
///
/// # Safety
///
/// Nothing uses the memory at `place`.
pub(super) unsafe fn map(
    place: *mut u8,
    size: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    file: Option<&File>,
) -> Option<*mut u8> {
    let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
    let (at, flags) = (place as usize, flags | fixed);
    // SAFETY: the caller promises that nothing uses what the mapping replaces.
    let at = unsafe {
        kernel::map(
            at,
            size,
            protection,
            flags,
            file.map_or(-1, |file| file.0),
            0,
        )
    };
    at.ok().map(|at| at as *mut u8)
}
