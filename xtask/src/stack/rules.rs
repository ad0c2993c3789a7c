//! Facts that the analysis cannot see in the library's code, each with a reason.

use super::image::matches;

/// Assumptions about functions.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Functions of other libraries: the name, and the bytes of stack.
    pub costs: Vec<(&'static str, u64)>,
    /// Functions that never return, because the process ends in them.
    pub ends: Vec<&'static str>,
    /// Functions that run only in programs that request them.
    pub excluded: Vec<String>,
    /// Calls through pointers: the caller, and all functions that it may call.
    pub pointers: Vec<(&'static str, &'static [&'static str])>,
}

impl Rules {
    pub fn cost(&self, name: &str) -> Option<u64> {
        let mut rules = self.costs.iter();
        let found = rules.find(|(pattern, _)| matches(pattern, name));
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
}

/// The rules for `libpinfold.so`.
pub fn pinfold() -> Rules {
    Rules {
        costs: COSTS.to_vec(),
        ends: ENDS.to_vec(),
        excluded: EXCLUDED.iter().map(|&name| name.into()).collect(),
        pointers: POINTERS.to_vec(),
    }
}

/// The most stack that functions of the C library and of the kernel's vDSO use. Wrappers of system
/// calls use 8 to 48 bytes in glibc 2.36. The values leave room for other versions.
const COSTS: &[(&str, u64)] = &[
    ("__errno_location", 32),
    // Registers the fork handlers once, at the start of the process: locks a list and copies four
    // words.
    ("__register_atfork", 256),
    ("bcmp", 64),
    // In the vDSO.
    ("clock_gettime", 256),
    ("close", 128),
    // Together with the function that it calls for each object. Only at the start of a profile.
    ("dl_iterate_phdr", 768),
    ("dup3", 32),
    ("fchmod", 64),
    ("fcntl", 256),
    ("ftruncate", 64),
    ("getauxval", 32),
    ("getpid", 32),
    ("getrandom", 128),
    ("getrlimit", 32),
    ("gettid", 32),
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
    // Only for the statistics.
    ("posix_fallocate", 256),
    // Computes a number from the TID in the thread's descriptor.
    ("pthread_getcpuclockid", 64),
    // For a key below 32, which needs no memory.
    ("pthread_getspecific", 64),
    // Changes an array of the C library's.
    ("pthread_key_create", 64),
    ("pthread_key_delete", 64),
    // Reads the thread pointer.
    ("pthread_self", 32),
    // Exchanges bits of the thread's own state.
    ("pthread_setcancelstate", 64),
    ("pthread_setspecific", 128),
    ("read", 128),
    // In the vDSO.
    ("sched_getcpu", 192),
    ("sched_yield", 32),
    // Copies two structures of 152 bytes for the kernel.
    ("sigaction", 512),
    ("strlen", 64),
    ("syscall", 32),
    // For the page size and the size of memory: at most a `sysinfo`.
    ("sysconf", 256),
    ("unlink", 32),
];

/// Functions that end the process, with or without a message.
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
    "pinfold::abort_with_callers",
    "pinfold::sys::die",
    // Only called when the process ends.
    "pinfold::slab::checks::debug::report::write_callers",
];

const EXCLUDED: &[&str] = &[
    // Only caches that trace each call (`PINFOLD_SLAB_DEBUG` with T) write text.
    "core::fmt::write",
    // Reports the first error in a cache that checks.
    "pinfold::slab::checks::debug::report::raise",
    // Loads and stores a few words. The settings were read when the first cache was made.
    "pinfold_malloc::changeable::publish",
    // Makes a thread, if another process asks for a heap profile. Runs in a shepherd's thread, or
    // in the program's own call of `tick`.
    "pinfold::heap::sampling::start_apart",
    // Runs once, and its text is written on a stack of its own. The process ends.
    "pinfold::guarded::report::write",
    // Walks the stack for a heap profile, on a stack of its own.
    "pinfold_profile_on_stack",
    // Walks the stack for caches that record callers (`PINFOLD_SLAB_DEBUG` with U).
    "pinfold::slab::checks::debug::track::Track::here",
];

const POINTERS: &[(&str, &[&str])] = &[
    // The fork hooks of each module that visit its locks. Hooks for a single lock are closures,
    // which use less stack than these.
    (
        "pinfold::lock::rank::count_held",
        &[
            "pinfold::arena::runs::visit_locks",
            "pinfold::counter::stripe::is_held_by",
            "pinfold::slab::fork::visit_nodes",
            "pinfold::slab::fork::visit_pending",
        ],
    ),
    (
        "pinfold::arena::runs::visit_locks",
        &["pinfold::lock::rank::Hooks::held_by::{{closure}}"],
    ),
    (
        "pinfold::slab::fork::visit_*",
        &["pinfold::lock::rank::Hooks::held_by::{{closure}}"],
    ),
    // The kernel's function in the vDSO.
    ("pinfold_rseq::vdso::clock", &["clock_gettime"]),
    // ThreadSanitizer's functions. The limit does not hold beside it.
    ("pinfold::sanitizer::call", &[]),
    // The watcher of fences.
    (
        "pinfold_rseq::fence::tell",
        &["pinfold::spared::note_fence"],
    ),
    // The library registers only these functions. A program is responsible for its own drains.
    (
        "pinfold::shepherd::*",
        &[
            "pinfold::slab::cpu::idle::drain",
            "pinfold::heap::sampling::look",
            "pinfold::show::live::look",
        ],
    ),
    // The functions of the server of requests, without the one that shows the settings.
    (
        "pinfold::show::live::look",
        &[
            "pinfold_malloc::control::makes_new_calls",
            "pinfold_malloc::control::serve",
        ],
    ),
    // The server's function that shows the settings loads and stores a few words.
    ("pinfold::show::announce", &[]),
    // The functions of the settings load or store a few words. They use less stack than what else
    // a request may ask for.
    ("pinfold_malloc::control::*", &[]),
    // The release function of a reference count is the program's own code.
    ("pinfold_ref_put", &[]),
    // Constructors of objects are the program's own code.
    (
        "pinfold::slab::node::handler_frees::<impl pinfold::slab::node::part::Node>::take_back",
        &[],
    ),
    ("pinfold::slab::node::objects::Objects::prepare", &[]),
    ("pinfold::slab::node::slabs::Slabs::take", &[]),
];
