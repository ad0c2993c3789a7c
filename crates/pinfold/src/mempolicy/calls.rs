//! Policies in the kernel: of threads, of ranges of addresses, and where pages lie.
//!
//! Nothing here is unsafe to call, with whatever address: a policy says where pages are to come from, and moving a page keeps
//! its content and address while no thread can tell. The worst that an address of somebody else's can do is to make his
//! memory slower, or scarcer, as `bind` does.
//!
//! All keep `errno`. The kernel's `maxnode`, which counts one more than it says, is nobody's concern.

use super::abi;
use super::{Call, Flags, Mempolicy, Mode, PolicyError};
use crate::sys::keep_errno;
use crate::topology::{NODES_MOST, NodeId, NodeSet};
use core::ffi::{c_int, c_long};
use core::ptr::{null, null_mut};

/// What becomes of pages that lie elsewhere than a new policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// They stay.
    No,
    /// Those that this process alone maps move.
    Own,
    /// All move. Needs `CAP_SYS_NICE`.
    All,
}

/// The kernel takes one from the count of bits.
const BITS: usize = NODES_MOST + 1;

/// Makes a call, keeps `errno`, and tells what the kernel answered.
pub(super) fn ask(call: Call, make: impl FnOnce() -> c_long) -> Result<c_long, PolicyError> {
    keep_errno(|| {
        let answer = make();
        if answer >= 0 {
            return Ok(answer);
        }
        // SAFETY: errno is the calling thread's own.
        let errno = unsafe { *libc::__errno_location() };
        Err(PolicyError::Refused { call, errno })
    })
}

/// Tells apart who said `EPERM`: a filter says it to a call that asks for nothing too, the kernel does not.
pub(super) fn rights(
    error: PolicyError,
    call: Call,
    nothing: impl FnOnce() -> Result<c_long, PolicyError>,
) -> PolicyError {
    if error.errno() != Some(libc::EPERM) {
        return error;
    }
    match nothing() {
        Err(again) if again == error => error,
        _ => PolicyError::NeedsRights(call),
    }
}

/// `mbind` of an empty range.
fn bind_nothing() -> Result<c_long, PolicyError> {
    // SAFETY: no memory is passed.
    ask(Call::Mbind, || unsafe {
        libc::syscall(abi::MBIND, 0, 0, 0, null::<u64>(), 0, 0)
    })
}

/// Whether policies can be set here, found out by making the calls with arguments that change nothing. Three system calls.
///
/// # Errors
///
/// What the kernel, or a filter before it, says; see [`PolicyError::is_forbidden`]. The system's default policy is in effect
/// then, and the rest of a program works.
///
/// ```
/// if let Err(error) = pinfold::mempolicy::available() {
///     println!("memory comes from where the kernel likes: {error}");
/// }
/// ```
pub fn available() -> Result<(), PolicyError> {
    get(0, 0).map(drop)?;
    bind_nothing()?;
    // A mode that nobody has: the call comes to the kernel, and changes nothing.
    // SAFETY: no memory is passed.
    let answer = ask(Call::SetMempolicy, || unsafe {
        libc::syscall(abi::SET_MEMPOLICY, 0xff, null::<u64>(), 0)
    });
    match answer {
        Err(error) if error.errno() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

/// Has the calling thread's memory come from where `policy` says, but for ranges that have policies of their own. Threads
/// and processes that it starts inherit it. One system call; two where the policy means all nodes.
///
/// # Errors
///
/// [`PolicyError::NoneAllowed`] when the thread may use none of the nodes; [`PolicyError::HomeOfThread`];
/// [`PolicyError::Refused`]. The thread's policy is as before.
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
    if policy.home().is_some() {
        return Err(PolicyError::HomeOfThread);
    }
    let (mode, mask) = arguments(policy)?;
    // SAFETY: the mask has as many bits as said.
    let answer = ask(Call::SetMempolicy, || unsafe {
        libc::syscall(abi::SET_MEMPOLICY, mode, mask.words.as_ptr(), BITS)
    });
    answer.map(drop).map_err(|error| explained(error, policy))
}

/// The calling thread's policy, [unbound](Mempolicy::unbound); `default` when it has none. One system call.
///
/// The kernel tells the nodes as the user named them only of policies with [`Flags::STATIC`] or [`Flags::RELATIVE`]; of others,
/// what they came to.
///
/// # Errors
///
/// [`PolicyError::Refused`]; [`PolicyError::UnknownMode`].
#[doc(alias = "get_mempolicy")]
pub fn thread() -> Result<Mempolicy, PolicyError> {
    let (number, nodes) = get(0, 0)?;
    policy_of(number, nodes)
}

/// The policy of the range that an address lies in, unbound, as [`thread`]'s is; `default` when the range has none. Without its
/// home node, which the kernel does not tell. One system call.
///
/// # Errors
///
/// [`PolicyError::Refused`] with `EFAULT` where nothing is mapped; [`PolicyError::UnknownMode`].
pub fn policy_at(at: *const u8) -> Result<Mempolicy, PolicyError> {
    let (number, nodes) = get(at.addr(), abi::MPOL_F_ADDR)?;
    policy_of(number, nodes)
}

/// The node that the page at an address lies on; the page is made if it was not there. One system call.
///
/// # Errors
///
/// [`PolicyError::Refused`] with `EFAULT` where nothing is mapped, or may be read.
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

/// The nodes that the calling thread may use: its cpuset's. One system call.
///
/// # Errors
///
/// [`PolicyError::Refused`].
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

/// Has the pages of `[at, at + len)` come from where `policy` says, and its home node if it has one. `at` is at a page's
/// beginning; `len` in bytes, to the end of its last page. Processes forked off later inherit it; for shared memory it holds for
/// everybody. One system call; one more where the policy means all nodes, and one where it has a home node.
///
/// Pages that are there already stay or move as `moving` says; `strict`: report those that stay elsewhere.
///
/// # Errors
///
/// [`PolicyError::NoneAllowed`] when the thread may use none of the nodes. [`PolicyError::NeedsRights`] for [`Move::All`] without
/// `CAP_SYS_NICE`. [`PolicyError::Refused`]: `EFAULT` where part of the
/// range is not mapped; `EIO` when `strict` and pages are elsewhere; then the policy holds nevertheless if moving was asked for.
/// When the home node alone is refused, the policy holds without.
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
    // The kernel rounds such a length up to nothing, and says that all is well.
    if len > isize::MAX as usize {
        return Err(PolicyError::Refused {
            call: Call::Mbind,
            errno: libc::EINVAL,
        });
    }
    let (mode, mask) = arguments(policy)?;
    let strict = if strict { abi::MPOL_MF_STRICT } else { 0 };
    let flags = strict | moving.bits();
    // SAFETY: the mask has as many bits as said; what lies at the address stays as it is.
    let answer = ask(Call::Mbind, || unsafe {
        libc::syscall(
            abi::MBIND,
            at.addr(),
            len,
            mode,
            mask.words.as_ptr(),
            BITS,
            flags,
        )
    });
    answer.map_err(|error| match moving {
        Move::All => rights(explained(error, policy), Call::Mbind, bind_nothing),
        _ => explained(error, policy),
    })?;
    policy
        .home()
        .map_or(Ok(()), |home| set_home_node(at, len, home))
}

