//! Tests every operation, undisturbed and in a storm of signals and moves between CPUs.
//!
//! The backend is the one that `PINFOLD_RSEQ` selects.

mod storm;

use pinfold_rseq::shard::{MAX_BATCH, REFUSED, TOKEN};
use pinfold_rseq::{
    Backend, Index, STACK_ALIGN, UNIT_HEADER, Units, backend, current, current_cpu, fence, init,
    possible,
};
use std::array::from_fn;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use storm::{choose, cpus, pin};

const WORD: usize = UNIT_HEADER;
const COUNTER: usize = UNIT_HEADER + 8;
/// A word from which a pop subtracts, and what it holds at first.
const COUNTDOWN: usize = UNIT_HEADER + 16;
/// A shard, and its batch.
const SHARD: usize = UNIT_HEADER + 24;
const BATCH: i64 = 20;
const ROOM: u64 = 1 << 40;

/// Returns a table with a unit for every index, each with an empty stack for `capacity` items.
fn table(capacity: usize) -> &'static Units {
    choose();
    let units: &'static Units = Box::leak(Box::new(Units::new()));
    for index in 0..possible() {
        let unit = Box::leak(Box::new([0u64; UNIT_HEADER / 8 + 7]));
        unit[WORD / 8] = stack(capacity) as u64;
        unit[COUNTDOWN / 8] = ROOM;
        unit[SHARD / 8 + 3] = BATCH as u64;
        units.install(index, unit.as_mut_ptr().cast()).unwrap();
    }
    units
}

/// Returns the word of an empty stack for `capacity` items.
fn stack(capacity: usize) -> *mut *mut u8 {
    #[repr(align(1024))]
    struct Block([*mut u8; STACK_ALIGN / 8]);
    let block = Box::leak(Box::new(Block([null_mut(); STACK_ALIGN / 8])));
    block.0[STACK_ALIGN / 8 - capacity..].as_mut_ptr()
}

fn words(units: &Units, offset: usize) -> impl Iterator<Item = u64> {
    (0..possible()).map(move |index| {
        // SAFETY: the unit is installed, and no operation is under way.
        unsafe { *units.unit(index).add(offset).cast::<u64>() }
    })
}

#[test]
fn a_pinned_thread_knows_its_cpu() {
    // SAFETY: `sched_getcpu` has no preconditions.
    let here = || unsafe { libc::sched_getcpu() } as usize;
    assert!(current_cpu() < cpus());
    for cpu in 0..cpus() {
        pin(cpu);
        // The system may forbid a CPU.
        assert!(here() != cpu || current_cpu() == cpu, "CPU {cpu}");
    }
}

#[test]
fn operations_without_a_unit_fail() {
    init(Index::Cid);
    let units = Box::leak(Box::new(Units::new()));
    let mut items = [null_mut(); 2];
    // SAFETY: there is no unit in which an offset could be wrong.
    unsafe {
        assert!(!units.add(WORD, 1));
        assert_eq!(units.count_up(SHARD, 1), REFUSED);
        assert!(units.claim(SHARD, TOKEN + 1).is_none());
        assert!(units.load(WORD).is_none());
        assert!(!units.store_if_equal(WORD, 0, 1));
        assert!(units.pop(WORD).is_null());
        assert!(!units.push(WORD, 8 as *mut u8));
        assert_eq!(units.pop_batch(WORD, &mut items), 0);
        assert_eq!(units.push_batch(WORD, &[8 as *mut u8]), 0);
    }
}

#[test]
fn stacks_are_last_in_first_out_and_bounded() {
    pin(0);
    let units = table(5);
    let item = |n: usize| (n * 8) as *mut u8;
    let mut items = [null_mut(); 9];
    // SAFETY: every index has a unit with a stack at WORD.
    unsafe {
        assert!(units.pop(WORD).is_null());
        assert!(units.push(WORD, item(1)));
        assert_eq!(
            units.push_batch(WORD, &[item(2), item(3), item(4), item(5), item(6)]),
            4
        );
        assert!(!units.push(WORD, item(7)));
        assert_eq!(units.push_batch(WORD, &[item(7)]), 0);
        assert_eq!(units.pop(WORD), item(5));
        assert_eq!(units.pop_batch(WORD, &mut items[..2]), 2);
        assert_eq!(items[..2], [item(4), item(3)]);
        assert_eq!(units.pop_batch(WORD, &mut items), 2);
        assert_eq!(items[..2], [item(2), item(1)]);
        assert_eq!(units.pop_batch(WORD, &mut items), 0);
        assert_eq!(units.pop_batch(WORD, &mut []), 0);
        assert_eq!(units.push_batch(WORD, &[]), 0);
    }
}

