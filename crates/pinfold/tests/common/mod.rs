//! Parts that several tests share.
#![allow(dead_code, reason = "each test uses a part")]

pub mod again;
pub mod held;
pub mod items;
pub mod machine;
pub mod reports;
pub mod runs;
pub mod timer;
pub mod trace;

use pinfold::slab::KmemCache;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::OnceLock;
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
    static CPUS: OnceLock<usize> = OnceLock::new();
    // musl counts the CPUs of the affinity, which `pin` changes. The first call comes before that.
    // SAFETY: `sysconf` has no preconditions.
    *CPUS.get_or_init(|| unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) as usize })
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

/// Allocates this many objects.
pub fn take(cache: &KmemCache, count: usize) -> Vec<NonNull<u8>> {
    (0..count).map(|_| cache.alloc().unwrap()).collect()
}

/// Frees objects.
pub fn give(cache: &KmemCache, objects: impl IntoIterator<Item = NonNull<u8>>) {
    for object in objects {
        // SAFETY: the tests pass each object that they took from this cache once, except for
        // planted faults, which the cache reports.
        unsafe { cache.free(object) };
    }
}

/// Asserts that `text` contains each of `words`.
#[track_caller]
pub fn assert_has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
}

/// Returns a field of `/proc/self/status`, in bytes.
pub fn status(field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    let kilobytes = line.split_ascii_whitespace().nth(1).unwrap();
    kilobytes.parse::<usize>().unwrap() << 10
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

/// Returns true in a process of the test `name` with this number of made-up nodes. Elsewhere, runs
/// the test in such a process.
#[track_caller]
pub fn on_nodes(nodes: usize, name: &str) -> bool {
    again::alone(name, |command| {
        command.env("PINFOLD_FAKE_NODES", nodes.to_string());
    })
}

/// Runs `f` in a forked child, which must return true there. An alarm ends the child after
/// `seconds`, because it may wait for a thread or a lock that does not exist in it.
#[track_caller]
pub fn in_child(seconds: u32, f: impl FnOnce() -> bool) {
    // SAFETY: the child uses only what works after a fork: the memory that it has, system calls,
    // and Pinfold. It leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: `alarm` has no preconditions.
        unsafe { libc::alarm(seconds) };
        let fine = catch_unwind(AssertUnwindSafe(f)).unwrap_or(false);
        // SAFETY: `_exit` has no preconditions.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a live integer that the kernel may write to.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed: {status:#x}");
}

/// Sets this process's limit on a resource, which can be raised again.
///
/// For valgrind's sake, the kernel treats a limit of 0 on data as no limit, so tests set 1.
pub fn limit(resource: impl Into<i64>, bytes: u64) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the kernel reads `limit` during the call.
    unsafe { libc::setrlimit(resource.into() as _, &raw const limit) };
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
