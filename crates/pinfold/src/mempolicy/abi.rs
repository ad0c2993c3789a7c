//! The constants of the kernel's interface: flags from `include/uapi/linux/mempolicy.h`, numbers of
//! the system calls from `arch/x86/entry/syscalls/syscall_64.tbl` and `scripts/syscall.tbl`.
//!
//! The libc crate has some of these constants, for some targets. All of them stand here, so that a
//! reader has to compare only one file with the kernel's. A test compares this file with libc.

use core::ffi::{c_int, c_long};

/// In `mode`: the nodes are the machine's node numbers, whichever nodes the process may use.
pub(crate) const MPOL_F_STATIC_NODES: u16 = 1 << 15;
/// In `mode`: the nodes are positions among the allowed nodes.
pub(crate) const MPOL_F_RELATIVE_NODES: u16 = 1 << 14;
/// In `mode`: a page may move to the node whose CPUs use it, if that is one of the policy's nodes.
pub(crate) const MPOL_F_NUMA_BALANCING: u16 = 1 << 13;

/// `get_mempolicy`: return a node instead of a mode.
pub(crate) const MPOL_F_NODE: c_long = 1 << 0;
/// `get_mempolicy`: ask about an address instead of the thread.
pub(crate) const MPOL_F_ADDR: c_long = 1 << 1;
/// `get_mempolicy`: return the thread's allowed nodes.
pub(crate) const MPOL_F_MEMS_ALLOWED: c_long = 1 << 2;

/// `mbind`: fail if a page lies on a node that the policy excludes.
pub(crate) const MPOL_MF_STRICT: c_int = 1 << 0;
/// `mbind`, `move_pages`: move the pages that only this process maps.
pub(crate) const MPOL_MF_MOVE: c_int = 1 << 1;
/// `mbind`, `move_pages`: move all pages; needs `CAP_SYS_NICE`.
pub(crate) const MPOL_MF_MOVE_ALL: c_int = 1 << 2;

#[cfg(target_arch = "x86_64")]
mod numbers {
    use core::ffi::c_long;
    pub(crate) const MBIND: c_long = 237;
    pub(crate) const SET_MEMPOLICY: c_long = 238;
    pub(crate) const GET_MEMPOLICY: c_long = 239;
    pub(crate) const MIGRATE_PAGES: c_long = 256;
    pub(crate) const MOVE_PAGES: c_long = 279;
    pub(crate) const SET_MEMPOLICY_HOME_NODE: c_long = 450;
}

#[cfg(target_arch = "aarch64")]
mod numbers {
    use core::ffi::c_long;
    pub(crate) const MBIND: c_long = 235;
    pub(crate) const GET_MEMPOLICY: c_long = 236;
    pub(crate) const SET_MEMPOLICY: c_long = 237;
    pub(crate) const MIGRATE_PAGES: c_long = 238;
    pub(crate) const MOVE_PAGES: c_long = 239;
    pub(crate) const SET_MEMPOLICY_HOME_NODE: c_long = 450;
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod numbers {
    //! Other architectures: libc's numbers.
    use core::ffi::c_long;
    pub(crate) const MBIND: c_long = libc::SYS_mbind;
    pub(crate) const GET_MEMPOLICY: c_long = libc::SYS_get_mempolicy;
    pub(crate) const SET_MEMPOLICY: c_long = libc::SYS_set_mempolicy;
    pub(crate) const MIGRATE_PAGES: c_long = libc::SYS_migrate_pages;
    pub(crate) const MOVE_PAGES: c_long = libc::SYS_move_pages;
    /// Calls added since 2019 have the same number on every architecture.
    pub(crate) const SET_MEMPOLICY_HOME_NODE: c_long = 450;
}

pub(crate) use numbers::*;

#[cfg(test)]
mod tests {
    #[test]
    fn constants_equal_libcs() {
        let ours = [
            super::MBIND,
            super::SET_MEMPOLICY,
            super::GET_MEMPOLICY,
            super::MIGRATE_PAGES,
            super::MOVE_PAGES,
            super::SET_MEMPOLICY_HOME_NODE,
        ];
        let libcs = [
            libc::SYS_mbind,
            libc::SYS_set_mempolicy,
            libc::SYS_get_mempolicy,
            libc::SYS_migrate_pages,
            libc::SYS_move_pages,
            libc::SYS_set_mempolicy_home_node,
        ];
        assert_eq!(ours, libcs);
        assert_eq!(
            i32::from(super::MPOL_F_STATIC_NODES),
            libc::MPOL_F_STATIC_NODES
        );
        assert_eq!(
            i32::from(super::MPOL_F_RELATIVE_NODES),
            libc::MPOL_F_RELATIVE_NODES
        );
        assert_eq!(
            i32::from(super::MPOL_F_NUMA_BALANCING),
            libc::MPOL_F_NUMA_BALANCING
        );
    }
}
