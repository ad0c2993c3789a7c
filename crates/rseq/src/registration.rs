//! Finds the area that the C library registered for the thread, or registers one.
//!
//! glibc registers an area for each thread since 2.35, unless it is told not to. Where the C
//! library does not, this module registers an area of its own in each thread that asks for its
//! index ([`current`](crate::current)).
//!
//! The own area is a thread-local variable at a fixed offset from the thread pointer. While it is
//! not registered, its id fields hold −1. So a critical section finds no unit, and the operation
//! takes its slow path. The thread's state stands behind the area:
//!
//! | state | changed when | to |
//! |---|---|---|
//! | [`FRESH`] | the kernel registers the area | [`REGISTERED`] |
//! | `FRESH` | the kernel refuses, for example because other code was first | [`NEVER`] |
//! | `REGISTERED` | the thread ends | `NEVER` |
#![allow(
    unsafe_code,
    reason = "registers memory with the kernel, and reads what the C library registered"
)]

use crate::{abi, arch, kernel, syscall};
use core::ffi::{c_int, c_void};
use core::ptr::without_provenance;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Where each registered thread of the process has its area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    /// Bytes from the thread pointer to the area.
    pub offset: isize,
    /// Bytes of the area that the kernel maintains.
    pub size: usize,
}

impl Registration {
    /// Returns the registration of the calling thread. Registers the thread if the C library has
    /// not. Returns `None` if that fails.
    pub(crate) fn here() -> Option<Self> {
        if !arch::SUPPORTED {
            return None;
        }
        let from_library = arch::registration();
        from_library.or_else(|| {
            if !OwnArea::here().register(key()?, Caller::First) {
                return None;
            }
            REGISTERS.store(true, Relaxed);
            Some(Registration {
                offset: arch::own_area(),
                size: feature_size().max(abi::ORIGINAL_FEATURE_SIZE),
            })
        })
    }

    /// Reads glibc's `__rseq_offset` and `__rseq_size`. Either pointer is null if the C library has
    /// no such variable.
    pub(crate) fn from_glibc(offset: *const isize, size: *const u32) -> Option<Self> {
        if offset.is_null() || size.is_null() {
            return None;
        }
        // SAFETY: both pointers are not null, so they are the addresses of glibc's read-only
        // variables, which glibc sets before any code of the program runs.
        let (offset, size) = unsafe { (*offset, *size as usize) };
        if size == 0 {
            return None;
        }
        // glibc 2.35 to 2.40 register 32 bytes and set `__rseq_size` to 32 or 20. The kernel may
        // maintain fewer bytes or more. So this function asks the kernel.
        let size = if size <= ORIGINAL_SIZE {
            feature_size().clamp(abi::ORIGINAL_FEATURE_SIZE, ORIGINAL_SIZE)
        } else {
            size
        };
        Some(Registration { offset, size })
    }
}

/// Returns how many bytes of an area the kernel can maintain, or 0 before Linux 6.3.
fn feature_size() -> usize {
    auxiliary(abi::AT_RSEQ_FEATURE_SIZE)
}

fn auxiliary(entry: libc::c_ulong) -> usize {
    // SAFETY: getauxval only reads the auxiliary vector.
    unsafe { libc::getauxval(entry) as usize }
}

/// The smallest area that a kernel registers.
const ORIGINAL_SIZE: usize = size_of::<abi::Rseq>();

/// Returns how many bytes to register: as many as the kernel can maintain, or the smallest area if
/// the own area is too small or not aligned enough for that.
fn registered_size() -> usize {
    let fits = feature_size() <= OWN_SIZE && auxiliary(abi::AT_RSEQ_ALIGN) <= OWN_SIZE;
    match fits {
        true => feature_size().max(ORIGINAL_SIZE),
        false => ORIGINAL_SIZE,
    }
}

/// Bytes of the own area. Its address is a multiple of this number.
pub(crate) const OWN_SIZE: usize = 64;

/// The key under which a registered thread has a value, so that the C library calls
/// [`thread_ends`]. Holds the key's number plus one, or 0.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Whether this crate has registered a thread.
static REGISTERS: AtomicBool = AtomicBool::new(false);

/// Whether no further thread may be registered.
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// Returns whether this crate registers the threads of the process, because the C library does not.
/// One load.
///
/// Returns false until [`init`](crate::init) has chosen the backend.
pub fn registers_threads() -> bool {
    // Relaxed: the flag guards no memory.
    REGISTERS.load(Relaxed)
}

