//! The kernel's ABI, from `include/uapi/linux/rseq.h` and `include/uapi/linux/membarrier.h`.
//!
//! The libc crate has none of it.

/// The thread's area, shared between it and the kernel. glibc allocates and registers it.
///
/// This crate never writes the id fields: since Linux 6.19 the kernel may kill a process that does.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct Rseq {
    /// The CPU number when registered, else 0; always a valid index.
    pub cpu_id_start: u32,
    /// The CPU number, or [`CPU_ID_UNINITIALIZED`], or [`CPU_ID_REGISTRATION_FAILED`].
    pub cpu_id: u32,
    /// Address of the [`Descriptor`] of the section the thread is in, or null.
    pub rseq_cs: u64,
    /// Flags, 0.
    pub flags: u32,
    /// The CPU's node (Linux 6.3).
    pub node_id: u32,
    /// The concurrency id (Linux 6.3).
    pub mm_cid: u32,
    /// Padding up to the 32 bytes that the first registrations had.
    pub reserved: u32,
}

/// What describes one critical section to the kernel: `struct rseq_cs`.
///
/// The assembly lays it out; the type documents it and is checked against it in the tests.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct Descriptor {
    /// 0.
    pub version: u32,
    /// 0.
    pub flags: u32,
    /// Address of the first instruction.
    pub start_ip: u64,
    /// Bytes from the first instruction to behind the committing one.
    pub post_commit_offset: u64,
    /// Where the kernel goes on when it aborts the section; [`SIGNATURE`] stands in the four bytes before.
    pub abort_ip: u64,
}

/// `cpu_id` of a thread that is not registered.
pub const CPU_ID_UNINITIALIZED: u32 = u32::MAX;
/// `cpu_id` of a thread whose registration failed.
pub const CPU_ID_REGISTRATION_FAILED: u32 = u32::MAX - 1;

/// The signature that glibc registers with: on x86-64 the operand of a trapping `ud1`, elsewhere a trapping
/// instruction.
pub const SIGNATURE: u32 = if cfg!(target_arch = "aarch64") {
    0xd428_bc00
} else {
    0x5305_3053
};

/// Size of the area before extensible registrations: the kernel's fields up to `flags`.
pub const ORIGINAL_FEATURE_SIZE: usize = 20;
/// Feature size from which on `mm_cid` is kept.
pub const FEATURE_SIZE_MM_CID: usize = 28;

/// Auxiliary vector entry with the kernel's feature size (Linux 6.3).
pub const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;

/// `MEMBARRIER_CMD_QUERY`: which commands are there.
pub const MEMBARRIER_CMD_QUERY: libc::c_int = 0;
/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ`: abort the sections of this process's running threads (Linux 5.10).
pub const MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 7;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ`: must come first, once a process.
pub const MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ: libc::c_int = 1 << 8;
/// `MEMBARRIER_CMD_FLAG_CPU`: only the CPU in the third argument.
pub const MEMBARRIER_CMD_FLAG_CPU: libc::c_uint = 1;

/// Offset of `cpu_id` in [`Rseq`].
pub const CPU_ID: isize = 4;
/// Offset of `rseq_cs` in [`Rseq`].
pub const RSEQ_CS: isize = 8;
/// Offset of `mm_cid` in [`Rseq`].
pub const MM_CID: isize = 24;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn offsets_are_the_kernels() {
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
