//! Isolation on demand: a thread that has a CPU for itself asks this library to leave the CPU
//! alone.
//!
//! A thread that polls a network card or follows a market wants no interrupt on its CPU. The kernel
//! can isolate CPUs when it starts (`isolcpus=`, `nohz_full=`). But other threads of the same
//! process still disturb such a CPU: by fences, by folds of its counters, and by memory that they
//! give back, because the kernel then interrupts every CPU of the process to flush translations of
//! addresses. Between [`enter`] and [`Isolation::leave`], this library does none of this to the CPU
//! if it can wait or be left out. [`Isolation::report`] says what it did nevertheless, and what the
//! system did.
//!
//! # What `enter` does
//!
//! 1. It enters the CPU into the list of isolated CPUs (`spared`). From here on, other threads
//!    leave the CPU out.
//! 2. It makes readers of grace periods fence for themselves, if they do not yet. This takes one
//!    `membarrier`, once in a process.
//! 3. It folds the CPU's counts of watched counters, and moves the CPU's free objects to where
//!    other CPUs find them. So no other thread needs to visit the CPU for them.
//! 4. It makes the words of caches and counters resident on all CPUs that have run the program: 20
//!    KiB for each, and more with hundreds of caches or counters. It makes the library's static
//!    variables resident too: about 1 MiB, and up to 4 MiB with those of a program that contains
//!    the library. Otherwise another thread might read such a page first and write to it later. The
//!    kernel would then replace the page, and interrupt all CPUs of the process to flush the old
//!    translation.
//! 5. It wakes the shepherds' threads, which leave the CPU if they may run elsewhere, and waits for
//!    that for at most 0.1 s.
//! 6. It notes the thread's context switches and the CPU's interrupts, for the report.
//!
//! # What other threads leave out, and what they do
//!
//! | act | while a CPU is isolated | in the report |
//! |---|---|---|
//! | a shepherd's fold | leaves out the CPU's counts | |
//! | a shepherd takes idle objects | leaves out the CPU; with concurrency ids, all CPUs | |
//! | fences of grace periods | interrupt no CPU; some, if one began before `enter` | `fences` |
//! | free memory goes back after some time, or beyond the kept share | waits for `leave` | |
//! | a huge block is freed | waits for `leave`; at most 64 blocks and 1 GiB | `given_back` beyond |
//! | a huge block grows or shrinks | is done | `given_back` |
//! | free memory goes back on request (`trim`), or under memory pressure | is done | `given_back` |
//! | free memory goes back near a limit, or beyond `dirty-limit` | is done | `given_back` |
//! | an exact sum that adders keep outrunning, a smaller batch, a collected list | is done | `fences` |
//! | the program folds a counter itself | is done | `folds` |
//! | a cache is shrunk or destroyed | is done | `drains`, `fences` |
//! | slow paths of the isolated thread tick | not done | |
//!
//! A *huge block* has a mapping of its own: 62 MiB and more. While it waits, it counts as in use.
//!
//! The acts of the isolated thread itself are not in its report. So while a CPU is isolated, free
//! memory of the whole process stays, and requests of `pinfold` wait if no other thread and no
//! shepherd serves them.
//!
//! An act that began before `enter` returned may still end after it, and be missing in the report:
//! a thread looks at the list when it begins an act. In the child of a fork no CPU is isolated, and
//! the guard does nothing.
//!
//! ```
//! use pinfold::isolate;
//! # use pinfold::topology::{CpuSet, affinity, set_affinity};
//!
//! std::thread::spawn(|| {
//!     // The thread is pinned to one CPU.
//! #   let cpu: CpuSet = affinity().unwrap().iter().take(1).collect();
//! #   assert!(set_affinity(&cpu));
//!     let isolation = isolate::enter().unwrap();
//!     // … polls …
//!     let report = isolation.leave();
//!     println!("{} fences, {} context switches", report.fences, report.switches);
//! })
//! .join()
//! .unwrap();
//! ```

