//! Per-CPU variables, arrays, pairs, lists and rings, as a program uses them: by threads that
//! change CPU, with signal handlers, and from afar.

mod common;

use common::{cpus, pin};
use pinfold::percpu::{Node, PerCpu, PerCpuArray, PerCpuList, PerCpuPair, PerCpuRing};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Runs `f` in `threads` threads until `time` is over. `f` gets the thread's number and a turn.
fn storm(threads: u64, time: Duration, f: impl Fn(u64, u64) + Sync) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (stop, f) = (&stop, &f);
            scope.spawn(move || {
                for turn in 0.. {
                    if turn % 512 == 0 {
                        pin((turn / 512 + thread) as usize % cpus());
                    }
                    if stop.load(Relaxed) {
                        break;
                    }
                    f(thread, turn);
                }
            });
        }
        std::thread::sleep(time);
        stop.store(true, Relaxed);
    });
}

#[test]
fn a_variable_without_memory_is_shared_and_right() {
    // An array that is larger than a unit, so that no copy can be allocated.
    static LARGE: PerCpuArray<u64, { 5 << 20 }> = PerCpuArray::new();
    storm(2, Duration::from_millis(100), |_, turn| {
        let element = LARGE.at(turn as usize % 3).unwrap();
        element.inc();
        element.update(|count| count + 1);
        LARGE.at(3).unwrap().add(2);
    });
    let sum = (0..3).map(|at| LARGE.at(at).unwrap().sum()).sum::<u64>();
    assert!(sum > 0);
    assert_eq!(sum, LARGE.at(3).unwrap().sum());
}

#[test]
fn no_addition_is_lost_by_any_operation() {
    static ADDED: PerCpu<u64> = PerCpu::new();
    static RETURNED: PerCpu<u64> = PerCpu::new();
    static UPDATED: PerCpu<u64> = PerCpu::new();
    static MOVED: PerCpu<u64> = PerCpu::new();
    static PAIR: PerCpuPair<u64, u64> = PerCpuPair::new();
    let (turns, moved, pairs) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    storm(6, Duration::from_secs(1), |_, turn| {
        ADDED.inc();
        RETURNED.add_return(1);
        UPDATED.update(|word| word + 1);
        MOVED.add(1);
        if turn % 7 == 0 {
            moved.fetch_add(MOVED.xchg(0), Relaxed);
        }
        if let Some((a, b)) = PAIR.read() {
            let done = PAIR.cmpxchg((a, b), (a + 1, b + 2));
            assert!(!done || b == 2 * a, "torn: {a}, {b}");
            pairs.fetch_add(u64::from(done), Relaxed);
        }
        turns.fetch_add(1, Relaxed);
    });
    let turns = turns.load(SeqCst);
    assert_eq!(ADDED.sum(), turns);
    assert_eq!(RETURNED.sum(), turns);
    assert_eq!(UPDATED.sum(), turns);
    assert_eq!(MOVED.sum() + moved.load(SeqCst), turns);
    let mut pair = (0, 0);
    PAIR.for_each_cpu(|_, (a, b)| pair = (pair.0 + a, pair.1 + b));
    assert_eq!(pair, (pairs.load(SeqCst), 2 * pairs.load(SeqCst)));
    assert!(pair.0 > 0);
}

#[test]
fn items_of_a_list_are_neither_lost_nor_doubled() {
    const NODES: usize = 64;
    static LIST: PerCpuList<AtomicBool> = PerCpuList::new();
    for _ in 0..NODES {
        LIST.push(Box::leak(Box::new(Node::new(AtomicBool::new(true)))));
    }
    // Marks a node as taken, and puts it back.
    let pass = |node: &'static mut Node<AtomicBool>| {
        assert!(node.value.swap(false, SeqCst), "a node was taken twice");
        node.value.store(true, SeqCst);
        LIST.push(node);
    };
    let (popped, drained) = (AtomicU64::new(0), AtomicU64::new(0));
    storm(6, Duration::from_secs(2), |thread, turn| {
        if thread == 0 && turn % 16 == 0 {
            let mut nodes = vec![];
            if let Ok(count) = LIST.take_all(|node| nodes.push(node)) {
                drained.fetch_add(count as u64, Relaxed);
            }
            nodes.into_iter().for_each(pass);
        } else if turn % 3 == 0 {
            LIST.take().for_each(pass);
        } else if let Some(node) = LIST.pop() {
            popped.fetch_add(1, Relaxed);
            pass(node);
        }
    });
    assert!(popped.load(SeqCst) > 0 && drained.load(SeqCst) > 0);
    let mut left = 0;
    LIST.take_all(|node| {
        assert!(*node.value.get_mut());
        left += 1;
    })
    .unwrap();
    assert_eq!(left, NODES);
    assert!(LIST.pop().is_none());
}

