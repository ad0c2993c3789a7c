//! The system calls for policies: of threads, of ranges of addresses, and of pages.
//!
//! These functions are safe to call with any address. A policy only says where future pages come
//! from, and moving a page keeps its content and its address. At worst, a wrong address makes that
//! memory slower, or scarcer under `bind`.
//!
//! All functions leave `errno` unchanged. The kernel wants as `maxnode` the number of bits plus 1.
//! The functions pass this number themselves.

use super::abi;
use super::noted::thread_changed;
use super::{Flags, Mempolicy, Mode, PolicyError, Syscall};
use crate::topology::{MAX_NODES, NodeId, NodeSet};
use core::ffi::{c_int, c_long};
use core::ptr::null_mut;
use pinfold_rseq::kernel::Answer;
use pinfold_rseq::syscall;

/// Which existing pages move, if they lie on other nodes than a new policy says.
///
/// ```
/// use pinfold::mempolicy::{self, Mempolicy, Move};
///
/// let data = vec![1u8; 1 << 16];
/// let page = data.as_ptr().wrapping_add(data.as_ptr().align_offset(4096));
/// if let Err(error) = mempolicy::apply(page, 4096, &Mempolicy::local(), Move::Own, false) {
///     println!("the page stays: {error}");
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// No page moves.
    No,
    /// Pages that only this process maps move.
    Own,
    /// All pages move. Needs `CAP_SYS_NICE`.
    All,
}

/// `maxnode` for a full set: the kernel subtracts 1 from `maxnode` to get the number of bits.
const BITS: usize = MAX_NODES + 1;

/// Returns the kernel's answer to `call`.
pub(super) fn ask(call: Syscall, answer: Answer<usize>) -> Result<usize, PolicyError> {
    answer.map_err(|errno| PolicyError::Refused { call, errno })
}

/// Turns the kernel's `EPERM` into [`PolicyError::NeedsRights`], and leaves a filter's `EPERM`.
///
/// The kernel permits a call with nothing to do to all processes. So if this call fails with the
/// same error, a filter forbids it.
pub(super) fn rights(error: PolicyError, call: Syscall, number: c_long) -> PolicyError {
    if error.errno() != Some(libc::EPERM) {
        return error;
    }
    match do_nothing(call, number) {
        Err(again) if again == error => error,
        _ => PolicyError::NeedsRights(call),
    }
}

/// Makes a call that sets the policy of a range or moves pages, with nothing to do.
fn do_nothing(call: Syscall, number: c_long) -> Result<usize, PolicyError> {
    // SAFETY: ranges and lists are empty, and masks are null. So the kernel reads and writes no
    // memory.
    ask(call, unsafe { syscall(number, [0; 6]) })
}

