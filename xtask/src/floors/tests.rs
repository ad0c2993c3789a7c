use super::*;

const HOUSE: Floors = Floors {
    package: "pinfold",
    folder: &["house"],
    wings: &[],
    groups: &[
        &["mod"],
        &["attic"],
        &["hall", "kitchen"],
        &["cellar"],
        &["garden"],
    ],
};

/// Returns the unlisted modules and the upward edges of `house`, whose `mod.rs` declares these
/// files and has the given other code.
fn findings(root: &str, files: &[(&str, &str)]) -> (BTreeSet<String>, Vec<String>) {
    let declares = |(file, _): &&(&str, &str)| !file.contains('/');
    let declared = files.iter().filter(declares);
    let modules: String = declared.map(|(file, _)| format!("mod {file};\n")).collect();
    let source = |file: &Path| {
        let inside = file.strip_prefix("crates/pinfold/src/house").ok()?;
        if inside == Path::new("mod.rs") {
            return Some(format!("{modules}{root}"));
        }
        let found = files.iter().find(|(name, code)| {
            let is_folder = code.contains("mod ");
            let name = Path::new(name);
            let path = if is_folder {
                name.join("mod.rs")
            } else {
                name.with_extension("rs")
            };
            path == inside
        });
        found.map(|(_, code)| (*code).to_owned())
    };
    let Findings { unlisted, upward } = HOUSE.check_in(&source).unwrap();
    let prefix = "crates/pinfold/src/house/";
    let upward = upward
        .iter()
        .map(|edge| edge.to_string().replace(prefix, ""));
    (unlisted, upward.collect())
}

/// Returns the upward edges of a house whose cellar has this code.
fn below(code: &str) -> Vec<String> {
    let files = [
        ("attic", ""),
        ("hall", ""),
        ("cellar", code),
        ("garden", ""),
    ];
    let root = "pub(crate) use attic::{Roof, tiles as slates};
                use cellar::Wine;
                use core::fmt;
                use crate::attic::Swallow;
                pub struct Door;";
    let (unlisted, upward) = findings(root, &files);
    assert!(unlisted.is_empty(), "{unlisted:?}");
    upward
}

#[test]
fn modules_above_are_found_and_others_are_not() {
    let found = below("use super::attic;\nuse crate::house::hall::Carpet;");
    assert_eq!(
        found,
        [
            "cellar -> attic (cellar.rs:1)",
            "cellar -> hall (cellar.rs:2)"
        ]
    );
    assert!(
        below("use super::garden; use crate::attic; use self::attic::X; use attic;").is_empty()
    );
    let (_, found) = findings(
        "",
        &[
            ("hall", "use super::kitchen;"),
            ("kitchen", "use super::hall;"),
        ],
    );
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_module_beside_the_others_uses_none_of_them() {
    let files = [("garden", "use super::cellar;"), ("cellar", "")];
    assert_eq!(findings("", &files).1, ["garden -> cellar (garden.rs:1)"]);
}

#[test]
fn lists_of_several_lines_are_read() {
    let found = below(
        "use super::{\n    garden,\n    hall::{Carpet,\n        Mirror as Glass},\n    attic::*,\n};",
    );
    assert_eq!(
        found,
        [
            "cellar -> attic (cellar.rs:5)",
            "cellar -> hall (cellar.rs:3)",
            "cellar -> hall (cellar.rs:4)",
        ]
    );
}

#[test]
fn names_of_the_folder_count_where_they_are_from() {
    let names = [
        "Roof", "slates", "Wine", "fmt", "Swallow", "Door", "*", "{self}",
    ];
    let found = names.map(|name| below(&format!("use super::{name};")).join(""));
    let attic = "cellar -> attic (cellar.rs:1)";
    let root = "cellar -> mod (cellar.rs:1)";
    assert_eq!(found, [attic, attic, "", "", "", root, root, root]);
}

#[test]
fn paths_in_code_and_in_macros_are_read() {
    let attic = ["cellar -> attic (cellar.rs:1)"];
    assert_eq!(below("fn f(x: &super::attic::Beam) {}"), attic);
    assert_eq!(
        below("fn f() { println!(\"{}\", [super::attic::f(1)]) }"),
        attic
    );
    assert_eq!(
        below("macro_rules! m { () => { $crate::house::attic::f() } }"),
        attic
    );
    assert_eq!(below("super::attic::m! {}"), attic);
    assert!(below("pub(in crate::house) fn f() {} // super::attic").is_empty());
    assert!(below("fn f() { m!(super::super::attic, self.x, self::attic::y) }").is_empty());
}

#[test]
fn nested_modules_belong_to_their_module_of_the_folder() {
    let nested = "use super::super::attic;\nuse super::Own;\nuse crate::house::hall;\nmod deep { use super::super::Own; use super::super::super::Roof; }";
    let files = [
        ("attic", ""),
        ("hall", ""),
        ("cellar", "mod shelf; use super::hall;"),
        ("cellar/shelf", nested),
    ];
    // `shelf` has a module inside, so its file is `shelf/mod.rs`.
    let (unlisted, found) = findings("use attic::Roof;", &files);
    assert!(unlisted.is_empty(), "{unlisted:?}");
    assert_eq!(
        found,
        [
            "cellar -> attic (cellar/shelf/mod.rs:1)",
            "cellar -> attic (cellar/shelf/mod.rs:4)",
            "cellar -> hall (cellar/mod.rs:1)",
            "cellar -> hall (cellar/shelf/mod.rs:3)",
        ]
    );
}

#[test]
fn tests_may_use_every_module() {
    assert!(below("#[cfg(test)] mod tests { use super::super::attic; }").is_empty());
    assert!(
        below("#[cfg(test)] use super::attic; #[cfg(test)] fn f() { super::attic::f() }")
            .is_empty()
    );
    assert!(below("impl X { #[cfg(test)] fn f() { super::attic::f() } }").is_empty());
    assert_eq!(below("#[cfg(not(test))] use super::attic;").len(), 1);
    // The file of a test module need not exist here.
    assert!(findings("#[cfg(test)] mod missing;", &[]).0.is_empty());
}

#[test]
fn modules_on_no_floor_are_found() {
    let (unlisted, upward) = findings(
        "mod shed {}",
        &[("stable", "use super::attic;"), ("hall", "")],
    );
    assert!(unlisted.iter().eq(["shed", "stable"]), "{unlisted:?}");
    assert!(upward.is_empty(), "{upward:?}");
}

#[test]
fn tables_name_each_module_once() {
    for floors in &FLOORS {
        let modules = floors.groups.concat();
        let once: BTreeSet<_> = modules.iter().collect();
        assert_eq!(once.len(), modules.len(), "{floors}");
    }
}
