//! The C API of policies in the kernel: of threads and ranges, and where pages lie. Functions that fail set errno to what the kernel
//! said, or EINVAL.

use crate::c_policy::{CPolicy, answer, copy_of, errno_of, failed, held_or_errno};
use core::ffi::{c_int, c_uint, c_void};
use pinfold::mempolicy::{self, Move, PageNode};
use pinfold::topology::NodeId;

const STRICT: c_uint = 1;
const MOVE: c_uint = 2;
const MOVE_ALL: c_uint = 4;

/// Pages handed on at once.
const AT_ONCE: usize = 64;

fn moving(flags: c_uint) -> Move {
    match flags {
        _ if flags & MOVE_ALL != 0 => Move::All,
        _ if flags & MOVE != 0 => Move::Own,
        _ => Move::No,
    }
}

/// Whether policies can be set here; false with errno.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_available() -> bool {
    answer(mempolicy::available()) == 0
}

/// `set_mempolicy`: the calling thread's policy from now on.
///
/// # Safety
///
/// Here and below: `policy` is null, or held by the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_set_thread(policy: *const CPolicy) -> c_int {
    // SAFETY: the caller's promise.
    answer(mempolicy::set_for_thread(&unsafe { copy_of(policy) }))
}

/// `get_mempolicy`: the calling thread's policy, a new handle.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_get_thread() -> *mut CPolicy {
    held_or_errno(mempolicy::thread())
}

/// `mbind`: the policy of `[at, at + len)` from now on.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_set_thread`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_apply(
    at: *const c_void,
    len: usize,
    policy: *const CPolicy,
    flags: c_uint,
) -> c_int {
    if flags & !(STRICT | MOVE | MOVE_ALL) != 0 {
        return failed(libc::EINVAL);
    }
    let strict = flags & STRICT != 0;
    // SAFETY: the caller's promise.
    let policy = unsafe { copy_of(policy) };
    let applied = mempolicy::apply(at.cast(), len, &policy, moving(flags), strict);
    answer(applied)
}

/// `get_mempolicy` with `MPOL_F_ADDR`: the policy of the range that the address lies in, a new handle.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_at(at: *const c_void) -> *mut CPolicy {
    held_or_errno(mempolicy::policy_at(at.cast()))
}

/// The node that the address's page lies on; −1 with errno.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_node_of(at: *const c_void) -> c_int {
    match mempolicy::node_at(at.cast()) {
        Ok(NodeId(node)) => node as c_int,
        Err(error) => failed(errno_of(error)),
    }
}

/// `move_pages`, of the calling process: moves pages to nodes, or for null only says where they are. How many stayed elsewhere
/// because the kernel gave up on them, or −1 with errno.
///
/// # Safety
///
/// `pages` is readable for `count` pointers, `nodes` for as many numbers or null, `status` is writable for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_move(
    count: usize,
    pages: *const *const c_void,
    nodes: *const c_int,
    status: *mut c_int,
    flags: c_uint,
) -> isize {
    if flags & !(MOVE | MOVE_ALL) != 0 {
        failed(libc::EINVAL);
        return -1;
    }
    // Whoever names targets wants them moved.
    let moving = match moving(flags) {
        _ if nodes.is_null() => Move::No,
        Move::No => Move::Own,
        moving => moving,
    };
    let mut left = 0;
    for from in (0..count).step_by(AT_ONCE) {
        let some = (count - from).min(AT_ONCE);
        // SAFETY: within the caller's lists.
        let pages = unsafe { core::slice::from_raw_parts(pages.add(from).cast(), some) };
        let mut targets = [NodeId(0); AT_ONCE];
        if !nodes.is_null() {
            // SAFETY: as above.
            let nodes = unsafe { core::slice::from_raw_parts(nodes.add(from), some) };
            for (target, &node) in targets.iter_mut().zip(nodes) {
                // A negative number is no node's, and the kernel says so.
                *target = NodeId(usize::try_from(node).unwrap_or(usize::MAX));
            }
        }
        let mut found = [PageNode::UNKNOWN; AT_ONCE];
        let moved = mempolicy::move_pages(pages, &targets[..some], &mut found[..some], moving);
        for (place, page) in found[..some].iter().enumerate() {
            let number = page.node().map(|node| node.0 as c_int);
            if let Some(number) = number.or(page.error().map(|errno| -errno)) {
                // SAFETY: as above.
                unsafe { status.add(from + place).write(number) };
            }
        }
        match moved {
            Ok(more) => left += more as isize,
            Err(error) => {
                failed(errno_of(error));
                return -1;
            }
        }
    }
    left
}
