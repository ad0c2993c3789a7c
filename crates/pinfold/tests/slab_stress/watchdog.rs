//! Ends a stress that takes too long, and says what each of its threads was doing.

use std::cell::Cell;
use std::fmt::Write;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize};
use std::time::Duration;

/// What one thread has done so far. Only that thread writes it, and the watchdog only prints it. So
/// no access needs an order.
struct Progress {
    /// The kernel's number of the thread, or 0.
    thread: AtomicI32,
    /// The thread pointer, which a lock's word contains while this thread holds the lock.
    pointer: AtomicUsize,
    /// What it does, or null.
    doing: AtomicPtr<&'static str>,
    /// Number of times that `doing` was set.
    steps: AtomicU64,
    handlers: AtomicU64,
    is_in_handler: AtomicBool,
}

/// The threads that [`enlist`] has entered. Further threads are not watched.
static THREADS: [Progress; 64] = [const {
    Progress {
        thread: AtomicI32::new(0),
        pointer: AtomicUsize::new(0),
        doing: AtomicPtr::new(null_mut()),
        steps: AtomicU64::new(0),
        handlers: AtomicU64::new(0),
        is_in_handler: AtomicBool::new(false),
    }
}; 64];

thread_local! {
    static MINE: Cell<Option<&'static Progress>> = const { Cell::new(None) };
}

/// Makes the watchdog report on the calling thread.
pub fn enlist() {
    // SAFETY: `gettid` has no preconditions.
    let me = unsafe { libc::gettid() };
    let free = |entry: &&Progress| {
        entry
            .thread
            .compare_exchange(0, me, Relaxed, Relaxed)
            .is_ok()
    };
    let mine = THREADS.iter().find(free);
    if let Some(mine) = mine {
        mine.pointer.store(pinfold_rseq::thread_pointer(), Relaxed);
    }
    MINE.set(mine);
}

/// Notes what the calling thread does from now on.
pub fn doing(what: &'static &'static str) {
    if let Some(mine) = MINE.get() {
        mine.doing
            .store(std::ptr::from_ref(what).cast_mut(), Relaxed);
        mine.steps.fetch_add(1, Relaxed);
    }
}

/// Runs the work of a signal handler, and counts the handler.
pub fn in_handler(work: impl FnOnce()) {
    let Some(mine) = MINE.get() else {
        return work();
    };
    mine.handlers.fetch_add(1, Relaxed);
    mine.is_in_handler.store(true, Relaxed);
    work();
    mine.is_in_handler.store(false, Relaxed);
}

/// Ends the process after this many seconds, because something waits without end. Reports twice, so
/// that the reader sees which threads go on.
pub fn watch(seconds: u64) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(seconds));
        say(&format!(
            "not done after {seconds} seconds: something hangs\n"
        ));
        say(&report());
        std::thread::sleep(Duration::from_secs(2));
        say("two seconds later:\n");
        say(&report());
        std::process::abort();
    });
}

/// Writes to standard error without the standard library's lock, which a stuck thread may hold.
fn say(text: &str) {
    // SAFETY: `text` is readable for its length. An error is ignored: there is nowhere to report
    // it.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

fn report() -> String {
    let mut text = String::new();
    for one in &THREADS {
        let thread = one.thread.load(Relaxed);
        if thread == 0 {
            continue;
        }
        let (doing, steps) = (one.doing.load(Relaxed), one.steps.load(Relaxed));
        // SAFETY: `doing` stores only references to statics, and an empty entry is null.
        let doing = unsafe { doing.as_ref() }.unwrap_or(&"nothing");
        let inside = match one.is_in_handler.load(Relaxed) {
            true => ", in a handler",
            false => "",
        };
        let handlers = one.handlers.load(Relaxed);
        let (state, waits) = (state(thread), waits_for(thread));
        _ = writeln!(
            text,
            "thread {thread}: {doing}, step {steps}, {handlers} handlers{inside}; {state}{waits}"
        );
    }
    text
}

fn of_task(thread: i32, what: &str) -> String {
    std::fs::read_to_string(format!("/proc/self/task/{thread}/{what}")).unwrap_or_default()
}

/// Returns what the kernel says about a thread: its state, and how often it slept and was
/// preempted.
fn state(thread: i32) -> String {
    let status = of_task(thread, "status");
    let is_wanted = |line: &&str| line.starts_with("State:") || line.contains("ctxt_switches:");
    let words = status
        .lines()
        .filter(is_wanted)
        .flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the system call in which a thread sleeps. If it waits for one of Pinfold's locks, also
/// returns which thread holds that lock. The lock's word, whose low half the thread has passed to
/// the kernel, contains the holder's thread pointer.
fn waits_for(thread: i32) -> String {
    let call = of_task(thread, "syscall");
    let call = call.trim();
    let words: Vec<&str> = call.split(' ').collect();
    let [number, at, _, value, ..] = words[..] else {
        return format!("; {call}");
    };
    let value = u32::from_str_radix(value.trim_start_matches("0x"), 16);
    let value = value.ok().map(|value| value & !7);
    let is_holder = |one: &&Progress| Some(one.pointer.load(Relaxed) as u32) == value;
    let holder = THREADS.iter().find(is_holder);
    match holder.filter(|_| number == libc::SYS_futex.to_string()) {
        Some(holder) => format!(
            "; waits for the lock {at} of thread {}",
            holder.thread.load(Relaxed)
        ),
        None => format!("; in system call {call}"),
    }
}
