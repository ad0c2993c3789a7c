//! What a tracer finds at the probes, without a tracer: the test itself writes breakpoints and the
//! semaphores. The handler of a breakpoint walks the stack by frame pointers and by unwind tables.

mod probe;

use pinfold_malloc::{c, heap_profile};
use probe::{Probe, find, loaded};
use std::ffi::{CStr, c_int, c_void};
use std::process::Command;
use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock};

type Block = *mut c_void;

/// The functions that `probe/callers.c` calls, in its order.
#[repr(C)]
struct Family {
    malloc: extern "C" fn(usize) -> Block,
    calloc: extern "C" fn(usize, usize) -> Block,
    realloc: unsafe extern "C" fn(Block, usize) -> Block,
    reallocarray: unsafe extern "C" fn(Block, usize, usize) -> Block,
    posix_memalign: unsafe extern "C" fn(*mut Block, usize, usize) -> c_int,
    aligned_alloc: extern "C" fn(usize, usize) -> Block,
    memalign: extern "C" fn(usize, usize) -> Block,
    valloc: extern "C" fn(usize) -> Block,
    free: unsafe extern "C" fn(Block),
    free_sized: unsafe extern "C" fn(Block, usize),
}

static FAMILY: Family = Family {
    malloc: c::pinfold_malloc,
    calloc: c::pinfold_calloc,
    realloc: c::pinfold_realloc,
    reallocarray: c::pinfold_reallocarray,
    posix_memalign: c::pinfold_posix_memalign,
    aligned_alloc: c::pinfold_aligned_alloc,
    memalign: c::pinfold_memalign,
    valloc: c::pinfold_valloc,
    free: c::pinfold_free,
    free_sized: c::pinfold_free_sized,
};

type Alloc = extern "C" fn(&Family, c_int, usize) -> Block;
type Free = extern "C" fn(&Family, Block, usize) -> c_int;

/// Ways of `probe/callers.c` to allocate.
const WAYS: c_int = 11;
/// The first way in which `realloc` resizes a block.
const FIRST_RESIZE: c_int = 8;

/// What a breakpoint has seen.
#[derive(Debug)]
struct Seen {
    is_alloc: bool,
    arguments: [usize; 3],
    by_frames: Vec<String>,
    by_tables: Vec<String>,
}

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());
/// The addresses of the two probes.
static PROBES: OnceLock<[usize; 2]> = OnceLock::new();
/// The end of the test thread's stack.
static STACK_END: OnceLock<usize> = OnceLock::new();

/// The registers at a breakpoint: the instruction, the frame pointer and the first arguments.
#[cfg(target_arch = "x86_64")]
fn registers(context: &mut libc::ucontext_t) -> (usize, usize, [usize; 3]) {
    let register = |name: c_int| context.uc_mcontext.gregs[name as usize] as usize;
    let arguments = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX].map(register);
    // The processor has already passed the breakpoint.
    let at = register(libc::REG_RIP) - 1;
    (at, register(libc::REG_RBP), arguments)
}
#[cfg(target_arch = "x86_64")]
const BREAKPOINT: &[u8] = &[0xcc];

/// The registers at a breakpoint. Steps over the breakpoint.
#[cfg(target_arch = "aarch64")]
fn registers(context: &mut libc::ucontext_t) -> (usize, usize, [usize; 3]) {
    let machine = &mut context.uc_mcontext;
    let at = machine.pc as usize;
    machine.pc += 4;
    let arguments = [0, 1, 2].map(|nth| machine.regs[nth] as usize);
    (at, machine.regs[29] as usize, arguments)
}
#[cfg(target_arch = "aarch64")]
const BREAKPOINT: &[u8] = &0xd420_0000_u32.to_le_bytes();

extern "C" fn at_breakpoint(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a `ucontext_t`.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let (at, frame, arguments) = registers(context);
    let probes = PROBES.get().unwrap();
    assert!(probes.contains(&at));
    SEEN.lock().unwrap().push(Seen {
        is_alloc: at == probes[0],
        arguments,
        by_frames: names(&by_frames(frame)),
        by_tables: names(&by_tables()),
    });
}

