//! The C API of where pages go under a policy: distances, weights, and the order of the nodes.

use super::policy::{CPolicy, copy_of};
use super::support::{boxed, failed, null_with, unboxed};
use core::ffi::{c_int, c_uint};
use pinfold::mempolicy::{Distances, Weights, node_for, zonelist};
use pinfold::topology::{MAX_NODES, NodeId, Topology};

/// What is known of the machine's nodes.
#[derive(Debug)]
pub struct CNodeOrder {
    distances: Distances,
    weights: Weights,
}

/// Returns the node of a number, or `None` if it is not a node's number.
fn node_of(number: c_int) -> Option<NodeId> {
    let number = usize::try_from(number).ok()?;
    (number < MAX_NODES).then_some(NodeId(number))
}

/// Reads the distances between the machine's nodes, and the nodes' weights. Destroy it with
/// `pinfold_node_order_destroy`. Returns null with EIO if the nodes cannot be read, or with ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_node_order_create() -> *mut CNodeOrder {
    let Ok(topology) = Topology::system() else {
        return null_with(libc::EIO);
    };
    boxed(CNodeOrder {
        distances: Distances::read(&topology),
        weights: Weights::read(&topology),
    })
}

/// Ends an order. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or an order of this API that has not been destroyed and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_node_order_destroy(this: *mut CNodeOrder) {
    if !this.is_null() {
        // SAFETY: `this` is not null, so the caller promises an order that `boxed` made in
        // `pinfold_node_order_create`, and that is not used afterwards.
        unsafe { unboxed(this) };
    }
}

/// Returns a node's weight, or −1 with EINVAL if `node` is not a node's number.
///
/// # Safety
///
/// `this` is an order of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_node_order_weight(this: &CNodeOrder, node: c_int) -> c_int {
    match node_of(node) {
        Some(node) => this.weights.weight(node).into(),
        None => failed(libc::EINVAL),
    }
}

/// Sets a node's weight in this order only. Returns 0, or −1 with EINVAL if `node` is not a node's
/// number or `weight` is not from 1 to 255.
///
/// # Safety
///
/// `this` is an order of this API that has not been destroyed, and that no other thread uses during
/// the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_node_order_set_weight(
    this: &mut CNodeOrder,
    node: c_int,
    weight: c_uint,
) -> c_int {
    match (node_of(node), u8::try_from(weight)) {
        (Some(node), Ok(weight @ 1..)) => {
            this.weights.set(node, weight);
            0
        }
        _ => failed(libc::EINVAL),
    }
}

/// Returns the node that a page goes to, or −1 with EINVAL if `local` is not a node's number.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds during the call. `order` is an order of this
/// API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_node_for(
    this: Option<&CPolicy>,
    page: u64,
    local: c_int,
    order: &CNodeOrder,
) -> c_int {
    let Some(local) = node_of(local) else {
        return failed(libc::EINVAL);
    };
    let policy = copy_of(this);
    node_for(&policy, page, local, &order.weights, &order.distances).0 as c_int
}

/// Stores the first `count` of the nodes that the kernel tries for a page (`policy_zonelist`), in
/// order. Returns how many nodes there are, or −1 with EINVAL if `from` is not a node's number.
///
/// # Safety
///
/// `this` is null, or a handle that the caller holds during the call. `order` is an order of this
/// API that has not been destroyed. `nodes` is writable for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempolicy_zonelist(
    this: Option<&CPolicy>,
    from: c_int,
    order: &CNodeOrder,
    nodes: *mut c_int,
    count: usize,
) -> isize {
    let Some(from) = node_of(from) else {
        return failed(libc::EINVAL) as isize;
    };
    let policy = copy_of(this);
    let mut found = 0;
    for node in zonelist(&policy, from, &order.distances) {
        if found < count {
            // SAFETY: `found` is below `count`, and the caller promises that `nodes` is writable
            // for `count` numbers.
            unsafe { nodes.add(found).write(node.0 as c_int) };
        }
        found += 1;
    }
    found as isize
}
