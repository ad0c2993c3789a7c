//! The choice of backend, made once for the process.
#![allow(
    unsafe_code,
    reason = "reads glibc's registration and the auxiliary vector"
)]

use crate::selftest::{Block, sections_work};
use crate::{MAX_INDEX, abi, arch, env};
use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicIsize, AtomicU8, AtomicUsize};

/// Which number selects the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Index {
    /// The CPU number. What NUMA work needs.
    Cpu,
    /// The kernel's concurrency id (Linux 6.3): dense in the number of threads that run at once, so that few threads
    /// on many CPUs use few units.
    Cid,
}

/// How operations are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Restartable sequences.
    Rseq(Index),
    /// Atomics, and a lock in each unit's header.
    Atomic,
}

/// Why restartable sequences are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// They are used.
    Nothing,
    /// `PINFOLD_RSEQ=off` was asked for.
    Disabled,
    /// This architecture has no critical sections here.
    Architecture,
    /// The C library is not glibc 2.35 or newer, or was told not to register (`glibc.pthread.rseq=0`), or the kernel
    /// or a sandbox refused.
    Registration,
    /// The self-test failed: the kernel does not keep its promise.
    SelfTest,
}

impl core::fmt::Display for Missing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Missing::Nothing => "in use",
            Missing::Disabled => "switched off by PINFOLD_RSEQ=off",
            Missing::Architecture => "no critical sections for this architecture",
            Missing::Registration => {
                "not registered: needs glibc 2.35, Linux 4.18, no glibc.pthread.rseq=0 in GLIBC_TUNABLES, and a sandbox that lets rseq pass"
            }
            Missing::SelfTest => "the kernel failed the self-test",
        })
    }
}

/// What the process decided on: two offsets from the thread pointer. [`Units`](crate::Units) has copies of them.
///
/// `cs` is 0 until a backend with restartable sequences was chosen, so that one test sends both the first call and
/// every call on the atomic backend the slow way.
#[repr(C, align(64))]
pub(crate) struct State {
    cs: AtomicIsize,
    index: AtomicIsize,
    possible: AtomicUsize,
    chosen: AtomicU8,
    missing: AtomicU8,
}

const UNDECIDED: u8 = 0;
const DECIDING: u8 = 1;
const ATOMIC: u8 = 2;
const RSEQ_CPU: u8 = 3;
const RSEQ_CID: u8 = 4;

pub(crate) static STATE: State = State {
    cs: AtomicIsize::new(0),
    index: AtomicIsize::new(0),
    possible: AtomicUsize::new(0),
    chosen: AtomicU8::new(UNDECIDED),
    missing: AtomicU8::new(Missing::Nothing as u8),
};

impl State {
    /// Offsets of `rseq_cs` and of the index from the thread pointer; the first is 0 on the atomic backend.
    #[inline(always)]
    pub(crate) fn offsets(&self) -> (isize, isize) {
        // Acquire pairs with the release in `decide`: with an offset of `rseq_cs` comes the offset
        // of the index. On x86-64 this only keeps the compiler from loading the index first.
        let cs = self.cs.load(Acquire);
        (cs, self.index.load(Relaxed))
    }

    pub(crate) fn is_atomic(&self) -> bool {
        self.cs.load(Acquire) == 0
    }
}

/// Chooses the backend, once for the process; later calls return what was chosen. `prefer` is the index to use where
/// both are offered; `PINFOLD_RSEQ=off|cpu|cid` in the environment overrides it.
///
/// Allocates nothing and may run before `main`, in the first allocation of a process. Costs a few microseconds the
/// first time. A call that comes while another thread (or the frame that a signal handler interrupted) decides
/// works on atomics until then.
pub fn init(prefer: Index) -> Backend {
    if STATE
        .chosen
        .compare_exchange(UNDECIDED, DECIDING, Acquire, Acquire)
        .is_ok()
    {
        decide(prefer);
    }
    backend()
}

