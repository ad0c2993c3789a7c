//! What the kernel's interface is made of: `include/uapi/linux/mempolicy.h`, and the numbers of the calls from
//! `arch/x86/entry/syscalls/syscall_64.tbl` and `scripts/syscall.tbl`.
//!
//! libc has some of it for some targets; all of it stands here, so that there is one place to compare.

use core::ffi::{c_int, c_long};

/// In `mode`: the nodes are numbers of the machine's, whatever the process may use.
pub(crate) const MPOL_F_STATIC_NODES: u16 = 1 << 15;
/// In `mode`: the nodes are positions among those the process may use.
pub(crate) const MPOL_F_RELATIVE_NODES: u16 = 1 << 14;
/// In `mode`: pages may move to the node that uses them, within the policy's.
pub(crate) const MPOL_F_NUMA_BALANCING: u16 = 1 << 13;

/// `get_mempolicy`: answer with a node, not a mode.
pub(crate) const MPOL_F_NODE: c_long = 1 << 0;
/// `get_mempolicy`: of an address, not of the thread.
pub(crate) const MPOL_F_ADDR: c_long = 1 << 1;
/// `get_mempolicy`: the nodes that the thread may use at all.
pub(crate) const MPOL_F_MEMS_ALLOWED: c_long = 1 << 2;

/// `mbind`: fail when a page lies elsewhere.
pub(crate) const MPOL_MF_STRICT: c_int = 1 << 0;
/// `mbind`, `move_pages`: move pages that this process alone maps.
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
    //! Other machines: libc's.
    use core::ffi::c_long;
    pub(crate) const MBIND: c_long = libc::SYS_mbind;
    pub(crate) const GET_MEMPOLICY: c_long = libc::SYS_get_mempolicy;
    pub(crate) const SET_MEMPOLICY: c_long = libc::SYS_set_mempolicy;
    pub(crate) const MIGRATE_PAGES: c_long = libc::SYS_migrate_pages;
    pub(crate) const MOVE_PAGES: c_long = libc::SYS_move_pages;
    /// The same number everywhere, as of all calls since 2019.
    pub(crate) const SET_MEMPOLICY_HOME_NODE: c_long = 450;
}

pub(crate) use numbers::*;

#[cfg(test)]
mod tests {
    #[test]
    fn as_libc_has_them() {
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