#[test]
fn records_of_rings_are_read_once_whole_and_in_order() {
    static RING: PerCpuRing<4, 64> = PerCpuRing::new();
    const WRITERS: u64 = 4;
    let appended: Vec<_> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    // For each CPU and writer, the last number read.
    let mut last = HashMap::new();
    let mut read = 0;
    let stop = AtomicBool::new(false);
    let mut note = |cpu: usize, [writer, number, check, cpu_again]: [u64; 4]| {
        assert_eq!(check, writer ^ number.rotate_left(17), "a record is torn");
        assert_eq!(cpu_again, !number, "a record is torn");
        let before = last.insert((cpu, writer), number);
        assert!(
            before.is_none_or(|before| before < number),
            "out of order, or read twice"
        );
        read += 1;
    };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (stop, appended) = (&stop, &appended[writer as usize]);
            scope.spawn(move || {
                for number in 0.. {
                    if number % 512 == 0 {
                        pin((number / 512 + writer) as usize % cpus());
                    }
                    let record = [writer, number, writer ^ number.rotate_left(17), !number];
                    if RING.push(record).is_ok() {
                        appended.fetch_add(1, Relaxed);
                    }
                    if stop.load(Relaxed) {
                        break;
                    }
                }
            });
        }
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(1) {
            RING.drain(&mut note);
        }
        stop.store(true, Relaxed);
    });
    RING.drain(&mut note);
    let appended: u64 = appended.iter().map(|count| count.load(SeqCst)).sum();
    assert_eq!(read, appended);
    assert!(appended > 1000, "the writers hardly ran");
}

static IN_HANDLER: PerCpu<u64> = PerCpu::new();
static HANDLER_LIST: PerCpuList<u64> = PerCpuList::new();
static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    IN_HANDLER.update(|count| count + 1);
    if let Some(node) = HANDLER_LIST.pop() {
        node.value += 1;
        HANDLER_LIST.push(node);
    }
    HANDLED.fetch_add(1, SeqCst);
}

#[test]
fn signal_handlers_use_the_same_variables() {
    // SAFETY: the handler only runs operations that handlers may run, and writes to an atomic.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
    }
    HANDLER_LIST.push(Box::leak(Box::new(Node::new(0))));
    let turns = AtomicU64::new(0);
    storm(2, Duration::from_millis(500), |thread, turn| {
        IN_HANDLER.update(|count| count + 1);
        if let Some(node) = HANDLER_LIST.pop() {
            HANDLER_LIST.push(node);
        }
        turns.fetch_add(1, Relaxed);
        // A flood of signals would leave the process no time for anything else.
        if thread == 0 && turn % 8192 == 0 {
            // SAFETY: the process has a handler for the signal.
            unsafe { libc::kill(libc::getpid(), libc::SIGUSR2) };
        }
    });
    std::thread::sleep(Duration::from_millis(50));
    let handled = HANDLED.load(SeqCst);
    assert!(handled > 0);
    assert_eq!(IN_HANDLER.sum(), turns.load(SeqCst) + handled);
    let mut nodes = 0;
    HANDLER_LIST.take_all(|_| nodes += 1).unwrap();
    assert_eq!(nodes, 1);
}

/// Another thread takes each CPU's count by a write of 0. No increment is lost, and no write is
/// undone by an operation that had begun before.
#[test]
fn a_write_from_afar_comes_before_or_after_each_operation() {
    static COUNT: PerCpu<u64> = PerCpu::new();
    static PAIR: PerCpuPair<u64, u64> = PerCpuPair::new();
    let (counted, taken) = (AtomicU64::new(0), AtomicU64::new(0));
    COUNT.inc_return();
    counted.fetch_add(1, SeqCst);
    storm(4, Duration::from_secs(1), |thread, turn| {
        if thread == 0 {
            for cpu in 0..cpus() {
                let old = COUNT.write_on(cpu, 0).expect("a fence");
                taken.fetch_add(old.unwrap_or(0), SeqCst);
            }
            return;
        }
        match turn % 3 {
            0 => COUNT.inc(),
            1 => _ = COUNT.inc_return(),
            _ => _ = COUNT.update(|count| count + 1),
        }
        counted.fetch_add(1, SeqCst);
        // The memory is that of the words, but a read waits until it is there again.
        assert!(PAIR.read().is_some());
    });
    assert!(taken.load(SeqCst) > 0);
    COUNT.for_each_cpu(|cpu, value| assert!(cpu.is_some() || value == 0, "{value} were shared"));
    assert_eq!(taken.load(SeqCst) + COUNT.sum(), counted.load(SeqCst));
}