/// Checks whether this process can set policies.
///
/// Makes each call with arguments that change nothing: at most three system calls.
///
/// # Errors
///
/// [`PolicyError::Refused`], with the error of the kernel, or of a filter in front of the kernel;
/// see [`PolicyError::is_forbidden`]. Then the system's default policy is in effect, and a program
/// can go on without policies.
///
/// # Examples
///
/// ```
/// if let Err(error) = pinfold::mempolicy::available() {
///     println!("memory comes from where the kernel likes: {error}");
/// }
/// ```
pub fn available() -> Result<(), PolicyError> {
    get(0, 0).map(drop)?;
    do_nothing(Syscall::Mbind, abi::MBIND)?;
    // The kernel has no mode 0xff, so the call changes nothing. `EINVAL` shows that the call
    // reached the kernel.
    // SAFETY: the node mask is null.
    let answer = ask(Syscall::SetMempolicy, unsafe {
        syscall(abi::SET_MEMPOLICY, [0xff, 0, 0])
    });
    match answer {
        Err(error) if error.errno() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

/// Sets the calling thread's policy.
///
/// The policy holds for memory in ranges that have no policy of their own. Threads and processes
/// that the thread starts inherit the policy. Costs one system call, or two if the policy means all
/// nodes.
///
/// # Errors
///
/// After an error, the thread's policy is unchanged.
///
/// * [`PolicyError::NoneAllowed`] if none of the policy's nodes is allowed.
/// * [`PolicyError::HomeOfThread`] if the policy has a home node.
/// * [`PolicyError::Refused`] if the kernel refuses.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{self, Mempolicy};
///
/// match mempolicy::set_for_thread(&Mempolicy::local()) {
///     Ok(()) => assert_eq!(mempolicy::thread()?, Mempolicy::local()),
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), pinfold::mempolicy::PolicyError>(())
/// ```
#[doc(alias = "set_mempolicy")]
pub fn set_for_thread(policy: &Mempolicy) -> Result<(), PolicyError> {
    // The policy that the process starts with must come first, because it would replace this one.
    super::init();
    set_unnoted(policy)?;
    thread_changed();
    Ok(())
}

/// Does what [`set_for_thread`] does, for the policy that the process starts with. Allocations
/// follow that policy anyway.
pub(super) fn set_unnoted(policy: &Mempolicy) -> Result<(), PolicyError> {
    if policy.home().is_some() {
        return Err(PolicyError::HomeOfThread);
    }
    let (mode, mask) = arguments(policy)?;
    // SAFETY: the mask is `MAX_NODES` bits long, which is what the kernel reads for `BITS`.
    let answer = ask(Syscall::SetMempolicy, unsafe {
        syscall(
            abi::SET_MEMPOLICY,
            [mode as usize, mask.words.as_ptr() as usize, BITS],
        )
    });
    answer.map(drop).map_err(|error| explained(error, policy))
}

/// Returns the calling thread's policy, [unbound](Mempolicy::unbound), or `default` if the thread
/// has no policy. One system call.
///
/// With [`Flags::STATIC`] or [`Flags::RELATIVE`] the nodes are the user nodes. Without these flags,
/// the kernel returns the policy's present nodes instead of the user nodes.
///
/// # Errors
///
/// [`PolicyError::Refused`] if the kernel refuses; [`PolicyError::UnknownMode`] if the kernel
/// returns a mode that this version does not know.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy;
///
/// match mempolicy::thread() {
///     Ok(policy) => println!("{policy}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
#[doc(alias = "get_mempolicy")]
pub fn thread() -> Result<Mempolicy, PolicyError> {
    let (number, nodes) = get(0, 0)?;
    policy_of(number, nodes)
}

/// Returns the policy of the range that contains an address, unbound, or `default` if the range has
/// no policy. One system call.
///
/// The kernel does not return the home node. For the nodes, the same holds as for [`thread`].
///
/// # Errors
///
/// [`PolicyError::Refused`], with `EFAULT` if nothing is mapped there; [`PolicyError::UnknownMode`]
/// if the kernel returns a mode that this version does not know.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy;
///
/// let data = [1u8; 10];
/// match mempolicy::policy_at(data.as_ptr()) {
///     Ok(policy) => println!("{policy}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub fn policy_at(at: *const u8) -> Result<Mempolicy, PolicyError> {
    let (number, nodes) = get(at.addr(), abi::MPOL_F_ADDR)?;
    policy_of(number, nodes)
}

/// Returns the node that holds the page at an address. Makes the page if it does not exist yet. One
/// system call.
///
/// # Errors
///
/// [`PolicyError::Refused`], with `EFAULT` if nothing is mapped there, or the mapping cannot be
/// read.
///
/// # Examples
///
/// ```
/// let text = 5u8;
/// match pinfold::mempolicy::node_at(&raw const text) {
///     Ok(node) => println!("on node {}", node.0),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub fn node_at(at: *const u8) -> Result<NodeId, PolicyError> {
    let (number, _) = get(at.addr(), abi::MPOL_F_NODE | abi::MPOL_F_ADDR)?;
    Ok(NodeId(number as usize))
}

