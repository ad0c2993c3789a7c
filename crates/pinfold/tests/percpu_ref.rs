//! Reference counts per CPU, and handles with such a count: in threads that change CPU, in signal
//! handlers, beside forks, and where the kernel refuses the fence.

mod common;

use common::timer::Timer;
use common::{StopAtEnd, cpus, forbid, from_environment, in_child, pin};
use pinfold::arc::{PerCpuArc, PerCpuArcOwner};
use pinfold::percpu::PerCpuRef;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// A count beside which the releases are counted.
#[repr(C)]
struct Counted {
    count: PerCpuRef,
    releases: AtomicU64,
}

impl Counted {
    fn new() -> Counted {
        Counted {
            count: PerCpuRef::new(|count| {
                let counted = core::ptr::from_ref(count).cast::<Counted>();
                // SAFETY: the count is the first field of a `Counted`.
                unsafe { &*counted }.releases.fetch_add(1, SeqCst);
            }),
            releases: AtomicU64::new(0),
        }
    }

    fn releases(&self) -> u64 {
        self.releases.load(SeqCst)
    }
}

#[test]
fn a_count_is_released_when_its_last_reference_goes() {
    let counted = Counted::new();
    let count = &counted.count;
    // References move from CPU to CPU: each CPU's own word has another sum.
    for cpu in 0..cpus() {
        pin(cpu);
        (0..3).for_each(|_| count.get());
        assert!(count.tryget() && count.tryget_live());
    }
    pin(0);
    (0..5 * cpus() - 1).for_each(|_| count.put());
    assert!(!count.is_dying() && !count.is_zero());
    assert_eq!(count.kill(), Ok(true));
    assert_eq!(count.kill(), Ok(false));
    assert!(count.is_dying() && !count.is_zero());
    assert!(!count.tryget_live() && count.tryget());
    count.put();
    assert_eq!(counted.releases(), 0);
    count.put();
    assert!(count.is_zero() && !count.tryget() && !count.tryget_live());
    assert_eq!(counted.releases(), 1);
}

#[test]
fn a_killed_count_can_live_again() {
    let counted = Counted::new();
    let count = &counted.count;
    assert!(!count.resurrect() && !count.reinit(), "it is live");
    for turn in 1..=3 {
        pin(turn as usize);
        count.get();
        pin(0);
        count.kill().unwrap();
        assert!(!count.reinit(), "it has a reference");
        assert!(count.resurrect() && !count.is_dying() && count.tryget_live());
        count.put();
        count.kill().unwrap();
        assert_eq!(counted.releases(), turn - 1);
        count.put();
        assert_eq!(counted.releases(), turn);
        assert!(!count.resurrect(), "it has no reference");
        assert!(count.reinit() && !count.is_zero());
    }
    // The last initial reference.
    count.kill().unwrap();
    assert_eq!(counted.releases(), 4);
}

#[test]
fn a_count_that_was_never_used_is_released_by_its_kill() {
    let counted = Counted::new();
    assert_eq!(counted.count.kill(), Ok(true));
    assert_eq!(counted.releases(), 1);
    assert!(!counted.count.tryget());
}

/// What handles share: whether it is still there, and how often it was dropped.
struct Witness<'w> {
    alive: AtomicBool,
    drops: &'w AtomicU64,
}

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        assert!(self.alive.swap(false, SeqCst));
        self.drops.fetch_add(1, SeqCst);
    }
}

/// Threads clone and drop handles on all CPUs, and give them to each other, while the owner goes.
/// The value is dropped once, after its last handle.
#[test]
fn a_value_lives_as_long_as_its_handles() {
    for round in 0..from_environment("PINFOLD_REF_ROUNDS", 200) {
        let drops = AtomicU64::new(0);
        let witness = Witness {
            alive: AtomicBool::new(true),
            drops: &drops,
        };
        let owner = PerCpuArcOwner::new(witness).ok().expect("memory");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel::<PerCpuArc<Witness<'_>>>();
            for thread in 0..3 {
                let (handle, sender, stop) = (owner.share(), sender.clone(), &stop);
                scope.spawn(move || {
                    for turn in 0.. {
                        if turn % 64 == 0 {
                            pin(thread + turn / 64);
                        }
                        let other = handle.clone();
                        assert!(other.alive.load(Relaxed));
                        // Another thread, on another CPU, drops this handle.
                        if turn % 8 == 0 {
                            let _ = sender.send(other);
                        }
                        if stop.load(Relaxed) {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            let end = StopAtEnd(&stop);
            let mut owner = Some(owner);
            let mut taken = 0;
            for handle in &receiver {
                assert!(handle.alive.load(Relaxed));
                taken += 1;
                if taken == 50 + round % 50 {
                    owner.take().unwrap().kill().ok().expect("a fence");
                    assert_eq!(drops.load(SeqCst), 0);
                }
                if taken == 150 {
                    stop.store(true, Relaxed);
                }
            }
            drop(end);
        });
        assert_eq!(drops.load(SeqCst), 1);
    }
}

/// A thread that gets a reference after the kill has returned would use an object that goes.
#[test]
fn no_reference_is_given_out_after_the_kill() {
    for _ in 0..from_environment("PINFOLD_REF_ROUNDS", 200) {
        let counted = Counted::new();
        let count = &counted.count;
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let killed = &killed;
                scope.spawn(move || {
                    pin(thread);
                    loop {
                        let late = killed.load(SeqCst);
                        let got = count.tryget_live();
                        assert!(!(late && got), "a reference after the kill");
                        if got {
                            count.put();
                        }
                        if late {
                            break;
                        }
                    }
                });
            }
            std::thread::yield_now();
            count.kill().unwrap();
            killed.store(true, SeqCst);
        });
        assert!(count.is_zero());
        assert_eq!(counted.releases(), 1);
    }
}