use crate::spared::{self, KINDS, Kind, Refused};
use crate::topology::affinity;
use crate::{arena, counter, counter_units, segment, shepherd, slab, sys};
use core::ffi::CStr;
use core::fmt;
use core::marker::PhantomData;
use pinfold_rseq::{current, kernel, syscall};

/// The maximum number of CPUs that threads of a process can isolate at once.
pub const MAX_ISOLATED: usize = spared::PLACES;

/// Why a thread cannot isolate its CPU.
///
/// ```
/// use pinfold::isolate::IsolateError;
///
/// assert!(IsolateError::NotPinned.to_string().contains("one CPU"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsolateError {
    /// The thread may run on more than one CPU.
    NotPinned,
    /// Another thread has isolated this CPU, or this one has already.
    Taken,
    /// [`MAX_ISOLATED`] CPUs are isolated.
    Full,
}

pinfold_rseq::error_texts! { IsolateError:
    IsolateError::NotPinned =>
        "the thread may run on several CPUs: pin it to one CPU first (sched_setaffinity)";
    IsolateError::Taken => "a thread has isolated this CPU already: leave that isolation first";
    IsolateError::Full => "64 CPUs are isolated already: leave one isolation first";
}

/// What disturbed an isolated CPU since [`enter`].
///
/// The first four are acts of this library in other threads of the process. Each *may* have
/// disturbed the CPU: the kernel does not say. The others are the
/// kernel's counts. They include what other programs caused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The CPU.
    pub cpu: usize,
    /// Fences (`membarrier`), each an interrupt.
    pub fences: u64,
    /// Calls by which memory went back to the system: each an interrupt, if the kernel has to flush
    /// translations on the CPU (a *TLB shootdown*).
    pub given_back: u64,
    /// Counters that the program folded: each at most one cache miss.
    pub folds: u64,
    /// How often the CPU's free objects were taken away.
    pub drains: u64,
    /// Context switches of the thread.
    pub switches: u64,
    /// Page faults of the thread.
    pub faults: u64,
    /// Interrupts of the CPU. 0 if `/proc/interrupts` cannot be read, like the next three.
    pub interrupts: u64,
    /// Interrupts of the local timer (x86 only).
    pub timer: u64,
    /// Function calls from other CPUs, fences among them (x86 only).
    pub calls: u64,
    /// Requests to flush translations (x86 only).
    pub flushes: u64,
}

impl Report {
    /// Returns a report with `counts`, by [`Kind`].
    fn new(cpu: usize, counts: [u64; KINDS]) -> Report {
        Report {
            cpu,
            fences: counts[Kind::Fence as usize],
            given_back: counts[Kind::GiveBack as usize],
            folds: counts[Kind::Fold as usize],
            drains: counts[Kind::Drain as usize],
            ..Report::default()
        }
    }
}

/// Isolates the CPU until it is dropped. See [`enter`].
#[must_use = "the CPU is isolated only until this value is dropped"]
pub struct Isolation {
    place: usize,
    cpu: usize,
    /// The process that entered. A child after `fork` has no isolated CPU.
    process: libc::pid_t,
    before: System,
    /// Not `Send`: the isolation belongs to the thread that is pinned.
    not_send: PhantomData<*mut ()>,
}

