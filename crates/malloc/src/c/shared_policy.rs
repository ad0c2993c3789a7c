//! The C API of policies for ranges of pages. Functions that fail set errno: EINVAL for a range
//! without pages, ENOENT for a page without a policy, EBUSY in a signal handler that interrupted a
//! set, ENOMEM if there is no memory.

use super::policy::{CPolicy, held, policy_of};
use super::support::{answer, boxed, failed, methods, null_with, unboxed};
use core::ffi::c_int;
use pinfold::mempolicy::SharedPolicy;

/// Creates an empty map from pages to policies. Destroy it with `pinfold_shared_policy_destroy`.
/// Returns null with ENOMEM if there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_shared_policy_create() -> *mut SharedPolicy {
    boxed(SharedPolicy::new())
}

methods! { &SharedPolicy, "`this` is a map of this API that has not been destroyed. `policy` is null, or a handle that the caller holds during the call.":
    /// Gives the pages from `start` to `end - 1` a copy of `policy` (`mpol_set_shared_policy`). If
    /// `policy` is null, removes their policy.
    ///
    /// Returns 0. If it fails, returns −1 with errno, and changes nothing.
    pinfold_shared_policy_set(start: u64, end: u64, policy: Option<&CPolicy>) -> c_int =
        |this| answer(this.set(start..end, policy_of(policy)));
    /// Gives the pages that no range has a policy for a copy of `policy`, as the `mpol=` of a
    /// mounted tmpfs. If `policy` is null, removes that policy.
    ///
    /// Returns 0. If it fails, returns −1 with errno, and changes nothing.
    pinfold_shared_policy_set_default(policy: Option<&CPolicy>) -> c_int =
        |this| answer(this.set_default(policy_of(policy)));
}

methods! { &SharedPolicy, "`this` is a map of this API that has not been destroyed.":
    /// Returns a new handle of a copy of the page's policy (`mpol_shared_policy_lookup`): the
    /// range's, or else the map's default. Returns null with ENOENT if there is neither, or with
    /// ENOMEM if there is no memory.
    pinfold_shared_policy_lookup(page: u64) -> *mut CPolicy = |this| {
        match this.lookup(page) {
            Some(policy) => held(policy),
            None => null_with(libc::ENOENT),
        }
    };
}

methods! { &SharedPolicy, "`this` is a map of this API that has not been destroyed. `mode` is null, or writable.":
    /// Returns the node from which a page should come for the calling thread. If `mode` is not
    /// null, stores the number of the mode there that chose the node. Returns −1 with ENOENT if
    /// neither the page nor the map has a policy.
    pinfold_shared_policy_node(page: u64, mode: Option<&mut c_int>) -> c_int = |this| {
        let Some((node, by)) = this.node_for(page) else {
            return failed(libc::ENOENT);
        };
        if let Some(mode) = mode {
            *mode = by as c_int;
        }
        node.0 as c_int
    };
}

/// Ends a map. Does nothing if `this` is null. Policies that were looked up stay valid.
///
/// # Safety
///
/// `this` is null, or a map of this API that has not been destroyed. It is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_policy_destroy(this: *mut SharedPolicy) {
    // SAFETY: the caller promises null or a map of this API, which came from `boxed`, and gives it
    // up.
    unsafe { unboxed(this) };
}
