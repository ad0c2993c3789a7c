//! Tests the threads that this crate registers itself, where the C library does not.
//!
//! Each case runs in a process of its own, because the backend is chosen once for a process. glibc
//! registers no thread there.

mod storm;

use pinfold_rseq::abi::{Rseq, SIGNATURE};
use pinfold_rseq::{
    Backend, Index, MAX_INDEX, Missing, UNIT_HEADER, Units, current, forbid_registration, init,
    missing, possible, registers_threads,
};
use std::env;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::thread;
use std::time::Duration;

const WORD: usize = UNIT_HEADER;
/// What [`current`] returns in a thread that is not registered.
const NONE: usize = MAX_INDEX - 1;
static UNITS: Units = Units::new();

#[test]
fn threads_come_and_go() {
    alone("case_threads_come_and_go");
}

#[test]
fn a_thread_that_ends_lets_go() {
    alone("case_a_thread_that_ends_lets_go");
}

#[test]
fn a_forked_child_stays_registered() {
    alone("case_a_forked_child_stays_registered");
}

#[test]
fn a_child_in_its_makers_memory_registers_nothing() {
    alone("case_a_child_in_its_makers_memory_registers_nothing");
}

#[test]
fn a_thread_that_other_code_registered_is_left_alone() {
    alone("case_a_thread_that_other_code_registered_is_left_alone");
}

#[test]
fn other_code_that_registers_first_has_the_process() {
    alone("case_other_code_that_registers_first_has_the_process");
}

#[test]
fn no_thread_is_registered_in_a_sandbox() {
    alone("case_no_thread_is_registered_in_a_sandbox");
}

/// Runs a case of this file with each index, if the kernel offers rseq.
fn alone(case: &str) {
    // SAFETY: the kernel refuses an area of size 0 before it registers anything.
    unsafe { libc::syscall(libc::SYS_rseq, 0usize, 0, 0, 0) };
    let offered = std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
    let supported = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    if !offered || !supported {
        return;
    }
    for index in ["cid", "cpu"] {
        let output = Command::new(env::current_exe().unwrap())
            .args([case, "--exact", "--ignored", "--nocapture"])
            .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
            .env("PINFOLD_RSEQ", index)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed, "{index}: {output:?}");
    }
}

/// Chooses the backend, and gives each index a unit.
fn begin() {
    init(Index::Cid);
    assert!(registers_threads(), "{:?}", missing());
    for index in 0..possible() {
        let unit = Box::leak(Box::new([0u64; UNIT_HEADER / 8 + 1])).as_mut_ptr();
        UNITS.install(index, unit.cast()).unwrap();
    }
}

/// Adds 1 on this CPU. Returns false if the thread is not registered.
fn add() -> bool {
    // SAFETY: each unit has this word.
    (0..100).any(|_| unsafe { UNITS.add(WORD, 1) })
}

fn sum() -> u64 {
    let units = (0..possible()).map(|index| UNITS.unit(index));
    // SAFETY: each unit is installed and has this word, and no operation is under way.
    units
        .map(|unit| unsafe { *unit.add(WORD).cast::<u64>() })
        .sum()
}

static ADDED: AtomicU64 = AtomicU64::new(0);

/// Registers the thread that it interrupts, if that was not tried yet.
extern "C" fn on_signal(_: libc::c_int) {
    current();
    if add() {
        ADDED.fetch_add(1, Relaxed);
    }
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_threads_come_and_go() {
    const THREADS: u64 = 4000;
    const ADDS: u64 = 5000;
    static RUNNING: AtomicU64 = AtomicU64::new(0);
    fn work() {
        assert!(current() < possible());
        assert!((0..ADDS).all(|_| add()));
        ADDED.fetch_add(ADDS, Relaxed);
        RUNNING.fetch_sub(1, SeqCst);
    }
    let wait_until = |few: u64| {
        while RUNNING.load(SeqCst) > few {
            thread::yield_now();
        }
    };
    begin();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| storm::storm(on_signal, &stop));
        for nth in 0..THREADS {
            wait_until(7);
            RUNNING.fetch_add(1, SeqCst);
            let thread = thread::spawn(work);
            // The C library frees the memory of a thread that nobody joins while the thread runs.
            if nth % 2 == 0 {
                thread.join().unwrap();
            }
        }
        wait_until(0);
        stop.store(true, Relaxed);
    });
    // The last signals are handled, and the last threads are gone.
    thread::sleep(Duration::from_millis(100));
    assert_eq!(sum(), ADDED.load(SeqCst));
    assert!(sum() > THREADS * ADDS);
}

