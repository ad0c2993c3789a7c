//! Per-CPU data in a process that forks while other threads work on it.

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
            // SAFETY: the child only runs operations, and ends by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                WORD.add(1);
                let mut items = 0;
                let taken = LIST.take_all(|_| items += 1);
                let read = RING.push([1]).is_ok() && RING.drain(|_, _| ()) > 0;
                // The thread at work may hold the item.
                let right = WORD.sum() == 6 && taken.is_ok() && items <= 1 && read;
                // SAFETY: `_exit` ends the child without running the parent's handlers.
                unsafe { libc::_exit(i32::from(!right)) };
            }
            let mut status = -1;
            // SAFETY: `child` is a child of this process, and `status` is writable.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0);
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(WORD.sum(), 5);
}
