//! The analysis of a few instructions, assembled by hand.

use super::chain::Chains;
use super::flow::{Call, frame};
use super::image::{Image, Target};
use super::rules::{self, Rules};
use super::{Args, check, check_loads, table};

const CODE: u64 = 0x1000;
const DATA: u64 = 0x8000;

/// Makes an image of functions that begin 64 bytes apart, the first at `CODE`.
fn image(functions: &[(&str, &[u8])]) -> Image {
    let mut image = Image::default();
    let mut code = Vec::new();
    for (name, bytes) in functions {
        image.function(CODE + code.len() as u64, bytes.len() as u64, name);
        code.extend_from_slice(bytes);
        // Fills the rest with traps.
        code.resize(code.len().next_multiple_of(64), 0xcc);
    }
    image.section(CODE, true, code);
    image
}

/// Returns the deepest point of function `f`, and the depths of its calls. Functions `g` and `h`
/// follow it.
fn measured(bytes: &[u8]) -> (u64, Vec<u64>) {
    let image = image(&[("f", bytes), ("g", SMALL), ("h", LARGE)]);
    let frame = frame(&image, &|_| false, CODE).unwrap();
    let depths = frame.calls.iter().map(|call| call.depth);
    (frame.deepest, depths.collect())
}

/// `push rbp; sub rsp, 0x20; call g; add rsp, 0x20; pop rbp; jmp h`, where `g` and `h` are the next
/// two functions.
const CALLS: &[u8] = &[
    0x55, 0x48, 0x83, 0xec, 0x20, 0xe8, 0x36, 0, 0, 0, 0x48, 0x83, 0xc4, 0x20, 0x5d, 0xe9, 0x6c, 0,
    0, 0,
];
/// `sub rsp, 0x18; add rsp, 0x18; ret`
const SMALL: &[u8] = &[0x48, 0x83, 0xec, 0x18, 0x48, 0x83, 0xc4, 0x18, 0xc3];
/// `lea r11, [rsp - 0x3000]; 1: sub rsp, 0x1000; mov qword ptr [rsp], 0; cmp rsp, r11; jne 1b; ret`
const LARGE: &[u8] = &[
    0x4c, 0x8d, 0x9c, 0x24, 0x00, 0xd0, 0xff, 0xff, 0x48, 0x81, 0xec, 0x00, 0x10, 0x00, 0x00, 0x48,
    0xc7, 0x04, 0x24, 0, 0, 0, 0, 0x4c, 0x39, 0xdc, 0x75, 0xec, 0xc3,
];
/// `push rbx; mov rbx, [rip + to DATA]; call rbx; call rax; call rbx; pop rbx; ret`
const POINTERS: &[u8] = &[
    0x53, 0x48, 0x8b, 0x1d, 0xf8, 0x6f, 0, 0, 0xff, 0xd3, 0xff, 0xd0, 0xff, 0xd3, 0x5b, 0xc3,
];

#[test]
fn frames_are_counted() {
    // The frame has the return address, the pushed register and 32 bytes. It is empty again at the
    // jump.
    assert_eq!(measured(CALLS), (48, vec![48, 0]));
    assert_eq!(measured(SMALL), (32, vec![]));
    assert_eq!(measured(LARGE), (8 + 0x3000, vec![]));
    // `mov [rsp - 0x10], rax; ret`: a word below the stack pointer.
    assert_eq!(
        measured(&[0x48, 0x89, 0x44, 0x24, 0xf0, 0xc3]),
        (24, vec![])
    );
    // `push rbp; mov rbp, rsp; and rsp, -64; sub rsp, 0x40; lea rsp, [rbp - 8]; pop rax; pop rbp;
    // ret`
    let aligned = [
        0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xe4, 0xc0, 0x48, 0x83, 0xec, 0x40, 0x48, 0x8d, 0x65,
        0xf8, 0x58, 0x5d, 0xc3,
    ];
    assert_eq!(measured(&aligned), (16 + 56 + 64, vec![]));
}

#[test]
fn unknown_stack_moves_are_errors() {
    for (code, error) in [
        // `sub rsp, rax; ret`
        (&[0x48, 0x29, 0xc4, 0xc3][..], "varying size"),
        // `1: push rax; jmp 1b`
        (&[0x50, 0xeb, 0xfd], "no bound"),
        // `mov rsp, rax; ret`
        (&[0x48, 0x89, 0xc4, 0xc3], "comes from memory"),
    ] {
        let found = frame(&image(&[("f", code)]), &|_| false, CODE).unwrap_err();
        assert!(format!("{found:#}").contains(error), "{found:#}");
    }
}