/// Follows the frame pointers as the kernel does for tracers.
fn by_frames(mut frame: usize) -> Vec<usize> {
    let mut stack = &raw const frame as usize..*STACK_END.get().unwrap() - 16;
    let mut addresses = Vec::new();
    while stack.contains(&frame) && frame.is_multiple_of(8) && addresses.len() < 64 {
        // SAFETY: both words are in use on this thread's stack.
        let [next, address] = unsafe { *(frame as *const [usize; 2]) };
        addresses.push(address);
        stack.start = frame + 1;
        frame = next;
    }
    addresses
}

fn by_tables() -> Vec<usize> {
    unsafe extern "C" {
        fn _Unwind_Backtrace(
            step: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
            found: *mut c_void,
        ) -> c_int;
        fn _Unwind_GetIP(context: *mut c_void) -> usize;
    }
    extern "C" fn step(context: *mut c_void, found: *mut c_void) -> c_int {
        // SAFETY: the unwinder passes a valid context and the vector below.
        unsafe { (*found.cast::<Vec<usize>>()).push(_Unwind_GetIP(context)) };
        0
    }
    let mut found: Vec<usize> = Vec::new();
    // SAFETY: the vector lives until the call returns.
    unsafe { _Unwind_Backtrace(step, (&raw mut found).cast()) };
    found
}

/// Returns the exported function that each return address lies in, or "".
fn names(addresses: &[usize]) -> Vec<String> {
    let name = |&address: &usize| {
        // SAFETY: the function only looks the address up.
        let info = unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            libc::dladdr(address.wrapping_sub(1) as *const c_void, &raw mut info);
            info
        };
        match info.dli_sname.is_null() {
            true => String::new(),
            // SAFETY: the loader's name is a C string that stays.
            false => unsafe { CStr::from_ptr(info.dli_sname) }
                .to_string_lossy()
                .into(),
        }
    };
    addresses.iter().map(name).collect()
}

/// Compiles `probe/callers.c` with frame pointers, and returns its two functions.
fn callers() -> Option<(Alloc, Free)> {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("callers.so");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-fno-omit-frame-pointer"])
        .args(["-fno-optimize-sibling-calls", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/probe/callers.c"
        ))
        .status();
    if !built.ok()?.success() {
        return None;
    }
    let path = std::ffi::CString::new(library.to_str()?).ok()?;
    // SAFETY: the functions have these types, and the library stays loaded.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let (alloc, free) = (
            libc::dlsym(library, c"outer".as_ptr()),
            libc::dlsym(library, c"outer_free".as_ptr()),
        );
        assert!(!alloc.is_null() && !free.is_null());
        Some((
            std::mem::transmute::<Block, Alloc>(alloc),
            std::mem::transmute::<Block, Free>(free),
        ))
    }
}

/// Writes a breakpoint over the instruction of each probe, and says that a tracer is attached.
fn attach(probes: [Probe; 2], loaded: u64) {
    // SAFETY: the handler has the type for `SA_SIGINFO`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = at_breakpoint as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(
            libc::sigaction(libc::SIGTRAP, &raw const action, std::ptr::null_mut()),
            0
        );
    }
    for probe in probes {
        let at = (loaded + probe.address) as usize;
        // SAFETY: the pages stay executable, and only a `nop` is overwritten. The semaphore is a
        // word of this program that other threads read.
        unsafe {
            let size = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let (page, all) = (
                at & !(size - 1),
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            );
            assert_eq!(libc::mprotect(page as *mut c_void, 2 * size, all), 0);
            std::ptr::copy_nonoverlapping(BREAKPOINT.as_ptr(), at as *mut u8, BREAKPOINT.len());
            (*((loaded + probe.semaphore) as *const AtomicU16)).fetch_add(1, Relaxed);
        }
    }
}

