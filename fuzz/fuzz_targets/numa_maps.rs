//! `/proc/PID/numa_maps`, which `pinfold numastat` reads.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/cli/src/numastat/maps.rs"]
#[allow(dead_code, reason = "the target uses a part")]
mod maps;

fuzz_target!(|text: &str| {
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
