//! A CPU that is isolated and without a tick stays undisturbed while Pinfold works around it. A
//! shepherd leaves such CPUs out, unless it is told otherwise.

mod common;

use common::from_environment;
use common::machine::{housekeeping, listed, move_to, quiet_cpus, wait_until};
use common::trace::{Event, Trace, now};
use pinfold::counter::PerCpuCounter;
use pinfold::isolate::{self, Report};
use pinfold::memory;
use pinfold::shepherd::{self, Shepherd};
use pinfold::slab::{KmemCache, grace};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::fs;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

const SIZE: usize = 64;
/// The number of objects that the loop allocates before it begins, and that other CPUs free.
const GIVEN: usize = 20_000;

static COUNTED: PerCpuCounter = PerCpuCounter::new();
static PASSES: AtomicU64 = AtomicU64::new(0);
static STOP: AtomicBool = AtomicBool::new(false);
/// The loop's thread, once it has begun.
static THREAD: AtomicI32 = AtomicI32::new(0);
/// The objects that the loop gave to other CPUs.
static OBJECTS: [AtomicUsize; GIVEN] = [const { AtomicUsize::new(0) }; GIVEN];

fn cache() -> KmemCache {
    KmemCache::new("quiet", Layout::from_size_align(SIZE, 8).unwrap()).unwrap()
}

/// Counts, allocates and frees on `cpu`, until `STOP`. If it should, isolates the CPU first, until
/// the process ends. The kernel ends the thread at any system
/// call: it is in the strict mode of seccomp, which allows only `read`, `write` and `exit`.
fn looping(cpu: usize, cache: &KmemCache, isolates: bool) {
    // khugepaged would join pages into a huge page, and interrupt the CPUs that use them.
    // SAFETY: the call takes numbers only.
    let refused = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    assert_eq!(refused, 0);
    move_to(0, &[cpu]);
    for place in &OBJECTS {
        place.store(cache.alloc().unwrap().as_ptr() as usize, Release);
    }
    if isolates {
        std::mem::forget(isolate::enter().unwrap());
    }
    pass(cache);
    // SAFETY: the calls take numbers only.
    unsafe {
        let thread = libc::gettid();
        let strict = libc::SECCOMP_MODE_STRICT;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, strict), 0);
        THREAD.store(thread, Release);
    }
    while !STOP.load(Relaxed) {
        pass(cache);
        PASSES.fetch_add(1, Relaxed);
    }
    // SAFETY: `exit` ends this thread only. The thread's stack holds nothing that must be dropped.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

fn pass(cache: &KmemCache) {
    let mut held = [None; 8];
    for _ in 0..10 {
        for place in &mut held {
            COUNTED.inc();
            *place = cache.alloc();
        }
        for object in held.iter_mut().filter_map(Option::take) {
            // SAFETY: the object came from `cache` above, and this is its only free.
            unsafe { cache.free(object) };
        }
    }
}

/// What happened to a CPU and to the thread that runs there.
#[derive(Debug)]
struct Seen {
    /// The interrupts by kind, without those of which there was none.
    interrupts: BTreeMap<String, u64>,
    switches: u64,
    faults: u64,
}

impl Seen {
    /// Returns the number of interrupts that are not the local timer's.
    fn not_timer(&self) -> u64 {
        self.interrupts.values().sum::<u64>() - self.timer()
    }

    /// Returns the number of the local timer's interrupts.
    fn timer(&self) -> u64 {
        self.interrupts.get("LOC:").copied().unwrap_or(0)
    }

    fn since(mut self, before: Seen) -> Seen {
        for (kind, count) in &mut self.interrupts {
            *count -= before.interrupts[kind];
        }
        self.interrupts.retain(|_, count| *count != 0);
        self.switches -= before.switches;
        self.faults -= before.faults;
        self
    }
}

