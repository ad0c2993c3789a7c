//! The C API of memory policies as values.
//!
//! A C handle is an object of a cache for policies: a policy and a count of its holders. A *holder*
//! is a part of the program that may use the handle. A function that takes a policy copies the
//! policy and keeps no reference, so no use of a policy can outlive its memory. A null handle is
//! the default policy, as in the kernel. Functions that fail set errno: EINVAL for an invalid
//! policy, ENOMEM if there is no memory.

use super::cache::{CCache, Constructor, create};
use super::support::{AsErrno, answer, boxed, failed, methods, null_with, unboxed};
use super::text::print_into;
use core::alloc::Layout;
use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong};
use core::fmt;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicUsize, fence};
use pinfold::mempolicy::{Flags, Mempolicy, Mode, PolicyError, SYSTEM_DEFAULT, effective};
use pinfold::slab::KmemCache;
use pinfold::topology::{MAX_NODES, NodeId, NodeSet};

/// A policy behind a C handle.
#[derive(Debug)]
pub struct CPolicy {
    /// Number of holders. The last one frees the handle.
    count: AtomicUsize,
    policy: Mempolicy,
}

/// A count above this number is a fault: the program gets the policy again and again, and never
/// puts it.
const MAX_HOLDERS: usize = isize::MAX as usize;
const WORD: usize = c_ulong::BITS as usize;
/// The longest mask, in bits: a page of 4096 bytes, as for the kernel. A longer mask is a mistake,
/// such as a negative length.
const MAX_BITS: usize = 8 * 4096;

/// The cache of the handles, which the first handle makes.
static CACHE: AtomicPtr<KmemCache> = AtomicPtr::new(null_mut());

fn cache() -> Option<&'static KmemCache> {
    // Acquire pairs with the release of the compare-exchange below: a thread that sees the address
    // also sees the cache.
    // SAFETY: the pointer is null, or a block of `boxed`. A block is never freed once it is stored.
    if let Some(cache) = unsafe { CACHE.load(Acquire).as_ref() } {
        return Some(cache);
    }
    let made = boxed(KmemCache::new("mempolicy", Layout::new::<CPolicy>()).ok()?);
    if made.is_null() {
        return None;
    }
    match CACHE.compare_exchange(null_mut(), made, AcqRel, Acquire) {
        // SAFETY: `made` is not null, and is never freed now that it is stored.
        Ok(_) => unsafe { made.as_ref() },
        Err(first) => {
            // SAFETY: the block came from `boxed` above. It was not stored, so no other thread has
            // seen it.
            unsafe { unboxed(made) };
            // SAFETY: another thread stored `first`, which is never freed.
            unsafe { first.as_ref() }
        }
    }
}

/// Makes a handle with one holder. Returns null with ENOMEM if there is no memory.
pub(crate) fn held(policy: Mempolicy) -> *mut CPolicy {
    let Some(object) = cache().and_then(KmemCache::alloc) else {
        return null_with(libc::ENOMEM);
    };
    let handle = object.as_ptr().cast::<CPolicy>();
    let count = AtomicUsize::new(1);
    // SAFETY: the object was just allocated, with the layout of a handle.
    unsafe { handle.write(CPolicy { count, policy }) };
    handle
}

/// Makes a handle, or null with the error's errno.
pub(crate) fn held_or_errno(made: Result<Mempolicy, PolicyError>) -> *mut CPolicy {
    match made {
        Ok(policy) => held(policy),
        Err(error) => null_with(error.as_errno()),
    }
}

/// Returns the policy of a handle. No handle stands for the default policy.
pub(crate) fn policy_of(this: Option<&CPolicy>) -> Option<&Mempolicy> {
    this.map(|this| &this.policy)
}

/// Returns a copy of a handle's policy. Returns the default policy if there is no handle.
pub(crate) fn copy_of(this: Option<&CPolicy>) -> Mempolicy {
    policy_of(this).cloned().unwrap_or_default()
}

/// Returns the nodes in the first `bits` bits of a mask. Returns `None` if the mask is too long, or
/// names a node above the largest possible number.
///
/// # Safety
///
/// `mask` is readable for the words that `bits` bits take.
pub(crate) unsafe fn nodes_of(mask: *const c_ulong, bits: usize) -> Option<NodeSet> {
    let mut nodes = NodeSet::EMPTY;
    if bits > MAX_BITS {
        return None;
    }
    for node in 0..bits {
        // SAFETY: `node` is below `bits`, and the caller promises that the words of `bits` bits are
        // readable.
        let word = unsafe { mask.add(node / WORD).read() };
        if word >> (node % WORD) & 1 == 1 {
            if node >= MAX_NODES {
                return None;
            }
            nodes.insert(node);
        }
    }
    Some(nodes)
}