/// Writes `value` to the word at `offset` of every unit.
fn everywhere(units: &Units, offset: usize, value: u64) {
    (0..possible()).for_each(|index| {
        // SAFETY: the unit is installed, and no operation is under way.
        unsafe { *units.unit(index).add(offset).cast::<u64>() = value };
    });
}

#[test]
fn a_counted_pop_needs_an_item_and_room() {
    pin(0);
    let units = table(2);
    if backend() == Backend::Atomic {
        return;
    }
    let item = |n: usize| (n * 8) as *mut u8;
    everywhere(units, COUNTDOWN, 10);
    // SAFETY: every index has a unit with a stack at WORD and a word at COUNTDOWN. The backend has
    // restartable sequences.
    unsafe {
        let pop = |n| units.known_area().pop_counted::<COUNTDOWN>(WORD, n);
        assert!(pop(1).is_null());
        assert!(units.push(WORD, item(1)));
        assert!(units.push(WORD, item(2)));
        assert!(pop(10).is_null());
        assert_eq!(pop(9), item(2));
        assert!(pop(1).is_null());
        everywhere(units, COUNTDOWN, -5i64 as u64);
        assert!(pop(1).is_null());
        everywhere(units, COUNTDOWN, 10);
        assert_eq!(pop(4), item(1));
        assert!(pop(1).is_null());
        assert_eq!(words(units, COUNTDOWN).min(), Some(6));
    }
}

#[test]
fn a_shard_counts_up_to_twice_its_batch_and_says_what_is_left() {
    pin(0);
    let units = table(1);
    let set = |[up, down, folded, batch]: [u64; 4]| {
        everywhere(units, SHARD, up);
        everywhere(units, SHARD + 8, down);
        everywhere(units, SHARD + 16, folded);
        everywhere(units, SHARD + 24, batch);
    };
    // SAFETY: every index has a unit with a shard.
    let [up, down] = unsafe {
        [
            &(|n| units.count_up(SHARD, n)) as &dyn Fn(i64) -> i64,
            &|n| units.count_down(SHARD, n),
        ]
    };
    let count = |sign: i64, n| if sign > 0 { up(n) } else { down(n) };
    for sign in [1, -1] {
        // The words count modulo 2^64. The distance is 0 at first.
        set([u64::MAX - 1, 5, u64::MAX - 6, 10]);
        assert_eq!((count(sign, 4), count(sign, 6), count(sign, 0)), (6, 0, 0));
        assert_eq!(
            (count(sign, 7), count(sign, 4), count(sign, 3)),
            (-7, REFUSED, -10)
        );
        assert_eq!(count(sign, 1), REFUSED);
        assert_eq!(count(-sign, 20), 10);
        set([7, 7, 0, 0]);
        assert_eq!(
            (count(sign, 1), count(sign, MAX_BATCH as i64)),
            (REFUSED, REFUSED)
        );
        set([7, 7, 0, MAX_BATCH]);
        assert_eq!(count(sign, 2 * MAX_BATCH as i64), -(MAX_BATCH as i64));
        set([7, 7, 0, 10u64.wrapping_sub(1 << 44)]);
        assert_eq!(count(sign, 1), REFUSED);
    }
}

#[test]
fn a_claimed_shard_refuses_everything_until_it_is_released() {
    pin(0);
    let units = table(1);
    for token in [TOKEN + 1, 2 * TOKEN - 1] {
        // The net is -5, or its distance from what was folded is the largest possible on each side.
        for folded in [0, 5 + 2 * MAX_BATCH, (-5i64) as u64 - 2 * MAX_BATCH] {
            for (at, word) in [10, 15, folded, MAX_BATCH].into_iter().enumerate() {
                everywhere(units, SHARD + 8 * at, word);
            }
            // SAFETY: every index has a unit with a shard.
            unsafe {
                let claim = units.claim(SHARD, token).unwrap();
                let found = (claim.net as i64, claim.folded, claim.batch);
                assert_eq!(found, (-5, folded, MAX_BATCH));
                assert!(units.claim(SHARD, token).is_none());
                for n in [0, 1, MAX_BATCH as i64] {
                    let answers = [units.count_up(SHARD, n), units.count_down(SHARD, n)];
                    assert_eq!(answers, [REFUSED; 2]);
                }
                claim.release((-6i64) as u64);
                assert_eq!(units.count_up(SHARD, 1), MAX_BATCH as i64 - 2);
            }
        }
    }
    // A frozen shard and one that is not in use cannot be claimed.
    for batch in [0, 10u64.wrapping_sub(1 << 44)] {
        everywhere(units, SHARD + 24, batch);
        // SAFETY: every index has a unit with a shard.
        assert!(unsafe { units.claim(SHARD, TOKEN + 1) }.is_none());
    }
}