/// The backend in use: [`Backend::Atomic`] until [`init`] has chosen.
pub fn backend() -> Backend {
    match STATE.chosen.load(Acquire) {
        RSEQ_CPU => Backend::Rseq(Index::Cpu),
        RSEQ_CID => Backend::Rseq(Index::Cid),
        _ => Backend::Atomic,
    }
}

/// Whether [`init`] has chosen.
pub fn decided() -> bool {
    STATE.chosen.load(Acquire) > DECIDING
}

/// Why restartable sequences are not used, or [`Missing::Nothing`].
pub fn missing() -> Missing {
    match STATE.missing.load(Acquire) {
        1 => Missing::Disabled,
        2 => Missing::Architecture,
        3 => Missing::Registration,
        4 => Missing::SelfTest,
        _ => Missing::Nothing,
    }
}

/// Whether the kernel keeps concurrency ids in the areas that the C library registered.
pub fn has_concurrency_ids() -> bool {
    let registered = arch::SUPPORTED.then(arch::registration).flatten();
    registered.is_some_and(|registered| registered.size >= abi::FEATURE_SIZE_MM_CID)
}

fn decide(prefer: Index) {
    let mut buffer = [0u8; 16];
    let asked = env::read("PINFOLD_RSEQ", &mut buffer);
    let index = match asked {
        Some(b"off" | b"0") => return settle_atomic(Missing::Disabled),
        Some(b"cpu") => Index::Cpu,
        Some(b"cid") => Index::Cid,
        _ => prefer,
    };
    if !arch::SUPPORTED {
        return settle_atomic(Missing::Architecture);
    }
    let Some(registered) = arch::registration() else {
        return settle_atomic(Missing::Registration);
    };
    let index = match index {
        Index::Cid if registered.size >= abi::FEATURE_SIZE_MM_CID => Index::Cid,
        _ => Index::Cpu,
    };
    let field = match index {
        Index::Cpu => abi::CPU_ID,
        Index::Cid => abi::MM_CID,
    };
    let (cs, at) = (registered.offset + abi::RSEQ_CS, registered.offset + field);
    /// The self-test's block, which is too large for the stack of a thread's first allocation.
    struct Own(UnsafeCell<Block>);
    // SAFETY: only the thread that decides uses the block, once.
    unsafe impl Sync for Own {}
    static BLOCK: Own = Own(UnsafeCell::new(Block::new()));
    // SAFETY: `init` calls this function once in the process, so that there is no other reference.
    if !sections_work(cs, at, unsafe { &mut *BLOCK.0.get() }) {
        return settle_atomic(Missing::SelfTest);
    }
    crate::fence::register();
    STATE.index.store(at, Relaxed);
    // Release: whoever sees the offset of `rseq_cs` sees the index's.
    STATE.cs.store(cs, Release);
    let chosen = match index {
        Index::Cpu => RSEQ_CPU,
        Index::Cid => RSEQ_CID,
    };
    STATE.chosen.store(chosen, Release);
}

fn settle_atomic(why: Missing) {
    STATE.missing.store(why as u8, Relaxed);
    STATE.chosen.store(ATOMIC, Release);
}

/// What a C library with registration says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    /// From the thread pointer to the area.
    pub offset: isize,
    /// Bytes of the area that the kernel keeps.
    pub size: usize,
}

impl Registration {
    /// From glibc's `__rseq_offset` and `__rseq_size`, which are null where the C library has none.
    pub(crate) fn from_glibc(offset: *const isize, size: *const u32) -> Option<Self> {
        if offset.is_null() || size.is_null() {
            return None;
        }
        // SAFETY: glibc's read-only variables, set before any code of the program runs.
        let (offset, size) = unsafe { (*offset, *size as usize) };
        if size == 0 {
            return None;
        }
        // glibc 2.35 to 2.40 say 32 or 20 whatever the kernel keeps in the 32 bytes that they register.
        let size = if size <= 32 {
            // SAFETY: getauxval only reads the auxiliary vector.
            let kernel = unsafe { libc::getauxval(abi::AT_RSEQ_FEATURE_SIZE) } as usize;
            kernel.clamp(abi::ORIGINAL_FEATURE_SIZE, 32)
        } else {
            size
        };
        Some(Registration { offset, size })
    }
}