/// Returns the calling thread's allowed nodes: its cpuset's nodes. One system call.
///
/// # Errors
///
/// [`PolicyError::Refused`] if the kernel, or a filter in front of it, refuses.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{self, Mempolicy};
///
/// let mut policy = Mempolicy::parse("interleave=relative:0-1")?;
/// if let Ok(allowed) = mempolicy::mems_allowed() {
///     policy.contextualize(&allowed)?;
///     println!("comes to nodes {}", policy.nodes());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn mems_allowed() -> Result<NodeSet, PolicyError> {
    get(0, abi::MPOL_F_MEMS_ALLOWED).map(|(_, nodes)| nodes)
}

/// Sets the policy of the pages of `[at, at + len)`, and their home node if the policy has one.
///
/// `at` is the beginning of a page. `len` is in bytes, and is rounded up to whole pages. Processes
/// that are forked later inherit the policy. For shared memory, the policy holds in every process
/// that maps the memory. `moving` says which existing pages move. With `strict`, a page that stays
/// on an excluded node is an error.
///
/// Costs one system call. A policy that means all nodes costs one more, and a home node one more.
///
/// # Errors
///
/// * [`PolicyError::NoneAllowed`] if none of the policy's nodes is allowed.
/// * [`PolicyError::NeedsRights`] for [`Move::All`] without `CAP_SYS_NICE`.
/// * [`PolicyError::Refused`] with `EFAULT` if part of the range is not mapped.
/// * [`PolicyError::Refused`] with `EIO` if `strict` is set and pages lie on excluded nodes. If the
///   caller asked for a move, the policy is set nevertheless.
/// * [`PolicyError::Refused`] by [`Syscall::SetHomeNode`]: the policy is set, but without its home
///   node.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{self, Mempolicy, Move};
///
/// # const MOST: usize = 1 << 20;
/// // A page's beginning in memory of one's own.
/// let memory = vec![0u8; MOST];
/// let page = memory.as_ptr().wrapping_add(memory.as_ptr().align_offset(1 << 16));
/// let policy = Mempolicy::parse("interleave")?;
/// match mempolicy::apply(page, MOST / 2, &policy, Move::Own, false) {
///     Ok(()) => assert_eq!(mempolicy::policy_at(page)?.mode(), policy.mode()),
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "mbind")]
pub fn apply(
    at: *const u8,
    len: usize,
    policy: &Mempolicy,
    moving: Move,
    strict: bool,
) -> Result<(), PolicyError> {
    // The kernel rounds `len` up to whole pages. A length near `usize::MAX` would wrap to 0, and
    // the kernel would report success.
    if len > isize::MAX as usize {
        return Err(PolicyError::Refused {
            call: Syscall::Mbind,
            errno: libc::EINVAL,
        });
    }
    let (mode, mask) = arguments(policy)?;
    let strict = if strict { abi::MPOL_MF_STRICT } else { 0 };
    let flags = strict | moving.bits();
    // SAFETY: the mask is `MAX_NODES` bits long, which is what the kernel reads for `BITS`.
    // `mbind` keeps the content of the range, mapped or not.
    let answer = ask(Syscall::Mbind, unsafe {
        syscall(
            abi::MBIND,
            [
                at.addr(),
                len,
                mode as usize,
                mask.words.as_ptr() as usize,
                BITS,
                flags as usize,
            ],
        )
    });
    answer.map_err(|error| match moving {
        Move::All => rights(explained(error, policy), Syscall::Mbind, abi::MBIND),
        _ => explained(error, policy),
    })?;
    policy
        .home()
        .map_or(Ok(()), |home| set_home_node(at, len, home))
}

/// Sets the home node of the policies of `[at, at + len)`. The kernel measures distances from the
/// home node. One system call.
///
/// Needs Linux 5.17.
///
/// # Errors
///
/// [`PolicyError::Refused`]:
///
/// * `ENOENT` if no part of the range has a policy.
/// * `EOPNOTSUPP` if a policy in the range is neither `bind` nor `prefer (many)`. The part of the
///   range in front of this policy has the home node.
/// * `EINVAL` if `at` is not the beginning of a page, or the node is not online.
/// * `ENOSYS` before Linux 5.17.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy;
/// use pinfold::topology::NodeId;
///
/// let data = [1u8; 10];
/// // Refused: the range has no policy, and does not begin at a page.
/// assert!(mempolicy::set_home_node(data.as_ptr().wrapping_add(1), 1, NodeId(0)).is_err());
/// ```
#[doc(alias = "set_mempolicy_home_node")]
pub fn set_home_node(at: *const u8, len: usize, node: NodeId) -> Result<(), PolicyError> {
    // SAFETY: the call gets no pointer that the kernel writes to, and keeps the content of the
    // range.
    let answer = ask(Syscall::SetHomeNode, unsafe {
        syscall(abi::SET_MEMPOLICY_HOME_NODE, [at.addr(), len, node.0, 0])
    });
    answer.map(drop)
}

