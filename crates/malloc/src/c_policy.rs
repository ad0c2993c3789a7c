//! The C API of memory policies as values.
//!
//! A C handle is a policy and a count of who holds it, an object of a cache of its own. What takes a policy copies it and keeps no
//! reference: whoever puts his last one leaves nobody with freed memory. A null policy is the default one, as in the kernel.
//! Functions that fail set errno: EINVAL for what is no policy, ENOMEM for want of memory.

use crate::c_cache::{CCache, Constructor, create, null_with};
use crate::c_counter::{boxed, unboxed};
use crate::c_text::print_into;
use crate::heap::set_errno;
use core::alloc::Layout;
use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong};
use core::fmt;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicUsize, fence};
use pinfold::mempolicy::{Flags, Mempolicy, Mode, PolicyError, SYSTEM_DEFAULT, effective};
use pinfold::slab::KmemCache;
use pinfold::topology::{NODES_MOST, NodeId, NodeSet};

/// A policy as C holds it.
#[derive(Debug)]
pub struct CPolicy {
    /// Who holds it; the last one frees it.
    count: AtomicUsize,
    policy: Mempolicy,
}

/// More holders than there can be: somebody takes and never puts.
const HOLDERS_MOST: usize = isize::MAX as usize;
const WORD: usize = c_ulong::BITS as usize;
/// No mask is longer, as for the kernel: a page of bits. What is, is a mistake, such as a negative number.
const BITS_MOST: usize = 8 * 4096;

/// Where policies are kept, made with the first one.
static CACHE: AtomicPtr<KmemCache> = AtomicPtr::new(null_mut());

fn cache() -> Option<&'static KmemCache> {
    // SAFETY: null, or from `boxed` and never taken back once it is there.
    if let Some(cache) = unsafe { CACHE.load(Acquire).as_ref() } {
        return Some(cache);
    }
    let made = boxed(KmemCache::new("mempolicy", Layout::new::<CPolicy>()).ok()?);
    if made.is_null() {
        return None;
    }
    match CACHE.compare_exchange(null_mut(), made, AcqRel, Acquire) {
        // SAFETY: as above.
        Ok(_) => unsafe { made.as_ref() },
        Err(first) => {
            // SAFETY: ours, and nobody has seen it.
            unsafe { unboxed(made) };
            // SAFETY: as above.
            unsafe { first.as_ref() }
        }
    }
}

/// A handle of a policy, held once; null with ENOMEM.
pub(crate) fn held(policy: Mempolicy) -> *mut CPolicy {
    let Some(object) = cache().and_then(KmemCache::alloc) else {
        return null_with(libc::ENOMEM);
    };
    let handle = object.as_ptr().cast::<CPolicy>();
    let count = AtomicUsize::new(1);
    // SAFETY: an object of ours, as large and aligned as a handle.
    unsafe { handle.write(CPolicy { count, policy }) };
    handle
}

/// A handle, or null with the error's errno.
pub(crate) fn held_or_errno(made: Result<Mempolicy, PolicyError>) -> *mut CPolicy {
    match made {
        Ok(policy) => held(policy),
        Err(error) => null_with(errno_of(error)),
    }
}

/// What the kernel said, or EINVAL.
pub(crate) fn errno_of(error: PolicyError) -> c_int {
    match error {
        PolicyError::NeedsRights(_) => libc::EPERM,
        _ => error.errno().unwrap_or(libc::EINVAL),
    }
}

/// 0, or −1 with the error's errno.
pub(crate) fn answer(result: Result<(), PolicyError>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => failed(errno_of(error)),
    }
}

pub(crate) fn failed(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// The policy of a handle; `None` for null, which is the default one.
///
/// # Safety
///
/// `this` is null, or held by the caller while the answer is used.
pub(crate) unsafe fn policy_of<'p>(this: *const CPolicy) -> Option<&'p Mempolicy> {
    // SAFETY: the caller's promise.
    unsafe { this.as_ref() }.map(|this| &this.policy)
}

/// As [`policy_of`], with a default policy for null.
///
/// # Safety
///
/// As there.
pub(crate) unsafe fn copy_of(this: *const CPolicy) -> Mempolicy {
    // SAFETY: the caller's promise.
    unsafe { policy_of(this) }.cloned().unwrap_or_default()
}

/// The nodes of a mask of `bits` bits; `None` when it has a number that no node can have, or is too long.
///
/// # Safety
///
/// `mask` is readable for the words that `bits` bits take.
unsafe fn nodes_of(mask: *const c_ulong, bits: usize) -> Option<NodeSet> {
    let mut nodes = NodeSet::EMPTY;
    if bits > BITS_MOST {
        return None;
    }
    for node in 0..bits {
        // SAFETY: the caller's promise.
        let word = unsafe { mask.add(node / WORD).read() };
        if word >> (node % WORD) & 1 == 1 {
            if node >= NODES_MOST {
                return None;
            }
            nodes.insert(node);
        }
    }
    Some(nodes)
}

/// Reads a policy. Null with EINVAL and what is wrong in `error`, or with ENOMEM.
///
/// # Safety
///
/// `text` is null or a C string; `error` is writable for `error_size` bytes, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_parse(
    text: *const c_char,
    error: *mut c_char,
    error_size: usize,
) -> *mut CPolicy {
    let wrong = |what: &dyn fmt::Display| {
        // SAFETY: the caller's promise.
        unsafe { print_into(error, error_size, what) };
        null_with(libc::EINVAL)
    };
    if text.is_null() {
        return wrong(&"no text; policies look like interleave:0-3");
    }
    // SAFETY: the caller's promise.
    let Ok(text) = unsafe { CStr::from_ptr(text) }.to_str() else {
        return wrong(&"not text in UTF-8; policies look like interleave:0-3");
    };
    match Mempolicy::parse(text) {
        Ok(policy) => {
            let made = held(policy);
            let outcome = if made.is_null() { "no memory" } else { "" };
            // SAFETY: the caller's promise.
            unsafe { print_into(error, error_size, outcome) };
            made
        }
        Err(error) => wrong(&error),
    }
}

