//! Finds code that has changed since the model that mirrors it was last compared with it.
//!
//! A model runs the real file where it can. Where it cannot, it has a step that mirrors a function
//! of the source. The model's file lists these steps in tables of its documentation:
//!
//! ```text
//! | step | mirrors | fingerprint |
//! |---|---|---|
//! | `Type::step` | `pinfold/src/module.rs` `Type::function` | `0123456789abcdef` |
//! ```
//!
//! The path is below `crates/`. If it ends with `/`, the function is in one of the files there. The
//! fingerprint is a hash of the function's tokens. Comments and formatting do not change it. An arm
//! of a macro that begins with a name counts as a function: the body of a critical section.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use syn::{ImplItem, Item, Type};

/// The functions of a file or of a folder with its folders.
struct Functions(Vec<Function>);

struct Function {
    file: PathBuf,
    /// The name, behind the name of its type if it has one.
    name: String,
    /// The signature and the body.
    tokens: TokenStream,
}

impl Functions {
    fn of(path: &Path) -> Functions {
        let mut found = Functions(Vec::new());
        found.visit(path);
        found
    }

    fn visit(&mut self, path: &Path) {
        if path.is_dir() {
            let entries = fs::read_dir(path).unwrap();
            entries.for_each(|entry| self.visit(&entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(path).unwrap_or_else(|why| panic!("{path:?}: {why}"));
            let file = syn::parse_file(&text).unwrap_or_else(|why| panic!("{path:?}: {why}"));
            self.add_all(path, file.items);
        }
    }

    fn add_all(&mut self, file: &Path, items: Vec<Item>) {
        for item in items {
            match item {
                Item::Fn(item) => self.add(file, None, &item.sig, &item.block),
                Item::Mod(item) if item.ident != "tests" => {
                    let (_, items) = item.content.unwrap_or_default();
                    self.add_all(file, items);
                }
                Item::Impl(item) => {
                    let Type::Path(of) = *item.self_ty else {
                        continue;
                    };
                    let of = of.path.segments.last().unwrap().ident.to_string();
                    for item in item.items {
                        if let ImplItem::Fn(item) = item {
                            self.add(file, Some(&of), &item.sig, &item.block);
                        }
                    }
                }
                Item::Macro(item) => self.add_arms(file, item.mac.tokens),
                _ => {}
            }
        }
    }

    fn add_arms(&mut self, file: &Path, arms: TokenStream) {
        let arms: Vec<_> = arms.into_iter().collect();
        for arm in arms.windows(4) {
            let [TokenTree::Group(pattern), _, _, TokenTree::Group(body)] = arm else {
                continue;
            };
            if let Some(TokenTree::Ident(name)) = pattern.stream().into_iter().next() {
                self.0.push(Function {
                    file: file.to_owned(),
                    name: name.to_string(),
                    tokens: body.stream(),
                });
            }
        }
    }

    fn add(&mut self, file: &Path, of: Option<&str>, sig: &syn::Signature, block: &syn::Block) {
        let mut tokens = sig.to_token_stream();
        block.to_tokens(&mut tokens);
        let name = &sig.ident;
        self.0.push(Function {
            file: file.to_owned(),
            name: of.map_or_else(|| name.to_string(), |of| format!("{of}::{name}")),
            tokens,
        });
    }

    /// Returns the fingerprint of the function `name`, and its file. A function that exists several
    /// times in a file, for different systems, has one fingerprint.
    fn fingerprint(&self, name: &str) -> Result<(u64, &Path), String> {
        let mut found = self.0.iter().filter(|function| function.name == name);
        let Some(first) = found.next() else {
            return Err(format!("there is no function `{name}`"));
        };
        let mut hash = Hash::new();
        hash.tokens(first.tokens.clone());
        for other in found {
            if other.file != first.file {
                return Err(format!("`{name}` is in two files"));
            }
            hash.tokens(other.tokens.clone());
        }
        Ok((hash.0, &first.file))
    }
}

/// FNV-1a.
struct Hash(u64);

impl Hash {
    fn new() -> Self {
        Hash(0xcbf2_9ce4_8422_2325)
    }

    fn token(&mut self, text: &str) {
        for byte in text.bytes().chain([0]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    /// Adds all tokens, except doc comments, which are attributes, and commas at the end of a list,
    /// which the formatter adds and removes.
    fn tokens(&mut self, stream: TokenStream) {
        let mut tokens = stream.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(mark) if mark.as_char() == ',' && tokens.peek().is_none() => {}
                TokenTree::Punct(mark) if mark.as_char() == '#' && is_doc(tokens.peek()) => {
                    tokens.next();
                }
                TokenTree::Group(group) => {
                    let (open, close) = match group.delimiter() {
                        Delimiter::Parenthesis => ("(", ")"),
                        Delimiter::Brace => ("{", "}"),
                        Delimiter::Bracket => ("[", "]"),
                        Delimiter::None => ("", ""),
                    };
                    self.token(open);
                    self.tokens(group.stream());
                    self.token(close);
                }
                other => self.token(&other.to_string()),
            }
        }
    }
}

fn is_doc(token: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = token else {
        return false;
    };
    let first = group.stream().into_iter().next();
    group.delimiter() == Delimiter::Bracket && first.is_some_and(|first| first.to_string() == "doc")
}

/// A row of a model's table.
struct Row {
    line: usize,
    step: String,
    path: String,
    function: String,
    fingerprint: String,
}

fn rows(text: &str) -> Vec<Row> {
    let lines = text.lines().enumerate();
    let rows = lines.filter_map(|(at, line)| {
        let cells: Vec<_> = line.strip_prefix("//! | `")?.split('`').collect();
        // The words in backquotes, and what stands between them.
        let [step, " | ", path, " ", function, " | ", fingerprint, " |"] = cells[..] else {
            return None;
        };
        Some(Row {
            line: at + 1,
            step: step.to_owned(),
            path: path.to_owned(),
            function: function.to_owned(),
            fingerprint: fingerprint.to_owned(),
        })
    });
    rows.collect()
}

fn models() -> Vec<PathBuf> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let in_folder = |folder: PathBuf| {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().path())
    };
    let is_model = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("model") && name.ends_with(".rs") && name != "model_mirrors.rs"
    };
    let mut models: Vec<_> = in_folder(tests.clone()).filter(is_model).collect();
    models.extend(in_folder(tests.join("model_counter")));
    models.sort();
    models
}

