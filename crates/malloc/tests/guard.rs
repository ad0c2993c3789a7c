//! Guarded blocks of a Rust program. Each fault happens in a process of its own: this test's file,
//! started again with the name of the fault.

use pinfold_malloc::{Pinfold, guard, heap_profile};
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, exit};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const VARIABLE: &str = "TEST_FAULT";
/// What the kernel says of an access that a page does not allow.
const SEGV_ACCERR: i32 = 2;
/// How long a process looks for a guarded block.
const PATIENCE: Duration = Duration::from_secs(60);

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 16).unwrap()
}

/// Runs the test `name` of this file in another process, which calls `child` and ends. Returns how
/// that process ended.
fn run(name: &str, child: impl FnOnce()) -> Output {
    if std::env::var(VARIABLE).is_ok_and(|value| value == name) {
        child();
        exit(0);
    }
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, name)
        .output()
        .unwrap()
}

/// Makes `handler` the program's action for a signal.
///
/// # Safety
///
/// The handler may be called at any time, and has the form that `flags` name.
unsafe fn handle(signal: i32, handler: usize, flags: i32) {
    // SAFETY: an action of zeroes is valid, and the caller promises the handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

/// Asserts that the process ended by `signal`, with a report of one line that has each of `words`.
#[track_caller]
fn assert_report(output: &Output, signal: i32, first: &str, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(signal), "{output:?}");
    let report = said
        .find("pinfold: guarded block: ")
        .unwrap_or_else(|| panic!("no report in {said}"));
    let report = &said[report..];
    let line = report.lines().next().unwrap();
    assert!(line.contains(first), "{line}, not {first}");
    for word in words {
        assert!(report.contains(word), "no {word} in {report}");
    }
    assert_eq!(said.matches("pinfold: guarded block").count(), 1, "{said}");
}

/// Allocates and frees blocks of `size` bytes until one is guarded, and returns it. The others are
/// freed by `free`.
fn guarded(size: usize) -> *mut u8 {
    assert!(guard::start(64));
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        let (before, _) = guard::counts();
        // SAFETY: the layout has a size.
        let block = unsafe { Pinfold.alloc(layout(size)) };
        if guard::counts().0 > before {
            return block;
        }
        // SAFETY: the block was allocated above.
        unsafe { Pinfold.dealloc(block, layout(size)) };
    }
    panic!("no block was guarded");
}

/// Returns a guarded block at the end of its page, or at the beginning.
fn guarded_at(size: usize, at_end: bool) -> *mut u8 {
    loop {
        let block = guarded(size);
        if (block as usize).is_multiple_of(4096) != at_end {
            return block;
        }
        // SAFETY: the block was allocated by this test.
        unsafe { Pinfold.dealloc(block, layout(size)) };
    }
}

#[inline(never)]
fn commits_an_overrun() {
    let block = guarded_at(64, true);
    // SAFETY: none: this is the fault. The address is a closed page of the allocator.
    unsafe { block.add(64).write_volatile(1) };
}

#[test]
fn an_overrun_by_one_byte() {
    let output = run("an_overrun_by_one_byte", || {
        commits_an_overrun();
    });
    let words = [", in use", "done by thread", "allocated by thread"];
    assert_report(
        &output,
        libc::SIGSEGV,
        "1 byte past the end of the block",
        &words,
    );
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("freed by thread"), "{said}");
    #[cfg(target_arch = "x86_64")]
    assert!(said.contains("block: write 1 byte past"), "{said}");
}

/// A write to a pipe without a reader raises SIGPIPE, which must not replace the fault's signal.
#[test]
fn a_report_without_a_reader() {
    let output = run("a_report_without_a_reader", || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        // SAFETY: the descriptors are open, and Rust's start has only changed the action.
        unsafe {
            libc::dup2(writer.as_raw_fd(), 2);
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        }
        commits_an_overrun();
    });
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

#[test]
fn an_underrun_by_three_bytes() {
    let output = run("an_underrun_by_three_bytes", || {
        let block = guarded_at(64, false);
        // SAFETY: none: this is the fault. The address is a closed page of the allocator.
        black_box(unsafe { block.sub(3).read_volatile() });
    });
    assert_report(
        &output,
        libc::SIGSEGV,
        "3 bytes before the block",
        &[", in use"],
    );
}

#[test]
fn a_use_after_the_free() {
    let output = run("a_use_after_the_free", || {
        let block = guarded(4000);
        let address = block as usize;
        // SAFETY: the block was allocated by this test.
        let frees = move || unsafe { Pinfold.dealloc(address as *mut u8, layout(4000)) };
        thread::spawn(frees).join().unwrap();
        // SAFETY: none: this is the fault. The address is a closed page of the allocator.
        black_box(unsafe { block.add(17).read_volatile() });
    });
    let words = ["allocated by thread", "freed by thread", ", free"];
    assert_report(&output, libc::SIGSEGV, "after the block was freed", &words);
}

