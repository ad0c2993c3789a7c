//! Per-CPU data in a process that forks while other threads work on it.

mod common;

use common::in_child;
use pinfold::percpu::{Node, PerCpu, PerCpuList, PerCpuRing};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[test]
fn a_forked_child_goes_on_with_copies_of_its_own() {
    static WORD: PerCpu<u64> = PerCpu::new();
    static LIST: PerCpuList<u64> = PerCpuList::new();
    static RING: PerCpuRing<1, 1024> = PerCpuRing::new();
    WORD.add(5);
    LIST.push(Box::leak(Box::new(Node::new(5))));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Other threads are at work from afar when the process forks.
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let mut nodes = vec![];
                let _ = LIST.take_all(|node| nodes.push(node));
                nodes.into_iter().for_each(|node| LIST.push(node));
                RING.drain(|_, _| ());
            }
        });
        for _ in 0..50 {
            in_child(30, || {
                WORD.add(1);
                let mut items = 0;
                let taken = LIST.take_all(|_| items += 1);
                let read = RING.push([1]).is_ok() && RING.drain(|_, _| ()) > 0;
                // The thread at work may hold the item.
                WORD.sum() == 6 && taken.is_ok() && items <= 1 && read
            });
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(WORD.sum(), 5);
}
