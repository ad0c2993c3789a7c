//! A heap profile as a process shows it or leaves it in a file, and what is made of it. The parts
//! of files are forgotten before functions are named: another process reads the files.
#![no_main]

use command::fuzzing::raw::Raw;
use command::fuzzing::report::{self, What};
use command::fuzzing::symbols::Profile;
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    let Ok(mut raw) = Raw::parse(data) else {
        return;
    };
    raw.mappings.clear();
    let mut profile = Profile::of(&raw, Duration::ZERO);
    let bytes = command::fuzzing::pprof::encode(&profile).expect("a message");
    let read = command::fuzzing::pprof::decode(&bytes).expect("what was written");
    assert_eq!(read.stacks.len(), profile.stacks.len());
    assert_eq!(read.locations.len(), profile.locations.len());
    for what in [What::InUse, What::Allocated] {
        let _ = report::summary(&profile, what);
        let _ = report::functions(&profile, what, 5);
        let _ = report::stacks(&profile, what, 5);
        let _ = report::json(&profile, what, 5).to_string();
    }
    profile.subtract(&read);
});
