//! What the analysis cannot see in the library's code, each with the reason why it holds.

use super::image::matches;

/// What is assumed of functions.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Functions of other libraries: name, and bytes of stack.
    pub costs: Vec<(&'static str, u64)>,
    /// Functions that never return: the process ends there.
    pub ends: Vec<&'static str>,
    /// Functions that only a program which asks for them reaches.
    pub excluded: Vec<String>,
    /// Calls through pointers: caller, and all functions that it may call.
    pub pointers: Vec<(&'static str, &'static [&'static str])>,
    /// Calls that close a cycle: caller and called function.
    pub repeated: Vec<(&'static str, &'static str)>,
    /// How many of those a chain has at most.
    pub repeated_most: usize,
}

impl Rules {
    pub fn cost(&self, name: &str) -> Option<u64> {
        let found = self
            .costs
            .iter()
            .find(|(pattern, _)| matches(pattern, name));
        found.map(|(_, bytes)| *bytes)
    }

    pub fn ends(&self, name: &str) -> bool {
        self.ends.iter().any(|pattern| matches(pattern, name))
    }

    pub fn excludes(&self, name: &str) -> bool {
        self.excluded.iter().any(|pattern| matches(pattern, name))
    }

    pub fn callees(&self, caller: &str) -> Option<&'static [&'static str]> {
        let mut rules = self.pointers.iter();
        let found = rules.find(|(pattern, _)| matches(pattern, caller));
        found.map(|(_, callees)| *callees)
    }

    pub fn repeats(&self, caller: &str, called: &str) -> bool {
        let mut rules = self.repeated.iter();
        rules.any(|(from, to)| matches(from, caller) && matches(to, called))
    }
}

/// The rules for `libpinfold.so`.
pub fn pinfold() -> Rules {
    Rules {
        costs: COSTS.to_vec(),
        ends: ENDS.to_vec(),
        excluded: EXCLUDED.iter().map(|&name| name.into()).collect(),
        pointers: POINTERS.to_vec(),
        repeated: REPEATED.to_vec(),
        repeated_most: 1,
    }
}

/// What calls of the C library and the kernel's vDSO take at most. Wrappers of system calls take 8
/// to 48 bytes in glibc 2.36; what is assumed leaves room for others.
const COSTS: &[(&str, u64)] = &[
    ("__errno_location", 32),
    // Registers the fork handlers, once, when the process starts: locks a list and copies four
    // words.
    ("__register_atfork", 256),
    ("bcmp", 64),
    // In the vDSO.
    ("clock_gettime", 256),
    ("close", 128),
    ("getauxval", 32),
    ("getpid", 32),
    ("getrandom", 128),
    ("getrlimit", 32),
    ("madvise", 32),
    ("memcpy", 64),
    ("memfd_create", 32),
    ("memmove", 64),
    ("memset", 64),
    ("mmap", 64),
    ("mmap64", 64),
    ("mprotect", 32),
    ("mremap", 160),
    ("munmap", 32),
    ("nanosleep", 128),
    ("open", 192),
    ("open64", 192),
    // For the file that `PINFOLD_STATS` asks for.
    ("posix_fallocate", 256),
    ("read", 128),
    // In the vDSO.
    ("sched_getcpu", 192),
    ("sched_yield", 32),
    ("strlen", 64),
    ("syscall", 32),
    // For the size of a page and of the memory: a `sysinfo` at most.
    ("sysconf", 256),
    ("unlink", 32),
];

/// The process ends there, with a message or without.
const ENDS: &[&str] = &[
    "_Unwind_Resume",
    "abort",
    "core::option::expect_failed",
    "core::option::unwrap_failed",
    "core::panicking::*",
    "core::result::unwrap_failed",
    "core::slice::copy_from_slice_impl::len_mismatch_fail*",
    "core::slice::index::slice_*",
    "core::str::slice_error_fail*",
    "pinfold::abort",
    "pinfold::sys::die",
];

const EXCLUDED: &[&str] = &[
    // Text is only written by caches that `PINFOLD_SLAB_DEBUG` has trace each call.
    "core::fmt::write",
    // A fault in a cache that checks is told in words, and once.
    "pinfold::slab::debug::report::raise",
    // Walks the stack for caches that `PINFOLD_SLAB_DEBUG` has note who calls.
    "pinfold::slab::debug::track::Track::here",
];

const POINTERS: &[(&str, &[&str])] = &[
    // What the library registers; a program's own drains are its own affair.
    ("pinfold::shepherd::*", &["pinfold::slab::idle::drain"]),
    // Constructors of objects are the program's own.
    (
        "pinfold::slab::aside::<impl pinfold::slab::node::Node>::take_back",
        &[],
    ),
    ("pinfold::slab::slabs::Slabs::take", &[]),
];

const REPEATED: &[(&str, &str)] = &[];