/// Has no thread registered from now on: a sandbox that the program is about to enter may end the
/// process at the system call. Threads that are registered stay so.
#[doc(hidden)]
pub fn forbid_registration() {
    // Relaxed: a thread that is made later sees the store, because its creation orders it.
    FORBIDDEN.store(true, Relaxed);
}

/// The offset of the thread's tag from its own area.
const TAG: usize = OWN_SIZE + 4;

/// Returns the calling thread's tag, or `None` on an architecture without thread-local words. A new
/// thread has the tag 0. Costs a few loads.
#[doc(hidden)]
pub fn tag() -> Option<u32> {
    arch::SUPPORTED.then(|| OwnArea::here().word(TAG).load(Relaxed))
}

/// Sets the calling thread's tag. Returns false on an architecture without thread-local words.
#[doc(hidden)]
pub fn set_tag(tag: u32) -> bool {
    if arch::SUPPORTED {
        OwnArea::here().word(TAG).store(tag, Relaxed);
    }
    arch::SUPPORTED
}

/// Returns the key. Makes it the first time.
fn key() -> Option<libc::pthread_key_t> {
    // Relaxed, here and elsewhere: the key is a number, and the C library has made its data before
    // it returned.
    if let Some(key) = KEY.load(Relaxed).checked_sub(1) {
        return Some(key);
    }
    /// glibc keeps the values of higher keys in memory that it allocates when a thread sets one.
    /// The allocator may be the caller of this module.
    const WITHOUT_MEMORY: libc::pthread_key_t = 32;
    let mut fresh = 0;
    // SAFETY: `fresh` is writable. The destructor stays loaded, because code with critical sections
    // must not be unloaded.
    if unsafe { libc::pthread_key_create(&raw mut fresh, Some(thread_ends)) } != 0 {
        return None;
    }
    let usable = fresh < WITHOUT_MEMORY || cfg!(target_env = "musl");
    if usable && KEY.compare_exchange(0, fresh + 1, Relaxed, Relaxed).is_ok() {
        return Some(fresh);
    }
    // SAFETY: this thread made the key above, and no thread has a value under it.
    unsafe { libc::pthread_key_delete(fresh) };
    KEY.load(Relaxed).checked_sub(1)
}

/// Registers the calling thread if this crate registers threads and has not tried this one.
/// Returns whether the thread is registered.
///
/// The first time in a thread, costs two system calls.
#[cold]
#[inline(never)]
pub(crate) fn register_late() -> bool {
    let key = KEY.load(Relaxed).checked_sub(1);
    key.is_some_and(|key| OwnArea::here().register(key, Caller::Later))
}

/// Who registers: the first thread of the process to do so, or a later one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    First,
    Later,
}

/// The calling thread's own area. Only this thread and its signal handlers use the words, so
/// relaxed accesses suffice. They are atomic because a handler or the kernel may come in between.
struct OwnArea {
    address: usize,
}

const FRESH: u32 = 0;
const REGISTERED: u32 = 1;
const NEVER: u32 = 2;