/// Makes a policy from text. If the text is invalid, writes the reason to `error`, and returns null
/// with EINVAL. Returns null with ENOMEM if there is no memory.
///
/// # Safety
///
/// `text` is null or a C string. `error` is null or writable for `error_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_parse(
    text: *const c_char,
    error: *mut c_char,
    error_size: usize,
) -> *mut CPolicy {
    let wrong = |what: &dyn fmt::Display| {
        // SAFETY: the caller promises that `error` is null or writable for `error_size` bytes.
        unsafe { print_into(error, error_size, what) };
        null_with(libc::EINVAL)
    };
    if text.is_null() {
        return wrong(&"no text; policies look like interleave:0-3");
    }
    // SAFETY: `text` is not null, so the caller promises a C string.
    let Ok(text) = unsafe { CStr::from_ptr(text) }.to_str() else {
        return wrong(&"not text in UTF-8; policies look like interleave:0-3");
    };
    match Mempolicy::parse(text) {
        Ok(policy) => {
            let made = held(policy);
            let outcome = if made.is_null() { "no memory" } else { "" };
            // SAFETY: the caller promises that `error` is null or writable for `error_size` bytes.
            unsafe { print_into(error, error_size, outcome) };
            made
        }
        Err(error) => wrong(&error),
    }
}

/// Makes a policy of a mode, flags and nodes. Returns null with EINVAL or ENOMEM if it fails.
///
/// # Safety
///
/// `mask` is readable for the words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_create(
    mode: c_int,
    flags: c_uint,
    mask: *const c_ulong,
    bits: usize,
) -> *mut CPolicy {
    let mode = usize::try_from(mode).ok().and_then(|n| Mode::ALL.get(n));
    // SAFETY: the caller promises that `mask` is readable for `bits` bits.
    let nodes = unsafe { nodes_of(mask, bits) };
    let known = [Flags::STATIC, Flags::RELATIVE, Flags::BALANCING];
    let asked = known.iter().filter(|flag| flags & bits_of(**flag) != 0);
    let asked = asked.fold(Flags::NONE, |all, &flag| all | flag);
    match (mode, nodes) {
        (Some(&mode), Some(nodes)) if bits_of(asked) == flags => {
            held_or_errno(Mempolicy::new(mode, asked, nodes))
        }
        _ => null_with(libc::EINVAL),
    }
}

fn bits_of(flags: Flags) -> c_uint {
    c_uint::from(flags.bits())
}

/// Writes the policy as text, like `snprintf`. Returns the length of the whole text.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds during the call. `buffer` is null or writable
/// for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_format(
    this: Option<&CPolicy>,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    // SAFETY: the caller promises that `this` is null or a handle that it holds, and that `buffer`
    // is null or writable for `size` bytes.
    unsafe { print_into(buffer, size, copy_of(this)) }
}

methods! { Option<&CPolicy>, "`this` is null, or a handle that the caller holds during the call.":
    /// Copies a policy (`mpol_dup`). Returns a new handle, or null with ENOMEM.
    pinfold_mempolicy_dup() -> *mut CPolicy = |this| held(copy_of(this));
}

/// Adds a holder (`mpol_get`), and returns `this`. Costs one atomic add.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_get(this: *mut CPolicy) -> *mut CPolicy {
    // Relaxed is enough: the caller holds the policy, so the count cannot reach 0 during the call.
    // SAFETY: the caller promises null, or a handle that it holds.
    if let Some(policy) = unsafe { this.as_ref() }
        && policy.count.fetch_add(1, Relaxed) > MAX_HOLDERS
    {
        pinfold::internal::abort(format_args!(
            "a memory policy was taken again and again, and never put"
        ));
    }
    this
}

/// Removes a holder (`mpol_put`). Frees the policy if no holder is left. Does nothing if `this` is
/// null. Leaves errno unchanged.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds. The caller is no longer a holder after the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_put(this: *mut CPolicy) {
    let Some(object) = NonNull::new(this) else {
        return;
    };
    // Release pairs with the fence below, in the thread that removes the last holder: that thread
    // frees the policy after this holder's last use.
    // SAFETY: `this` is not null, so the caller promises a handle that it holds.
    if unsafe { object.as_ref() }.count.fetch_sub(1, Release) != 1 {
        return;
    }
    // Acquire pairs with the release above in the other holders' threads: their uses of the policy
    // come before the free.
    fence(Acquire);
    if let Some(cache) = cache() {
        // SAFETY: the handle came from this cache, has no holder left, and needs no drop.
        unsafe { cache.free(object.cast()) };
    }
}

