//! Counters in hostile surroundings: signal handlers that use the counters of the code that they
//! interrupt, forks at any moment, and no memory.

mod common;

use common::timer::Timer;
use common::{Random, StopAtEnd, in_child, limit, pin};
use pinfold::counter::{CounterTree, EventCounter, PerCpuCounter};
use pinfold::vmstat::{VmStat, Zone};
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::time::{Duration, Instant};

pinfold::vmstat_items! { enum Item { Here = "here" } }

static COUNTER: PerCpuCounter = PerCpuCounter::new();
static SMALL: PerCpuCounter = PerCpuCounter::new().with_batch(3);
static DRIFTING: PerCpuCounter = PerCpuCounter::new().with_max_drift(100);
static TREE: CounterTree = CounterTree::new().with_batch(3);
static LIMITED: PerCpuCounter = PerCpuCounter::new().with_batch(8);
static EVENTS: EventCounter = EventCounter::new();
static ITEMS: VmStat<Item> = VmStat::new();

static HANDLED: AtomicU64 = AtomicU64::new(0);
/// The sum of what the handlers have added to each counter.
static ADDED: AtomicI64 = AtomicI64::new(0);
/// The number of limited adds that were not refused, less what was taken away again.
static WITHIN: AtomicI64 = AtomicI64::new(0);

/// Adds within a limit, and subtracts within the batch. The value must never pass the limit.
fn add_within_limit() {
    const LIMIT: i64 = 100;
    if LIMITED.limited_add(LIMIT, 1) {
        assert!(WITHIN.fetch_add(1, SeqCst) < LIMIT);
    } else {
        WITHIN.fetch_sub(1, SeqCst);
        LIMITED.dec();
    }
}

/// Adds to the counters that the interrupted code uses, by amounts within and above the batch. In
/// every 16th call also reads, sums and folds them.
extern "C" fn on_timer(_: libc::c_int) {
    let turn = HANDLED.fetch_add(1, Relaxed);
    let n = match turn % 8 {
        0 => 1000,
        1 => -700,
        2..=4 => 1,
        _ => -1,
    };
    for counter in [&COUNTER, &SMALL, &DRIFTING] {
        counter.add(n);
    }
    TREE.add(n);
    ITEMS.add(Zone::normal(0), Item::Here, n);
    ADDED.fetch_add(n, Relaxed);
    add_within_limit();
    EVENTS.inc();
    if turn.is_multiple_of(16) {
        for counter in [&COUNTER, &SMALL, &DRIFTING] {
            counter.sum();
            counter.read();
            counter.bounds();
            counter.fold();
        }
        TREE.compare(0);
        TREE.sum();
    }
}

#[test]
fn handlers_nested_in_increments_lose_nothing() {
    let begin = Instant::now();
    let (added, events) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|seed| {
                scope.spawn(move || {
                    let _timer = Timer::start(libc::SIGUSR1, on_timer, 50);
                    let mut random = Random::new(seed);
                    let (mut added, mut events) = (0, 0);
                    while begin.elapsed() < Duration::from_secs(3) {
                        for _ in 0..100 {
                            let n = random.below(7) as i64 - 3;
                            for counter in [&COUNTER, &SMALL, &DRIFTING] {
                                counter.add(n);
                            }
                            TREE.add(n);
                            ITEMS.add(Zone::normal(0), Item::Here, n);
                            EVENTS.inc();
                            add_within_limit();
                            added += n;
                            events += 1;
                        }
                        if random.below(100) == 0 {
                            pin(random.below(64) as usize);
                        }
                    }
                    (added, events)
                })
            })
            .collect();
        threads.into_iter().fold((0, 0), |(a, b), thread| {
            let (c, d) = thread.join().unwrap();
            (a + c, b + d)
        })
    });
    let handled = HANDLED.load(SeqCst);
    println!("{handled} handlers in {:?}", begin.elapsed());
    // About 180,000 are expected. An emulated machine has time for fewer.
    assert!(handled > 500, "only {handled} handlers ran");
    let truth = added + ADDED.load(SeqCst);
    for counter in [&COUNTER, &SMALL, &DRIFTING] {
        assert_eq!(counter.sum(), truth);
        // No shard may keep more than its batch.
        assert!(counter.read().abs_diff(truth) <= counter.error_bound());
        assert!(folds_to(counter, truth), "{} of {truth}", counter.read());
    }
    assert_eq!(TREE.sum(), truth);
    assert!(TREE.read().abs_diff(truth) <= TREE.error_bound());
    assert_eq!(ITEMS.sum(Item::Here), truth);
    assert!(ITEMS.read(Item::Here).abs_diff(truth) <= ITEMS.error_bound(Item::Here));
    assert_eq!(EVENTS.sum(), events + handled);
    assert_eq!(LIMITED.sum(), WITHIN.load(SeqCst));
}

/// Returns whether folding makes the counter read as `value`. One fold is enough, unless a thread
/// of another test holds a lock that the counters share.
fn folds_to(counter: &PerCpuCounter, value: i64) -> bool {
    let begin = Instant::now();
    while counter.read() != value && begin.elapsed() < Duration::from_secs(10) {
        counter.fold();
    }
    counter.read() == value
}