fn seen(cpu: usize) -> Seen {
    let thread = THREAD.load(Acquire);
    let read = |file: &str| fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).unwrap();
    let status = read("status");
    let switches = status.lines().filter(|line| line.contains("ctxt_switches"));
    let switches = switches.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    let stat = read("stat");
    let fields: Vec<_> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    let number = |at: usize| fields[at].parse::<u64>().unwrap();
    Seen {
        interrupts: interrupts(cpu),
        switches: switches.sum(),
        faults: number(7) + number(9),
    }
}

/// Returns the CPU's interrupts by kind.
fn interrupts(cpu: usize) -> BTreeMap<String, u64> {
    let text = fs::read_to_string("/proc/interrupts").unwrap();
    let mut lines = text.lines();
    let name = format!("CPU{cpu}");
    let mut names = lines.next().unwrap().split_whitespace();
    let column = names.position(|word| word == name).unwrap();
    let count = |line: &str| {
        let mut words = line.split_whitespace();
        let kind = words.next()?.to_owned();
        Some((kind, words.nth(column)?.parse().ok()?))
    };
    lines.filter_map(count).collect()
}

/// Calls by which one thread makes the kernel interrupt the CPUs of the other threads: a fence, and
/// calls after which the CPUs must forget addresses of memory.
const INTERRUPTING: [libc::c_long; 6] = [
    libc::SYS_membarrier,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_mmap,
];

/// Selects the flushes for which a CPU interrupts others (`TLB_REMOTE_SEND_IPI`).
const SENDS: &str = "reason == 4";

/// Selects the faults of a program that writes to a page that it may only read (x86-64).
const REPLACES: &str = "error_code == 7";

/// Records what happens on the loop's CPU, and the calls on other CPUs that may interrupt it.
struct Traces {
    cpu: usize,
    here: Trace,
    calls: Trace,
}

/// What the traces show for a span of time.
#[derive(Debug, Default)]
struct Traced {
    /// The number of events on the loop's CPU, by name.
    events: BTreeMap<String, u64>,
    /// System calls and page faults of the loop's thread.
    own: u64,
    /// Switches to threads of this process.
    switches: u64,
    /// Interrupts from other CPUs while one of this process's threads was in a fence.
    fences: u64,
    /// The same while a thread changed the process's mappings, or gave memory back.
    mappings: u64,
    /// The number of such calls on other CPUs, by number.
    calls: BTreeMap<i64, u64>,
    /// How often a thread of this process made other CPUs forget addresses outside such calls. One
    /// cause is a first write to a page that was read before.
    outside: u64,
    /// The threads that made other CPUs forget addresses, and the call in which they did, or the
    /// kernel's functions and the last write that replaced a page.
    flushes: BTreeMap<String, u64>,
}

impl Traces {
    /// Begins to record. Says so and returns `None` if the kernel cannot trace.
    fn begin(cpu: usize) -> Option<Traces> {
        let here = [
            ("sched/sched_switch", ""),
            ("irq_vectors", ""),
            ("irq/irq_handler_entry", ""),
            ("raw_syscalls/sys_enter", ""),
            ("exceptions/page_fault_user", ""),
        ];
        let ids = INTERRUPTING
            .map(|call| format!("id == {call}"))
            .join(" || ");
        let calls = [
            ("raw_syscalls/sys_enter", ids.as_str()),
            ("raw_syscalls/sys_exit", ids.as_str()),
            ("tlb/tlb_flush", SENDS),
            ("exceptions/page_fault_user", REPLACES),
        ];
        let others: Vec<_> = listed("online")
            .into_iter()
            .filter(|&it| it != cpu)
            .collect();
        let begun = Trace::begin("here", &[cpu], &here)
            .and_then(|here| Ok((here, Trace::begin("calls", &others, &calls)?)))
            .and_then(|(here, calls)| {
                calls.record_stacks("tlb/tlb_flush", SENDS)?;
                Ok((here, calls))
            });
        match begun {
            Ok((here, calls)) => Some(Traces { cpu, here, calls }),
            Err(why) => {
                println!("without ftrace, which this kernel does not offer: {why}");
                None
            }
        }
    }