#[test]
fn jump_tables_are_followed() {
    // `lea rcx, [rip + to DATA]; movsxd rax, [rcx + rax * 4]; add rax, rcx; jmp rax`, then a case
    // that uses 24 bytes.
    let mut code = vec![
        0x48, 0x8d, 0x0d, 0xf9, 0x6f, 0, 0, 0x48, 0x63, 0x04, 0x81, 0x48, 0x01, 0xc8, 0xff, 0xe0,
    ];
    let case = CODE + code.len() as u64;
    code.extend_from_slice(SMALL);
    let mut image = image(&[("f", &code)]);
    let distance = |to: u64| (to.wrapping_sub(DATA) as i32).to_le_bytes();
    let table = [distance(case), distance(CODE + 0x500)].concat();
    image.section(DATA, false, table);
    assert_eq!(frame(&image, &|_| false, CODE).unwrap().deepest, 32);
}

#[test]
fn a_pointer_is_known_until_its_register_changes() {
    let mut image = image(&[("f", POINTERS), ("g", SMALL)]);
    image.pointer(DATA, Target::Own(CODE + 64));
    let calls = frame(&image, &|_| false, CODE).unwrap().calls;
    let call = |at, known: bool| Call {
        at: CODE + at,
        target: known.then_some(Target::Own(CODE + 64)),
        depth: 16,
    };
    assert_eq!(calls, [call(8, true), call(10, false), call(12, true)]);
}

#[test]
fn the_deepest_chain_is_found() {
    let image = image(&[("f", CALLS), ("g", SMALL), ("h", LARGE)]);
    let rules = Rules::default();
    let mut chains = Chains::new(&image, &rules);
    let chain = chains.from(CODE);
    assert!(chains.problems().is_empty(), "{:?}", chains.problems());
    assert_eq!(chain.total, 8 + 0x3000);
    let links = chain.links.iter().map(|link| (&*link.name, link.frame));
    assert_eq!(links.collect::<Vec<_>>(), [("f", 0), ("h", 8 + 0x3000)]);
    // Without the large function, the chain through the small one is the deepest.
    let rules = Rules {
        excluded: vec!["h".into()],
        ..Rules::default()
    };
    assert_eq!(Chains::new(&image, &rules).from(CODE).total, 48 + 32);
    // The code behind a call that never returns is not reached.
    let rules = Rules {
        ends: vec!["g"],
        ..Rules::default()
    };
    assert_eq!(Chains::new(&image, &rules).from(CODE).total, 48);
}

#[test]
fn calls_through_pointers_need_a_rule() {
    let mut image = image(&[("f", POINTERS), ("g", SMALL)]);
    image.pointer(DATA, Target::Import("malloc".into()));
    let problems = |rules: &Rules| {
        let mut chains = Chains::new(&image, rules);
        let total = chains.from(CODE).total;
        (total, chains.problems().iter().cloned().collect::<Vec<_>>())
    };
    let (_, found) = problems(&Rules::default());
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("how much malloc uses"));
    assert!(found[1].contains("what f calls by a pointer"));
    let rules = Rules {
        costs: vec![("malloc", 100)],
        pointers: vec![("f", &["g"])],
        ..Rules::default()
    };
    assert_eq!(problems(&rules), (116, Vec::new()));
    let rules = Rules {
        pointers: vec![("f", &["no such function"])],
        ..rules
    };
    assert_eq!(problems(&rules).1.len(), 1);
}

#[test]
fn a_system_call_takes_no_stack() {
    // `push rax; syscall; pop rax; ret`
    let image = image(&[("f", &[0x50, 0x0f, 0x05, 0x58, 0xc3])]);
    let rules = Rules::default();
    let mut chains = Chains::new(&image, &rules);
    assert_eq!(chains.from(CODE).total, 16);
    assert!(chains.problems().is_empty());
}

#[test]
fn cycles_are_problems() {
    // `push rax; call itself; pop rax; ret`
    let image = image(&[("f", &[0x50, 0xe8, 0xfa, 0xff, 0xff, 0xff, 0x58, 0xc3])]);
    let rules = Rules::default();
    let mut chains = Chains::new(&image, &rules);
    chains.from(CODE);
    assert_eq!(chains.problems().len(), 1);
}

