//! The C API of reference counts per CPU.
//!
//! A C count is a [`RefCount`] with the program's release function, in memory of the program.

use super::support::{failed, fence_errno};
use core::ffi::c_int;
use pinfold::internal::refcount::{self, Killed, RefCount};

/// A count, and the function that is called when no reference is left, unless it is null.
// The header declares this layout, and its initialiser writes these words.
#[repr(C)]
pub struct CRef {
    count: RefCount,
    release: Option<unsafe extern "C" fn(*mut CRef)>,
}

impl CRef {
    /// Calls the release function, which may free `this`.
    ///
    /// # Safety
    ///
    /// `this` is a count without references, which the caller does not use any more.
    unsafe fn release(this: *const CRef) {
        // SAFETY: the caller promises a count, which no other thread frees.
        if let Some(release) = unsafe { (*this).release } {
            // SAFETY: the program passed a function that takes the count.
            unsafe { release(this.cast_mut()) };
        }
    }
}

/// Makes a live count with its initial reference, and its release function.
///
/// # Safety
///
/// `this` is writable, and holds no count. `release` is null, or may be called with `this`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_init(
    this: *mut CRef,
    release: Option<unsafe extern "C" fn(*mut CRef)>,
) {
    let count = RefCount::new();
    // SAFETY: the caller promises that `this` is writable.
    unsafe { this.write(CRef { count, release }) };
}

/// Frees the count's words.
///
/// # Safety
///
/// `this` is initialised, and no other thread uses it now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_exit(this: *mut CRef) {
    // SAFETY: the caller promises a count that no other thread uses. The fresh count has no words,
    // so it may be forgotten.
    unsafe {
        let release = (*this).release;
        let count = RefCount::new();
        drop(this.replace(CRef { count, release }));
    }
}

/// Adds a reference. The caller has one.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_get(this: &CRef) {
    this.count.get();
}

/// Adds a reference if there is one left. Returns whether it did.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_tryget(this: &CRef) -> bool {
    this.count.try_get()
}

/// Adds a reference if the count is live. Returns whether it did.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_tryget_live(this: &CRef) -> bool {
    this.count.try_get_live()
}

/// Takes a reference away, and calls the release function if it was the last one.
///
/// # Safety
///
/// `this` is initialised, and the caller has a reference.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_put(this: *const CRef) {
    // SAFETY: the caller has a reference, so the count is there until `put` takes it away.
    if unsafe { (*this).count.put() } {
        // SAFETY: no reference is left.
        unsafe { CRef::release(this) };
    }
}

/// Makes the count atomic, and takes the initial reference away. Returns 0, or −1 with EALREADY if
/// the count was killed before, or with the errno of the fence.
///
/// # Safety
///
/// `this` is initialised, and the caller has the initial reference.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_kill(this: *const CRef) -> c_int {
    // SAFETY: the caller has the initial reference, so the count is there until `kill` takes it
    // away.
    match refcount::kill(unsafe { &(*this).count }) {
        Ok(Killed::Before) => return failed(libc::EALREADY),
        Ok(Killed::Left) => {}
        // SAFETY: no reference is left.
        Ok(Killed::Last) => unsafe { CRef::release(this) },
        Err(refused) => return failed(fence_errno(refused)),
    }
    0
}

/// Gives a killed count that has references a new initial one, and makes it live. Returns whether
/// it did.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_resurrect(this: &CRef) -> bool {
    refcount::revive(&this.count, false)
}

/// Gives a killed count without references its initial one, and makes it live. Returns whether it
/// did.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_reinit(this: &CRef) -> bool {
    refcount::revive(&this.count, true)
}

/// Returns whether the count was killed.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_is_dying(this: &CRef) -> bool {
    this.count.is_dead()
}

/// Returns whether no reference is left.
///
/// # Safety
///
/// `this` is initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_ref_is_zero(this: &CRef) -> bool {
    this.count.is_zero()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `PINFOLD_REF_INIT` writes these words.
    #[test]
    fn a_new_count_has_the_words_of_the_headers_initialiser() {
        let fresh = CRef {
            count: RefCount::new(),
            release: None,
        };
        // SAFETY: a count is three words without padding, and a null function is a zero word.
        let words = unsafe { core::ptr::from_ref(&fresh).cast::<[u64; 3]>().read() };
        assert_eq!(words, [2, (1 << 63) + 1, 0]);
        assert_eq!((size_of::<CRef>(), align_of::<CRef>()), (24, 8));
    }
}
