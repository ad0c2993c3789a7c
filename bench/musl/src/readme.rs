//! The allocation and the add of README.md's Rust program, which four threads repeat.

use pinfold::counter::PerCpuCounter;
use pinfold::slab::Cache;
use std::error::Error;
use std::sync::Barrier;
use std::time::Instant;

const THREADS: usize = 4;
const ROUNDS: usize = 2_000_000;

static OPEN: PerCpuCounter = PerCpuCounter::new();

pub fn run(report: fn(Instant) -> Result<(), Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
    let names = Cache::new("names")?;
    let [worked, reported] = [0; 2].map(|_| Barrier::new(THREADS + 1));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let name = names
                        .alloc(String::from("pinfold"))
                        .expect("memory for a name");
                    OPEN.add(name.len() as i64);
                }
                worked.wait();
                reported.wait();
            });
        }
        worked.wait();
        let done = report(begun);
        reported.wait();
        done
    })?;
    assert_eq!(OPEN.sum(), (7 * THREADS * ROUNDS) as i64);
    Ok(())
}
