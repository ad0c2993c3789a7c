//! A tracer that steps through a critical section gets to its end.

mod storm;

use pinfold_rseq::{STACK_ALIGN, UNIT_HEADER, Units, possible};
use std::ptr::null_mut;
use storm::choose;

const STACK: usize = UNIT_HEADER;
const WORD: usize = UNIT_HEADER + 8;
/// More steps than a child needs, also where each section is aborted many times.
const STEPS: u32 = 400_000;

/// Returns a table of units, one for each index. A unit holds an empty stack and a word.
fn table() -> &'static Units {
    #[repr(align(1024))]
    struct Block([*mut u8; STACK_ALIGN / 8]);
    choose();
    let units: &'static Units = Box::leak(Box::new(Units::new()));
    for index in 0..possible() {
        let block = Box::leak(Box::new(Block([null_mut(); STACK_ALIGN / 8])));
        let unit = Box::leak(Box::new([0u64; UNIT_HEADER / 8 + 2]));
        unit[STACK / 8] = block.0[1..].as_mut_ptr() as u64;
        units.install(index, unit.as_mut_ptr().cast()).unwrap();
    }
    units
}

/// Has the parent trace this process, calls each kind of section a few times, and ends the process.
fn child(units: &Units) -> ! {
    // SAFETY: the calls have no pointers. The units have both words, and the item is not null.
    unsafe {
        if libc::ptrace(libc::PTRACE_TRACEME) != 0 {
            libc::_exit(77);
        }
        libc::raise(libc::SIGSTOP);
        for round in 1..4 {
            units.push(STACK, round as *mut u8);
            units.pop(STACK);
            units.push_batch(STACK, &[round as *mut u8; 3]);
            units.pop_batch(STACK, &mut [null_mut(); 3]);
            units.add(WORD, 1);
            units.store_if_equal(WORD, 1, 2);
            units.store(WORD, 1);
            units.fetch_add(WORD, 1);
            units.compare_exchange(WORD, 1, 2);
        }
        libc::_exit(0)
    }
}

#[test]
fn a_stepped_section_ends() {
    let units = table();
    // SAFETY: the child makes system calls and runs sections only.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        child(units);
    }
    let mut status = 0;
    for _ in 0..STEPS {
        // SAFETY: the child is this process's, and `status` is writable.
        unsafe {
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            if !libc::WIFSTOPPED(status) {
                break;
            }
            libc::ptrace(libc::PTRACE_SINGLESTEP, pid, 0, 0);
        }
    }
    if libc::WIFSTOPPED(status) {
        // SAFETY: the child is this process's, and was not waited for.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, null_mut(), 0);
        }
        panic!("the child does not get through its sections");
    }
    if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 77 {
        eprintln!("not run: this machine allows no tracing");
        return;
    }
    assert_eq!(status, 0);
}
