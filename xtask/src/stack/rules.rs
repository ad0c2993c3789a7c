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
    pub excluded: Vec<&'static str>,
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
        excluded: EXCLUDED.to_vec(),
        pointers: POINTERS.to_vec(),
        repeated: REPEATED.to_vec(),
        repeated_most: 1,
    }
}

const COSTS: &[(&str, u64)] = &[
    ("__errno_location", 32),
    ("abort", 0),
    ("bcmp", 64),
    ("clock_gettime", 256),
    ("close", 256),
    ("getauxval", 256),
    ("getpid", 64),
    ("getrandom", 256),
    ("getrlimit", 256),
    ("madvise", 64),
    ("memcpy", 64),
    ("memmove", 64),
    ("memset", 64),
    ("mmap", 64),
    ("mmap64", 64),
    ("mprotect", 64),
    ("mremap", 128),
    ("munmap", 64),
    ("nanosleep", 256),
    ("open", 256),
    ("open64", 256),
    ("read", 256),
    ("sched_getcpu", 256),
    ("sched_yield", 64),
    ("strlen", 64),
    ("syscall", 64),
    ("sysconf", 512),
    ("unlink", 64),
    ("__register_atfork", 256),
];

/// The process ends there with a message, or an abort.
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
    // Caches that `PINFOLD_SLAB_DEBUG` or a flag has checked: a fault is told in words, by whoever finds it.
    "pinfold::slab::debug::report::raise",
    "pinfold::slab::debug::track::Track::here",
    // Asked for by `PINFOLD_STATS`, or a debugged cache's environment text.
];
const POINTERS: &[(&str, &[&str])] = &[
    (
        "pinfold::shepherd::Shepherd::tick",
        &["pinfold::slab::idle::drain"],
    ),
    // The constructor of a cache is the program's own.
    ("pinfold::slab::slabs::Slabs::take", &[]),
    ("pinfold::slab::aside::*take_back", &[]),
];
const REPEATED: &[(&str, &str)] = &[];
