//! Finds out which nodes hold single pages, and moves pages.

use super::abi;
use super::calls::{ask, rights};
use super::{Move, PolicyError, Syscall};
use crate::topology::{NodeId, NodeSet};
use pinfold_rseq::syscall;

/// The kernel's answer for a page: its node, or an error.
///
/// ```
/// use pinfold::mempolicy::{PageNode, nodes_of_pages};
///
/// let data = [1u8; 10];
/// let mut nodes = [PageNode::UNKNOWN; 2];
/// if nodes_of_pages(&[data.as_ptr(), std::ptr::null()], &mut nodes).is_ok() {
///     assert!(nodes[0].node().is_some());
///     // Nothing is mapped at address 0.
///     assert!(nodes[1].error().is_some());
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct PageNode(i32);

impl PageNode {
    /// The kernel has not answered for this page.
    pub const UNKNOWN: PageNode = PageNode(i32::MIN);

    /// Returns the node that holds the page, after a move if there was one.
    pub fn node(self) -> Option<NodeId> {
        usize::try_from(self.0).ok().map(NodeId)
    }

    /// Returns the kernel's error number if the kernel named no node:
    ///
    /// | errno | meaning |
    /// |---|---|
    /// | `ENOENT` | the page does not exist yet |
    /// | `EFAULT` | nothing is mapped there, or it is the page of zeroes; older kernels: as `ENOENT` |
    /// | `EBUSY` | the page is in use |
    /// | `EACCES` | other processes map the page too |
    /// | `ENOMEM` | the target node has no memory left |
    pub fn error(self) -> Option<i32> {
        (self.0 < 0 && self != PageNode::UNKNOWN).then(|| -self.0)
    }
}

/// Pages that one system call moves. The call needs a copy of the targets in the kernel's format,
/// on the stack.
const AT_ONCE: usize = 64;

/// Stores in `nodes` which node holds each page.
///
/// Any address in a page stands for the page. The call makes no pages. One system call.
///
/// # Errors
///
/// [`PolicyError::LengthsDiffer`] if the slices differ in length; [`PolicyError::Refused`] if the
/// kernel refuses.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{PageNode, nodes_of_pages};
///
/// let data = [1u8; 10];
/// let mut nodes = [PageNode::UNKNOWN];
/// match nodes_of_pages(&[data.as_ptr()], &mut nodes) {
///     Ok(()) => println!("on node {:?}", nodes[0].node()),
///     Err(error) => println!("{error}"),
/// }
/// ```
#[doc(alias = "move_pages")]
pub fn nodes_of_pages(pages: &[*const u8], nodes: &mut [PageNode]) -> Result<(), PolicyError> {
    if pages.len() != nodes.len() {
        return Err(PolicyError::LengthsDiffer);
    }
    nodes.fill(PageNode::UNKNOWN);
    // SAFETY: both slices have `pages.len()` elements, which was checked above. The kernel writes
    // an `int` for each page to `nodes`, and `PageNode` is a transparent `i32`.
    let answer = ask(Syscall::MovePages, unsafe {
        syscall(
            abi::MOVE_PAGES,
            [
                0,
                pages.len(),
                pages.as_ptr() as usize,
                0,
                nodes.as_mut_ptr() as usize,
                0,
            ],
        )
    });
    answer.map(drop)
}

