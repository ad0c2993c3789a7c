//! The limits of the process: its resource limits, its nodes, and the kernel's settings.

use super::files::{number_at_start, read_file};
use super::{Once, page_size};
use pinfold_rseq::{kernel, syscall};

/// Returns how many bytes of address space `RLIMIT_AS` left to the process at the first call, or
/// `usize::MAX` if there was no limit.
pub(crate) fn address_space_left() -> usize {
    static LEFT: Once = Once::new();
    match LEFT.get_or_read(|| {
        let limit = resource_limit(libc::RLIMIT_AS);
        if limit == usize::MAX {
            return usize::MAX;
        }
        limit.saturating_sub(mapped().0)
    }) {
        left if left >= Once::UNREAD - 1 => usize::MAX,
        left => left,
    }
}

/// Returns the limit of `resource` in bytes, or `usize::MAX` if it is not limited.
pub(crate) fn resource_limit(resource: impl Into<i64>) -> usize {
    match kernel::limit(resource).unwrap_or(libc::RLIM_INFINITY) {
        libc::RLIM_INFINITY => usize::MAX,
        bytes => usize::try_from(bytes).unwrap_or(usize::MAX),
    }
}

/// Returns the nodes that the process may use, one bit for each, as `get_mempolicy` tells them.
/// Returns `None` if the kernel, or a filter in front of it, refuses. One system call.
pub(crate) fn allowed_nodes() -> Option<[u64; 16]> {
    /// From `include/uapi/linux/mempolicy.h`.
    const MPOL_F_MEMS_ALLOWED: usize = 1 << 2;
    let mut nodes = [0u64; 16];
    // The kernel subtracts one from the number of bits.
    let bits = nodes.len() * 64 + 1;
    let mask = nodes.as_mut_ptr() as usize;
    let arguments = [0, mask, bits, 0, MPOL_F_MEMS_ALLOWED];
    // SAFETY: the kernel writes `bits - 1` bits, which `nodes` has. With this flag it takes no
    // other address.
    let answer = unsafe { syscall(libc::SYS_get_mempolicy, arguments) };
    answer.is_ok().then_some(nodes)
}

/// Returns how many bytes the process has mapped, as two numbers.
///
/// The first number counts all mappings, as `RLIMIT_AS` does. The second counts the private
/// writable mappings. It includes the stack, which `RLIMIT_DATA` does not count. Both are 0 if the
/// system's file cannot be read.
pub(crate) fn mapped() -> (usize, usize) {
    let mut text = [0u8; 96];
    let got = read_file(c"/proc/self/statm", &mut text);
    let field = |nth| {
        let mut words = text[..got].split(|&byte| byte == b' ');
        let pages = words.nth(nth).map_or(0, number_at_start);
        pages.saturating_mul(page_size())
    };
    (field(0), field(5))
}

/// Returns whether `vm.overcommit_memory` was 2 at the first call. Then every committed page counts
/// against the overcommit limit, touched or not.
pub(crate) fn commits_strictly() -> bool {
    static STRICT: Once = Once::new();
    STRICT.get_or_read(|| {
        let mut text = [0u8; 8];
        let got = read_file(c"/proc/sys/vm/overcommit_memory", &mut text);
        usize::from(got > 0 && text[0] == b'2')
    }) == 1
}

/// Returns how many mappings the kernel allows a process: `vm.max_map_count`, or the kernel's
/// default if that cannot be read.
pub(crate) fn mappings_most() -> usize {
    let mut text = [0u8; 32];
    let got = read_file(c"/proc/sys/vm/max_map_count", &mut text);
    match number_at_start(&text[..got]) {
        0 => 65530,
        most => most,
    }
}

/// Returns how many bytes the kernel tries to keep free, `vm.min_free_kbytes`, or 0 if that cannot
/// be read.
pub(crate) fn least_free() -> u64 {
    let mut text = [0u8; 32];
    let got = read_file(c"/proc/sys/vm/min_free_kbytes", &mut text);
    (number_at_start(&text[..got]) as u64).saturating_mul(1024)
}
