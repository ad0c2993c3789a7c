//! A program's own data for each CPU: `cargo run --release -p pinfold --example percpu`.
//!
//! Each operation works on the copy of the CPU on which the thread runs, without a lock or an
//! atomic instruction.
//!
//! * A [`PerCpu`] is a word for each CPU.
//! * A [`PerCpuList`] is a list for each CPU. Here it holds buffers that no thread uses.
//! * A [`PerCpuRing`] is a ring of records for each CPU, which any thread can read.

use pinfold::percpu::{Node, PerCpu, PerCpuList, PerCpuRing};
use std::error::Error;
use std::thread;

static LARGEST: PerCpu<u64> = PerCpu::new();
static FREE: PerCpuList<[u8; 4096]> = PerCpuList::new();
/// A record is a request's number and its length.
static TRACE: PerCpuRing<2, 256> = PerCpuRing::new();

fn answer(number: u64) {
    let buffer = FREE
        .pop()
        .unwrap_or_else(|| Box::leak(Box::new(Node::new([0; 4096]))));
    let length = number % 4096;
    buffer.value[..length as usize].fill(1);
    FREE.push(buffer);
    LARGEST.update(|largest| largest.max(length));
    // A full ring refuses the record.
    _ = TRACE.push([number, length]);
}

fn main() -> Result<(), Box<dyn Error>> {
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..10_000).for_each(answer));
        }
    });
    println!("the longest answer had {} bytes", LARGEST.fold(0, u64::max));
    let mut records = 0;
    TRACE.drain(|_cpu, [_number, _length]| records += 1);
    println!("{records} records");
    let mut buffers = 0;
    FREE.take_all(|buffer| {
        // SAFETY: `answer` made each buffer with `Box`, and the list has given this one up.
        drop(unsafe { Box::from_raw(buffer) });
        buffers += 1;
    })?;
    println!("{buffers} buffers were free");
    Ok(())
}
