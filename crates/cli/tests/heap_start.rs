//! When a heap profile can be started from outside, and what `pinfold heap start` says if not.

mod program;

use program::Program;
use std::fs;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn pinfold() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pinfold"))
}

#[track_caller]
fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    output
}

/// Says that it is ready, after it has loaded the library that its argument names. Without an
/// argument, registers a table of unwinding information without entries.
const CANNOT_BE_WALKED: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int (*find)(void *address, void *result);

/* The unwinder calls this function, because the test has changed the name that it asks for. */
int _dl_find_objecX(void *address, void *result) {
    return find(address, result);
}

int main(int count, char **arguments) {
    static int table[2];
    void (*begin)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "__register_frame");
    find = (int (*)(void *, void *))dlsym(RTLD_DEFAULT, "_dl_find_object");
    if (count < 2)
        begin(table);
    else if (!dlopen(arguments[1], RTLD_NOW))
        return 1;
    puts("ready");
    fflush(stdout);
    for (;;) {
        usleep(1000);
        void *volatile block = malloc(100000);
        free(block);
    }
}
"#;

/// A process whose stacks cannot be walked gets no profile, and the command says why.
#[test]
fn a_start_without_walks_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("walked.c"), CANNOT_BE_WALKED).unwrap();
    let mut compiler = Command::new("cc");
    let flags = ["-O1", "-rdynamic", "-o"];
    output(
        compiler
            .arg(path("walked.c"))
            .args(flags)
            .arg(path("walked"))
            .arg("-ldl"),
    );
    let mut compiler = Command::new("cc");
    let found = output(compiler.arg("-print-file-name=libgcc_s.so.1")).stdout;
    let mut library = fs::read(String::from_utf8(found).unwrap().trim()).unwrap();
    // An older unwinder does not ask this function.
    let name = b"\0_dl_find_object\0";
    if let Some(at) = library.windows(name.len()).position(|bytes| bytes == name) {
        library[at + name.len() - 2] = b'X';
    }
    fs::write(path("libgcc_s.so.1"), library).unwrap();
    for (library, why) in [
        (Some("libgcc_s.so.1"), "GCC 12"),
        (None, "unwinding tables"),
    ] {
        let mut program = pinfold();
        program.args(["run", "--"]).arg(path("walked"));
        let mut program = Program::start(program.args(library.map(path)));
        let pid = program.pid();
        let start = pinfold().args(["heap", "start", &pid]).output().unwrap();
        let said = String::from_utf8_lossy(&start.stderr);
        assert_eq!(start.status.code(), Some(2), "{said}");
        assert!(said.contains(why) && !said.contains("try again"), "{said}");
        assert!(program.process.try_wait().unwrap().is_none());
    }
}

/// Waits for a thread while it holds the loader's lock. A program in C, because those in Rust have
/// loaded the unwinder from the start.
const JOINS_INSIDE_THE_LOADER: &str = r#"
#define _GNU_SOURCE
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static void *rest(void *nothing) {
    sleep(3);
    return nothing;
}

static int join_a_thread(struct dl_phdr_info *info, size_t size, void *nothing) {
    pthread_t thread;
    puts("ready");
    fflush(stdout);
    pthread_create(&thread, NULL, rest, nothing);
    pthread_join(thread, NULL);
    return 1;
}

int main(void) {
    return dl_iterate_phdr(join_a_thread, NULL) != 1;
}
"#;

#[test]
fn a_start_does_not_wait_for_the_loader() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("joins.c"), folder.path().join("joins"));
    fs::write(&source, JOINS_INSIDE_THE_LOADER).unwrap();
    let mut compiler = Command::new("cc");
    output(compiler.arg(&source).args(["-pthread", "-o"]).arg(&program));
    let mut program = Program::start(pinfold().args(["run", "--"]).arg(&program));
    sleep(Duration::from_millis(200));
    // The process may refuse, because a profile needs the loader.
    let begin = Instant::now();
    let start = ["heap", "start", &program.pid()];
    pinfold().args(start).output().unwrap();
    while program.process.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < PATIENCE, "the program waits without end");
        sleep(Duration::from_millis(20));
    }
    assert!(program.process.wait().unwrap().success());
}
