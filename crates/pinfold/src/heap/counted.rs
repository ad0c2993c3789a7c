//! Counts calls of malloc in a process that was asked to count (`PINFOLD_STATS`), and tells the
//! heap profile of freed blocks.
//!
//! The fast paths stay closed in such a process, so that every call reaches a slow path, which
//! counts it here. In other processes, counting costs a slow path one load.

use super::mode;
use crate::arena;
use crate::profile;
use crate::segment::{CLASSES, Call};
use crate::slab::kmalloc;
use crate::vmstat::VmEvents;

pub(super) static CALLS: VmEvents<Call> = VmEvents::new();

const _: () = assert!(kmalloc::CLASSES <= CLASSES);

fn add(call: Call, n: usize) {
    if mode::reports() {
        add_counted(call, n);
    }
}

fn add_counted(call: Call, n: usize) {
    if mode::counts_calls() {
        CALLS.add(call, n as u64);
    }
}

/// Counts an allocation of a size class, or of a class's twin.
pub(super) fn allocated_class(class: usize) {
    add(Call::alloc(class % kmalloc::CLASSES), 1);
}

/// Counts the free of a block of a size class, or of a class's twin. `from` is as in
/// [`profile::freed`].
pub(super) fn freed_class(block: *mut u8, class: usize, from: usize) {
    if mode::reports() {
        if kmalloc::is_sampled(class) {
            let stood_in = profile::freed(block, from);
            // SAFETY: the block stood in for one whose sample is gone.
            unsafe { kmalloc::release(stood_in) };
        }
        add_counted(Call::free(class % kmalloc::CLASSES), 1);
    }
}

pub(super) fn allocated_large(bytes: usize) {
    add(Call::LARGE_ALLOC, 1);
    add(Call::LARGE_BYTES, bytes);
}

/// Counts the free of a large block. The caller still owns the block. `from` is as in
/// [`profile::freed`].
pub(super) fn freed_large(block: *mut u8, bytes: usize, from: usize) {
    if mode::reports() {
        // A large block has no stand-in.
        let _ = profile::freed(block, from);
        add_counted(Call::LARGE_FREE, 1);
        add_counted(Call::LARGE_BYTES_FREED, bytes);
    }
}

/// Counts that a large block of `before` bytes has `after` bytes now.
pub(super) fn resized_large(before: usize, after: usize) {
    add(Call::LARGE_BYTES, after.saturating_sub(before));
    add(Call::LARGE_BYTES_FREED, before.saturating_sub(after));
}

pub(super) fn reallocated() {
    add(Call::REALLOC, 1);
}

pub(super) fn failed() {
    add(Call::FAILED, 1);
}

/// Counts that a program got `block` for `size` bytes.
pub(super) fn requested(block: *mut u8, size: usize) {
    if mode::counts_calls() && !block.is_null() {
        let class = kmalloc::class_of_any(arena::entry(block as usize));
        requested_in(class, size);
    }
}

/// Counts that a program got a guarded block of class `class` for `size` bytes.
pub(super) fn requested_guarded(class: usize, size: usize) {
    if mode::counts_calls() {
        requested_in(Some(class), size);
    }
}

fn requested_in(class: Option<usize>, size: usize) {
    CALLS.add(Call::REQUESTED, size as u64);
    if let Some(class) = class {
        CALLS.add(Call::requested(class % kmalloc::CLASSES), size as u64);
    }
}

/// Counts that a growing block of `size` bytes got a run.
pub(super) fn requested_large(size: usize) {
    add(Call::REQUESTED, size);
}
