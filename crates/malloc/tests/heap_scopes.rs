//! Scopes: the global allocator's blocks come from a heap, in one thread, for a while.

#[path = "../../pinfold/tests/common/again.rs"]
mod again;

use again::alone;
use pinfold::heaps::Heap;
use pinfold_malloc::scope;
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::mpsc::channel;
use std::thread;

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

/// Blocks of each kind: small, a run, and a mapping.
const SIZES: [usize; 6] = [24, 5000, 40_000, 300_000, 5 << 20, 70 << 20];

#[test]
fn only_the_threads_in_a_scope_allocate_from_the_heap() {
    if !alone("only_the_threads_in_a_scope_allocate_from_the_heap", |_| {}) {
        return;
    }
    let heap = Heap::new("scope").unwrap();
    let (ask, asked) = channel::<usize>();
    let (answer, answered) = channel::<Vec<u8>>();
    let other = thread::spawn(move || {
        let blocks = asked.iter().map(|size| black_box(Vec::with_capacity(size)));
        blocks.for_each(|block| answer.send(block).unwrap());
    });
    for size in SIZES {
        let before = heap.held();
        let outside: Vec<u8> = black_box(Vec::with_capacity(size));
        assert_eq!(heap.held(), before, "{size}");
        let (inside, elsewhere): (Vec<u8>, _) = scope(&heap, || {
            // Sends and receives first, because the channel allocates in the scope.
            ask.send(size).unwrap();
            let elsewhere = answered.recv().unwrap();
            let before = heap.held();
            let inside = black_box(Vec::with_capacity(size));
            assert!(heap.held() > before || size < 64 << 10, "{size}");
            (inside, elsewhere)
        })
        .unwrap();
        // Only the block of this thread is the heap's.
        // SAFETY: the test owns both blocks.
        unsafe {
            assert!(heap.contains(inside.as_ptr()), "{size}");
            assert!(!heap.contains(elsewhere.as_ptr()), "{size}");
            assert!(!heap.contains(outside.as_ptr()), "{size}");
        }
    }
    drop(ask);
    other.join().unwrap();
}

/// Blocks of a scope grow, shrink, move and die outside of it, and the other way round.
#[test]
fn blocks_cross_the_border_of_a_scope() {
    let heap = Heap::new("border").unwrap();
    for from in SIZES {
        for to in SIZES {
            let mut bytes = scope(&heap, || vec![from as u8; from]).unwrap();
            bytes.resize(to, from as u8);
            bytes.shrink_to_fit();
            assert!(bytes.iter().all(|&byte| byte == from as u8));
            let mut bytes = vec![from as u8; from];
            scope(&heap, || {
                bytes.resize(to, from as u8);
                bytes.shrink_to_fit();
            });
            assert!(bytes.iter().all(|&byte| byte == from as u8));
            scope(&heap, || drop(bytes));
        }
    }
    heap.shrink().unwrap();
    assert!(heap.held() < 4 << 20, "{}", heap.held());
}

#[test]
fn scopes_nest_and_end_when_they_unwind() {
    let [outer, inner] = ["outer", "inner"].map(|name| Heap::new(name).unwrap());
    let blocks = scope(&outer, || {
        let first = vec![1u8; 100_000];
        let second = scope(&inner, || vec![2u8; 200_000]).unwrap();
        let third = vec![3u8; 300_000];
        (first, second, third)
    });
    assert!((400_000..800_000).contains(&outer.held()));
    assert!((200_000..400_000).contains(&inner.held()));
    drop(blocks);
    let unwound =
        std::panic::catch_unwind(|| scope(&outer, || std::panic::resume_unwind(Box::new(1))));
    assert!(unwound.is_err());
    let (before, block) = (outer.held(), black_box(vec![1u8; 1 << 20]));
    assert_eq!(outer.held(), before);
    drop(block);
}

