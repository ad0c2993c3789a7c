//! Parts that several tests share.
#![allow(dead_code, reason = "each test uses a part")]

pub mod again;
pub mod held;
pub mod items;
pub mod machine;
pub mod runs;
pub mod timer;
pub mod trace;

use std::sync::atomic::{AtomicBool, Ordering};

/// A sequence of pseudorandom numbers, the same for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

pub fn cpus() -> usize {
    // Not the affinity, which `pin` changes.
    // SAFETY: `sysconf` has no preconditions.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) as usize }
}

/// Moves the thread to the `nth` CPU. Does nothing where that is not allowed.
pub fn pin(nth: usize) {
    pinfold::topology::set_affinity(&[nth % cpus()].into_iter().collect());
}

/// Keeps the thread, and the children that it forks, on the CPU on which it runs. If they moved,
/// they could get other objects: those of another CPU's sheaves, or of another node's slabs.
pub fn stay_on_one_cpu() {
    // SAFETY: `sched_getcpu` has no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    let cpu = usize::try_from(cpu).expect("a CPU's number");
    pinfold::topology::set_affinity(&[cpu].into_iter().collect());
}

/// Returns a number from the environment, for long runs of a test.
pub fn from_environment(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |value| value.parse().expect("a number"))
}

/// Sets the flag when it is dropped, so that a failing test stops its threads.
pub struct StopAtEnd<'f>(pub &'f AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs the ignored test `name` with this number of made-up nodes.
#[track_caller]
pub fn with_nodes(nodes: usize, name: &str) -> String {
    again::passes(name, |command| {
        command.env("PINFOLD_FAKE_NODES", nodes.to_string());
    })
}

/// Makes the kernel answer `errno` to these system calls of this thread from now on.
pub fn forbid(calls: &[libc::c_long], errno: i32) {
    let statement = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = vec![statement(load, 0, 0, 0)];
    for (n, call) in calls.iter().enumerate() {
        let to_refusal = (calls.len() - n) as u8;
        program.push(statement(equal, *call as u32, to_refusal, 0));
    }
    program.push(statement(answer, libc::SECCOMP_RET_ALLOW, 0, 0));
    program.push(statement(
        answer,
        libc::SECCOMP_RET_ERRNO | errno as u32,
        0,
        0,
    ));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the call takes plain numbers, and restricts only the calling thread.
    let given_up = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(given_up, 0);
    // SAFETY: `filter` points to `program`, which lives until the call returns. The kernel copies
    // the program.
    let set = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const filter,
        )
    };
    assert_eq!(set, 0);
}
