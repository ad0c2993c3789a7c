//! Text as a memory policy, as `PINFOLD_POLICY`, `--policy` and the C API take it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinfold::mempolicy::Mempolicy;
use pinfold::topology::NodeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

#[path = "../../crates/cli/src/policy/fault.rs"]
mod fault;

fuzz_target!(|data: &[u8]| {
    // What the command says of a policy that is wrong: it points into the text.
    let shown = fault::parse(OsStr::from_bytes(data));
    let Ok(text) = std::str::from_utf8(data) else {
        assert!(shown.is_err());
        return;
    };
    match Mempolicy::parse(text) {
        Ok(mut policy) => {
            assert_eq!(shown.ok().as_ref(), Some(&policy));
            let printed = policy.to_string();
            assert_eq!(printed.parse(), Ok(policy.clone()), "{printed}");
            let before = policy.clone();
            policy.rebind(&NodeSet::from_iter([0, 3, 1023]));
            assert_eq!(policy.unbound(), before);
        }
        Err(error) => {
            assert!(error.position() <= text.len());
            assert!(!error.to_string().is_empty());
            assert!(shown.is_err_and(|shown| !format!("{shown:#}").is_empty()));
        }
    }
});
