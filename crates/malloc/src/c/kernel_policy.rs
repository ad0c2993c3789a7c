//! The C API of the kernel's memory policies, for threads and for ranges of addresses, and of the
//! nodes on which pages lie. Functions that fail set errno to the kernel's error, or to EINVAL.

use super::policy::{CPolicy, copy_of, held_or_errno, nodes_of, store_nodes};
use super::support::{AsErrno, answer, failed};
use core::ffi::{c_int, c_uint, c_ulong, c_void};
use pinfold::mempolicy::{self, Move, PageNode};
use pinfold::topology::NodeId;

const STRICT: c_uint = 1;
const MOVE: c_uint = 2;
const MOVE_ALL: c_uint = 4;

/// Pages passed to the kernel in one call, so that the arrays fit on a small stack.
const AT_ONCE: usize = 64;

fn moving(flags: c_uint) -> Move {
    match flags {
        _ if flags & MOVE_ALL != 0 => Move::All,
        _ if flags & MOVE != 0 => Move::Own,
        _ => Move::No,
    }
}

/// Returns whether policies can be set here, or false with errno. Costs three system calls.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_available() -> bool {
    answer(mempolicy::available()) == 0
}

/// Sets the calling thread's policy (`set_mempolicy`). Returns 0, or −1 with errno.
///
/// # Safety
///
/// `policy` is null, or a handle that the caller holds during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_set_thread(policy: Option<&CPolicy>) -> c_int {
    answer(mempolicy::set_for_thread(&copy_of(policy)))
}

/// Notes that the calling thread's policy may have changed by a call that Pinfold did not make.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_thread_changed() {
    mempolicy::thread_changed();
}

/// Returns a new handle of the calling thread's policy (`get_mempolicy`), or null with errno.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_get_thread() -> *mut CPolicy {
    held_or_errno(mempolicy::thread())
}

/// Sets the policy of `[at, at + len)` (`mbind`). Returns 0, or −1 with errno.
///
/// # Safety
///
/// `policy` is null, or a handle that the caller holds during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_apply(
    at: *const c_void,
    len: usize,
    policy: Option<&CPolicy>,
    flags: c_uint,
) -> c_int {
    if flags & !(STRICT | MOVE | MOVE_ALL) != 0 {
        return failed(libc::EINVAL);
    }
    let strict = flags & STRICT != 0;
    let policy = copy_of(policy);
    let applied = mempolicy::apply(at.cast(), len, &policy, moving(flags), strict);
    answer(applied)
}

/// Returns a new handle of the policy of the mapping at `at` (`get_mempolicy` with `MPOL_F_ADDR`),
/// or null with errno.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mempolicy_at(at: *const c_void) -> *mut CPolicy {
    held_or_errno(mempolicy::policy_at(at.cast()))
}

/// Returns the node on which the page at `at` lies, or −1 with errno. Makes the page if it does not
/// exist.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_node_of(at: *const c_void) -> c_int {
    match mempolicy::node_at(at.cast()) {
        Ok(NodeId(node)) => node as c_int,
        Err(error) => failed(error.as_errno()),
    }
}

/// Moves pages of the calling process to nodes (`move_pages`). If `nodes` is null, only stores
/// where the pages lie.
///
/// Returns how many pages the kernel could not move, or −1 with errno. Costs a system call for
/// every 64 pages.
///
/// # Safety
///
/// `pages` is readable for `count` pointers. `nodes` is null or readable for `count` integers.
/// `status` is writable for `count` integers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_move(
    count: usize,
    pages: *const *const c_void,
    nodes: *const c_int,
    status: *mut c_int,
    flags: c_uint,
) -> isize {
    if flags & !(MOVE | MOVE_ALL) != 0 {
        return failed(libc::EINVAL) as isize;
    }
    // A caller that names target nodes wants the pages moved, even without a flag.
    let moving = match moving(flags) {
        _ if nodes.is_null() => Move::No,
        Move::No => Move::Own,
        moving => moving,
    };
    let mut left = 0;
    for from in (0..count).step_by(AT_ONCE) {
        let some = (count - from).min(AT_ONCE);
        // SAFETY: `from + some` is at most `count`, and the caller promises `count` readable
        // pointers.
        let pages = unsafe { core::slice::from_raw_parts(pages.add(from).cast(), some) };
        let mut targets = [NodeId(0); AT_ONCE];
        if !nodes.is_null() {
            // SAFETY: `from + some` is at most `count`, and the caller promises `count` readable
            // integers.
            let nodes = unsafe { core::slice::from_raw_parts(nodes.add(from), some) };
            for (target, &node) in targets.iter_mut().zip(nodes) {
                // `usize::MAX` is no node. The kernel answers it with an error, as it does a
                // negative number.
                *target = NodeId(usize::try_from(node).unwrap_or(usize::MAX));
            }
        }
        let mut found = [PageNode::UNKNOWN; AT_ONCE];
        let moved = mempolicy::move_pages(pages, &targets[..some], &mut found[..some], moving);
        for (place, page) in found[..some].iter().enumerate() {
            let number = page.node().map(|node| node.0 as c_int);
            if let Some(number) = number.or(page.error().map(|errno| -errno)) {
                // SAFETY: `from + place` is below `count`, and the caller promises room for `count`
                // integers.
                unsafe { status.add(from + place).write(number) };
            }
        }
        match moved {
            Ok(more) => left += more as isize,
            Err(error) => return failed(error.as_errno()) as isize,
        }
    }
    left
}

/// Moves the pages of a process on the n-th node of `from` to the n-th node of `to`
/// (`migrate_pages`). Returns how many pages the kernel could not move, or −1 with errno.
///
/// # Safety
///
/// `from` and `to` are readable for the words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_migrate(
    pid: c_int,
    from: *const c_ulong,
    to: *const c_ulong,
    bits: usize,
) -> isize {
    // SAFETY: the caller promises that both masks are readable.
    let masks = unsafe { (nodes_of(from, bits), nodes_of(to, bits)) };
    let (Some(from), Some(to)) = masks else {
        return failed(libc::EINVAL) as isize;
    };
    match mempolicy::migrate(pid, &from, &to) {
        Ok(left) => left as isize,
        Err(error) => failed(error.as_errno()) as isize,
    }
}

/// Stores the nodes that the calling thread may use in a mask of `bits` bits. Returns 0, or −1 with
/// errno.
///
/// # Safety
///
/// `mask` is writable for the words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mems_allowed(mask: *mut c_ulong, bits: usize) -> c_int {
    match mempolicy::mems_allowed() {
        // SAFETY: the caller promises that `mask` is writable.
        Ok(nodes) => unsafe { store_nodes(&nodes, mask, bits) },
        Err(error) => failed(error.as_errno()),
    }
}
