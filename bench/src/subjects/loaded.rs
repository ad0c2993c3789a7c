//! Pools in C and C++. Each is compiled at run time to a shared library with the functions of
//! `bench/pools/pool.h`, because its headers are in packages that a build must not need.

use super::SubjectName;
use crate::whole::launch::helper;
use crate::whole::prepare::{self, Cache};
use anyhow::{Context, Result, bail, ensure};
use pinfold_lab::Subject;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};

/// A loaded pool.
pub struct Loaded {
    enter_thread: unsafe extern "C" fn(),
    alloc: unsafe extern "C" fn() -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
}

impl Loaded {
    /// Compiles, loads and starts the pool `name` with objects of `size` bytes, of which at most
    /// `objects` are in use at a time by `threads` threads.
    pub fn start(name: SubjectName, size: usize, objects: usize, threads: usize) -> Result<Loaded> {
        let library = build(name, size)?;
        let path = CString::new(library.display().to_string())?;
        // SAFETY: the library is one of `bench/pools`, whose initialisation has no preconditions.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        ensure!(!handle.is_null(), "cannot load it: {}", last_error());
        let symbol = |name: &CStr| {
            // SAFETY: `dlopen` returned the handle, and nothing closes it.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            ensure!(!found.is_null(), "it has no {}", name.to_string_lossy());
            Ok(found)
        };
        // SAFETY: each symbol is a function with the type that `pool.h` declares, which every
        // source of `bench/pools` includes. The library stays loaded.
        let (start, loaded) = unsafe {
            let start: unsafe extern "C" fn(usize, usize) -> *const c_char =
                std::mem::transmute(symbol(c"pool_start")?);
            let loaded = Loaded {
                enter_thread: std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(symbol(
                    c"pool_enter_thread",
                )?),
                alloc: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_void>(
                    symbol(c"pool_alloc")?,
                ),
                free: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(
                    symbol(c"pool_free")?,
                ),
            };
            (start, loaded)
        };
        // SAFETY: the function takes any numbers, and this is the library's only start.
        let refused = unsafe { start(objects, threads) };
        if !refused.is_null() {
            // SAFETY: the function returns null or a string that lives as long as the library.
            bail!("{}", unsafe { CStr::from_ptr(refused) }.to_string_lossy());
        }
        Ok(loaded)
    }
}

impl Subject for Loaded {
    fn enter_thread(&self) {
        // SAFETY: the pool is started, and the function may be called repeatedly.
        unsafe { (self.enter_thread)() };
    }

    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        // SAFETY: the pool is started, and this thread called `enter_thread`.
        unsafe { (self.alloc)() }.cast()
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that the object came from this pool and is unused. This
        // thread called `enter_thread`.
        unsafe { (self.free)(object.cast()) };
    }
}

/// Compiles a pool, and returns its library.
fn build(name: SubjectName, size: usize) -> Result<PathBuf> {
    let (source, package, header) = match name {
        SubjectName::Pmr => ("pmr.cc", "g++", None),
        SubjectName::BoostSingleton => (
            "boost_singleton.cc",
            "libboost-dev",
            Some("boost/version.hpp"),
        ),
        SubjectName::BoostLockfree => (
            "boost_lockfree.cc",
            "libboost-dev",
            Some("boost/version.hpp"),
        ),
        SubjectName::DpdkMempool => ("dpdk.c", "libdpdk-dev", Some("dpdk/rte_mempool.h")),
        _ => bail!("{name} is no pool in C or C++"),
    };
    if let Some(header) = header {
        prepare::header_or_install(header, package)?;
    }
    let cache = Cache::open(None)?;
    let (compiler, standard) = match source.ends_with(".cc") {
        true => ("clang++", "-std=c++17"),
        false => ("clang", "-std=gnu17"),
    };
    let options = "-O3 -DNDEBUG -fPIC -shared -pthread -w";
    let mut arguments = vec![compiler.to_owned(), standard.to_owned()];
    arguments.extend(options.split(' ').map(str::to_owned));
    arguments.push(format!("-DSIZE={size}"));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pools");
    arguments.push(folder.join(source).display().to_string());
    if name == SubjectName::DpdkMempool {
        prepare::tool_or_install("pkg-config", "pkg-config")?;
        let flags = helper("pkg-config", &["--cflags", "--libs", "libdpdk"])?;
        let flags = String::from_utf8(flags).context("pkg-config wrote no text")?;
        arguments.extend(flags.split_whitespace().map(str::to_owned));
    }
    // After the source, because the linker takes only what it already misses from a library.
    arguments.push("-latomic".to_owned());
    let output = cache.lib.join(format!("libpool-{name}-{size}.so"));
    prepare::compile(&arguments, &output)?;
    Ok(output)
}

/// Returns why the last call of the dynamic linker failed.
fn last_error() -> String {
    // SAFETY: the function takes no argument, and returns null or a string that is valid until this
    // thread's next call.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: the string is valid, and is copied at once.
    unsafe { CStr::from_ptr(error) }
        .to_string_lossy()
        .into_owned()
}