/// The index of the unit that operations would use now. By the time it returns the thread may be elsewhere.
///
/// Costs one load with restartable sequences, a call of `sched_getcpu` on atomics.
#[inline]
pub fn current() -> usize {
    let (cs, index) = crate::near!(STATE, State).offsets();
    if cs == 0 {
        // SAFETY: sched_getcpu has no preconditions.
        let cpu = unsafe { libc::sched_getcpu() };
        return if cpu < 0 { 0 } else { cpu as usize % MAX_INDEX };
    }
    // SAFETY: the offset comes from a successful registration.
    (unsafe { arch::read_index(index) } as usize).min(MAX_INDEX - 1)
}

/// One more than the largest index there can be, from `/sys/devices/system/cpu/possible`; [`MAX_INDEX`] when that
/// cannot be read. Three system calls the first time, then one load.
pub fn possible() -> usize {
    let known = STATE.possible.load(Relaxed);
    if known != 0 {
        return known;
    }
    let read = read_possible().unwrap_or(MAX_INDEX).clamp(1, MAX_INDEX);
    STATE.possible.store(read, Relaxed);
    read
}

#[cold]
#[inline(never)]
fn read_possible() -> Option<usize> {
    let path = c"/sys/devices/system/cpu/possible";
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // The calls are the kernel's: those of the C library are where it cancels threads.
    // SAFETY: the path is a NUL-terminated literal.
    let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags) };
    let mut last = LastNumber::default();
    let mut end = -1;
    if fd >= 0 {
        let mut piece = [0u8; 64];
        loop {
            // SAFETY: `piece` is writable for its whole length.
            end = unsafe { libc::syscall(libc::SYS_read, fd, piece.as_mut_ptr(), piece.len()) };
            let Some(read) = usize::try_from(end).ok().and_then(|n| piece.get(..n)) else {
                break;
            };
            read.iter().for_each(|&byte| last.feed(byte));
            // sysfs gives as much as the buffer takes.
            if read.len() < piece.len() {
                end = 0;
                break;
            }
        }
        // SAFETY: `fd` was opened above and nobody else has it.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
    // SAFETY: as above.
    unsafe { *errno = before };
    (end == 0).then(|| last.get())?.map(|last| last + 1)
}

/// The last number in a list like `0-3,8-11`, which is fed byte by byte.
#[derive(Default)]
struct LastNumber {
    number: usize,
    digits: bool,
}

impl LastNumber {
    fn feed(&mut self, byte: u8) {
        match byte {
            b'0'..=b'9' if self.digits => {
                let tens = self.number.saturating_mul(10);
                self.number = tens.saturating_add(usize::from(byte - b'0'));
            }
            b'0'..=b'9' => {
                self.number = usize::from(byte - b'0');
                self.digits = true;
            }
            // The list ends with a line's end.
            b'\n' => {}
            _ => self.digits = false,
        }
    }

    fn get(&self) -> Option<usize> {
        (self.digits && self.number < MAX_INDEX).then_some(self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_number_of_lists() {
        let last_number = |list: &[u8]| {
            let mut last = LastNumber::default();
            list.iter().for_each(|&byte| last.feed(byte));
            last.get()
        };
        assert_eq!(last_number(b"0-3\n"), Some(3));
        assert_eq!(last_number(b"0-3,8-11"), Some(11));
        assert_eq!(last_number(b"0\n"), Some(0));
        assert_eq!(last_number(b"99999999999999999999"), None);
        assert_eq!(last_number(b"8192"), None);
        assert_eq!(last_number(b""), None);
        assert_eq!(last_number(b"0-3,"), None);
    }

    #[test]
    fn the_choice_is_made_once() {
        init(Index::Cpu);
        // The thread of another test may be deciding.
        while !decided() {
            std::thread::yield_now();
        }
        let first = backend();
        assert_eq!(init(Index::Cid), first);
        assert_eq!(first == Backend::Atomic, missing() != Missing::Nothing);
        assert!(current() < possible());
    }
}
