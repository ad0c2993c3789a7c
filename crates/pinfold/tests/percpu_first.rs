//! The first pushes on a CPU, while another thread takes the items of all CPUs. A process has each
//! first push once, so the test runs processes.

use pinfold::percpu::{Node, PerCpu, PerCpuList};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

const VARIABLE: &str = "PINFOLD_TEST_FIRST_PUSH";

/// Moves the thread to the `nth` CPU. Does nothing if the system does not allow it.
fn pin(nth: usize) {
    // SAFETY: `cpu_set_t` consists of integers, so zeroes are valid, and the call gets its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(nth, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

#[test]
fn first_pushes_lose_and_double_nothing() {
    for _ in 0..40 {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "one_process", "--include-ignored", "--quiet"])
            .env(VARIABLE, "1")
            .output()
            .unwrap();
        assert!(status.status.success(), "{status:?}");
    }
}

#[test]
#[ignore = "runs in a process of its own"]
fn one_process() {
    const PUSHERS: usize = 3;
    const NODES: usize = 200;
    static COUNT: PerCpu<u64> = PerCpu::new();
    static LIST: PerCpuList<AtomicBool> = PerCpuList::new();
    if std::env::var_os(VARIABLE).is_none() {
        return;
    }
    // Gives the CPUs units, but none for lists.
    for cpu in 0..4 {
        pin(cpu);
        COUNT.inc();
    }
    let (ready, left) = (AtomicUsize::new(0), AtomicUsize::new(PUSHERS));
    let mut taken = 0;
    let mut take = || {
        let done = LIST.take_all(|node| {
            assert!(!node.value.swap(true, SeqCst), "a node was taken twice");
            taken += 1;
        });
        done.unwrap();
    };
    std::thread::scope(|scope| {
        for cpu in 0..PUSHERS {
            let (ready, left) = (&ready, &left);
            scope.spawn(move || {
                pin(cpu);
                let nodes: Vec<_> = (0..NODES)
                    .map(|_| Box::leak(Box::new(Node::new(AtomicBool::new(false)))))
                    .collect();
                ready.fetch_add(1, SeqCst);
                while ready.load(SeqCst) < PUSHERS {
                    std::hint::spin_loop();
                }
                nodes.into_iter().for_each(|node| LIST.push(node));
                left.fetch_sub(1, SeqCst);
            });
        }
        while left.load(SeqCst) > 0 {
            take();
        }
    });
    take();
    assert_eq!(taken, PUSHERS * NODES);
}
