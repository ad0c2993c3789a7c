//! The grammar of `PINFOLD_SLAB_DEBUG`. The input is a cache's name, a line feed, and the setting.
#![no_main]

use libfuzzer_sys::fuzz_target;
use parse::{check, flags_for};

// The library's own source, for what it does not export.
#[path = "../../crates/pinfold/src/slab/checks/debug/parse.rs"]
mod parse;

/// Stands for the library's flags: only the letters matter to the grammar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DebugFlags(u32);

impl DebugFlags {
    const NONE: DebugFlags = DebugFlags(0);
    const DEFAULT: DebugFlags = DebugFlags(0xf);

    fn of_letter(letter: char) -> Option<DebugFlags> {
        let nth = "FZPUT".find(letter.to_ascii_uppercase())?;
        Some(DebugFlags(1 << nth))
    }
}

impl std::ops::BitOr for DebugFlags {
    type Output = DebugFlags;
    fn bitor(self, other: DebugFlags) -> DebugFlags {
        DebugFlags(self.0 | other.0)
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((name, text)) = std::str::from_utf8(data)
        .ok()
        .and_then(|all| all.split_once('\n'))
    else {
        return;
    };
    let flags = flags_for(text, name).ok();
    match check(text) {
        Ok(()) => assert!(flags.is_some()),
        Err(error) => {
            assert!(flags.is_none());
            assert!(text[error.at..].starts_with(error.letter), "{error:?}");
        }
    }
    // A pattern alone decides as a search that tries everything does.
    if text.len() <= 32 && !text.contains([',', ';']) {
        let found = flags_for(&format!("T,{text}"), name) != Ok(DebugFlags::NONE);
        assert_eq!(found, fits(text.trim().as_bytes(), name.as_bytes()));
    }
});

/// Whether `name` is what `pattern` describes: a row for each prefix of the pattern.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let mut row = vec![false; name.len() + 1];
    row[0] = true;
    for &byte in pattern {
        let before = row.clone();
        row[0] = byte == b'*' && before[0];
        for n in 0..name.len() {
            row[n + 1] = match byte {
                b'*' => before[n + 1] || row[n],
                b'?' => before[n],
                _ => before[n] && byte == name[n],
            };
        }
    }
    row[name.len()]
}