/// Threads get and put while the count is killed and revived again and again.
#[test]
fn no_reference_is_lost_while_a_count_changes_its_mode() {
    let counted = Counted::new();
    let count = &counted.count;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let stop = &stop;
            scope.spawn(move || {
                for turn in 0.. {
                    if turn % 512 == 0 {
                        pin(thread + turn / 512);
                    }
                    // The main thread keeps a reference of its own.
                    count.get();
                    assert!(count.tryget());
                    count.put();
                    count.put();
                    if stop.load(Relaxed) {
                        break;
                    }
                }
            });
        }
        let _end = StopAtEnd(&stop);
        count.get();
        for _ in 0..500 {
            assert_eq!(count.kill(), Ok(true));
            assert!(count.resurrect());
        }
    });
    count.kill().unwrap();
    assert_eq!(counted.releases(), 0);
    count.put();
    assert_eq!(counted.releases(), 1);
}

static RELEASED: AtomicU64 = AtomicU64::new(0);
static INTERRUPTED: PerCpuRef = PerCpuRef::new(|_| {
    RELEASED.fetch_add(1, SeqCst);
});
static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    // Every other handler keeps its reference until the next one.
    if HANDLED.fetch_add(1, SeqCst).is_multiple_of(2) {
        INTERRUPTED.get();
    } else {
        INTERRUPTED.put();
    }
    assert!(INTERRUPTED.tryget());
    INTERRUPTED.put();
}

#[test]
fn signal_handlers_get_and_put() {
    let timer = Timer::start(libc::SIGUSR1, on_signal, 50);
    while HANDLED.load(SeqCst) < 1000 {
        INTERRUPTED.get();
        INTERRUPTED.put();
    }
    drop(timer);
    if !HANDLED.load(SeqCst).is_multiple_of(2) {
        INTERRUPTED.put();
    }
    assert_eq!(RELEASED.load(SeqCst), 0);
    INTERRUPTED.kill().unwrap();
    assert_eq!(RELEASED.load(SeqCst), 1);
}

/// The child of a fork goes on with the references of the parent's thread, also if another thread
/// was killing or reviving a count at that moment.
#[test]
fn a_forked_child_counts_on() {
    let stop = AtomicBool::new(false);
    let busy = Counted::new();
    busy.count.get();
    std::thread::scope(|scope| {
        let _end = StopAtEnd(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                busy.count.kill().unwrap();
                assert!(busy.count.resurrect());
            }
        });
        let counted = Counted::new();
        let count = &counted.count;
        count.get();
        for _ in 0..50 {
            in_child(30, || {
                count.get();
                count.put();
                let killed = count.kill() == Ok(true) && counted.releases() == 0;
                count.put();
                // The other thread had killed the count, or not. One reference is left then.
                let other = busy.count.kill().is_ok();
                busy.count.put();
                killed && counted.releases() == 1 && other && busy.releases() == 1
            });
        }
        count.put();
        count.kill().unwrap();
        assert_eq!(counted.releases(), 1);
    });
}

/// Without the fence no thread can know that the CPUs' words are at rest. So the kill fails, and
/// the count goes on.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_kill_that_may_not_fence_changes_nothing() {
    if !common::again::alone("a_kill_that_may_not_fence_changes_nothing", |_| ()) {
        return;
    }
    let (counted, later) = (Counted::new(), Counted::new());
    let owner = PerCpuArcOwner::new(7).unwrap();
    let count = &counted.count;
    count.get();
    drop(owner.share());
    forbid(&[libc::SYS_membarrier], libc::ENOSYS);
    if pinfold_rseq::backend() == pinfold_rseq::Backend::Atomic {
        assert_eq!(count.kill(), Ok(true));
        return;
    }
    assert_eq!(count.kill().unwrap_err().errno, libc::ENOSYS);
    assert!(!count.is_dying() && count.tryget_live());
    (0..2).for_each(|_| count.put());
    assert_eq!(counted.releases(), 0);
    // The value is leaked, but a handle that is left keeps it.
    let (owner, _) = owner.kill().unwrap_err();
    let handle = owner.share();
    drop(owner);
    assert_eq!(*handle, 7);
    // A count that is first used after the refusal needs no fence.
    later.count.get();
    assert_eq!(later.count.kill(), Ok(true));
    later.count.put();
    assert_eq!(later.releases(), 1);
}

/// Blocks of size classes hold values of every layout that fits, and are given back.
#[test]
fn values_of_any_layout() {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    for turn in 0..1000 {
        let page = PerCpuArcOwner::new(Page([7; 4096])).ok().expect("memory");
        let nothing = PerCpuArcOwner::new(()).expect("memory");
        let handle = page.share();
        assert!(core::ptr::from_ref(&*handle).addr().is_multiple_of(4096));
        drop((page, nothing));
        assert_eq!(handle.0[turn], 7);
    }
    #[repr(align(0x20000))]
    struct Wide(());
    assert!(PerCpuArcOwner::new(Wide(())).is_err(), "too large");
}