#[test]
fn operations_fail_on_a_stopped_index() {
    pin(0);
    let units = table(5);
    for index in 0..possible() {
        units.stop(index);
    }
    if fence().is_ok() {
        assert!((0..possible()).all(|index| units.await_stopped(index)));
        // SAFETY: every index has a unit, so both offsets lie in it.
        unsafe {
            assert!(!units.add(COUNTER, 1));
            assert!(!units.push(WORD, 8 as *mut u8));
        }
    }
    (0..possible()).for_each(|index| units.resume(index));
    // SAFETY: every index has a unit, so the offset lies in it.
    assert!(unsafe { units.add(COUNTER, 1) });
    assert_eq!(words(units, COUNTER).sum::<u64>(), 1);
}

#[test]
fn a_unit_is_installed_once() {
    let units = table(1);
    let there = units.unit(0);
    assert_eq!(units.install(0, 64 as *mut u8), Err(there));
    assert!(units.unit(usize::MAX).is_null());
}

/// Threads move tokens between the stacks of all CPUs, count each move, and change CPU at random.
/// Signals interrupt them, and the handler does the same. At the end every token is there once, and
/// the counts agree.
#[test]
fn a_storm_neither_loses_nor_doubles_a_token() {
    const TOKENS: usize = 48;
    const WORKERS: usize = 8;
    let units = table(64);
    HANDLER_UNITS.store(std::ptr::from_ref(units) as u64, Ordering::SeqCst);
    // Each worker places its own tokens. A thread may keep its concurrency id on all CPUs, so one
    // thread would place all tokens in one unit.
    let place = |seed: usize| {
        for token in (1..=TOKENS).filter(|token| token % WORKERS == seed) {
            pin(token % cpus());
            // On atomics, a push fails as long as a preempted thread holds the unit.
            let push = |_| {
                std::thread::yield_now();
                // SAFETY: every index has a unit with a stack at WORD.
                unsafe { units.push(WORD, (token * 8) as *mut u8) }
            };
            assert!((0..1000).any(push));
        }
    };
    let stop = AtomicBool::new(false);
    let [counted, moved, popped] = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|seed| {
                scope.spawn({
                    let stop = &stop;
                    move || {
                        place(seed);
                        shuffle(units, seed as u64, stop)
                    }
                })
            })
            .collect();
        scope.spawn(|| storm::storm(on_signal, &stop));
        storm::wait(&HANDLED);
        stop.store(true, Ordering::Relaxed);
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .fold([0; 3], |sums, counts| from_fn(|at| sums[at] + counts[at]))
    });
    assert!(
        HANDLED.load(Ordering::SeqCst) > 100,
        "too few signals arrived"
    );
    let added: u64 = words(units, COUNTER).sum();
    assert_eq!(added, counted + HANDLED.load(Ordering::SeqCst));
    let [up, down, folded] = [0, 8, 16].map(|at| words(units, SHARD + at));
    let nets: Vec<u64> = up
        .zip(down)
        .map(|(up, down)| up.wrapping_sub(down))
        .collect();
    assert_eq!(
        nets.iter().fold(0, |sum: u64, net| sum.wrapping_add(*net)),
        moved
    );
    let mut sum = 0u64;
    for (net, folded) in nets.into_iter().zip(folded) {
        // Every claim has ended.
        let distance = net.wrapping_sub(folded) as i64;
        assert!(distance.abs() <= 2 * BATCH, "{distance}");
        sum = sum.wrapping_add(folded);
    }
    assert_eq!(sum, FOLDED.load(Ordering::SeqCst));
    assert!(moved > 0 && sum > 0);
    let subtracted: u64 = words(units, COUNTDOWN).map(|word| ROOM - word).sum();
    assert!(subtracted >= popped, "{subtracted} of {popped}");
    assert_eq!(popped > 0, backend() != Backend::Atomic);
    let mut seen: Vec<u64> = words(units, WORD).flat_map(items_of).collect();
    seen.extend(
        SET_ASIDE
            .iter()
            .map(|place| place.load(Ordering::SeqCst))
            .filter(|&token| token != 0),
    );
    seen.sort_unstable();
    assert_eq!(seen, (1..=TOKENS as u64).map(|t| t * 8).collect::<Vec<_>>());
}