/// The end of the calling thread's stack.
fn stack_end() -> usize {
    // SAFETY: the calls fill in what they are passed.
    unsafe {
        let mut attributes = std::mem::zeroed();
        assert_eq!(
            libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes),
            0
        );
        let (mut start, mut size) = (std::ptr::null_mut(), 0);
        libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut size);
        libc::pthread_attr_destroy(&raw mut attributes);
        start as usize + size
    }
}

/// Checks that a walk found `inner` and its caller `outer`, at most `within` functions away.
#[track_caller]
fn check_walk(walk: &[String], inner: &str, outer: &str, within: usize, what: &str) {
    let at = walk.windows(2).position(|pair| pair == [inner, outer]);
    assert!(at.is_some_and(|at| at <= within), "{what}: {walk:?}");
}

#[track_caller]
fn check(seen: &Seen, inner: &str, outer: &str, is_direct: bool, what: &str) {
    // `realloc` itself keeps no frame pointer for the blocks that it allocates and frees.
    if is_direct {
        check_walk(
            &seen.by_frames,
            inner,
            outer,
            6,
            &format!("{what}, frame pointers"),
        );
    }
    // The signal's frames come first.
    check_walk(
        &seen.by_tables,
        inner,
        outer,
        20,
        &format!("{what}, tables"),
    );
}

/// Checks how many bytes a sample stands for, by the formula of OpenTelemetry's contract.
#[track_caller]
fn check_weight(size: usize, weight: usize) {
    let size = size as f64;
    let expected = size / -(-size / 524_288.0).exp_m1();
    let off = (weight as f64 - expected).abs();
    // Records count objects in steps of a 1024th.
    assert!(off <= 1.0 + size / 2048.0, "{weight}, not {expected}");
}

// A tracer sees the program's functions at each probe, and the arguments of the contract.
#[test]
fn a_tracer_finds_the_callers_and_the_arguments() {
    let Some((alloc, free)) = callers() else {
        println!("skipped: there is no C compiler");
        return;
    };
    let file = std::fs::read("/proc/self/exe").unwrap();
    let probes = [find(&file, "alloc"), find(&file, "free")];
    STACK_END.set(stack_end()).unwrap();
    let loaded = loaded(&file);
    PROBES
        .set(probes.map(|probe| (loaded + probe.address) as usize))
        .unwrap();
    attach(probes, loaded);
    while !heap_profile::is_sampling() {
        free(&FAMILY, alloc(&FAMILY, 0, 700_000), 0);
    }
    SEEN.lock().unwrap().clear();
    for (way, size) in (0..WAYS).flat_map(|way| [100, 40_000, 900_000].map(|size| (way, size))) {
        let mut samples = 0;
        while samples < 3 {
            let block = alloc(&FAMILY, way, size);
            assert!(!block.is_null());
            let seen = std::mem::take(&mut *SEEN.lock().unwrap());
            let what = format!("way {way}, {size} bytes");
            for one in &seen {
                check(one, "inner", "outer", way < FIRST_RESIZE, &what);
            }
            let last = seen.iter().rfind(|one| one.arguments[0] == block as usize);
            let last = last.filter(|last| last.is_alloc);
            free(&FAMILY, block, if samples == 1 { size } else { 0 });
            let frees = std::mem::take(&mut *SEEN.lock().unwrap());
            let Some(last) = last else {
                // A free of a block without a sample is not seen.
                assert!(frees.is_empty(), "{what}: {frees:?}");
                continue;
            };
            samples += 1;
            assert_eq!(last.arguments[1], size.max(1), "{what}");
            if way < FIRST_RESIZE {
                check_weight(size, last.arguments[2]);
            }
            let [freed] = &frees[..] else {
                panic!("{what}: {frees:?}")
            };
            assert!(
                !freed.is_alloc && freed.arguments[0] == block as usize,
                "{what}"
            );
            check(freed, "inner_free", "outer_free", true, &what);
        }
    }
}