#[test]
fn a_scope_beyond_its_limit_gets_an_error() {
    let heap = Heap::builder("limit").limit(1 << 20).build().unwrap();
    scope(&heap, || {
        let mut bytes: Vec<u8> = vec![7; 1000];
        assert!(bytes.try_reserve_exact(2 << 20).is_err());
        assert!(Vec::<u8>::new().try_reserve_exact(2 << 20).is_err());
        assert!(bytes.iter().all(|&byte| byte == 7));
    });
    assert!(Vec::<u8>::new().try_reserve_exact(2 << 20).is_ok());
}

/// Near its limit, a heap serves a block or refuses it. It leaves none to malloc, which would not
/// count it.
#[test]
fn no_block_escapes_a_limit() {
    let heap = Heap::builder("near").limit(400 << 10).build().unwrap();
    let (blocks, refused) = scope(&heap, || {
        let mut blocks: Vec<Vec<u8>> = Vec::with_capacity(64);
        let mut refused = 0;
        // Classes have slabs of different sizes.
        for size in [3000, 10_000, 20_000, 40_000, 64, 700].repeat(10) {
            let mut block = Vec::new();
            match block.try_reserve_exact(size) {
                Ok(()) => blocks.push(block),
                Err(_) => refused += 1,
            }
        }
        (blocks, refused)
    })
    .unwrap();
    assert!(refused > 0 && !blocks.is_empty());
    for block in &blocks {
        // SAFETY: the test owns the block.
        let is_of_heap = unsafe { heap.contains(block.as_ptr()) };
        assert!(is_of_heap, "{}", block.capacity());
    }
}

/// A heap that was dropped while code holds its blocks keeps them: nothing else gets their memory.
#[test]
fn blocks_outlive_a_heap_that_had_a_scope() {
    let heap = Heap::new("outlived").unwrap();
    let map: HashMap<u32, String> = scope(&heap, || {
        (0..1000).map(|key| (key, format!("value {key}"))).collect()
    })
    .unwrap();
    drop(heap);
    pinfold::memory::trim();
    let next = Heap::new("next").unwrap();
    for nth in 0..100_000 {
        let size = 8 + nth % 600;
        let block = next.alloc(size).unwrap();
        // SAFETY: the test owns the block of `size` bytes.
        unsafe { block.write_bytes(0xff, size) };
    }
    let others: Vec<Vec<u8>> = (0..100_000).map(|nth| vec![0xff; nth % 600]).collect();
    assert!((0..1000).all(|key| map[&key] == format!("value {key}")));
    drop(others);
}

/// A profile starts and stops while there are scopes, and malloc keeps working.
#[test]
fn samples_and_scopes() {
    if !alone("samples_and_scopes", |_| {}) {
        return;
    }
    let heap = Heap::new("sampled").unwrap();
    for round in 0..6 {
        match round % 3 {
            0 => assert!(pinfold_malloc::heap_profile::start(4096)),
            1 => {}
            _ => assert!(pinfold_malloc::heap_profile::stop()),
        }
        let before = heap.held();
        let outside: Vec<Vec<u8>> = (0..2000).map(|size| vec![1; size]).collect();
        assert_eq!(heap.held(), before);
        let inside: Vec<Vec<u8>> =
            scope(&heap, || (0..2000).map(|size| vec![2; size]).collect()).unwrap();
        assert!(heap.held() > 1 << 20);
        // Profiles leave the heap's blocks out, also those that grow.
        let mut mapping: Vec<u8> = scope(&heap, || Vec::with_capacity(64 << 20)).unwrap();
        mapping.reserve_exact(200 << 20);
        let totals = pinfold::internal::profile::totals();
        assert!(totals.bytes - totals.freed_bytes < 64 << 20);
        drop(mapping);
        assert!(outside.iter().flatten().all(|&byte| byte == 1));
        assert!(inside.iter().flatten().all(|&byte| byte == 2));
    }
}
