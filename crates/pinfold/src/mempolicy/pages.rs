//! Where single pages lie, and moving them.

use super::abi;
use super::calls::{ask, rights};
use super::{Call, Move, PolicyError};
use crate::topology::{NodeId, NodeSet};
use core::ffi::c_long;
use core::ptr::null;

/// What the kernel says of a page: its node, or why there is none to tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct PageNode(i32);

impl PageNode {
    /// Nothing was asked, or answered, yet.
    pub const UNKNOWN: PageNode = PageNode(i32::MIN);

    /// The node that the page lies on, or was moved to.
    pub fn node(self) -> Option<NodeId> {
        usize::try_from(self.0).ok().map(NodeId)
    }

    /// Why there is no node: `ENOENT` no page is there, `EFAULT` the same to older kernels, or nothing is mapped, or it is the page of zeroes, `EBUSY` it is in
    /// use, `EACCES` others map it too, `ENOMEM` the target has no room.
    pub fn error(self) -> Option<i32> {
        (self.0 < 0 && self != PageNode::UNKNOWN).then(|| -self.0)
    }
}

/// Pages told of in one call, where targets have to be put into the kernel's form.
const AT_ONCE: usize = 64;

/// Which nodes pages lie on. Any address in a page stands for it; pages are not made. One system call.
///
/// # Errors
///
/// [`PolicyError::LengthsDiffer`]; [`PolicyError::Refused`].
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
    // SAFETY: both lists have the length said; the kernel writes ints to the second.
    let answer = ask(Call::MovePages, || unsafe {
        libc::syscall(
            abi::MOVE_PAGES,
            0,
            pages.len(),
            pages.as_ptr(),
            null::<i32>(),
            nodes.as_mut_ptr(),
            0,
        )
    });
    answer.map(drop)
}

/// Moves each page to its target, and says where it is now; returns how many the kernel gave up on. With [`Move::No`] asks
/// only. A system call for every 64 pages.
///
/// # Errors
///
/// [`PolicyError::LengthsDiffer`]. [`PolicyError::Refused`]: `ENODEV` a target is not online, `EACCES` it may not be used.
/// [`PolicyError::NeedsRights`] for [`Move::All`] without `CAP_SYS_NICE`. Pages before the fault may have moved.
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
            // A number that is no int is no node's either, and the kernel says so.
            *to = i32::try_from(target.0).unwrap_or(i32::MAX);
        }
        // SAFETY: the three lists have at least the length said; the kernel writes ints to the last.
        let answer = ask(Call::MovePages, || unsafe {
            libc::syscall(
                abi::MOVE_PAGES,
                0,
                pages.len(),
                pages.as_ptr(),
                wanted.as_ptr(),
                nodes.as_mut_ptr(),
                moving.bits(),
            )
        });
        let refused = |error| rights(error, Call::MovePages, move_nothing);
        left += answer.map_err(refused)? as usize;
    }
    Ok(left)
}

/// Moves the pages of a process that lie on nodes of `from` to those of `to`, the n-th to the n-th; 0 is the calling process.
/// Returns how many could not be moved. One system call, of time in proportion to the process's memory.
///
/// # Errors
///
/// [`PolicyError::Refused`]: `ESRCH` there is no such process, `EINVAL` none of the targets may be used.
/// [`PolicyError::NeedsRights`]: it is somebody else's, or the nodes are not its own.
#[doc(alias = "migrate_pages")]
pub fn migrate(pid: i32, from: &NodeSet, to: &NodeSet) -> Result<usize, PolicyError> {
    // The kernel takes one from the count of bits.
    let bits = from.words.len() * 64 + 1;
    let (from, to) = (from.words.as_ptr(), to.words.as_ptr());
    // SAFETY: both masks have as many bits as said.
    let answer = ask(Call::MigratePages, || unsafe {
        libc::syscall(abi::MIGRATE_PAGES, pid, bits, from, to)
    });
    let refused = |error| rights(error, Call::MigratePages, migrate_nothing);
    answer.map(|left| left as usize).map_err(refused)
}

fn move_nothing() -> Result<c_long, PolicyError> {
    let none = null::<u64>();
    // SAFETY: lists of no length.
    ask(Call::MovePages, || unsafe {
        libc::syscall(abi::MOVE_PAGES, 0, 0, none, none, none, 0)
    })
}

fn migrate_nothing() -> Result<c_long, PolicyError> {
    let none = null::<u64>();
    // SAFETY: empty sets.
    ask(Call::MigratePages, || unsafe {
        libc::syscall(abi::MIGRATE_PAGES, 0, 0, none, none)
    })
}
