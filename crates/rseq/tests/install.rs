//! Tests when a unit can be installed. The test is alone in its process, because the backend is
//! chosen once for a process.

use pinfold_rseq::{Index, UNIT_HEADER, Units, decided, init};
use std::ptr::null_mut;

#[test]
fn no_unit_is_installed_before_the_backend_is_chosen() {
    static UNITS: Units = Units::new();
    let unit = Box::leak(Box::new([0u64; UNIT_HEADER / 8 + 1])).as_mut_ptr();
    assert_eq!(UNITS.install(0, unit.cast()), Err(null_mut()));
    assert!(UNITS.unit(0).is_null());
    init(Index::Cid);
    assert!(decided());
    assert_eq!(UNITS.install(0, unit.cast()), Ok(()));
    assert_eq!(UNITS.install(0, unit.cast()), Err(unit.cast()));
}