/// Isolates the CPU to which the calling thread is pinned, until the result is dropped.
///
/// The thread should not move to another CPU meanwhile. Takes up to 0.1 s if there is a shepherd,
/// reads `/proc/interrupts`, and makes at least 1 MiB resident, and 20 KiB for each CPU that has
/// run the program. Not for signal handlers.
///
/// # Errors
///
/// * [`IsolateError::NotPinned`] if the thread may run on more than one CPU.
/// * [`IsolateError::Taken`] if the CPU is isolated already. If two threads that are pinned to the
///   same CPU call this at once, both may get this error.
/// * [`IsolateError::Full`] if [`MAX_ISOLATED`] CPUs are isolated.
///
/// ```
/// use pinfold::isolate::{self, IsolateError};
/// # use pinfold::topology::affinity;
///
/// // This thread is not pinned.
/// # if affinity().is_some_and(|cpus| cpus.len() > 1) {
/// assert_eq!(isolate::enter().unwrap_err(), IsolateError::NotPinned);
/// # }
/// ```
#[doc(alias = "quiet_vmstat")]
pub fn enter() -> Result<Isolation, IsolateError> {
    let cpu = pinned_to().ok_or(IsolateError::NotPinned)?;
    pinfold_rseq::watch_fences(spared::note_fence);
    shepherd::register_fork();
    let place = spared::claim(cpu, current()).map_err(|refused| match refused {
        Refused::Taken => IsolateError::Taken,
        Refused::Full => IsolateError::Full,
    })?;
    slab::grace::let_readers_fence();
    counter::fold_watched_here();
    slab::empty_here();
    slab::make_units_resident();
    counter_units::make_resident();
    sys::make_statics_resident();
    shepherd::await_moves();
    segment::show_isolated();
    Ok(Isolation {
        place,
        cpu,
        process: kernel::process(),
        before: System::now(cpu),
        not_send: PhantomData,
    })
}

/// Calls `each` with a report on each CPU that a thread of this process has isolated. The report
/// has only what this library did: the kernel's counts are 0, because they belong to the other
/// thread. Costs some loads.
///
/// ```
/// use pinfold::isolate;
///
/// isolate::for_each(|report| println!("CPU {}: {} fences", report.cpu, report.fences));
/// ```
pub fn for_each(mut each: impl FnMut(Report)) {
    spared::for_each(|cpu, counts| each(Report::new(cpu, counts)));
}

/// Returns the one CPU that the calling thread may use, or `None` if it may use several.
fn pinned_to() -> Option<usize> {
    let cpus = sys::keep_errno(affinity)?;
    let mut cpus = cpus.iter();
    let cpu = cpus.next();
    cpu.filter(|_| cpus.next().is_none())
}

impl Isolation {
    /// Returns what disturbed the CPU so far. Costs a system call, and reads `/proc/interrupts`.
    ///
    /// In a child after `fork`, in which no CPU is isolated, all numbers but `cpu` are 0.
    pub fn report(&self) -> Report {
        if kernel::process() != self.process {
            return Report {
                cpu: self.cpu,
                ..Report::default()
            };
        }
        let (now, before) = (System::now(self.cpu), &self.before);
        let since = |of: fn(&System) -> u64| of(&now).saturating_sub(of(before));
        Report {
            switches: since(|system| system.switches),
            faults: since(|system| system.faults),
            interrupts: since(|system| system.interrupts.all),
            timer: since(|system| system.interrupts.timer),
            calls: since(|system| system.interrupts.calls),
            flushes: since(|system| system.interrupts.flushes),
            ..Report::new(self.cpu, spared::counts(self.place))
        }
    }

    /// Ends the isolation. Returns what disturbed the CPU. Costs what [`report`](Self::report)
    /// costs. Wakes the shepherds, which may give memory back that waited. If no CPU is isolated
    /// any more, also unmaps the huge blocks that waited.
    pub fn leave(self) -> Report {
        self.report()
    }
}

impl Drop for Isolation {
    fn drop(&mut self) {
        if kernel::process() == self.process {
            spared::release(self.place);
            if !spared::any() {
                arena::unmap_waiting();
            }
            segment::show_isolated();
            shepherd::wake();
        }
    }
}

impl fmt::Debug for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Isolation");
        text.field("cpu", &self.cpu).finish_non_exhaustive()
    }
}

/// What the kernel counts for a thread and its CPU.
struct System {
    switches: u64,
    faults: u64,
    interrupts: Interrupts,
}

impl System {
    /// Returns the counts of the calling thread and of `cpu`.
    fn now(cpu: usize) -> System {
        // SAFETY: zeroes are a valid `rusage`.
        let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
        let arguments = [libc::RUSAGE_THREAD as usize, (&raw mut usage) as usize];
        // SAFETY: the kernel writes one `rusage`, which `usage` has room for. If a sandbox refuses
        // the call, the counts stay 0.
        let _ = unsafe { syscall(libc::SYS_getrusage, arguments) };
        System {
            switches: (usage.ru_nvcsw + usage.ru_nivcsw) as u64,
            faults: (usage.ru_minflt + usage.ru_majflt) as u64,
            interrupts: Interrupts::read(c"/proc/interrupts", cpu),
        }
    }
}