impl Move {
    pub(super) const fn bits(self) -> c_int {
        match self {
            Move::No => 0,
            Move::Own => abi::MPOL_MF_MOVE,
            Move::All => abi::MPOL_MF_MOVE_ALL,
        }
    }
}

/// Returns the mode and the nodes to pass to the kernel for a policy.
fn arguments(policy: &Mempolicy) -> Result<(c_int, NodeSet), PolicyError> {
    let number = policy.mode() as c_int | c_int::from(policy.flags().bits());
    let user = policy.user_nodes();
    let all = user.len() == MAX_NODES || user.is_empty() && policy.mode().interleaves();
    if !all {
        return Ok((number, user.clone()));
    }
    // A kernel refuses node numbers above the largest that it was built for. So "all nodes" becomes
    // the allowed nodes, or their positions.
    let allowed = mems_allowed()?;
    let relative = policy.flags().contains(Flags::RELATIVE);
    let nodes = if relative {
        (0..allowed.len()).collect()
    } else {
        allowed
    };
    Ok((number, nodes))
}

/// Turns `EINVAL` into [`PolicyError::NoneAllowed`] if none of the policy's nodes is allowed. This
/// is the most common reason for `EINVAL`.
fn explained(error: PolicyError, policy: &Mempolicy) -> PolicyError {
    if error.errno() != Some(libc::EINVAL) || policy.user_nodes().is_empty() {
        return error;
    }
    let mut bound = policy.clone();
    match mems_allowed().map(|allowed| bound.contextualize(&allowed)) {
        Ok(Err(none_allowed)) => none_allowed,
        _ => error,
    }
}

/// Calls `get_mempolicy`. Returns the number and the nodes of the kernel's answer.
fn get(at: usize, flags: c_long) -> Result<(u32, NodeSet), PolicyError> {
    let mut number: c_int = 0;
    let mut nodes = NodeSet::EMPTY;
    // With `MPOL_F_NODE` the number is the answer, and the kernel returns no node mask.
    let mask = if flags & abi::MPOL_F_NODE == 0 {
        nodes.words.as_mut_ptr()
    } else {
        null_mut()
    };
    // `MPOL_F_MEMS_ALLOWED` asks for the mask only.
    let place = if flags == abi::MPOL_F_MEMS_ALLOWED {
        null_mut()
    } else {
        &raw mut number
    };
    // SAFETY: `number` and the mask outlive the call and are writable, or are null. The mask is
    // `MAX_NODES` bits long, which is what the kernel writes for `BITS`.
    ask(Syscall::GetMempolicy, unsafe {
        syscall(
            abi::GET_MEMPOLICY,
            [place as usize, mask as usize, BITS, at, flags as usize],
        )
    })?;
    Ok((number as u32, nodes))
}

/// Makes a policy from the kernel's answer.
fn policy_of(number: u32, nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
    let flags = Flags::from_bits(number as u16);
    let mode = number & !u32::from(flags.bits());
    let mode = Mode::from_number(u64::from(mode)).ok_or(PolicyError::UnknownMode(mode))?;
    let nodes = match mode {
        Mode::Default | Mode::Local => NodeSet::EMPTY,
        // For a policy with flags the kernel returns all user nodes, of which `prefer` uses the
        // first.
        Mode::Preferred => nodes.iter().take(1).collect(),
        _ => nodes,
    };
    Mempolicy::new(mode, flags, nodes)
}