    /// Returns what happened between the two times, and ends the recording.
    fn between(self, begin: Duration, end: Duration) -> Traced {
        self.here.end();
        self.calls.end();
        let during = |event: &Event| (begin..=end).contains(&event.time);
        let mut calls = Vec::new();
        for cpu in listed("online") {
            if cpu != self.cpu {
                calls.extend(self.calls.events(cpu));
            }
        }
        let (replaced, calls): (Vec<_>, _) = calls
            .into_iter()
            .partition(|event| event.name == "page_fault_user");
        let (flushes, calls): (Vec<_>, _) = calls
            .into_iter()
            .partition(|event| event.name == "tlb_flush");
        let calls = calls_of(calls);
        let mut traced = Traced::default();
        for flush in flushes.iter().filter(|flush| during(flush)) {
            let mut within = calls.iter().filter(|call| call.spans(flush));
            let call = within.find(|call| call.thread == flush.thread);
            let why = if let Some(call) = call {
                format!("call {}", call.number)
            } else {
                // The fault during which the thread flushed takes microseconds.
                let span = flush.time.saturating_sub(Duration::from_millis(1))..=flush.time;
                let mut faults = replaced.iter();
                let fault = faults
                    .find(|fault| fault.thread == flush.thread && span.contains(&fault.time))
                    .map_or("", |fault| &fault.details);
                traced.outside += u64::from(is_of_this_process(flush.thread));
                format!("{} {fault}", flush.stack.join(" < "))
            };
            let by = format!("{}: {why}", flush.task);
            *traced.flushes.entry(by).or_default() += 1;
        }
        for call in calls
            .iter()
            .filter(|call| call.end >= begin && call.begin <= end)
        {
            *traced.calls.entry(call.number).or_default() += 1;
        }
        for event in self.here.events(self.cpu).into_iter().filter(during) {
            traced.note(&event, &calls);
        }
        traced
    }
}

/// A system call of another CPU.
struct Call {
    thread: i32,
    number: i64,
    begin: Duration,
    end: Duration,
}

impl Call {
    fn spans(&self, event: &Event) -> bool {
        (self.begin..=self.end).contains(&event.time)
    }
}

/// Pairs the beginnings and the ends of calls.
fn calls_of(mut events: Vec<Event>) -> Vec<Call> {
    events.sort_by_key(|event| event.time);
    let mut open = BTreeMap::new();
    let mut calls = Vec::new();
    for event in events {
        let number = event.details.split_whitespace().nth(1);
        let number = number.and_then(|word| word.parse().ok()).unwrap();
        if event.name == "sys_enter" {
            open.insert(event.thread, (number, event.time));
        } else if let Some((number, begin)) = open.remove(&event.thread) {
            calls.push(Call {
                thread: event.thread,
                number,
                begin,
                end: event.time,
            });
        }
    }
    let unfinished = |(thread, (number, begin))| Call {
        thread,
        number,
        begin,
        end: Duration::MAX,
    };
    calls.extend(open.into_iter().map(unfinished));
    calls
}

fn is_of_this_process(thread: i32) -> bool {
    fs::exists(format!("/proc/self/task/{thread}")).unwrap()
}

impl Traced {
    fn note(&mut self, event: &Event, calls: &[Call]) {
        *self.events.entry(event.name.clone()).or_default() += 1;
        let own = event.thread == THREAD.load(Acquire);
        let in_call = |fence: bool| {
            let mut calls = calls
                .iter()
                .filter(|call| (call.number == libc::SYS_membarrier) == fence && call.spans(event));
            u64::from(calls.next().is_some())
        };
        match event.name.as_str() {
            "sys_enter" | "page_fault_user" => self.own += u64::from(own),
            "sched_switch" => {
                let next = event.details.split("next_pid=").nth(1);
                let next = next
                    .and_then(|text| text.split_whitespace().next())
                    .unwrap();
                let next = next.parse().unwrap();
                let is_loop = next == THREAD.load(Acquire);
                self.switches += u64::from(is_of_this_process(next) && !is_loop);
            }
            "call_function_entry" | "call_function_single_entry" | "reschedule_entry" => {
                self.fences += in_call(true);
                self.mappings += in_call(false);
            }
            _ => {}
        }
    }
}