/// Moves tokens and counts until `stop`, and holds no token at the end.
///
/// Returns how often it counted, by how much it moved the shards, and how many tokens it took by
/// counted pops.
fn shuffle(units: &Units, seed: u64, stop: &AtomicBool) -> [u64; 3] {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let [mut counted, mut moved, mut popped] = [0; 3];
    let counts_pops = backend() != Backend::Atomic;
    let mut held = [null_mut(); 4];
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if random.is_multiple_of(256) {
            pin(random as usize / 256 % cpus());
        }
        let batch = random as usize / 1024 % 4 + 1;
        // SAFETY: every index has a unit with a stack at WORD and the other words. Pops are counted
        // only if the backend has restartable sequences.
        unsafe {
            let got = if batch == 1 && counts_pops && random & 1 << 20 == 0 {
                held[0] = units.known_area().pop_counted::<COUNTDOWN>(WORD, 1);
                popped += u64::from(!held[0].is_null());
                usize::from(!held[0].is_null())
            } else if batch == 1 {
                held[0] = units.pop(WORD);
                usize::from(!held[0].is_null())
            } else {
                units.pop_batch(WORD, &mut held[..batch])
            };
            let mut put = 0;
            while put < got {
                if units.push(WORD, held[put]) {
                    put += 1;
                } else {
                    pin((random as usize + put) % cpus());
                    random = random.rotate_left(9);
                }
                put += units.push_batch(WORD, &held[put..got]);
            }
            counted += u64::from(units.add(COUNTER, 1));
            // Five up for each one down.
            let is_up = !random.is_multiple_of(6);
            let left = match is_up {
                true => units.count_up(SHARD, batch as i64),
                false => units.count_down(SHARD, batch as i64),
            };
            if left != REFUSED {
                moved = moved.wrapping_add_signed(if is_up { 1 } else { -1 } * batch as i64);
            }
            if left < 0
                && let Some(claim) = units.claim(SHARD, TOKEN + 1 + random % 1000)
            {
                if random.is_multiple_of(64) {
                    pin(random as usize / 64 % cpus());
                }
                let by = claim.net.wrapping_sub(claim.folded);
                FOLDED.fetch_add(by, Ordering::SeqCst);
                let net = claim.net;
                claim.release(net);
            }
            if let Some(word) = units.load(WORD) {
                units.store_if_equal(WORD, word, word);
            }
        }
    }
    [counted, moved, popped]
}

fn items_of(word: u64) -> Vec<u64> {
    let mut items = vec![];
    let mut top = word as *const u64;
    loop {
        // SAFETY: a stack has an item or the guard below its top, and no operation is under way.
        unsafe {
            top = top.sub(1);
            if *top == 0 {
                return items;
            }
            items.push(*top);
        }
    }
}

static HANDLER_UNITS: AtomicU64 = AtomicU64::new(0);
/// Tokens that a handler could not put back.
static SET_ASIDE: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
static HANDLED: AtomicU64 = AtomicU64::new(0);
/// What all folds of shards have added.
static FOLDED: AtomicU64 = AtomicU64::new(0);

/// Counts once, takes a token, and puts it back.
extern "C" fn on_signal(_: libc::c_int) {
    // The handler may be the first in its thread that needs the index.
    current();
    // SAFETY: the test stored the address of a leaked table before it armed the timer.
    let units = unsafe { &*(HANDLER_UNITS.load(Ordering::Relaxed) as *const Units) };
    // SAFETY: every index has a unit with a stack at WORD.
    unsafe {
        if units.add(COUNTER, 1) {
            HANDLED.fetch_add(1, Ordering::Relaxed);
        }
        let token = units.pop(WORD);
        // The push fails while the interrupted frame holds the unit (on atomics), and if another
        // thread has filled the stack.
        if !token.is_null() && !(0..9).any(|_| units.push(WORD, token)) {
            let place = SET_ASIDE.iter().find(|place| {
                place
                    .compare_exchange(0, token as u64, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
            });
            place.expect("there are more places than tokens");
        }
    }
}

#[test]
fn backend_follows_the_environment() {
    choose();
    let backend = backend();
    // A broken operation would make the self-test fail. Then all tests would run on atomics, and
    // pass.
    assert_ne!(pinfold_rseq::missing(), pinfold_rseq::Missing::SelfTest);
    match std::env::var("PINFOLD_RSEQ").as_deref() {
        Ok("off") => assert_eq!(backend, Backend::Atomic),
        // The test machine always has restartable sequences.
        Ok("cpu") if std::env::var_os("PINFOLD_MACHINE").is_some() => {
            assert_eq!(backend, Backend::Rseq(Index::Cpu));
        }
        Ok("cpu") => assert_ne!(backend, Backend::Rseq(Index::Cid)),
        _ => {}
    }
}
