//! Code without a file has the names that its process writes for perf.
//!
//! The program is this test itself, run by `pinfold run` in a role that an environment variable
//! names.
#![cfg(target_arch = "x86_64")]

mod program;

use program::{Program, ROLE, RUN, in_role};
use std::hint::black_box;
use std::process::Command;
use std::{env, fs};

extern "C" fn holds() {
    std::mem::forget(black_box(vec![1u8; 4 << 20]));
}

/// Makes a function that calls another one, as Python's trampolines do.
fn made() -> (usize, extern "C" fn(extern "C" fn())) {
    // sub rsp, 8; call rdi; add rsp, 8; ret
    const CODE: [u8; 11] = [0x48, 0x83, 0xec, 8, 0xff, 0xd7, 0x48, 0x83, 0xc4, 8, 0xc3];
    let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the system chooses the address.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    // SAFETY: the page is new, and larger than the code, which is a function of this type.
    unsafe {
        page.cast::<[u8; 11]>().write(CODE);
        (
            page.addr(),
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(extern "C" fn())>(page),
        )
    }
}

/// Does what the environment asks for. Does nothing as a test.
#[test]
fn role() {
    if env::var(ROLE).is_err() {
        return;
    }
    let (start, call) = made();
    let map = format!("/tmp/perf-{}.map", std::process::id());
    fs::write(&map, format!("{start:x} b py::handle:/srv/app.py\n")).unwrap();
    call(holds);
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    fs::remove_file(map).unwrap();
}

#[test]
fn the_process_names_the_code_that_it_made() {
    let words = [&RUN[..2], &["--heap=1", "--"]].concat();
    let mut program = Program::start(&mut in_role(&words, "makes code"));
    let mut command = Command::new(RUN[0]);
    let output = command.args(["heap", "dump", "--stacks", "3", &program.pid()]);
    let output = output.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let is_named = text.contains("    py::handle:/srv/app.py\n");
    drop(program.process.stdin.take());
    program.process.wait().unwrap();
    assert!(
        is_named,
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
