//! The program's own actions for SIGSEGV, which it sets again and again while blocks are guarded.
//! This file has a function `sigaction` of its own, through which all code of the process calls the
//! system's. It makes the calls of the guarding thread slow, so that the program's calls come in
//! between.

use pinfold_malloc::{Pinfold, guard};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// How long the thread that guards blocks sleeps before and after each of its calls, in
/// microseconds.
const NAP: u64 = 150;
const PATIENCE: Duration = Duration::from_secs(60);

thread_local! {
    static IS_SLOW: Cell<bool> = const { Cell::new(false) };
}

/// Calls of the guarding thread that set an action.
static SET: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    fn __sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
}

/// Stands in front of the C library's function.
///
/// # Safety
///
/// The arguments are those of `sigaction`.
#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let is_slow = IS_SLOW.get() && !new.is_null();
    if is_slow {
        SET.fetch_add(1, Relaxed);
        thread::sleep(Duration::from_micros(NAP));
    }
    // SAFETY: the caller promises the arguments.
    let result = unsafe { __sigaction(signal, new, old) };
    if is_slow {
        thread::sleep(Duration::from_micros(NAP));
    }
    result
}

const PAGE: usize = 4096;
/// The page at which the test faults.
static TARGET: AtomicUsize = AtomicUsize::new(0);
/// The number of the handler that had the last fault, and how many faults there were.
static LAST: AtomicUsize = AtomicUsize::new(0);
static FAULTS: AtomicUsize = AtomicUsize::new(0);

fn protect(access: c_int) {
    // SAFETY: the page is the test's own.
    let done = unsafe { libc::mprotect(TARGET.load(Relaxed) as *mut c_void, PAGE, access) };
    assert_eq!(done, 0);
}

fn handled(nth: usize) {
    LAST.store(nth, Relaxed);
    FAULTS.fetch_add(1, Relaxed);
    protect(libc::PROT_READ);
}

extern "C" fn with_information<const NTH: usize>(
    _: c_int,
    info: *mut libc::siginfo_t,
    _: *mut c_void,
) {
    // SAFETY: the kernel passes the information of a fault.
    let address = unsafe { (*info).si_addr() } as usize;
    if address != TARGET.load(Relaxed) {
        // SAFETY: `_exit` has no preconditions.
        unsafe { libc::_exit(9) };
    }
    handled(NTH);
}

extern "C" fn with_number<const NTH: usize>(_: c_int) {
    handled(NTH);
}

/// Sets the program's action to handler `nth`.
fn set(nth: usize) {
    // SAFETY: an action of zeroes is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    (action.sa_sigaction, action.sa_flags) = match nth {
        0 => (
            with_information::<0> as *const () as usize,
            libc::SA_SIGINFO,
        ),
        1 => (with_number::<1> as *const () as usize, 0),
        2 => (
            with_information::<2> as *const () as usize,
            libc::SA_SIGINFO | libc::SA_NODEFER,
        ),
        // Another action with the same function.
        3 => (with_number::<1> as *const () as usize, libc::SA_RESTART),
        _ => (with_number::<4> as *const () as usize, libc::SA_RESETHAND),
    };
    // SAFETY: the functions are handlers of these kinds.
    let result = unsafe { sigaction(libc::SIGSEGV, &raw const action, null_mut()) };
    assert_eq!(result, 0);
}

/// Faults once, and returns the number of the handler that was called.
fn fault() -> usize {
    let before = FAULTS.load(Relaxed);
    protect(libc::PROT_NONE);
    // SAFETY: a handler makes the page readable.
    unsafe { (TARGET.load(Relaxed) as *const u8).read_volatile() };
    assert_eq!(FAULTS.load(Relaxed), before + 1);
    LAST.load(Relaxed)
}

/// Sets the flag when it is dropped, so that a failing test stops its thread.
struct StopAtEnd<'f>(&'f AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

// The program's newest action has every fault of the program that comes after it, and is in effect
// in the end.
#[test]
fn each_fault_goes_to_the_newest_action() {
    // SAFETY: a new mapping takes no other memory.
    let page = unsafe {
        libc::mmap(
            null_mut(),
            PAGE,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    TARGET.store(page as usize, Relaxed);
    assert!(guard::start(64));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = StopAtEnd(&done);
        scope.spawn(|| {
            IS_SLOW.set(true);
            let layout = Layout::from_size_align(64, 16).unwrap();
            while !done.load(Relaxed) {
                // SAFETY: the layout has a size, and the block is freed once.
                unsafe { Pinfold.dealloc(Pinfold.alloc(layout), layout) };
            }
        });
        let started = Instant::now();
        let mut rounds = 0;
        // Until the other thread has replaced actions many times.
        while SET.load(Relaxed) < 500 || rounds < 2000 {
            assert!(
                started.elapsed() < PATIENCE,
                "{} were replaced",
                SET.load(Relaxed)
            );
            let nth = rounds % 5;
            set(nth);
            if rounds % 3 != 0 {
                let expected = if nth == 3 { 1 } else { nth };
                assert_eq!(fault(), expected, "in round {rounds}");
            }
            if rounds % 7 == 0 {
                thread::sleep(Duration::from_micros(NAP));
            }
            rounds += 1;
        }
        set(2);
        drop(stop);
    });
    assert_eq!(fault(), 2);
    // SAFETY: an action of zeroes is valid, and the call writes to it.
    let now = unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        assert_eq!(sigaction(libc::SIGSEGV, null(), &raw mut now), 0);
        now
    };
    assert_ne!(now.sa_flags & libc::SA_NODEFER, 0);
}