/// One CPU's column of `/proc/interrupts`.
#[derive(Default)]
struct Interrupts {
    all: u64,
    timer: u64,
    calls: u64,
    flushes: u64,
}

impl Interrupts {
    /// Reads the column of `cpu`. All numbers are 0 if the file cannot be read.
    fn read(path: &CStr, cpu: usize) -> Interrupts {
        let mut table = Table {
            cpu,
            ..Table::default()
        };
        if let Ok(file) = kernel::open(path, libc::O_RDONLY | libc::O_CLOEXEC, 0) {
            let mut piece = [0; 512];
            while let Ok(length @ 1..) = kernel::read(file, &mut piece) {
                piece[..length].iter().for_each(|&byte| table.feed(byte));
            }
            let _ = kernel::close(file);
        }
        table.found
    }
}

/// Reads the table of interrupts byte by byte.
///
/// The first line names the CPUs, as `CPU0`. Each later line has a label with a colon, and then a
/// number for each CPU.
#[derive(Default)]
struct Table {
    cpu: usize,
    found: Interrupts,
    is_past_first_line: bool,
    /// The place of the CPU's number behind the label.
    column: Option<usize>,
    label: [u8; 3],
    word: [u8; 20],
    length: usize,
    /// The number of words that have ended on this line.
    words: usize,
}

impl Table {
    fn feed(&mut self, byte: u8) {
        if !byte.is_ascii_whitespace() {
            if let Some(place) = self.word.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
            return;
        }
        if self.length > 0 {
            self.end_word();
            self.words += 1;
            self.length = 0;
        }
        if byte == b'\n' {
            self.is_past_first_line = true;
            self.words = 0;
        }
    }

    fn end_word(&mut self) {
        let word = &self.word[..self.length];
        let number = |digits: &[u8]| str::from_utf8(digits).ok()?.parse::<u64>().ok();
        if !self.is_past_first_line {
            let cpu = word.strip_prefix(b"CPU").and_then(number);
            if cpu == Some(self.cpu as u64) {
                self.column = Some(self.words + 1);
            }
        } else if self.words == 0 {
            self.label = [0; 3];
            let label = word.strip_suffix(b":").unwrap_or(word);
            let length = label.len().min(3);
            self.label[..length].copy_from_slice(&label[..length]);
        } else if Some(self.words) == self.column {
            let count = number(word).unwrap_or(0);
            let of_kind = match &self.label {
                // These lines have one number, for the whole machine.
                b"ERR" | b"MIS" => return,
                b"LOC" => Some(&mut self.found.timer),
                b"CAL" => Some(&mut self.found.calls),
                b"TLB" => Some(&mut self.found.flushes),
                _ => None,
            };
            self.found.all += count;
            if let Some(of_kind) = of_kind {
                *of_kind += count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_of_a_cpu_is_added_up() {
        let text = "           CPU0       CPU2       CPU10
   0:         22          1          2   IO-APIC   2-edge      timer 7
 LOC:      31107      12345          5   Local timer interrupts
 CAL:         10         20         30   Function call interrupts
 TLB:          1          2          3   TLB shootdowns
 ERR:          9
 MIS:          8
";
        for (cpu, all, rest) in [
            (0, 31140, [31107, 10, 1]),
            (2, 12368, [12345, 20, 2]),
            (10, 40, [5, 30, 3]),
            (1, 0, [0; 3]),
        ] {
            let mut table = Table {
                cpu,
                ..Table::default()
            };
            text.bytes().for_each(|byte| table.feed(byte));
            let found = table.found;
            assert_eq!(found.all, all, "CPU {cpu}");
            assert_eq!([found.timer, found.calls, found.flushes], rest, "CPU {cpu}");
        }
    }
}
