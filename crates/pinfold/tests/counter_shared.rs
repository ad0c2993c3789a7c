//! Counters in shared memory: forked and executed members, members that are killed at any
//! instruction, and files that are refused.

use pinfold::counter::{SharedCounters, SharedError};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

/// Names the descriptor for a member that this test executes.
const MEMBER: &str = "COUNTER_SHARED_MEMBER";
const ADDS: i64 = 20_000;

/// Makes an empty file in memory, which children inherit.
fn memfd(flags: libc::c_uint) -> File {
    // SAFETY: the name ends with a zero byte.
    let fd = unsafe { libc::memfd_create(c"counters".as_ptr(), flags) };
    assert!(fd >= 0);
    // SAFETY: the descriptor is new, so this file alone owns it.
    unsafe { File::from_raw_fd(fd) }
}

fn open(file: &File, count: usize) -> Result<SharedCounters, SharedError> {
    SharedCounters::in_shared(file.as_raw_fd(), count)
}

/// Runs `work` in a forked child, which ends there.
fn fork(work: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child uses only atomics, system calls and memory that it has, and then ends.
    match unsafe { libc::fork() } {
        0 => {
            // A child that counts without end must not outlive a test that fails.
            // SAFETY: the call changes only what happens when this child's parent ends.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            work();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        child => {
            assert!(child > 0);
            child
        }
    }
}

fn wait(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is writable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
fn forked_and_executed_members_count_together() {
    let file = memfd(0);
    let counters = open(&file, 3).unwrap();
    let children: Vec<_> = (0..4)
        .map(|_| {
            fork(|| {
                (0..ADDS).for_each(|_| {
                    counters.add(2, 5);
                    counters.add(2, -3);
                });
            })
        })
        .collect();
    let executed: Vec<_> = ["off", "cpu", "cid"]
        .map(|backend| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "member", "--nocapture"])
                .env(MEMBER, file.as_raw_fd().to_string())
                .env("PINFOLD_RSEQ", backend)
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .into();
    // Sums while the members add.
    let mut last = 0;
    for _ in 0..1000 {
        let sum = counters.sum(1).unwrap();
        assert!(
            sum >= last,
            "a count that only grows went from {last} to {sum}"
        );
        last = sum;
    }
    for child in children {
        assert_eq!(wait(child), 0);
    }
    for mut child in executed {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(counters.sum(0), Some(0));
    assert_eq!(counters.sum(1), Some(3 * ADDS));
    assert_eq!(counters.sum(2), Some(4 * 2 * ADDS));
    assert_eq!(counters.read(1), Some(3 * ADDS));
}

/// A member that the test above executes.
#[test]
fn member() {
    let Ok(fd) = std::env::var(MEMBER) else {
        return;
    };
    let counters = SharedCounters::in_shared(fd.parse().unwrap(), 3).unwrap();
    (0..ADDS).for_each(|_| assert!(counters.add(1, 1)));
    assert!(counters.sum(1).unwrap() >= ADDS);
}

/// Words beside the counters, in a mapping that the children share.
fn told() -> &'static [AtomicI64; 2] {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS,
    );
    // SAFETY: maps new memory, which is never unmapped.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: the mapping has room, and zeroes are valid atomics.
    unsafe { &*at.cast() }
}

#[test]
fn a_killed_member_loses_nothing_and_blocks_no_other() {
    let file = memfd(0);
    let counters = open(&file, 1).unwrap();
    let mut random = 12345u64;
    for _ in 0..200 {
        let [begun, done] = told();
        let before = counters.sum(0).unwrap();
        // One member adds, and says before and after how much. The other one sums, so that it is
        // killed during a freeze too.
        let adder = fork(|| {
            loop {
                begun.fetch_add(1, SeqCst);
                counters.add(0, 1);
                done.fetch_add(1, SeqCst);
            }
        });
        let summer = fork(|| {
            loop {
                counters.sum(0);
            }
        });
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(500 + random % 2000)
            || done.load(Relaxed) == 0
        {
            std::hint::spin_loop();
        }
        for child in [adder, summer] {
            // SAFETY: the child was forked here, and was not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            wait(child);
        }
        let added = counters.sum(0).unwrap() - before;
        let (least, most) = (done.load(SeqCst), begun.load(SeqCst));
        assert!(
            (least..=most).contains(&added),
            "{added} were added, and {least} to {most} were meant"
        );
        assert!(counters.add(0, 7) && counters.sum(0) == Some(before + added + 7));
    }
}

#[test]
fn sums_are_exact_while_members_move_amounts_in_pairs() {
    let file = memfd(0);
    let counters = open(&file, 1).unwrap();
    // The value is between 0 and 100 for each member at every moment.
    let children: Vec<_> = (0..3)
        .map(|_| {
            fork(|| {
                loop {
                    counters.add(0, 100);
                    counters.add(0, -100);
                }
            })
        })
        .collect();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(500) {
        let sum = counters.sum(0).unwrap();
        assert!(sum % 100 == 0 && (0..=300).contains(&sum), "{sum}");
    }
    for child in children {
        // SAFETY: the child was forked here, and was not waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        wait(child);
    }
}

#[test]
fn bad_files_and_numbers_are_refused() {
    let refused = |file: &File, count| open(file, count).unwrap_err();
    let file = memfd(libc::MFD_ALLOW_SEALING);
    assert_eq!(refused(&file, 0), SharedError::Count { count: 0 });
    assert_eq!(
        refused(&file, usize::MAX),
        SharedError::Count { count: usize::MAX }
    );
    let counters = open(&file, 5).unwrap();
    assert_eq!(refused(&file, 6), SharedError::OtherCount { found: 5 });
    assert!(file.set_len(0).is_err(), "the file is not sealed");
    assert!(!counters.add(5, 1));
    assert_eq!(
        (counters.sum(5), counters.read(5), counters.len()),
        (None, None, 5)
    );

    let small = memfd(0);
    small.set_len(4096).unwrap();
    assert!(matches!(
        refused(&small, 1),
        SharedError::TooSmall { bytes: 4096, .. }
    ));
    let other = memfd(0);
    std::io::Write::write_all(&mut &other, b"pinfcnt\x02").unwrap();
    other.set_len(1 << 30).unwrap();
    assert!(matches!(refused(&other, 1), SharedError::Layout { .. }));
    let read_only = File::open("/proc/self/exe").unwrap();
    assert_eq!(
        refused(&read_only, 1),
        SharedError::File {
            errno: libc::EACCES
        }
    );
    for error in [refused(&small, 1), refused(&other, 1), refused(&file, 6)] {
        assert!(error.to_string().contains("give"), "{error}");
    }
}