impl OwnArea {
    fn here() -> OwnArea {
        OwnArea {
            address: arch::thread_pointer().wrapping_add_signed(arch::own_area()),
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the callers pass the offset of a 32-bit field of the area, or of the state or the
        // tag behind it. All stay as long as the thread, and the reference does not leave this
        // module.
        unsafe { &*((self.address + offset) as *const AtomicU32) }
    }

    fn state(&self) -> &AtomicU32 {
        self.word(OWN_SIZE)
    }

    /// Registers the area if that was not tried yet. Returns whether it is registered.
    ///
    /// A signal handler that interrupts this function may do the same. The kernel then answers the
    /// interrupted call with `EBUSY`: the area is registered already.
    fn register(&self, key: libc::pthread_key_t, caller: Caller) -> bool {
        match self.state().load(Relaxed) {
            REGISTERED => return true,
            FRESH if !FORBIDDEN.load(Relaxed) && is_owner(caller) => {}
            _ => return false,
        }
        // Before the area is registered, so that no thread ends with a registered area.
        // SAFETY: the key exists, and no code reads through the value.
        if unsafe { libc::pthread_setspecific(key, without_provenance(FIRST_ROUND)) } != 0 {
            return false;
        }
        // A section that found no unit has left its descriptor's address here. Kernels older than
        // 6.15 expect null.
        // SAFETY: `rseq_cs` is an aligned 64-bit field of the area, which stays as long as the
        // thread.
        let section = unsafe { &*((self.address + abi::RSEQ_CS as usize) as *const AtomicU64) };
        section.store(0, Relaxed);
        let registered = matches!(self.call(0), Ok(()) | Err(libc::EBUSY));
        let state = if registered { REGISTERED } else { NEVER };
        self.state().store(state, Relaxed);
        registered
    }

    /// Undoes the registration. The thread is never registered again.
    fn unregister(&self) {
        if self.state().load(Relaxed) != REGISTERED {
            return;
        }
        // The kernel writes 0 to `mm_cid`, which looks like an index. No handler may read it.
        let _signals = kernel::Signals::block();
        if self.call(UNREGISTER).is_ok() {
            // The kernel has let go of the area, so its id fields may be written.
            for field in [abi::CPU_ID, abi::MM_CID] {
                let field = self.word(field as usize);
                field.store(abi::CPU_ID_UNINITIALIZED, Relaxed);
            }
            self.state().store(NEVER, Relaxed);
        }
    }

    /// Makes the system call `rseq` with this area.
    fn call(&self, flags: usize) -> Result<(), c_int> {
        let (size, signature) = (registered_size(), abi::SIGNATURE as usize);
        // SAFETY: the area has `size` bytes. It stays until the thread ends, and `thread_ends` lets
        // the kernel go of it before.
        unsafe { syscall(libc::SYS_rseq, [self.address, size, flags, signature]) }.map(drop)
    }
}

/// The flag of the system call that undoes a registration.
const UNREGISTER: usize = 1;

/// Returns whether the thread-local variables are the calling thread's. A child of `vfork` uses
/// those of its maker. If the child registered them, its maker would take them for registered.
///
/// The C library's TID stays the maker's in such a child. Before the C library has started, it does
/// not know its TID, but then there is no other thread.
fn is_owner(caller: Caller) -> bool {
    let mut clock = 0;
    // SAFETY: the handle is the calling thread's, and `clock` is writable.
    let error = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    match error {
        // The kernel's number of a thread's clock contains the complement of the TID, above 3 bits.
        0 => !(clock >> 3) == kernel::thread(),
        _ => caller == Caller::First,
    }
}

/// The values under the key. The C library calls [`thread_ends`] again in the next round of
/// destructors if the thread has a value again by then.
const FIRST_ROUND: usize = 1;
const SECOND_ROUND: usize = 2;

/// Undoes the registration of a thread that ends, before the C library frees the area.
///
/// Does so in the second round of destructors. In the first, most other destructors run, and these
/// may use critical sections. The C libraries make four rounds. So this function still runs twice
/// in a thread that is first registered by a destructor of the second round.
unsafe extern "C" fn thread_ends(round: *mut c_void) {
    // glibc frees the area when the kernel's thread is gone. So a sandbox need not see the call.
    let stays = cfg!(target_env = "gnu") && FORBIDDEN.load(Relaxed);
    if stays {
        return;
    }
    match KEY.load(Relaxed).checked_sub(1) {
        Some(key) if round.addr() == FIRST_ROUND => {
            // SAFETY: the key exists, and no code reads through the value.
            unsafe { libc::pthread_setspecific(key, without_provenance(SECOND_ROUND)) };
        }
        _ => OwnArea::here().unregister(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_fresh_thread_is_behind_an_area_without_index() {
        if !arch::SUPPORTED {
            return;
        }
        let fresh = std::thread::spawn(|| {
            let own = OwnArea::here();
            assert_eq!(own.address % OWN_SIZE, 0);
            let words = [abi::CPU_ID as usize, abi::MM_CID as usize, OWN_SIZE];
            words.map(|offset| own.word(offset).load(Relaxed))
        });
        let unset = abi::CPU_ID_UNINITIALIZED;
        assert_eq!(fresh.join().unwrap(), [unset, unset, FRESH]);
    }

    #[test]
    fn the_c_librarys_tid_is_the_kernels() {
        assert!(is_owner(Caller::Later));
        assert!(
            std::thread::spawn(|| is_owner(Caller::Later))
                .join()
                .unwrap()
        );
    }

    #[test]
    fn a_call_that_a_handler_overtook_finds_the_thread_registered() {
        let thread = std::thread::spawn(|| {
            if !arch::SUPPORTED || arch::registration().is_some() || Registration::here().is_none()
            {
                return;
            }
            let own = OwnArea::here();
            own.state().store(FRESH, Relaxed);
            assert!(own.register(key().unwrap(), Caller::Later));
            assert_eq!(own.state().load(Relaxed), REGISTERED);
        });
        thread.join().unwrap();
    }

    #[test]
    fn registered_sizes_are_those_that_a_kernel_takes() {
        assert!((ORIGINAL_SIZE..=OWN_SIZE).contains(&registered_size()));
    }
}