/// The rounds of destructors that have run, and those in which the thread could add.
static ROUNDS: AtomicU32 = AtomicU32::new(0);
static WITH_INDEX: AtomicU32 = AtomicU32::new(0);
static KEY: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_each_round(_: *mut c_void) {
    let round = ROUNDS.fetch_add(1, Relaxed);
    let index = current();
    let has_index = add();
    assert_eq!(has_index, index < possible());
    assert!(has_index || index == NONE);
    WITH_INDEX.fetch_or(u32::from(has_index) << round, Relaxed);
    set_again();
}

fn set_again() {
    // SAFETY: the key was made, and no code reads through the value.
    let error = unsafe { libc::pthread_setspecific(KEY.load(Relaxed), 8 as *const c_void) };
    assert_eq!(error, 0);
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_a_thread_that_ends_lets_go() {
    begin();
    let mut key = 0;
    // SAFETY: `key` is writable, and the destructor stays loaded.
    let error = unsafe { libc::pthread_key_create(&raw mut key, Some(in_each_round)) };
    assert_eq!(error, 0);
    KEY.store(key, Relaxed);
    let thread = thread::spawn(|| {
        current();
        assert!(add());
        set_again();
    });
    thread.join().unwrap();
    // The C libraries make four rounds. The crate's key is the older one, so its destructor runs
    // first in each.
    assert_eq!(ROUNDS.load(Relaxed), 4);
    assert_eq!(WITH_INDEX.load(Relaxed), 0b0001);
}

/// Returns the exit status of a child.
fn status_of(child: libc::pid_t) -> libc::c_int {
    let mut status = 0;
    // SAFETY: `status` is writable, and `child` is a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_a_forked_child_stays_registered() {
    begin();
    current();
    // SAFETY: the child adds, makes a thread, and ends without destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let here = current() < possible() && add();
        let there = thread::spawn(|| current() < possible() && add()).join();
        // SAFETY: the child ends as it is.
        unsafe { libc::_exit(libc::c_int::from(!(here && there.unwrap_or(false)))) };
    }
    assert_eq!(status_of(child), 0);
    assert!(add());
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_a_child_in_its_makers_memory_registers_nothing() {
    extern "C" fn child(_: *mut c_void) -> libc::c_int {
        libc::c_int::from(current() != NONE || add())
    }
    begin();
    let thread = thread::spawn(|| {
        let mut stack = Box::new([MaybeUninit::<u128>::uninit(); 4096]);
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let top = stack.as_mut_ptr_range().end.cast();
        // SAFETY: the child has a stack of its own, and this thread waits until the child has
        // ended.
        let pid = unsafe { libc::clone(child, top, flags, null_mut()) };
        assert!(pid > 0);
        assert_eq!(status_of(pid), 0);
        // The child has left no index behind.
        assert!(!add());
        assert!(current() < possible() && add());
    });
    thread.join().unwrap();
}

/// Registers the thread with an area of the test's own.
fn register_otherwise() {
    let area = Box::leak(Box::new(MaybeUninit::<Rseq>::zeroed()));
    // SAFETY: the area is zeroed, as the kernel expects, and stays until the process ends.
    let answer = unsafe { libc::syscall(libc::SYS_rseq, area.as_mut_ptr(), 32, 0, SIGNATURE) };
    assert_eq!(answer, 0);
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_a_thread_that_other_code_registered_is_left_alone() {
    begin();
    let thread = thread::spawn(|| {
        register_otherwise();
        assert!((0..3).all(|_| current() == NONE && !add()));
    });
    thread.join().unwrap();
    assert!(current() < possible() && add());
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_other_code_that_registers_first_has_the_process() {
    register_otherwise();
    assert_eq!(init(Index::Cid), Backend::Atomic);
    assert_eq!(missing(), Missing::Registration);
    assert!(!registers_threads());
    assert!(thread::spawn(|| current() < possible()).join().unwrap());
}

#[test]
#[ignore = "runs in a process of its own"]
fn case_no_thread_is_registered_in_a_sandbox() {
    begin();
    current();
    forbid_registration();
    assert!(add());
    let thread = thread::spawn(|| assert!(current() == NONE && !add()));
    thread.join().unwrap();
}