/// Runs `work` again and again for the test's time, and returns what the loop's CPU saw meanwhile.
fn while_looping(what: &str, cpu: usize, mut work: impl FnMut()) -> (Seen, Option<Traced>) {
    let time = Duration::from_secs(from_environment("PINFOLD_QUIET_SECONDS", 5));
    let traces = Traces::begin(cpu);
    // Lets the disturbances of the previous part end, and those of the beginning of the traces.
    std::thread::sleep(Duration::from_millis(500));
    let (before, passes, begin) = (seen(cpu), PASSES.load(Relaxed), Instant::now());
    let traced_from = now();
    while begin.elapsed() < time {
        work();
        std::thread::sleep(Duration::from_millis(2));
    }
    let traced_to = now();
    let found = seen(cpu).since(before);
    let passes = PASSES.load(Relaxed) - passes;
    println!("{what}: {passes} passes in {} s, {found:?}", time.as_secs());
    let traced = traces.map(|traces| traces.between(traced_from, traced_to));
    if let Some(traced) = &traced {
        println!("{what}: {traced:?}");
    }
    // The kernel ends the thread at a system call, and then there are no more passes.
    let now = PASSES.load(Relaxed);
    wait_until("the next pass", || PASSES.load(Relaxed) > now);
    (found, traced)
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn nothing_of_pinfold_disturbs_an_isolated_cpu() {
    let without_tick = listed("nohz_full");
    let both = |cpu: &usize| without_tick.contains(cpu);
    let Some(cpu) = listed("isolated").into_iter().find(both) else {
        return;
    };
    move_to(0, &housekeeping());
    let cache: &'static KmemCache = Box::leak(Box::new(cache()));
    std::thread::spawn(move || looping(cpu, cache, false));
    wait_until("the loop's begin", || THREAD.load(Acquire) != 0);

    let (alone, _) = while_looping("alone", cpu, || ());
    let running = Shepherd::new()
        .interval(Duration::from_millis(5))
        .fold_isolated()
        .start()
        .unwrap();
    shepherd::watch(&COUNTED).unwrap();
    let mut left = OBJECTS.iter();
    let (mut folds, mut freed) = (0, 0);
    let (beside, traced) = while_looping("folds, sums, statistics, remote frees", cpu, || {
        folds += running.tick();
        let read = COUNTED.read();
        assert!(COUNTED.sum() >= read - COUNTED.error_bound() as i64);
        assert!(cache.statistics().slabs > 0);
        for place in left.by_ref().take(50) {
            let object = NonNull::new(place.swap(0, AcqRel) as *mut u8).unwrap();
            // SAFETY: the loop's thread allocated the object and gave it up. The swap gives it to
            // this thread only.
            unsafe { cache.free(object) };
            freed += 1;
        }
    });
    running.stop();
    STOP.store(true, Relaxed);
    const FEW: u64 = 20;
    println!("{folds} folds, {freed} objects freed from afar");
    assert!(folds > 20 && freed > 500, "{folds} {freed}");
    assert_eq!(beside.faults, 0);
    if let Some(traced) = traced {
        // No call, no fault and no switch is Pinfold's. No interrupt is that of a fence, or of a
        // page that another thread read before it wrote to it. Memory that goes back to the system
        // takes an interrupt of each CPU of the process, because the CPU must forget the memory's
        // addresses. That is rare.
        assert_eq!(
            (traced.own, traced.switches, traced.fences, traced.outside),
            (0, 0, 0, 0),
            "{traced:?}"
        );
        assert!(traced.mappings <= FEW, "{traced:?}");
    }
    // The emulated machine disturbs the CPU by itself, more often under load: each such tick of the
    // timer comes with a switch and two other interrupts. And when the shepherd gives memory back
    // to the system, the kernel makes all CPUs of the process forget the memory's addresses
    // ("TLB"). If one of the actions above disturbed the CPU, it would do so each time.
    let more = beside.timer().saturating_sub(alone.timer());
    assert!(
        beside.not_timer() <= alone.not_timer() + FEW + 2 * more
            && beside.switches <= alone.switches + FEW + more,
        "{alone:?} {beside:?}"
    );
}

/// The loop isolates its CPU on demand. Then memory does not go back either.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn nothing_of_pinfold_reaches_a_cpu_that_is_isolated_on_demand() {
    let without_tick = listed("nohz_full");
    let both = |cpu: &usize| without_tick.contains(cpu);
    let Some(cpu) = listed("isolated").into_iter().find(both) else {
        return;
    };
    move_to(0, &housekeeping());
    let cache: &'static KmemCache = Box::leak(Box::new(cache()));
    memory::set_dirty_time(Duration::ZERO);
    let running = Shepherd::new().interval(Duration::from_millis(5)).start();
    let running = running.unwrap();
    shepherd::watch(&COUNTED).unwrap();
    STOP.store(false, Relaxed);
    THREAD.store(0, Relaxed);
    std::thread::spawn(move || looping(cpu, cache, true));
    wait_until("the loop's begin", || THREAD.load(Acquire) != 0);

    let large = Layout::from_size_align(1 << 16, 8).unwrap();
    let large = KmemCache::new("large", large).unwrap();
    let mut left = OBJECTS.iter();
    let (beside, traced) = while_looping("isolated, beside work", cpu, || {
        running.tick();
        let read = COUNTED.read();
        assert!(COUNTED.sum() >= read - COUNTED.error_bound() as i64);
        assert!(cache.statistics().slabs > 0);
        grace::synchronize().unwrap();
        let objects: Vec<_> = (0..64).map(|_| large.alloc().unwrap()).collect();
        for object in objects {
            // SAFETY: the object came from this cache just now, and has this size.
            unsafe {
                object.as_ptr().write_bytes(1, 1 << 16);
                large.free(object);
            }
        }
        for place in left.by_ref().take(50) {
            let object = NonNull::new(place.swap(0, AcqRel) as *mut u8).unwrap();
            // SAFETY: the loop's thread allocated the object and gave it up. The swap gives it to
            // this thread only.
            unsafe { cache.free(object) };
        }
    });
    let mut report = Report::default();
    isolate::for_each(|of| report = of);
    println!("{report:?}");
    running.stop();
    STOP.store(true, Relaxed);
    assert_eq!(report.cpu, cpu);
    let all = [
        report.fences,
        report.folds,
        report.drains,
        report.given_back,
    ];
    assert_eq!(all, [0; 4], "{report:?}");
    assert_eq!(beside.faults, 0);
    if let Some(traced) = traced {
        let pinfolds = (traced.own, traced.switches, traced.fences, traced.outside);
        assert_eq!(pinfolds, (0, 0, 0, 0), "{traced:?}");
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_shepherd_leaves_isolated_cpus_alone_unless_told_otherwise() {
    let counter = PerCpuCounter::new().with_batch(1 << 20);
    let add_on = |cpu, n| {
        move_to(0, &[cpu]);
        counter.add(n);
        move_to(0, &housekeeping());
    };
    let (all, sparing) = (Shepherd::new().fold_isolated(), Shepherd::new());
    shepherd::watch(&counter).unwrap();
    let mut truth = 0;
    // CPUs with `isolcpus=`, with `nohz_full=`, and with both.
    for cpu in quiet_cpus() {
        add_on(0, 7);
        add_on(cpu, 5);
        truth += 12;
        assert_eq!(sparing.tick(), 1, "CPU {cpu}");
        assert_eq!(
            (counter.read(), counter.sum()),
            (truth - 5, truth),
            "CPU {cpu}"
        );
        assert_eq!(sparing.tick(), 0, "CPU {cpu}");
        // The first CPU and this one hold something.
        assert_eq!(all.tick(), 2, "CPU {cpu}");
        assert_eq!((counter.read(), counter.sum()), (truth, truth), "CPU {cpu}");
    }
}
