//! Chooses the backend, once for the process, and reads the current index.
#![allow(unsafe_code, reason = "reads the index from the thread's area")]

use crate::registration::{Registration, register_late};
use crate::selftest::{Block, sections_work};
use crate::{MAX_INDEX, abi, arch, env, kernel};
use core::cell::UnsafeCell;
use core::fmt;
use core::str::FromStr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicIsize, AtomicU8, AtomicUsize};

/// The number that selects the unit.
///
/// ```
/// use pinfold_rseq::{Backend, Index};
///
/// // Without restartable sequences, or if `PINFOLD_RSEQ` says otherwise, the answer differs.
/// if pinfold_rseq::init(Index::Cpu) == Backend::Rseq(Index::Cpu) {
///     assert!(pinfold_rseq::current() < pinfold_rseq::possible());
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Index {
    /// The CPU number. Needed wherever a unit's memory must lie on its CPU's node.
    Cpu,
    /// The kernel's concurrency id (Linux 6.3). The kernel gives these ids, counted from 0, to the
    /// threads that run at the same moment. So a program with few threads uses few units even on a
    /// machine with many CPUs.
    Cid,
}

/// The environment variable that chooses the backend, in the form that [`Backend`] parses.
pub const VARIABLE: &str = "PINFOLD_RSEQ";

/// How operations are carried out.
///
/// ```
/// use pinfold_rseq::{Backend, Missing};
///
/// let backend = pinfold_rseq::init(pinfold_rseq::Index::Cid);
/// assert_eq!(backend == Backend::Atomic, pinfold_rseq::missing() != Missing::Nothing);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// By restartable sequences, with this index.
    Rseq(Index),
    /// By atomics, with a lock in each unit's header.
    Atomic,
}

impl Backend {
    /// Parses a word, as `from_str` does.
    fn parse(value: &[u8]) -> Option<Backend> {
        match value {
            b"off" | b"0" => Some(Backend::Atomic),
            b"cpu" => Some(Backend::Rseq(Index::Cpu)),
            b"cid" => Some(Backend::Rseq(Index::Cid)),
            _ => None,
        }
    }
}

impl FromStr for Backend {
    type Err = BackendError;

    /// Reads `off` or `0`, `cpu`, or `cid`.
    ///
    /// # Errors
    ///
    /// [`BackendError`] for anything else.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold_rseq::{Backend, Index};
    ///
    /// assert_eq!("cid".parse(), Ok(Backend::Rseq(Index::Cid)));
    /// assert_eq!(Backend::Atomic.to_string(), "off");
    /// assert!("maybe".parse::<Backend>().is_err());
    /// ```
    fn from_str(value: &str) -> Result<Backend, BackendError> {
        Backend::parse(value.as_bytes()).ok_or(BackendError)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Atomic => "off",
            Backend::Rseq(Index::Cpu) => "cpu",
            Backend::Rseq(Index::Cid) => "cid",
        })
    }
}

/// A text that is not a [`Backend`].
///
/// ```
/// use pinfold_rseq::{Backend, BackendError};
///
/// assert_eq!("maybe".parse::<Backend>(), Err(BackendError));
/// assert!(BackendError.to_string().contains("cid"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendError;

crate::error_texts! { BackendError: BackendError => "not a backend: give off, cpu or cid"; }

/// Why restartable sequences are not in use.
///
/// ```
/// use pinfold_rseq::Missing;
///
/// assert_eq!(Missing::Disabled.to_string(), "switched off by PINFOLD_RSEQ=off");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// Restartable sequences are in use.
    Nothing,
    /// The user asked for the atomic backend by `PINFOLD_RSEQ=off`.
    Disabled,
    /// This crate has no critical sections for the architecture.
    Architecture,
    /// The thread that chose the backend is not registered. Either the kernel or a sandbox refused,
    /// or other code than the C library had registered the thread.
    Registration,
    /// The self-test failed: an operation did not do what it should.
    SelfTest,
    /// The kernel is one for Arm that does not abort a preempted section: Linux 6.19 to 7.0.13.
    Kernel,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Missing::Nothing => "in use",
            Missing::Disabled => return write!(f, "switched off by {VARIABLE}=off"),
            Missing::Architecture => "no critical sections for this architecture",
            Missing::Registration => {
                "not registered: needs Linux 4.18, a sandbox that lets rseq pass, and no other library that registers threads"
            }
            Missing::SelfTest => "the kernel failed the self-test",
            Missing::Kernel => {
                "on Arm, Linux 6.19 to 7.0.13 does not abort preempted sections; use Linux 7.0.14, 7.1 or newer"
            }
        })
    }
}