/// Lowers the batch. Tries again while the thread that holds a unit on the atomic backend does not
/// run: on a loaded machine it may stand still for longer than `set_batch` waits.
#[cfg(target_arch = "x86_64")]
fn narrow(counter: &PerCpuCounter, batch: u64) {
    let begin = Instant::now();
    while let Err(error) = counter.set_batch(batch) {
        assert_eq!(error, pinfold::counter::CounterError::Fence);
        assert!(begin.elapsed() < Duration::from_secs(30), "{error}");
    }
}

/// The counter that is folded step by step.
#[cfg(target_arch = "x86_64")]
static STEPPED: OnceLock<PerCpuCounter> = OnceLock::new();
/// Instructions stepped through so far.
#[cfg(target_arch = "x86_64")]
static STEPS: AtomicU64 = AtomicU64::new(0);
/// The instruction at which the handler uses the counter.
#[cfg(target_arch = "x86_64")]
static STRIKE_AT: AtomicU64 = AtomicU64::new(0);
/// What the handler adds.
#[cfg(target_arch = "x86_64")]
const HANDLERS_ADD: i64 = 3000;

/// Counts the instructions that a thread steps through. At one of them, adds to the counter, folds
/// it and sums it.
#[cfg(target_arch = "x86_64")]
extern "C" fn on_step(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const TRAP: i64 = 0x100;
    if STEPS.fetch_add(1, Relaxed) + 1 == STRIKE_AT.load(Relaxed) {
        let counter = STEPPED.get().unwrap();
        counter.add(HANDLERS_ADD);
        counter.fold();
        counter.sum();
        // SAFETY: `context` is the interrupted frame's context, which the kernel gave to this
        // handler. Clearing the trap flag there ends the stepping.
        unsafe {
            (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_EFL as usize] &=
                !TRAP;
        }
    }
}

/// A handler runs at each instruction of a fold from afar in turn. Its add needs a wider batch, and
/// it folds and sums. Nothing may be lost or counted twice.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_handler_at_any_instruction_of_a_fold_loses_nothing() {
    // SAFETY: the handler uses only counters and atomics, which a signal handler may use.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_step as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGTRAP, &raw const action, std::ptr::null_mut());
    }
    let counter = STEPPED.get_or_init(|| PerCpuCounter::new().with_max_drift(1 << 40));
    let mut truth = 0;
    for strike in 1.. {
        counter.set(0);
        narrow(counter, 1024);
        for n in [700, -300, 200] {
            counter.add(n);
        }
        STEPS.store(0, Relaxed);
        STRIKE_AT.store(strike, Relaxed);
        // SAFETY: each sequence only changes the trap flag. It leaves the red zone below the stack
        // pointer untouched, and restores the stack pointer.
        unsafe {
            std::arch::asm!(
                "sub rsp, 128",
                "pushfq",
                "or qword ptr [rsp], 0x100",
                "popfq",
                "add rsp, 128"
            );
            counter.fold();
            std::arch::asm!(
                "sub rsp, 128",
                "pushfq",
                "and qword ptr [rsp], -257",
                "popfq",
                "add rsp, 128"
            );
        }
        let struck = STEPS.load(Relaxed) >= strike;
        truth = 600 + if struck { HANDLERS_ADD } else { 0 };
        assert_eq!(counter.sum(), truth, "at instruction {strike}");
        assert!(folds_to(counter, truth), "at instruction {strike}");
        if !struck {
            assert!(strike > 40, "a fold took only {strike} instructions");
            break;
        }
    }
    assert_eq!(truth, 600);
}

/// Calls of `__register_atfork`.
static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);

/// Replaces the C library's function to count its calls, and then calls it.
#[unsafe(no_mangle)]
extern "C" fn __register_atfork(
    prepare: Option<extern "C" fn()>,
    parent: Option<extern "C" fn()>,
    child: Option<extern "C" fn()>,
    object: *mut libc::c_void,
) -> libc::c_int {
    type Register = extern "C" fn(
        Option<extern "C" fn()>,
        Option<extern "C" fn()>,
        Option<extern "C" fn()>,
        *mut libc::c_void,
    ) -> libc::c_int;
    REGISTRATIONS.fetch_add(1, SeqCst);
    // SAFETY: the name is a C string. The C library's function of that name exists and has this
    // type.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, c"__register_atfork".as_ptr());
        std::mem::transmute::<*mut libc::c_void, Register>(next)(prepare, parent, child, object)
    }
}

/// What a fork needs is registered when the program starts. An add registers nothing: it may be
/// that of a handler that interrupted a fork or an allocation, and registering would wait for the C
/// library's locks.
#[test]
#[cfg_attr(target_env = "musl", ignore = "musl has no __register_atfork")]
fn an_add_registers_nothing_for_forks() {
    let before = REGISTRATIONS.load(SeqCst);
    assert!(before >= 1, "nothing was registered at the start");
    let counter = PerCpuCounter::new();
    counter.inc();
    EventCounter::new().inc();
    assert_eq!(counter.sum(), 1);
    assert_eq!(REGISTRATIONS.load(SeqCst), before);
}

