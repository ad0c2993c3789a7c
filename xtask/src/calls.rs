//! The functions of the C library that the allocator's crates may call.
//!
//! A preloaded library or a sanitizer may replace any function of the C library. Its function may
//! allocate, take a lock, or wait for the end of its own start, and all of these wait for the
//! allocator. So the allocator makes its system calls itself (`pinfold_rseq::kernel`).

use std::path::Path;

const CRATES: [&str; 5] = ["rseq", "pinfold", "malloc", "preload", "names"];

/// The functions that these crates may call, and why.
const ALLOWED: [(&str, &[&str]); 10] = [
    (
        "reads memory of the C library, of the loader or of the vDSO",
        &["__errno_location", "getauxval", "sched_getcpu", "SIGRTMIN"],
    ),
    (
        "is the loader's, and takes the loader's locks in any case",
        &["dlopen", "dlsym", "dladdr", "dl_iterate_phdr"],
    ),
    (
        "makes or ends a thread, which only the C library can do",
        &[
            "pthread_create",
            "pthread_join",
            "pthread_detach",
            "pthread_self",
            "pthread_getcpuclockid",
            "pthread_attr_init",
            "pthread_attr_destroy",
            "pthread_attr_getinheritsched",
            "pthread_attr_getschedpolicy",
            "pthread_attr_getstacksize",
            "pthread_attr_setinheritsched",
            "pthread_attr_setschedparam",
            "pthread_attr_setschedpolicy",
            "pthread_attr_setstacksize",
        ],
    ),
    (
        "keeps a value for each thread in the C library",
        &[
            "pthread_key_create",
            "pthread_key_delete",
            "pthread_getspecific",
            "pthread_setspecific",
        ],
    ),
    ("only changes a set that the caller passes", &["CPU_SET"]),
    ("is called once, at the start", &["pthread_atfork"]),
    ("ends the process", &["abort"]),
    (
        "lets libraries that chain the handlers of signals see those of guarded blocks",
        &["sigaction"],
    ),
    ("writes to a stream of the program's", &["fprintf"]),
    (
        "is called on request only: by a self-test, or where /sys cannot be read",
        &[
            "sysconf",
            "fork",
            "waitpid",
            "kill",
            "alarm",
            "sched_getaffinity",
            "sched_setaffinity",
        ],
    ),
];

/// Finds calls of other functions. Leaves tests and comments out.
pub fn check(file: &Path, text: &str, faults: &mut Vec<String>) {
    let path = file.to_string_lossy();
    let is_allocators = CRATES
        .iter()
        .any(|name| path.contains(&format!("crates/{name}/src/")));
    let is_test = ["tests.rs", "units.rs"]
        .iter()
        .any(|end| path.ends_with(end));
    // The one place that calls the kernel by the C library, on processors without code of their
    // own.
    if !is_allocators || is_test || path.ends_with("rseq/src/syscall.rs") {
        return;
    }
    for (at, line) in text.lines().enumerate() {
        if line.starts_with("mod tests {") {
            return;
        }
        if line.trim_start().starts_with("//") {
            continue;
        }
        for rest in line.split("libc::").skip(1) {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let (name, after) = rest.split_at(end.unwrap_or(rest.len()));
            let is_allowed = ALLOWED.iter().any(|(_, names)| names.contains(&name));
            if after.starts_with('(') && !is_allowed {
                faults.push(format!(
                    "{path}:{}: {name} may be another library's, which waits for the allocator; \
                     use pinfold_rseq::kernel",
                    at + 1
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allowed_calls_pass() {
        let faults = |path: &str, text: &str| {
            let mut faults = Vec::new();
            check(Path::new(path), text, &mut faults);
            faults.len()
        };
        let text = "libc::close(1); libc::abort(libc::close_range())\n// libc::open()\n";
        assert_eq!(faults("crates/pinfold/src/x.rs", text), 2);
        assert_eq!(faults("crates/cli/src/x.rs", text), 0);
        assert_eq!(faults("crates/pinfold/src/x/tests.rs", text), 0);
        let text = format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{\n{text}");
        assert_eq!(faults("crates/pinfold/src/x.rs", &text), 0);
        assert_eq!(
            faults("crates/malloc/src/x.rs", "let x = libc::O_PATH | 1;"),
            0
        );
    }
}