/// What [`init`] decided for the process. `cs` and `index` are the offsets of `rseq_cs` and of the
/// index from the thread pointer. Each [`Units`](crate::Units) has copies of both.
///
/// `cs` is 0 until a backend with restartable sequences is chosen. So one comparison sends both the
/// first call and every call on the atomic backend to the slow path.
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

// `near!` requires `#[used]`.
#[used]
pub(crate) static STATE: State = State {
    cs: AtomicIsize::new(0),
    index: AtomicIsize::new(0),
    possible: AtomicUsize::new(0),
    chosen: AtomicU8::new(UNDECIDED),
    missing: AtomicU8::new(Missing::Nothing as u8),
};

impl State {
    /// Returns the offsets of `rseq_cs` and of the index from the thread pointer. The first is 0 on
    /// the atomic backend, and until the backend is chosen.
    #[inline(always)]
    pub(crate) fn offsets(&self) -> (isize, isize) {
        // Acquire pairs with the release in `decide`: a thread that reads the offset of `rseq_cs`
        // also reads the offset of the index. On x86-64 the acquire only keeps the compiler from
        // loading the index first.
        let cs = self.cs.load(Acquire);
        (cs, self.index.load(Relaxed))
    }

    /// Returns whether restartable sequences are not in use: the atomic backend is chosen, or none
    /// yet.
    pub(crate) fn is_atomic(&self) -> bool {
        // Acquire pairs with the release in `decide`: a thread that finds restartable sequences in
        // use also reads the index's offset.
        self.cs.load(Acquire) == 0
    }
}

/// Chooses the backend, once for the process, and returns it. Later calls return the same backend.
///
/// `prefer` is the index to use if the kernel offers both. `PINFOLD_RSEQ=off|cpu|cid` in the
/// environment overrides `prefer`.
///
/// A call that comes while another thread decides returns [`Backend::Atomic`]. So does a call from
/// a signal handler that interrupted the deciding thread. The operations of both callers use no
/// critical sections until the backend is chosen.
///
/// Allocates nothing, and may run before `main` in the first allocation of a process. Costs a few
/// microseconds the first time, then a compare-exchange and a load.
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

/// Returns the backend in use: [`Backend::Atomic`] until [`init`] has chosen. One load.
pub fn backend() -> Backend {
    // Acquire pairs with the release in `decide`: a thread that reads the backend also reads the
    // offsets.
    match STATE.chosen.load(Acquire) {
        RSEQ_CPU => Backend::Rseq(Index::Cpu),
        RSEQ_CID => Backend::Rseq(Index::Cid),
        _ => Backend::Atomic,
    }
}

/// Returns whether [`init`] has chosen. One load.
pub fn decided() -> bool {
    // Acquire pairs with the releases in `decide` and `settle_atomic`: a thread that sees the
    // decision also sees the offsets, or why the backend is atomic.
    STATE.chosen.load(Acquire) > DECIDING
}

/// Returns why restartable sequences are not in use, or [`Missing::Nothing`]. One load.
pub fn missing() -> Missing {
    match STATE.missing.load(Acquire) {
        1 => Missing::Disabled,
        2 => Missing::Architecture,
        3 => Missing::Registration,
        4 => Missing::SelfTest,
        5 => Missing::Kernel,
        _ => Missing::Nothing,
    }
}

