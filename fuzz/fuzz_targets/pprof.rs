//! A profile in pprof's format, as `pinfold heap dump FILE` and `--diff` take it. The input is the
//! message before it is compressed: the fuzzer could not change a compressed one in small steps.
#![no_main]

use command::fuzzing::report;
use flate2::Compression;
use flate2::write::GzEncoder;
use libfuzzer_sys::fuzz_target;
use pinfold_pprof::internal::pprof;
use pinfold_pprof::internal::profile::What;
use std::io::Write;

fuzz_target!(|data: &[u8]| {
    let _ = pprof::decode(data);
    let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
    gzip.write_all(data).expect("memory");
    let Ok(mut profile) = pprof::decode(&gzip.finish().expect("memory")) else {
        return;
    };
    for what in [What::InUse, What::Allocated] {
        let _ = report::summary(&profile, what);
        let _ = report::functions(&profile, what, 5);
        let _ = report::stacks(&profile, what, 5);
        let _ = report::json(&profile, None, what, 5).to_string();
    }
    let again = pprof::decode(&pprof::encode(&profile)).expect("the same");
    profile.subtract(&again);
});
