//! The kernel's ABI for restartable sequences and `membarrier`, from `include/uapi/linux/rseq.h`
//! and `include/uapi/linux/membarrier.h`. The libc crate does not define it.

/// The area that each thread shares with the kernel. The C library or this crate registers it.
///
/// This crate never writes the id fields of a registered area, because the kernel may kill a
/// process that does (since Linux 6.19).
///
/// ```
/// use pinfold_rseq::abi::{MM_CID, Rseq};
///
/// assert_eq!(std::mem::offset_of!(Rseq, mm_cid) as isize, MM_CID);
/// ```
#[repr(C, align(32))]
#[derive(Debug)]
pub struct Rseq {
    /// The CPU number if the area is registered, otherwise 0. Always a valid index.
    pub cpu_id_start: u32,
    /// The CPU number, or [`CPU_ID_UNINITIALIZED`], or [`CPU_ID_REGISTRATION_FAILED`].
    pub cpu_id: u32,
    /// The address of the [`Descriptor`] of the section that the thread is in, or null.
    pub rseq_cs: u64,
    /// Bits by which Linux 7.0 and newer announce extensions. 0 before.
    pub flags: u32,
    /// The number of the CPU's node (Linux 6.3).
    pub node_id: u32,
    /// The concurrency id (Linux 6.3).
    pub mm_cid: u32,
    /// Padding up to 32 bytes, the size of the area in the first kernels with rseq. Linux 7.0 and
    /// newer use these bytes if the thread asks for longer time slices.
    pub reserved: u32,
}

/// Describes one critical section to the kernel: `struct rseq_cs`.
///
/// The assembly lays descriptors out. This type documents the layout, and a test checks its
/// offsets.
///
/// ```
/// assert_eq!(size_of::<pinfold_rseq::abi::Descriptor>(), 32);
/// ```
#[repr(C, align(32))]
#[derive(Debug)]
pub struct Descriptor {
    /// Always 0.
    pub version: u32,
    /// Always 0.
    pub flags: u32,
    /// The address of the section's first instruction.
    pub start_ip: u64,
    /// The number of bytes from the first instruction to the end of the committing instruction.
    pub post_commit_offset: u64,
    /// The address at which the kernel continues when it aborts the section. [`SIGNATURE`] stands
    /// in the four bytes before it.
    pub abort_ip: u64,
}

/// The `cpu_id` of a thread whose area is not registered.
pub const CPU_ID_UNINITIALIZED: u32 = u32::MAX;
/// The `cpu_id` of a thread whose registration failed.
pub const CPU_ID_REGISTRATION_FAILED: u32 = u32::MAX - 1;

/// The signature that glibc registers with: on x86-64 the operand of a trapping `ud1`, on aarch64 a
/// trapping instruction.
pub const SIGNATURE: u32 = if cfg!(target_arch = "aarch64") {
    0xd428_bc00
} else {
    0x5305_3053
};

/// The feature size of kernels without extensible registrations: the fields up to `flags`. A
/// kernel's feature size is the number of bytes of the area that it maintains.
pub const ORIGINAL_FEATURE_SIZE: usize = 20;
/// The smallest feature size with which the kernel maintains `mm_cid`.
pub const FEATURE_SIZE_MM_CID: usize = 28;

/// The entry of the auxiliary vector that holds the kernel's feature size (Linux 6.3).
pub const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;
/// The entry of the auxiliary vector that holds the alignment of an area of the feature size (Linux
/// 6.3).
pub const AT_RSEQ_ALIGN: libc::c_ulong = 28;

/// `MEMBARRIER_CMD_QUERY`: returns which commands the kernel has.
pub const MEMBARRIER_CMD_QUERY: libc::c_int = 0;
/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ`: aborts the sections of this process's running threads
/// (Linux 5.10).
pub const MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 7;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ`: registers the process. Needed once, before the
/// first fence.
pub const MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 8;
/// `MEMBARRIER_CMD_FLAG_CPU`: restricts the command to the CPU in the third argument.
pub const MEMBARRIER_CMD_FLAG_CPU: libc::c_uint = 1;

/// The offset of `cpu_id` in [`Rseq`].
pub const CPU_ID: isize = 4;
/// The offset of `rseq_cs` in [`Rseq`].
pub const RSEQ_CS: isize = 8;
/// The offset of `mm_cid` in [`Rseq`].
pub const MM_CID: isize = 24;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn offsets_match_the_kernels_headers() {
        assert_eq!(offset_of!(Rseq, cpu_id) as isize, CPU_ID);
        assert_eq!(offset_of!(Rseq, rseq_cs) as isize, RSEQ_CS);
        assert_eq!(offset_of!(Rseq, mm_cid) as isize, MM_CID);
        assert_eq!(offset_of!(Rseq, mm_cid) + 4, FEATURE_SIZE_MM_CID);
        assert_eq!(offset_of!(Rseq, flags) + 4, ORIGINAL_FEATURE_SIZE);
        assert_eq!((size_of::<Rseq>(), align_of::<Rseq>()), (32, 32));
        assert_eq!(offset_of!(Descriptor, abort_ip), 24);
        assert_eq!(size_of::<Descriptor>(), 32);
    }
}
