//! A table's memory once the process has a unit.

use pinfold_rseq::{Index, UNIT_HEADER, Units, init};

/// Returns the calling thread's page faults.
fn faults() -> i64 {
    // SAFETY: zeroes are a valid `rusage`, and the kernel writes one.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage.ru_minflt
    }
}

/// A fault that replaces a page makes the kernel interrupt all CPUs of the process.
#[test]
fn later_units_replace_no_page() {
    static UNITS: Units = Units::new();
    init(Index::Cid);
    let unit = Box::leak(Box::new([0u64; UNIT_HEADER / 8 + 1])).as_mut_ptr();
    for index in 0..500 {
        assert!(UNITS.unit(index).is_null());
    }
    assert_eq!(UNITS.install(0, unit.cast()), Ok(()));
    let before = faults();
    for index in 1..500 {
        assert_eq!(UNITS.install(index, unit.cast()), Ok(()));
    }
    assert_eq!(faults(), before);
}