/// Moves each page to its target node, and stores in `nodes` where each page is now. Returns how
/// many pages the kernel gave up on.
///
/// With [`Move::No`], moves nothing. One system call for every 64 pages.
///
/// # Errors
///
/// After an error, some of the first pages may have moved.
///
/// * [`PolicyError::LengthsDiffer`] if the slices differ in length.
/// * [`PolicyError::NeedsRights`] for [`Move::All`] without `CAP_SYS_NICE`.
/// * [`PolicyError::Refused`] with `ENODEV` if a target is not online.
/// * [`PolicyError::Refused`] with `EACCES` if a target is not allowed.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{Move, PageNode, move_pages, node_at};
///
/// let data = [1u8; 10];
/// let mut now = [PageNode::UNKNOWN];
/// if let Ok(home) = node_at(data.as_ptr()) {
///     match move_pages(&[data.as_ptr()], &[home], &mut now, Move::Own) {
///         Ok(given_up) => println!("{given_up} could not move; now on {:?}", now[0].node()),
///         Err(error) => println!("{error}"),
///     }
/// }
/// ```
pub fn move_pages(
    pages: &[*const u8],
    targets: &[NodeId],
    nodes: &mut [PageNode],
    moving: Move,
) -> Result<usize, PolicyError> {
    if pages.len() != targets.len() || pages.len() != nodes.len() {
        return Err(PolicyError::LengthsDiffer);
    }
    if moving == Move::No {
        return nodes_of_pages(pages, nodes).map(|()| 0);
    }
    nodes.fill(PageNode::UNKNOWN);
    let chunks = pages.chunks(AT_ONCE).zip(targets.chunks(AT_ONCE));
    let mut left = 0;
    for ((pages, targets), nodes) in chunks.zip(nodes.chunks_mut(AT_ONCE)) {
        let mut wanted = [-1; AT_ONCE];
        for (to, target) in wanted.iter_mut().zip(targets) {
            // A number beyond `int` is no node's number: the kernel refuses `i32::MAX` as a target.
            *to = i32::try_from(target.0).unwrap_or(i32::MAX);
        }
        // SAFETY: `pages` and `nodes` have `pages.len()` elements, because their whole slices have
        // equal lengths and are cut alike. `wanted` has `AT_ONCE`, which is at least as many. The
        // kernel writes an `int` for each page to `nodes`, and `PageNode` is a transparent `i32`.
        let answer = ask(Syscall::MovePages, unsafe {
            syscall(
                abi::MOVE_PAGES,
                [
                    0,
                    pages.len(),
                    pages.as_ptr() as usize,
                    wanted.as_ptr() as usize,
                    nodes.as_mut_ptr() as usize,
                    moving.bits() as usize,
                ],
            )
        });
        let refused = |error| rights(error, Syscall::MovePages, abi::MOVE_PAGES);
        left += answer.map_err(refused)?;
    }
    Ok(left)
}

/// Moves a process's pages on the n-th node of `from` to the n-th node of `to`. Returns how many
/// pages the kernel could not move.
///
/// `pid` 0 is the calling process. One system call, which takes time in proportion to the process's
/// memory.
///
/// # Errors
///
/// * [`PolicyError::Refused`] with `ESRCH` if there is no such process.
/// * [`PolicyError::Refused`] with `EINVAL` if none of the targets is allowed.
/// * [`PolicyError::NeedsRights`] without `CAP_SYS_NICE`, if the process is another user's or may
///   not use the targets.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{mems_allowed, migrate};
///
/// if let Ok(allowed) = mems_allowed() {
///     match migrate(0, &allowed, &allowed) {
///         Ok(left) => println!("{left} pages could not move"),
///         Err(error) => println!("{error}"),
///     }
/// }
/// ```
#[doc(alias = "migrate_pages")]
pub fn migrate(pid: i32, from: &NodeSet, to: &NodeSet) -> Result<usize, PolicyError> {
    // The kernel subtracts 1 from this to get the number of bits.
    let bits = from.words.len() * 64 + 1;
    let (from, to) = (from.words.as_ptr(), to.words.as_ptr());
    // SAFETY: both masks are `bits - 1` bits long, which is what the kernel reads.
    let answer = ask(Syscall::MigratePages, unsafe {
        syscall(
            abi::MIGRATE_PAGES,
            [pid as usize, bits, from as usize, to as usize],
        )
    });
    let refused = |error| rights(error, Syscall::MigratePages, abi::MIGRATE_PAGES);
    answer.map_err(refused)
}