/// Returns whether the kernel maintains concurrency ids in the registered areas.
///
/// Costs a few loads and at most one call of `getauxval`. Registers the calling thread first if the
/// C library has not.
pub fn has_concurrency_ids() -> bool {
    let registered = Registration::here();
    registered.is_some_and(|registered| registered.size >= abi::FEATURE_SIZE_MM_CID)
}

fn decide(prefer: Index) {
    let index = match env::parsed(VARIABLE, Backend::parse) {
        Some(Backend::Atomic) => return settle_atomic(Missing::Disabled),
        Some(Backend::Rseq(index)) => index,
        None => prefer,
    };
    if !arch::SUPPORTED {
        return settle_atomic(Missing::Architecture);
    }
    let Some(registered) = Registration::here() else {
        return settle_atomic(Missing::Registration);
    };
    if cfg!(target_arch = "aarch64") && kernel::release(|release| !aborts_on_arm(release)) {
        return settle_atomic(Missing::Kernel);
    }
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
    // SAFETY: `init` calls `decide` once in the process, and only the thread that runs `decide`
    // uses the block.
    unsafe impl Sync for Own {}
    static BLOCK: Own = Own(UnsafeCell::new(Block::new()));
    // SAFETY: `init` calls `decide` once in the process, so this is the only reference to the
    // block.
    if !sections_work(cs, at, unsafe { &mut *BLOCK.0.get() }) {
        return settle_atomic(Missing::SelfTest);
    }
    crate::fence::register();
    STATE.index.store(at, Relaxed);
    // Release pairs with the acquire in `offsets`: a thread that reads the offset of `rseq_cs` also
    // reads the offset of the index.
    STATE.cs.store(cs, Release);
    let chosen = match index {
        Index::Cpu => RSEQ_CPU,
        Index::Cid => RSEQ_CID,
    };
    STATE.chosen.store(chosen, Release);
}

/// Returns whether an Arm kernel with this release, as `uname` names it, aborts a section if it
/// preempts the thread inside. Linux 6.19 does not, nor does 7.0 before 7.0.14, nor a candidate of
/// 7.1. There, two threads could get the same object.
///
/// Returns false for a text that is no release. Also returns false below 4.18: that kernel has no
/// restartable sequences, so the number is made up (`setarch --uname-2.6`).
fn aborts_on_arm(release: &[u8]) -> bool {
    let digits = release
        .iter()
        .take_while(|byte| byte.is_ascii_digit() || **byte == b'.');
    let version = &release[..digits.count()];
    let mut numbers = version.split(|&byte| byte == b'.').map(|number| {
        let text = core::str::from_utf8(number).unwrap_or_default();
        text.parse::<u32>().ok()
    });
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else {
        return false;
    };
    let patch = numbers.next().flatten().unwrap_or(0);
    let is_candidate = release[version.len()..].starts_with(b"-rc");
    match (major, minor, patch) {
        version if version < (4, 18, 0) => false,
        version if version < (6, 19, 0) => true,
        version if version < (7, 0, 14) => false,
        (7, 1, 0) => !is_candidate,
        _ => true,
    }
}

fn settle_atomic(why: Missing) {
    STATE.missing.store(why as u8, Relaxed);
    STATE.chosen.store(ATOMIC, Release);
}

/// Returns the index of the unit that operations would use now, or `MAX_INDEX - 1` in a thread that
/// is not registered.
///
/// The thread may have moved to another index by the time this returns. Costs three loads with
/// restartable sequences, and a call of `sched_getcpu` otherwise.
///
/// Where this crate registers the threads itself ([`registers_threads`](crate::registers_threads)),
/// the first call in a thread registers it, by two system calls. Until then, every operation of the
/// thread fails. So a slow path should call this function.
#[inline]
pub fn current() -> usize {
    let (cs, index) = crate::near!(STATE, State).offsets();
    if cs == 0 {
        return ask_for_cpu();
    }
    // SAFETY: `cs` is not 0, so `index` is the offset of an id field in the thread's area.
    let read = || unsafe { arch::read_index(index) } as usize;
    match read() {
        index if index < MAX_INDEX => index,
        _ if register_late() => read().min(MAX_INDEX - 1),
        _ => MAX_INDEX - 1,
    }
}