#[test]
fn mirrored_functions_are_those_that_the_models_mirror() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut faults = Vec::new();
    let mut sources = BTreeMap::new();
    let mut checked = 0;
    for model in models() {
        let text = fs::read_to_string(&model).unwrap();
        let steps = Functions::of(&model);
        let name = model.strip_prefix(crates).unwrap().display().to_string();
        for row in rows(&text) {
            checked += 1;
            let place = format!("crates/{name}:{}", row.line);
            if !steps.0.iter().any(|step| step.name == row.step) {
                faults.push(format!("{place}: the model has no step `{}`", row.step));
            }
            let source = sources
                .entry(row.path.clone())
                .or_insert_with(|| Functions::of(&crates.join(&row.path)));
            match source.fingerprint(&row.function) {
                Err(why) => faults.push(format!("{place}: {why} in crates/{}", row.path)),
                Ok((now, _)) if format!("{now:016x}") == row.fingerprint => {}
                Ok((now, file)) => faults.push(format!(
                    "{place}: `{}` in {} has changed. Compare it with the step `{}` of the model, \
                     which mirrors it. Change the step if it does something else now, and run the \
                     model. Then write the new fingerprint into the table: {now:016x}",
                    row.function,
                    file.strip_prefix(crates.parent().unwrap())
                        .unwrap()
                        .display(),
                    row.step,
                )),
            }
        }
    }
    assert!(checked > 0, "no model has a table");
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn only_code_changes_a_fingerprint() {
    let of = |text: &str| {
        let mut found = Functions(Vec::new());
        found.add_all(Path::new("file"), syn::parse_file(text).unwrap().items);
        found.fingerprint("Word::add").map(|(hash, _)| hash)
    };
    let first = of("impl Word { fn add(&self, n: u64) { self.0.fetch_add(n, Relaxed); } }");
    assert!(first.is_ok());
    let formatted = "impl<'a> Trait for Word<'a> {
        /// Adds.
        #[inline]
        fn add(
            &self,
            n: u64,
        ) {
            // A comment.
            self.0.fetch_add(n, /* another */ Relaxed,);
        }
    }";
    assert_eq!(of(formatted), first);
    for changed in [
        "impl Word { fn add(&self, n: u64) { self.0.fetch_add(n, Release); } }",
        "impl Word { fn add(&self, n: u64) { self.0.fetch_add(n, Relaxed) } }",
        "impl Other { fn add(&self, n: u64) { self.0.fetch_add(n, Relaxed); } }",
    ] {
        assert_ne!(of(changed), first);
    }
}
