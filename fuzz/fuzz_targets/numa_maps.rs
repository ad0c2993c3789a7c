//! `/proc/PID/numa_maps`, which `pinfold numastat`, `policy --check` and `migrate` read.
#![no_main]

use command::fuzzing::Checked;
use libfuzzer_sys::fuzz_target;
use pinfold::topology::NodeId;

#[path = "../../crates/cli/src/numastat/maps.rs"]
#[allow(dead_code, reason = "the target uses a part")]
mod maps;

fuzz_target!(|text: &str| {
    for local in [None, Some(NodeId(1))] {
        if let Ok(checked) = Checked::of(7, String::new(), text, local) {
            assert_eq!(
                checked.is_misplaced(),
                checked.to_string().contains("do not lie where")
            );
        }
    }
    match maps::Usage::parse(text) {
        Ok(usage) => {
            for node in usage.nodes().iter() {
                let _ = usage.total(node);
                let _ = usage.bytes(maps::Kind::Huge, node);
            }
        }
        Err(error) => assert!(format!("{error:#}").starts_with("line ")),
    }
});