/// Returns the number of the CPU on which the thread runs, whatever the index of units is.
///
/// The thread may have moved to another CPU by the time this returns. Costs three loads in a thread
/// that is registered, and a call of `sched_getcpu` otherwise. The result is below [`MAX_INDEX`].
///
/// ```
/// assert!(pinfold_rseq::current_cpu() < pinfold_rseq::MAX_INDEX);
/// ```
#[inline]
pub fn current_cpu() -> usize {
    let (cs, _) = crate::near!(STATE, State).offsets();
    if cs != 0 {
        // SAFETY: `cs` is not 0, so it is the offset of `rseq_cs` in the thread's area, where
        // `cpu_id` is too.
        let cpu = unsafe { arch::read_index(cs - abi::RSEQ_CS + abi::CPU_ID) } as usize;
        if cpu < MAX_INDEX {
            return cpu;
        }
    }
    ask_for_cpu()
}

#[cold]
#[inline(never)]
fn ask_for_cpu() -> usize {
    // SAFETY: `sched_getcpu` has no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).unwrap_or(0) % MAX_INDEX
}

/// Returns one more than the largest index that the system can have, at most [`MAX_INDEX`].
///
/// The number comes from `/sys/devices/system/cpu/possible`. If that file cannot be read, the
/// answer is [`MAX_INDEX`]. Costs three or more system calls the first time, then one load.
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
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let file = kernel::open(c"/sys/devices/system/cpu/possible", flags, 0).ok()?;
    let mut last = LastNumber::default();
    let mut piece = [0u8; 64];
    let is_whole = loop {
        let got = kernel::read(file, &mut piece).ok();
        let Some(read) = got.and_then(|got| piece.get(..got)) else {
            break false;
        };
        read.iter().for_each(|&byte| last.feed(byte));
        // sysfs fills the buffer as long as there is more to read, so a short read is the last.
        if read.len() < piece.len() {
            break true;
        }
    };
    let _ = kernel::close(file);
    is_whole.then(|| last.get())?.map(|last| last + 1)
}

/// Finds the last number in a list like `0-3,8-11`, which is fed byte by byte.
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
            // The list ends with a newline.
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
        assert_eq!(last_number(b"0,2-3\n"), Some(3));
        assert_eq!(last_number(b"0-1,5\n"), Some(5));
        assert_eq!(last_number(b"0\n"), Some(0));
        assert_eq!(last_number(b"99999999999999999999"), None);
        assert_eq!(last_number(b"8192"), None);
        assert_eq!(last_number(b""), None);
        assert_eq!(last_number(b"0-3,"), None);
    }

    #[test]
    fn the_backend_is_chosen_once() {
        init(Index::Cpu);
        // Another test's thread may be choosing the backend.
        while !decided() {
            std::thread::yield_now();
        }
        let first = backend();
        assert_eq!(init(Index::Cid), first);
        assert_eq!(first == Backend::Atomic, missing() != Missing::Nothing);
        assert!(current() < possible());
    }

    #[test]
    fn arm_kernels_that_do_not_abort_are_known_by_their_release() {
        let each = |texts: &str, aborts: bool| {
            for release in texts.split(' ') {
                assert_eq!(aborts_on_arm(release.as_bytes()), aborts, "{release:?}");
            }
        };
        each(
            "4.18.0 6.12.63+deb13-arm64 6.18.999 7.0.14 7.0.21-amd64",
            true,
        );
        each("7.1.0 7.1 7.3.4+deb14-arm64 7.2.0-rc3 8.0.0-rc1", true);
        each(
            "6.19.0 6.19.12-arm64 6.19.0-rc1 7.0 7.0.0-rc7 7.0.13 7.1.0-rc1",
            false,
        );
        // Made up, or no releases.
        each("2.6.79-arm64  - 7 x.y.z 7. 99999999999.0", false);
    }
}
