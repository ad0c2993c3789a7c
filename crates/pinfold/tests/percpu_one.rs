//! Per-CPU variables, arrays, lists and rings on one CPU: what each operation returns. No other
//! test of the process takes lists apart or forks meanwhile.

mod common;

use common::pin;
use pinfold::percpu::{Node, PerCpu, PerCpuArray, PerCpuList, PerCpuPair, PerCpuRing, PushError};

#[test]
fn a_variable_does_what_the_kernels_names_say() {
    pin(0);
    static WORD: PerCpu<i64> = PerCpu::new();
    assert_eq!(WORD.read(), 0);
    WORD.write(0b1100);
    WORD.and(0b0110);
    WORD.or(0b0001);
    WORD.add(-10);
    WORD.dec();
    assert_eq!(WORD.add_return(2), -4);
    WORD.inc();
    assert_eq!(WORD.xchg(7), -3);
    assert_eq!(WORD.cmpxchg(8, 9), 7);
    assert_eq!(WORD.cmpxchg(7, 9), 7);
    let mut expected = 5;
    assert!(!WORD.try_cmpxchg(&mut expected, 1));
    assert_eq!(expected, 9);
    assert!(WORD.try_cmpxchg(&mut expected, 20));
    assert_eq!(WORD.update(|word| word * 2), 20);
    assert_eq!(WORD.read(), 40);
    assert_eq!(WORD.sum(), 40);
    assert_eq!((WORD.inc_return(), WORD.dec_return()), (41, 40));
    assert_eq!((WORD.sub_return(-2), WORD.sub_return(2)), (42, 40));
    let here = (0..8192)
        .find(|&cpu| WORD.read_on(cpu) == Some(40))
        .unwrap();
    assert_eq!(WORD.write_on(here, -1), Ok(Some(40)));
    assert_eq!((WORD.read_on(here), WORD.xchg(40)), (Some(-1), -1));
    assert_eq!(
        (WORD.read_on(8191), WORD.write_on(8191, 1)),
        (None, Ok(None))
    );
    assert_eq!(PerCpu::<i64>::new().write_on(here, 1), Ok(None));
    assert_eq!(WORD.fold(1, |sum, word| sum + word), 41);
    assert!(format!("{WORD:?}").contains("40"));
}

#[test]
fn every_type_comes_back_as_it_was() {
    pin(0);
    fn check<T: pinfold::percpu::Word + PartialEq + std::fmt::Debug>(zero: T, values: &[T]) {
        let variable = PerCpu::new();
        assert_eq!(variable.read(), zero);
        for &value in values {
            variable.write(value);
            assert_eq!(variable.read(), value);
            assert_eq!(variable.cmpxchg(value, zero), value);
            assert_eq!(variable.xchg(value), zero);
        }
    }
    check(0, &[u64::MAX, 1]);
    check(0, &[i64::MIN, -1]);
    check(0, &[i32::MIN, -1, i32::MAX]);
    check(0, &[u8::MAX, 3]);
    check(0, &[i16::MIN, -1]);
    check(false, &[true, false]);
    check([0, 0], &[[1, u32::MAX], [u32::MAX, 2]]);
    check(None, &[Some(&17u64), None]);
}

#[test]
fn elements_are_apart() {
    pin(0);
    let array = PerCpuArray::<u64, 20>::new();
    for at in 0..20 {
        array.at(at).unwrap().add(at as u64 + 1);
    }
    for at in 0..20 {
        assert_eq!(array.at(at).unwrap().sum(), at as u64 + 1);
    }
    assert!(array.at(20).is_none());
}

#[test]
fn a_dropped_variables_memory_is_zero_for_the_next() {
    for _ in 0..3 {
        let variable = PerCpu::<u64>::new();
        assert_eq!(variable.sum(), 0);
        variable.add(1 << 40);
    }
}

#[test]
fn a_pair_changes_only_if_both_words_are_as_expected() {
    pin(0);
    let pair = PerCpuPair::<u64, i64>::new();
    assert_eq!(pair.read(), Some((0, 0)));
    assert!(pair.cmpxchg((0, 0), (u64::MAX, -3)));
    assert!(!pair.cmpxchg((u64::MAX, 0), (5, 5)));
    assert!(!pair.cmpxchg((0, -3), (5, 5)));
    assert_eq!(pair.read(), Some((u64::MAX, -3)));
    assert!(pair.cmpxchg((u64::MAX, -3), (7, 8)));
    let mut copies = vec![];
    pair.for_each_cpu(|_, copy| copies.push(copy));
    copies.retain(|&copy| copy != (0, 0));
    assert_eq!(copies, [(7, 8)]);
    // The first operation on a new pair finds no copy.
    assert!(!PerCpuPair::<u64, u64>::new().cmpxchg((1, 0), (2, 2)));
}

#[test]
fn a_list_gives_the_last_item_first() {
    pin(0);
    let list = PerCpuList::new();
    for n in 0..3 {
        list.push(Box::leak(Box::new(Node::new(n))));
    }
    assert_eq!(list.pop().map(|node| node.value), Some(2));
    assert_eq!(
        list.take().map(|node| node.value).collect::<Vec<_>>(),
        [1, 0]
    );
    assert!(list.pop().is_none() && list.take().next().is_none());
}

#[test]
fn a_ring_refuses_what_it_has_no_room_for() {
    pin(0);
    let ring = PerCpuRing::<2, 4>::new();
    assert_eq!(ring.drain(|_, _| unreachable!()), 0);
    for n in 0..4 {
        ring.push([n, !n]).unwrap();
    }
    assert_eq!(ring.push([4, 5]), Err(PushError::Full));
    let mut seen = vec![];
    assert_eq!(ring.drain(|_, [n, inverse]| seen.push((n, !inverse))), 4);
    assert_eq!(seen, [(0, 0), (1, 1), (2, 2), (3, 3)]);
    ring.push([9, 9]).unwrap();
    let larger_than_a_unit = PerCpuRing::<4, { 1 << 20 }>::new();
    assert_eq!(larger_than_a_unit.push([0; 4]), Err(PushError::Unavailable));
    assert_eq!(larger_than_a_unit.drain(|_, _| ()), 0);
}