/// A policy of a mode, its flags and nodes; null with EINVAL or ENOMEM.
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
    // SAFETY: the caller's promise.
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

/// The policy as text. As `snprintf`.
///
/// # Safety
///
/// Here and below: `this` is null, or held by the caller. `buffer` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_format(
    this: *const CPolicy,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    // SAFETY: the caller's promise.
    unsafe { print_into(buffer, size, copy_of(this)) }
}

/// `mpol_dup`: a copy that is nobody else's; null with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_dup(this: *const CPolicy) -> *mut CPolicy {
    // SAFETY: the caller's promise.
    held(unsafe { copy_of(this) })
}

/// `mpol_get`: holds it once more.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_get(this: *mut CPolicy) -> *mut CPolicy {
    // SAFETY: the caller's promise.
    if let Some(policy) = unsafe { this.as_ref() }
        && policy.count.fetch_add(1, Relaxed) > HOLDERS_MOST
    {
        pinfold::abort(format_args!(
            "a memory policy was taken again and again, and never put"
        ));
    }
    this
}

/// `mpol_put`: holds it once less; the last one frees it. Null is none. Leaves errno alone.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`]; the caller does not use it any more, as far as this hold goes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_put(this: *mut CPolicy) {
    let Some(object) = NonNull::new(this) else {
        return;
    };
    // SAFETY: the caller's promise.
    if unsafe { object.as_ref() }.count.fetch_sub(1, Release) != 1 {
        return;
    }
    // What the others did with it comes before the free.
    fence(Acquire);
    if let Some(cache) = cache() {
        // SAFETY: it came from there, nobody holds it, and a policy is plain data.
        unsafe { cache.free(object.cast()) };
    }
}

/// The mode's number.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_mode(this: *const CPolicy) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { policy_of(this) }.map_or(0, |policy| policy.mode() as c_int)
}

/// The flags' bits.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_flags(this: *const CPolicy) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { policy_of(this) }.map_or(0, |policy| bits_of(policy.flags()))
}

/// Stores the nodes in a mask of `bits` bits; 0, or −1 with ERANGE when there are some beyond it, EINVAL for too many bits.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`]; `mask` is writable for the words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_nodes(
    this: *const CPolicy,
    mask: *mut c_ulong,
    bits: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let policy = unsafe { policy_of(this) }.unwrap_or(&SYSTEM_DEFAULT);
    if bits > BITS_MOST {
        return failed(libc::EINVAL);
    }
    for word in 0..bits.div_ceil(WORD) {
        let nodes = policy
            .nodes()
            .iter()
            .filter(|&node| node < bits && node / WORD == word);
        let value = nodes.fold(0, |value: c_ulong, node| value | 1 << (node % WORD));
        // SAFETY: the caller's promise.
        unsafe { mask.add(word).write(value) };
    }
    if policy.nodes().iter().any(|node| node >= bits) {
        return failed(libc::ERANGE);
    }
    0
}

/// Measures distances from `node`, −1 for the CPU's own. 0, or −1 with EINVAL, or with EBUSY when others hold it too.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`]; nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_set_home_node(this: *mut CPolicy, node: c_int) -> c_int {
    let home = match node {
        -1 => Ok(None),
        _ => usize::try_from(node).map(|node| Some(NodeId(node))),
    };
    let (Some(mut this), Ok(home)) = (NonNull::new(this), home) else {
        return failed(libc::EINVAL);
    };
    // SAFETY: the caller's promise.
    if unsafe { this.as_ref() }.count.load(Acquire) != 1 {
        return failed(libc::EBUSY);
    }
    // SAFETY: the caller alone holds it.
    answer(unsafe { this.as_mut() }.policy.set_home_node(home))
}

/// `mpol_rebind_policy`: the policy as it is once these nodes are allowed, a new one; null with EINVAL or ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`]; `mask` is readable for the words that `bits` bits take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_rebind(
    this: *const CPolicy,
    mask: *const c_ulong,
    bits: usize,
) -> *mut CPolicy {
    // SAFETY: the caller's promise.
    let (allowed, mut policy) = unsafe { (nodes_of(mask, bits), copy_of(this)) };
    match allowed {
        Some(allowed) if !allowed.is_empty() => {
            policy.rebind(&allowed);
            held(policy)
        }
        _ => null_with(libc::EINVAL),
    }
}

/// Which of two policies holds: the range's, else the task's, else the system's. A new handle; null with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_mempolicy_format`], for both.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_effective(
    range: *const CPolicy,
    task: *const CPolicy,
) -> *mut CPolicy {
    // SAFETY: the caller's promise.
    let (range, task) = unsafe { (policy_of(range), policy_of(task)) };
    held(effective(range, task).clone())
}

/// As [`pinfold_cache_create`](crate::c_cache::pinfold_cache_create), with memory from where `policy` says.
///
/// # Safety
///
/// As there; `policy` is null, or held by the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_create_policy(
    name: *const c_char,
    size: usize,
    align: usize,
    flags: c_uint,
    constructor: Option<Constructor>,
    policy: *const CPolicy,
) -> *mut CCache {
    // SAFETY: the caller's promise.
    unsafe { create(name, (size, align), flags, constructor, policy_of(policy)) }
}
