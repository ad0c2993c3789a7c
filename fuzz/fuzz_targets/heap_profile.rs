//! A heap profile as a process shows it or leaves it in a file, and what is made of it. No function
//! has a name: another process reads the files.
#![no_main]

use command::fuzzing::report;
use libfuzzer_sys::fuzz_target;
use pinfold_pprof::internal::names::Found;
use pinfold_pprof::internal::profile::{Profile, What};
use pinfold_pprof::internal::flame::{self, Picture};
use pinfold_pprof::internal::{pprof, raw::Raw};

fuzz_target!(|data: &[u8]| {
    let Ok(raw) = Raw::parse(data) else {
        return;
    };
    let mut profile = Profile::of(&raw, |_, _| Found::default());
    let read = pprof::decode(&pprof::encode(&profile)).expect("what was written");
    assert_eq!(read.stacks.len(), profile.stacks.len());
    assert_eq!(read.locations.len(), profile.locations.len());
    for what in [What::InUse, What::Allocated, What::Fragments] {
        let picture = Picture {
            what,
            subtitle: None,
            most: usize::MAX,
            clean: command::fuzzing::escaped,
        };
        let _ = flame::draw(&profile, picture);
        let _ = report::summary(&profile, what);
        let _ = report::functions(&profile, what, 5);
        let _ = report::stacks(&profile, what, 5);
        let _ = report::json(&profile, None, what, 5).to_string();
    }
    profile.subtract(&read);
});