/// Measures distances from `node` for the policies of `[at, at + len)`. One system call; Linux 5.17.
///
/// # Errors
///
/// [`PolicyError::Refused`]: `ENOENT` where no part of the range has a policy, `EOPNOTSUPP` where one is neither `bind` nor `prefer
/// (many)` (parts before it have the home node), `EINVAL` for a node that is not online, `ENOSYS` before Linux 5.17.
#[doc(alias = "set_mempolicy_home_node")]
pub fn set_home_node(at: *const u8, len: usize, node: NodeId) -> Result<(), PolicyError> {
    // SAFETY: no memory is passed, and what lies at the address stays as it is.
    let answer = ask(Call::SetHomeNode, || unsafe {
        libc::syscall(abi::SET_MEMPOLICY_HOME_NODE, at.addr(), len, node.0, 0)
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

/// The mode and the nodes to pass for a policy.
fn arguments(policy: &Mempolicy) -> Result<(c_int, NodeSet), PolicyError> {
    let number = policy.mode() as c_int | c_int::from(policy.flags().bits());
    let user = policy.user_nodes();
    let all = user.len() == NODES_MOST || user.is_empty() && policy.mode().interleaves();
    if !all {
        return Ok((number, user.clone()));
    }
    // The kernel takes no numbers beyond those it was built for, so "all" is spelled out.
    let allowed = mems_allowed()?;
    let relative = policy.flags().contains(Flags::RELATIVE);
    let nodes = if relative {
        (0..allowed.len()).collect()
    } else {
        allowed
    };
    Ok((number, nodes))
}

/// `EINVAL` has many reasons; the commonest is found out.
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

/// `get_mempolicy`: the number and the nodes that it answers with.
fn get(at: usize, flags: c_long) -> Result<(u32, NodeSet), PolicyError> {
    let mut number: c_int = 0;
    let mut nodes = NodeSet::EMPTY;
    // With a node to tell, the kernel has no nodes to tell besides.
    let mask = if flags & abi::MPOL_F_NODE == 0 {
        nodes.words.as_mut_ptr()
    } else {
        null_mut()
    };
    // Only this question takes no place for a number.
    let place = if flags == abi::MPOL_F_MEMS_ALLOWED {
        null_mut()
    } else {
        &raw mut number
    };
    // SAFETY: number and mask are writable, and the mask has as many bits as said.
    ask(Call::GetMempolicy, || unsafe {
        libc::syscall(abi::GET_MEMPOLICY, place, mask, BITS, at, flags)
    })?;
    Ok((number as u32, nodes))
}

/// The policy of the kernel's answer.
fn policy_of(number: u32, nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
    let flags = Flags::from_bits(number as u16);
    let mode = number & !u32::from(flags.bits());
    let mode = Mode::from_number(u64::from(mode)).ok_or(PolicyError::UnknownMode(mode))?;
    let nodes = match mode {
        Mode::Default | Mode::Local => NodeSet::EMPTY,
        // With `static` and the like the kernel keeps all that it was given, and uses the first.
        Mode::Preferred => nodes.iter().take(1).collect(),
        _ => nodes,
    };
    Mempolicy::new(mode, flags, nodes)
}