methods! { Option<&CPolicy>, "`this` is null, or a handle that the caller holds during the call.":
    /// Returns the number of the policy's mode.
    pinfold_mempolicy_mode() -> c_int =
        |this| policy_of(this).map_or(0, |policy| policy.mode() as c_int);
    /// Returns the bits of the policy's flags.
    pinfold_mempolicy_flags() -> c_uint =
        |this| policy_of(this).map_or(0, |policy| bits_of(policy.flags()));
}

/// Stores the policy's nodes in a mask of `bits` bits.
///
/// Returns 0, or −1: ERANGE if some nodes do not fit, EINVAL if `bits` is too large.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds during the call. `mask` is writable for the
/// words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_nodes(
    this: Option<&CPolicy>,
    mask: *mut c_ulong,
    bits: usize,
) -> c_int {
    let policy = policy_of(this).unwrap_or(&SYSTEM_DEFAULT);
    // SAFETY: the caller promises that `mask` is writable.
    unsafe { store_nodes(policy.nodes(), mask, bits) }
}

/// Stores `nodes` in a mask of `bits` bits. Returns what [`pinfold_mempolicy_nodes`] does.
///
/// # Safety
///
/// `mask` is writable for the words that `bits` bits take.
pub(crate) unsafe fn store_nodes(nodes: &NodeSet, mask: *mut c_ulong, bits: usize) -> c_int {
    if bits > MAX_BITS {
        return failed(libc::EINVAL);
    }
    for word in 0..bits.div_ceil(WORD) {
        let in_word = (nodes.iter()).filter(|&node| node < bits && node / WORD == word);
        let value = in_word.fold(0, |value: c_ulong, node| value | 1 << (node % WORD));
        // SAFETY: `word` is one of the words of `bits` bits, which the caller promises are
        // writable.
        unsafe { mask.add(word).write(value) };
    }
    if nodes.iter().any(|node| node >= bits) {
        return failed(libc::ERANGE);
    }
    0
}

/// Sets the node from which the policy measures distances. −1 means the node of the allocating CPU.
///
/// Returns 0, or −1: EINVAL, or EBUSY if the policy has another holder.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds. No other thread uses the handle during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_set_home_node(this: *mut CPolicy, node: c_int) -> c_int {
    let home = match node {
        -1 => Ok(None),
        _ => usize::try_from(node).map(|node| Some(NodeId(node))),
    };
    let (Some(mut this), Ok(home)) = (NonNull::new(this), home) else {
        return failed(libc::EINVAL);
    };
    // Acquire pairs with the release in `pinfold_mempolicy_put`: former holders' uses of the policy
    // come before the change below.
    // SAFETY: `this` is not null, so the caller promises a handle that it holds.
    if unsafe { this.as_ref() }.count.load(Acquire) != 1 {
        return failed(libc::EBUSY);
    }
    // SAFETY: the count is 1, so the caller is the only holder.
    answer(unsafe { this.as_mut() }.policy.set_home_node(home))
}

/// Makes the policy that results if the nodes in `mask` become the allowed nodes
/// (`mpol_rebind_policy`). Returns a new handle, or null with EINVAL or ENOMEM.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds during the call. `mask` is readable for the
/// words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_rebind(
    this: Option<&CPolicy>,
    mask: *const c_ulong,
    bits: usize,
) -> *mut CPolicy {
    // SAFETY: the caller promises that `this` is null or a handle that it holds, and that `mask` is
    // readable for `bits` bits.
    let (allowed, mut policy) = unsafe { (nodes_of(mask, bits), copy_of(this)) };
    match allowed {
        Some(allowed) if !allowed.is_empty() => {
            policy.rebind(&allowed);
            held(policy)
        }
        _ => null_with(libc::EINVAL),
    }
}

/// Returns a new handle of the policy that is in effect: the range's policy, else the task's, else
/// the system's. Returns null with ENOMEM if there is no memory.
///
/// # Safety
///
/// Each of `range` and `task` is null, or a handle that the caller holds during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_effective(
    range: Option<&CPolicy>,
    task: Option<&CPolicy>,
) -> *mut CPolicy {
    let (range, task) = (policy_of(range), policy_of(task));
    held(effective(range, task).clone())
}

/// Creates a cache like [`pinfold_cache_create`](crate::c::cache::pinfold_cache_create), in memory
/// that `policy` places.
///
/// # Safety
///
/// `name` is null or a C string. The constructor initialises an object at the address that it gets.
/// It does not unwind, and does not use this cache. `policy` is null, or a handle that the caller
/// holds during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_create_policy(
    name: *const c_char,
    size: usize,
    align: usize,
    flags: c_uint,
    constructor: Option<Constructor>,
    policy: Option<&CPolicy>,
) -> *mut CCache {
    // SAFETY: the caller promises a valid name and constructor, as `create` requires, and that
    // `policy` is null or a handle that it holds.
    unsafe { create(name, (size, align), flags, constructor, policy_of(policy)) }
}