fn args(entries: &[&str], limit: u64) -> Args {
    Args {
        limit,
        library: None,
        entries: entries.iter().map(|&entry| entry.to_owned()).collect(),
        frames: None,
        without: Vec::new(),
        chains: false,
    }
}

#[test]
fn a_chain_above_the_limit_fails() {
    let image = image(&[("f", CALLS), ("g", SMALL), ("h", LARGE)]);
    let outcome = |args: Args| check(&image, &Rules::default(), &args);
    assert!(outcome(args(&["f"], 12296)).is_ok());
    let error = outcome(args(&["g", "f"], 12295)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "these functions use more than 12295 bytes of stack: f"
    );
    let error = outcome(args(&["absent"], 4096)).unwrap_err();
    assert_eq!(error.to_string(), "the library has no function absent");
    // An unexplained call is an error, however little stack it seems to use.
    let mut lost = Image::default();
    lost.function(CODE, POINTERS.len() as u64, "f");
    lost.section(CODE, true, POINTERS.to_vec());
    assert!(check(&lost, &rules::pinfold(), &args(&["f"], 4096)).is_err());
}

#[test]
fn reads_of_the_global_offset_table_are_found() {
    // `mov rbx, [rip + to DATA]` is the second instruction. Reads behind the return are allowed.
    let mut image = image(&[("f", POINTERS), ("g", SMALL)]);
    assert_eq!(table::first_read(&image, CODE), None);
    image.table(DATA, 8);
    assert_eq!(table::first_read(&image, CODE), Some(CODE + 1));
    assert_eq!(table::first_read(&image, CODE + 64), None);
}

/// A value that is built in memory by stores of single bytes and loaded whole once made a page by a
/// policy take 1.7 times as long.
#[test]
fn loads_that_wait_for_narrower_stores_are_found() {
    let stalls = |parts: &[&[u8]]| {
        let image = image(&[("f", &parts.concat()), ("g", SMALL)]);
        frame(&image, &|_| false, CODE).unwrap().stalls.len()
    };
    // `mov [rsp - 8], cl`, the byte behind it, and the word of both
    let (low, high): (&[u8], &[u8]) = (&[0x88, 0x4c, 0x24, 0xf8], &[0x88, 0x54, 0x24, 0xf9]);
    let whole: &[u8] = &[0x48, 0x89, 0x4c, 0x24, 0xf8];
    // `mov eax, [rsp - 8]`, `ret`
    let (load, ret): (&[u8], &[u8]) = (&[0x8b, 0x44, 0x24, 0xf8], &[0xc3]);
    assert_eq!(stalls(&[low, high, load, ret]), 1);
    assert_eq!(stalls(&[whole, high, load, ret]), 1);
    // The load needs what one store wrote, and perhaps less.
    assert_eq!(stalls(&[whole, load, ret]), 0);
    assert_eq!(stalls(&[low, high, whole, load, ret]), 0);
    assert_eq!(stalls(&[load, low, ret]), 0);
    // Only one of two paths has the narrow store: `test cl, cl; je` to the load.
    assert_eq!(
        stalls(&[whole, &[0x84, 0xc9, 0x74, 0x04], low, load, ret]),
        1
    );
    // A call takes longer than the stores: `call g`, 64 bytes behind `f`.
    assert_eq!(stalls(&[low, high, &[0xe8, 51, 0, 0, 0], load, ret]), 0);
    // `push rbp; mov rbp, rsp; mov [rbp - 8], cl; mov eax, [rbp - 8]; pop rbp; ret`
    let framed = [
        0x55, 0x48, 0x89, 0xe5, 0x88, 0x4d, 0xf8, 0x8b, 0x45, 0xf8, 0x5d, 0xc3,
    ];
    assert_eq!(stalls(&[&framed]), 1);
}

#[test]
fn a_fast_path_whose_load_waits_fails() {
    // `mov [rsp - 8], cl; mov eax, [rsp - 8]; ret`
    let code = [0x88, 0x4c, 0x24, 0xf8, 0x8b, 0x44, 0x24, 0xf8, 0xc3];
    let image = image(&[("f", &code), ("g", SMALL)]);
    let outcome = |name| check_loads(&image, &Rules::default(), name);
    assert!(outcome("g").is_ok());
    let error = outcome("f").unwrap_err().to_string();
    assert!(error.starts_with("f+0x4 loads bytes"), "{error}");
    assert!(outcome("absent").is_err());
}