#[test]
fn a_second_free() {
    let output = run("a_second_free", || {
        let block = guarded(100);
        // SAFETY: none for the second call: this is the fault.
        unsafe {
            Pinfold.dealloc(block, layout(100));
            Pinfold.dealloc(block, layout(100));
        }
    });
    let words = ["allocated by thread", "freed by thread"];
    assert_report(
        &output,
        libc::SIGABRT,
        "free after the block was freed",
        &words,
    );
}

#[test]
fn a_write_into_the_rest_of_the_page() {
    let output = run("a_write_into_the_rest_of_the_page", || {
        let block = guarded_at(13, true);
        // SAFETY: the two bytes lie in the block's page. Its free is the fault.
        unsafe {
            block.add(14).write(0);
            Pinfold.dealloc(block, layout(13));
        }
    });
    let first = "earlier write 2 bytes past the end of the block";
    assert_report(&output, libc::SIGABRT, first, &["allocated by thread"]);
}

#[test]
fn the_programs_own_handler_is_called_after_the_report() {
    extern "C" fn ends(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel passes valid information.
        let code = unsafe { (*info).si_code };
        // SAFETY: `_exit` has no preconditions.
        unsafe { libc::_exit(40 + code) };
    }
    let output = run(
        "the_programs_own_handler_is_called_after_the_report",
        || {
            // The handler comes after that of the pool.
            let first = guarded(64);
            // SAFETY: the block was allocated above, and the handler calls nothing but `_exit`.
            unsafe {
                Pinfold.dealloc(first, layout(64));
                handle(libc::SIGSEGV, ends as *const () as usize, libc::SA_SIGINFO);
            }
            commits_an_overrun();
        },
    );
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(40 + SEGV_ACCERR), "{output:?}");
    assert!(said.contains("1 byte past the end"), "{said}");
}

static REPAIRED: AtomicUsize = AtomicUsize::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// A handler that makes a page readable, as runtimes do that watch pages.
extern "C" fn repairs(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    REPAIRED.fetch_add(1, Relaxed);
    // SAFETY: the page is this test's.
    unsafe { libc::mprotect(PAGE.load(Relaxed) as *mut _, 4096, libc::PROT_READ) };
}

#[test]
fn a_programs_faults_and_signals_reach_it_as_without_guarded_blocks() {
    let name = "a_programs_faults_and_signals_reach_it_as_without_guarded_blocks";
    let output = run(name, || {
        // SAFETY: the handler only calls `mprotect`, and the page is a new mapping.
        unsafe {
            handle(
                libc::SIGSEGV,
                repairs as *const () as usize,
                libc::SA_SIGINFO,
            );
            let anywhere = std::ptr::null_mut();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(anywhere, 4096, libc::PROT_NONE, flags, -1, 0);
            PAGE.store(page as usize, Relaxed);
            for round in 1..20 {
                let block = guarded(64);
                libc::mprotect(page, 4096, libc::PROT_NONE);
                black_box(page.cast::<u8>().read_volatile());
                assert_eq!(REPAIRED.load(Relaxed), 2 * round - 1);
                let another = guarded(64);
                libc::raise(libc::SIGSEGV);
                assert_eq!(REPAIRED.load(Relaxed), 2 * round);
                Pinfold.dealloc(block, layout(64));
                Pinfold.dealloc(another, layout(64));
            }
        }
        println!("both came");
    });
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("both came"));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("pinfold:"));
}

/// Installs a handler of SIGSEGV that makes the page of the fault readable.
fn repair_all_pages() {
    extern "C" fn repairs(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        REPAIRED.fetch_add(1, Relaxed);
        // SAFETY: the kernel passes valid information, and the page is one of the allocator's,
        // which no code uses.
        unsafe {
            let page = (*info).si_addr() as usize & !4095;
            libc::mprotect(page as *mut _, 4096, libc::PROT_READ);
        }
    }
    // SAFETY: the handler only calls `mprotect`.
    unsafe {
        handle(
            libc::SIGSEGV,
            repairs as *const () as usize,
            libc::SA_SIGINFO | libc::SA_ONSTACK,
        );
    }
}

#[inline(never)]
fn reads_a_freed_block() -> *mut u8 {
    let block = guarded(64);
    // SAFETY: none: the read is the fault, which the handler repairs.
    unsafe {
        Pinfold.dealloc(block, layout(64));
        black_box(block.read_volatile());
    }
    block
}

