//! How much stack operations on counters take. Threads and signal handlers that count may have
//! little of it.

mod common;

use common::pin;
use pinfold::counter::{CounterTree, EventCounter, PerCpuCounter, PerCpuHistogram};

/// What the stack is filled with before an operation.
const PAINT: u64 = 0x5ee5_ace5_5ee5_ace5;
/// Bytes of stack that are examined.
const DEPTH: usize = 64 << 10;
/// Bytes of stack that examining it takes itself, and that are left out.
const OWN: usize = 512;
/// The most that an operation may take: half of what an allocation may take.
const MOST: usize = 2048;

/// Returns how many bytes of stack `operation` takes, or [`OWN`] if it takes less.
#[inline(never)]
fn stack_of(operation: &dyn Fn()) -> usize {
    let here = 0u64;
    let top = std::hint::black_box(&raw const here) as usize & !7;
    let word = |below: usize| (top - below) as *mut u64;
    let mut below = OWN;
    while below < DEPTH {
        // SAFETY: the thread's stack is larger than `DEPTH`, and nothing is in use below this
        // frame.
        unsafe { word(below).write_volatile(PAINT) };
        below += 8;
    }
    operation();
    let painted = |below: &usize| {
        // SAFETY: the loop above painted this word of the thread's stack.
        unsafe { word(*below).read_volatile() == PAINT }
    };
    let mut depths = (OWN..DEPTH).step_by(8).rev();
    depths.find(|below| !painted(below)).unwrap_or(OWN)
}

#[test]
fn the_measurement_finds_a_large_frame() {
    let taken = stack_of(&|| {
        std::hint::black_box([1u8; 3000]);
    });
    assert!((3000..4500).contains(&taken), "{taken}");
}

/// Keeps the compiler from removing an operation whose result has no use.
fn done<T>(result: T) {
    std::hint::black_box(&result);
}

#[test]
fn operations_take_little_stack() {
    let counter = PerCpuCounter::new().with_batch(64);
    let widening = PerCpuCounter::new().with_max_drift(1000);
    let fresh = PerCpuCounter::new();
    let tree = CounterTree::new().with_batch(2);
    let events = EventCounter::new();
    let histogram = PerCpuHistogram::new();
    for cpu in [1, 0] {
        pin(cpu);
        (0..100).for_each(|_| counter.inc());
        (0..1000).for_each(|_| widening.inc());
    }
    let operations: [(&str, &dyn Fn()); 18] = [
        ("first add", &|| fresh.inc()),
        ("add", &|| (0..100).for_each(|_| counter.inc())),
        ("large add", &|| counter.add(1 << 50)),
        ("widening", &|| (0..2000).for_each(|_| widening.add(3))),
        ("read", &|| done(counter.read())),
        ("sum", &|| done(counter.sum())),
        ("bounds", &|| done(counter.bounds())),
        ("compare", &|| done(counter.compare(counter.read()))),
        ("fold", &|| done(counter.fold())),
        ("far limit", &|| done(counter.limited_add(1 << 60, 1))),
        ("near limit", &|| {
            done(counter.limited_add(counter.read() + 60, 1));
        }),
        ("swap", &|| done(counter.swap(3))),
        ("batch", &|| done(counter.set_batch(7))),
        ("tree", &|| (0..1000).for_each(|_| tree.inc())),
        ("tree's comparison", &|| done(tree.compare(tree.read()))),
        ("tree's swap", &|| done(tree.swap(3))),
        ("event", &|| {
            events.inc();
            done(events.sum());
        }),
        ("record", &|| histogram.record(7)),
    ];
    for (name, operation) in operations {
        let taken = stack_of(operation);
        println!("{name}: {taken} bytes");
        assert!(taken <= MOST, "{name} takes {taken} bytes of stack");
    }
}
