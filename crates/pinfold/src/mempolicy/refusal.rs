//! Explains the error numbers of the system calls for policies.

use super::Syscall;
use core::fmt;

/// Why the kernel refused a call, and what to do about it.
pub(super) struct Refusal(pub(super) Syscall, pub(super) i32);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match reason(self.0, self.1) {
            Some(reason) => f.write_str(reason),
            None => write!(f, "refused with errno {}", self.1),
        }
    }
}

fn reason(call: Syscall, errno: i32) -> Option<&'static str> {
    Some(match (call, errno) {
        (Syscall::SetHomeNode, libc::ENOSYS) => {
            "not available here (ENOSYS): the call needs Linux 5.17, and no filter (seccomp, a container's) may \
             forbid it; distances are measured from the CPU's node instead"
        }
        (_, libc::ENOSYS) => {
            "not available here (ENOSYS): a kernel without NUMA, or a filter (seccomp, a container's) that forbids it; \
             the default policy stays in effect. In a container, allow the call or add CAP_SYS_NICE"
        }
        (_, libc::EPERM) => {
            "not permitted (EPERM): a filter (seccomp, a container's) forbids it; the default policy stays in effect. \
             In a container, allow the call or add CAP_SYS_NICE"
        }
        (Syscall::SetMempolicy, libc::EINVAL) => {
            "refused (EINVAL): none of the nodes exists, has memory and may be used (see Mems_allowed_list in \
             /proc/self/status), or this kernel does not know the mode or flag (prefer (many) needs Linux 5.15, weighted \
             interleave 6.9, balancing 5.12)"
        }
        (Syscall::Mbind, libc::EINVAL) => {
            "refused (EINVAL): the range does not begin at a page, or none of the nodes exists, has memory and may be used \
             (see Mems_allowed_list in /proc/self/status), or this kernel does not know the mode or flag (prefer (many) \
             needs Linux 5.15, weighted interleave 6.9, balancing 5.12)"
        }
        (Syscall::SetHomeNode, libc::EINVAL) => {
            "refused (EINVAL): the range does not begin at a page, or the home node is not online (see \
             /sys/devices/system/node/online)"
        }
        (Syscall::SetHomeNode, libc::ENOENT) => {
            "nothing in the range has a policy (ENOENT); apply bind or prefer (many) first"
        }
        (Syscall::SetHomeNode, libc::EOPNOTSUPP) => {
            "a policy in the range has no home node (EOPNOTSUPP); only bind and prefer (many) have one"
        }
        (Syscall::MigratePages, libc::EINVAL) => {
            "refused (EINVAL): none of the target nodes exists and may be used (see Mems_allowed_list in \
             /proc/self/status)"
        }
        (_, libc::EINVAL) => "refused (EINVAL): this kernel does not know the value of an argument",
        (Syscall::Mbind, libc::EIO) => {
            "pages lie on other nodes (EIO), and the call did not move them; ask for a move, or do not be \
             strict"
        }
        (Syscall::Mbind | Syscall::GetMempolicy, libc::EFAULT) => {
            "part of the range is not mapped (EFAULT); map it first"
        }
        (_, libc::EFAULT) => "an address is not mapped (EFAULT)",
        (_, libc::ENOMEM) => {
            "the kernel has no memory for the call (ENOMEM), or the process has too many mappings (vm.max_map_count)"
        }
        (Syscall::MovePages, libc::ENODEV) => {
            "a target node is not online (ENODEV); see /sys/devices/system/node/online"
        }
        (Syscall::MovePages, libc::EACCES) => {
            "a target node may not be used (EACCES); see Mems_allowed_list in /proc/self/status"
        }
        (_, libc::ESRCH) => "there is no such process (ESRCH)",
        _ => return None,
    })
}