#[test]
fn a_second_free_is_reported_after_a_read() {
    let name = "a_second_free_is_reported_after_a_read";
    let output = run(name, || {
        repair_all_pages();
        // SAFETY: none: this is the fault.
        unsafe { Pinfold.dealloc(reads_a_freed_block(), layout(64)) };
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{said}");
    let firsts: Vec<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("pinfold: guarded block: "))
        .collect();
    assert_eq!(firsts.len(), 2, "{said}");
    assert!(firsts[1].starts_with("free after the block was freed"));
}

#[test]
fn signals_on_the_alternate_stack_do_no_harm_to_a_report() {
    extern "C" fn fills_its_stack(_: i32) {
        black_box([0xffu8; 12 << 10]);
    }
    let name = "signals_on_the_alternate_stack_do_no_harm_to_a_report";
    let output = run(name, || {
        // Leaked: signals also come after this function, until the process ends.
        let stack = vec![0u8; 256 << 10].leak();
        // SAFETY: the stack is never freed. The handler touches nothing but its stack.
        let target = unsafe {
            let alternate = libc::stack_t {
                ss_sp: stack.as_mut_ptr().cast(),
                ss_flags: 0,
                ss_size: stack.len(),
            };
            libc::sigaltstack(&raw const alternate, std::ptr::null_mut());
            handle(
                libc::SIGUSR1,
                fills_its_stack as *const () as usize,
                libc::SA_ONSTACK | libc::SA_RESTART,
            );
            libc::pthread_self() as usize
        };
        repair_all_pages();
        thread::spawn(move || {
            loop {
                // SAFETY: the target lives until the process ends.
                unsafe { libc::pthread_kill(target as _, libc::SIGUSR1) };
                thread::sleep(Duration::from_micros(20));
            }
        });
        for _ in 0..20 {
            reads_a_freed_block();
        }
        println!("went on");
    });
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("went on"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches("guarded block: ").count(), 20, "{said}");
}

#[test]
fn a_heap_profile_that_ends_leaves_its_interval_to_nobody() {
    let name = "a_heap_profile_that_ends_leaves_its_interval_to_nobody";
    let output = run(name, || {
        assert!(guard::start(guard::MAX_INTERVAL));
        assert!(heap_profile::start(1) && heap_profile::stop());
        let begin = Instant::now();
        // No block is guarded in the first tenth of a second.
        while begin.elapsed() < Duration::from_millis(300) {
            // SAFETY: the block is freed with its layout.
            unsafe { Pinfold.dealloc(Pinfold.alloc(layout(64)), layout(64)) };
        }
        assert_eq!(guard::counts().0, 0);
    });
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_environment_guards_from_the_start() {
    let name = "the_environment_guards_from_the_start";
    if std::env::var("PINFOLD_GUARD").is_ok() {
        assert!(guard::is_on());
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args([name, "--exact"]);
    let output = child.env("PINFOLD_GUARD", "4096").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn threads_use_guarded_blocks_of_all_sizes_as_any_others() {
    let name = "threads_use_guarded_blocks_of_all_sizes_as_any_others";
    let output = run(name, || {
        assert!(guard::start(1));
        assert!(heap_profile::start(4096));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for seed in 0..4u64 {
                scope.spawn({
                    let stop = &stop;
                    move || churn(seed, stop)
                });
            }
            let begin = Instant::now();
            while guard::counts().0 < 700 && begin.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(10));
            }
            stop.store(true, Relaxed);
        });
        let (made, freed) = guard::counts();
        assert!(freed > made / 2 && freed <= made, "{made} {freed}");
        let totals = heap_profile::totals();
        assert_eq!(totals.samples, totals.freed_samples, "{totals:?}");
        assert!(guard::stop() && heap_profile::stop());
    });
    assert!(output.status.success(), "{output:?}");
}

/// Allocates, resizes and frees blocks, and checks their content.
fn churn(seed: u64, stop: &AtomicBool) {
    let mut random = seed;
    let mut next = |below: usize| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(seed | 1);
        (random >> 33) as usize % below
    };
    let mut kept: Vec<(*mut u8, Layout)> = Vec::new();
    while !stop.load(Relaxed) {
        let layout = Layout::from_size_align(1 + next(5000), 1 << next(13)).unwrap();
        let zeroed = next(2) == 0;
        // SAFETY: each block is used within its layout, and freed once.
        unsafe {
            let block = match zeroed {
                true => Pinfold.alloc_zeroed(layout),
                false => Pinfold.alloc(layout),
            };
            assert!(!block.is_null() && (block as usize).is_multiple_of(layout.align()));
            assert!(!zeroed || (0..layout.size()).all(|at| block.add(at).read() == 0));
            block.write_bytes(layout.size() as u8, layout.size());
            let size = 1 + next(5000);
            let moved = Pinfold.realloc(block, layout, size);
            let kept_bytes = size.min(layout.size());
            assert!((0..kept_bytes).all(|at| moved.add(at).read() == layout.size() as u8));
            moved.write_bytes(7, size);
            kept.push((
                moved,
                Layout::from_size_align(size, layout.align()).unwrap(),
            ));
            if kept.len() > 100 {
                let (block, layout) = kept.swap_remove(next(100));
                assert!((0..layout.size()).all(|at| block.add(at).read() == 7));
                Pinfold.dealloc(block, layout);
            }
        }
    }
    for (block, layout) in kept {
        // SAFETY: the block was kept above.
        unsafe { Pinfold.dealloc(block, layout) };
    }
}