/// Forks while threads add, fold, sum, swap and change batches. The child has one thread. It must
/// find consistent counters that work.
#[test]
fn a_child_finds_counters_consistent() {
    let counters: Vec<_> = [1, 4, 100]
        .map(|batch| PerCpuCounter::new().with_batch(batch))
        .into_iter()
        .chain([PerCpuCounter::new().with_max_drift(50)])
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..3 {
            let (counters, stop) = (&counters, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    let counter = &counters[random.below(4) as usize];
                    for _ in 0..random.below(50) {
                        counter.add(random.below(9) as i64 - 4);
                    }
                    match random.below(8) {
                        0 => drop(counter.fold()),
                        1 => drop(counter.swap(5)),
                        2 => drop(counter.sum()),
                        3 if seed == 0 => drop(counter.set_batch(1 + random.below(60))),
                        4 => pin(random.below(64) as usize),
                        _ => {}
                    }
                }
            });
        }
        for _ in 0..200 {
            in_child(10, || counters.iter().all(works_alone));
        }
    });
}

/// A handler that interrupted a fold may wait for the locks of a thread that waits for that fold.
#[test]
fn a_handler_above_a_fold_outlasts_a_swap() {
    static FOLDED: PerCpuCounter = PerCpuCounter::new().with_batch(1);
    /// Some of these share their locks with `FOLDED`.
    static OTHERS: [PerCpuCounter; 8] = [const { PerCpuCounter::new() }; 8];
    static FOLDER: AtomicU64 = AtomicU64::new(0);
    static RETURNED: AtomicU64 = AtomicU64::new(0);
    extern "C" fn on_signal(_: libc::c_int) {
        for counter in &OTHERS {
            counter.limited_add(i64::MAX / 2, 1);
        }
        RETURNED.fetch_add(1, SeqCst);
    }
    FOLDED.set(0);
    OTHERS.iter().for_each(|counter| counter.set(0));
    // SAFETY: the handler only does what counters allow in handlers.
    unsafe { libc::signal(libc::SIGUSR2, on_signal as *const () as libc::sighandler_t) };
    static STOP: AtomicBool = AtomicBool::new(false);
    // No scope: if the threads are stuck, this test must not wait for them.
    let folding = std::thread::spawn(|| {
        // SAFETY: `pthread_self` has no preconditions.
        FOLDER.store(unsafe { libc::pthread_self() } as u64, SeqCst);
        while !STOP.load(Relaxed) {
            FOLDED.inc();
        }
    });
    let swapping = std::thread::spawn(|| {
        while !STOP.load(Relaxed) {
            FOLDED.set(0);
            // Other tests use the same locks.
            std::thread::sleep(Duration::from_micros(300));
        }
    });
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        let (thread, before) = (FOLDER.load(SeqCst), RETURNED.load(SeqCst));
        if thread == 0 {
            continue;
        }
        // SAFETY: that thread runs until `STOP` is set.
        unsafe { libc::pthread_kill(thread as libc::pthread_t, libc::SIGUSR2) };
        let sent = Instant::now();
        while RETURNED.load(SeqCst) == before {
            assert!(
                sent.elapsed() < Duration::from_secs(20),
                "the handler waits for ever"
            );
            std::thread::yield_now();
        }
    }
    STOP.store(true, Relaxed);
    folding.join().unwrap();
    swapping.join().unwrap();
}

/// Returns whether all operations work on a counter that no other thread uses.
fn works_alone(counter: &PerCpuCounter) -> bool {
    let before = counter.sum();
    let within = |truth: i64| counter.read().abs_diff(truth) <= counter.error_bound();
    let mut fine = within(before) && counter.bounds() == (before, before);
    for n in 1..=300 {
        counter.inc();
        fine &= within(before + n);
    }
    fine &= counter.sum() == before + 300;
    // Folding finds these adds in the shards. So no freeze of a thread that the child does not have
    // keeps adds out.
    counter.fold();
    fine &= counter.read() == before + 300;
    fine && counter.swap(1) == before + 300 && counter.sum() == 1 && counter.limited_add(2, 1)
}

/// Without address space for per-CPU memory, counters are exact atomics.
#[test]
fn no_memory_means_atomics() {
    in_child(30, || {
        // From here on, the child cannot map memory.
        limit(libc::RLIMIT_AS, 0);
        let counter = PerCpuCounter::new().with_value(5).with_batch(10);
        let events = EventCounter::new();
        for _ in 0..1000 {
            counter.inc();
            events.inc();
        }
        counter.sum() == 1005
            && counter.read().abs_diff(1005) <= counter.error_bound()
            && counter.swap(0) == 1005
            && counter.limited_add(1, 1)
            && !counter.limited_add(1, 1)
            && events.sum() == 1000
    });
}
