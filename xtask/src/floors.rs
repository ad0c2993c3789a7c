//! The floors of a folder of the library: its modules in groups, one above the other.
//!
//! Modules that use each other in circles can only be understood all at once. So a module may use
//! the modules of its own group and of the groups below, but none above. [`FLOORS`] has the groups.
//!
//! A use is a path that begins with `crate`, `super` or `self`, outside of tests: in a `use`, in
//! other code, or in the arguments of a macro. A name that the folder's `mod.rs` imports counts as
//! the module that `mod.rs` imports the name from. Other names of `mod.rs` count as the module
//! `mod`. Calls of methods are not seen, because only the compiler knows which module defines a
//! method.

use anyhow::{Context, Result};
use proc_macro2::{Span, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// The name of a folder's own module: `mod.rs`, or `lib.rs`.
const ROOT: &str = "mod";

pub static FLOORS: [Floors; 5] = [
    // The few items of lib.rs are on no floor: any module may use them.
    Floors {
        package: "malloc",
        folder: &[],
        wings: &[],
        groups: &[
            &["inlined", "c", "at_start"],
            &["control"],
            &["changeable"],
            &["settings"],
            &["background"],
            &["heap_dumps"],
            &["heap_profile", "guard"],
        ],
    },
    Floors {
        package: "pprof",
        folder: &["internal"],
        wings: &[],
        groups: &[
            // The errors of reading stand in the folder's own module.
            &["flame", "pprof", "profile", "raw", "elf"],
            &["names", "maps", ROOT],
        ],
    },
    Floors {
        package: "pinfold",
        folder: &[],
        wings: &[],
        groups: &[
            &["export", "internal", "memory"],
            &["heap"],
            &["arc", "pages", "show", "isolate"],
            &["guarded", "heaps"],
            &["slab"],
            &["arena"],
            &["segment", "profile"],
            &["vmstat"],
            &["mempolicy"],
            &["shepherd"],
            &["nodes"],
            &["account", "counter", "percpu"],
            &["counter_units", "cache_units"],
            &["topology"],
            &["fork"],
            &["lock"],
            &["last_words", "sanitizer", "spared", "sys"],
        ],
    },
    Floors {
        package: "pinfold",
        folder: &["heap"],
        wings: &[],
        groups: &[
            &[ROOT],
            &["realloc"],
            &["entry", "data", "scope", "sizes"],
            &["start", "sampled"],
            &["sampling", "plain", "lost", "fragments"],
            &["gate", "blocks", "counted"],
            &["mode"],
        ],
    },
    Floors {
        package: "pinfold",
        folder: &["slab"],
        wings: &["cpu", "node", "checks", "cache", "report"],
        groups: &[
            &[ROOT],
            &[
                "typed",
                "allocator",
                "info",
                "attributes",
                "blocks",
                "slabinfo",
            ],
            &[
                "kmem_cache",
                "builder",
                "lifetime",
                "kmalloc",
                "bundle",
                "prefilled",
                "mempool",
                "heap_caches",
            ],
            &["fork"],
            &[
                "sheaf_units",
                "remote",
                "in_flight",
                "deferred",
                "idle",
                "reclaim",
                "harden",
                "debugged",
                "sampled",
            ],
            &[
                "place",
                "registry",
                "descriptor",
                "part",
                "parts",
                "survey",
                "handler_frees",
                "debugged_node",
                "refuse",
                "events",
            ],
            &[
                "objects",
                "sheaf",
                "slabs",
                "slab_bits",
                "purge",
                "look",
                "guard",
            ],
            &["geometry", "tune", "key", "debug"],
            // Stands beside the others: every module may use it, and it uses none of them.
            &["grace"],
        ],
    },
];

pub struct Floors {
    /// The folder in `crates` that has the folder.
    package: &'static str,
    /// The module path of the folder, without `crate`.
    folder: &'static [&'static str],
    /// Folders in the folder whose modules stand on its floors, each by itself.
    wings: &'static [&'static str],
    /// The modules, top-down.
    groups: &'static [&'static [&'static str]],
}

/// What [`Floors::check`] finds.
pub struct Findings {
    /// The modules of the folder that are in no group.
    pub unlisted: BTreeSet<String>,
    pub upward: BTreeSet<Edge>,
}

/// A use of the module `to` in the module `from`.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    pub from: String,
    pub to: String,
    pub file: PathBuf,
    pub line: usize,
}

impl Floors {
    /// Returns the folder's path.
    pub fn path(&self) -> PathBuf {
        self.source().join(self.folder.join("/"))
    }

    /// Returns the path of the crate's source.
    fn source(&self) -> PathBuf {
        ["crates", self.package, "src"].iter().collect()
    }

    /// Reads all files of the folder, and looks for modules that are on no floor and for uses of
    /// modules above.
    ///
    /// # Errors
    ///
    /// If a module's file cannot be read or parsed.
    pub fn check(&self) -> Result<Findings> {
        self.check_in(&|file| std::fs::read_to_string(file).ok())
    }

    /// Checks the folder's files, whose text `source` returns.
    fn check_in(&self, source: &Source<'_>) -> Result<Findings> {
        let mut reader = Reader {
            source: self.source(),
            wings: self.wings,
            ..Reader::default()
        };
        reader.read(self.folder, source)?;
        let mut upward = BTreeSet::new();
        for one in &reader.uses {
            let to = reader.module_of(&one.path).unwrap_or(&one.from);
            if let (Some(own), Some(used)) = (self.floor(&one.from), self.floor(to))
                && used < own
            {
                upward.insert(Edge {
                    from: one.from.clone(),
                    to: to.to_owned(),
                    file: one.file.clone(),
                    line: one.line,
                });
            }
        }
        let mut unlisted = reader.modules;
        unlisted.retain(|module| self.floor(module).is_none());
        Ok(Findings { unlisted, upward })
    }

    /// Returns how many groups are above the group of `module`.
    fn floor(&self, module: &str) -> Option<usize> {
        self.groups.iter().position(|group| group.contains(&module))
    }
}

impl fmt::Display for Floors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups: Vec<_> = self.groups.iter().map(|group| group.join(", ")).collect();
        f.write_str(&groups.join(" > "))
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Edge { from, to, line, .. } = self;
        write!(f, "{from} -> {to} ({}:{line})", self.file.display())
    }
}

/// Returns the text of a file, or `None` if there is no such file.
type Source<'a> = dyn Fn(&Path) -> Option<String> + 'a;

/// Collects what the files of a folder declare, import and use. All paths begin at the crate's
/// root.
#[derive(Default)]
struct Reader {
    /// The path of the crate's source.
    source: PathBuf,
    wings: &'static [&'static str],
    /// The folder's own module.
    root: Names,
    /// The modules of the folder.
    modules: BTreeSet<String>,
    /// The paths that the folder's own module imports, by the names that they get there.
    imports: BTreeMap<String, Names>,
    uses: Vec<Use>,
    /// The module whose code is being read, and its file.
    here: Names,
    file: PathBuf,
    /// Modules whose files have not been read yet.
    waiting: Vec<Names>,
}

type Names = Vec<String>;

/// A path in the code of the folder's module `from`.
struct Use {
    from: String,
    path: Names,
    file: PathBuf,
    line: usize,
}

impl Reader {
    /// Reads the file of a folder's own module, and the files of all modules in it.
    fn read(&mut self, folder: &[&str], source: &Source<'_>) -> Result<()> {
        self.root = folder.iter().map(|&name| name.to_owned()).collect();
        self.waiting.push(self.root.clone());
        while let Some(module) = self.waiting.pop() {
            let path = self.source.join(module.join("/"));
            let files = [".rs", "/mod.rs", "/lib.rs"];
            let mut files = files
                .map(|end| PathBuf::from(format!("{}{end}", path.display())))
                .into_iter();
            let found = files.find_map(|file| Some((source(&file)?, file)));
            let (text, file) =
                found.with_context(|| format!("no file has the module {}", path.display()))?;
            let code = syn::parse_file(&text).with_context(|| file.display().to_string())?;
            (self.here, self.file) = (module, file);
            self.visit_file(&code);
        }
        Ok(())
    }

    /// Returns the first name of a path that begins in this folder, without its wing.
    fn name_of<'a>(&self, inside: &'a [String]) -> Option<&'a str> {
        let names = inside.iter().map(String::as_str);
        let mut names = names.skip_while(|name| self.wings.contains(name));
        names.next()
    }

    /// Returns the module of this folder that has the item `path`, or `None` for an item from
    /// outside the folder.
    fn module_of<'a>(&'a self, path: &'a [String]) -> Option<&'a str> {
        let inside = path.strip_prefix(&self.root[..])?;
        let Some(name) = self.name_of(inside) else {
            return Some(ROOT);
        };
        if self.modules.contains(name) {
            return Some(name);
        }
        let Some(import) = self.imports.get(name) else {
            return Some(ROOT);
        };
        let first = self.name_of(import.strip_prefix(&self.root[..])?)?;
        self.modules.contains(first).then_some(first)
    }

    /// Returns the path that `names` stand for in the code of this module. A name from another
    /// crate is treated as a name of this module. This does no harm, because a module may use
    /// itself.
    fn absolute(&self, names: &[String]) -> Names {
        let here = self.here.len();
        let supers = names.iter().take_while(|name| *name == "super").count();
        let (outer, rest) = match names.first().map(String::as_str) {
            Some("crate") => (0, 1),
            Some("self") => (here, 1),
            _ => (here.saturating_sub(supers), supers),
        };
        [&self.here[..outer], &names[rest..]].concat()
    }

    fn note(&mut self, names: &[String], span: Span) {
        let from = self.name_of(&self.here[self.root.len()..]);
        self.uses.push(Use {
            from: from.unwrap_or(ROOT).to_owned(),
            path: self.absolute(names),
            file: self.file.clone(),
            line: span.start().line,
        });
    }

    /// Notes each item of a `use`. `above` are the names above `tree`.
    fn import(&mut self, tree: &syn::UseTree, above: &[String]) {
        let below = |name: &syn::Ident| [above, &[name.to_string()]].concat();
        let (path, name, span) = match tree {
            syn::UseTree::Path(path) => return self.import(&path.tree, &below(&path.ident)),
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.import(tree, above));
            }
            syn::UseTree::Glob(glob) => (above.to_vec(), None, glob.star_token.span),
            syn::UseTree::Name(name) if name.ident == "self" => {
                (above.to_vec(), above.last().cloned(), name.ident.span())
            }
            syn::UseTree::Name(name) => (
                below(&name.ident),
                Some(name.ident.to_string()),
                name.ident.span(),
            ),
            syn::UseTree::Rename(item) => (
                below(&item.ident),
                Some(item.rename.to_string()),
                item.ident.span(),
            ),
        };
        self.note(&path, span);
        if self.here == self.root {
            let path = self.absolute(&path);
            self.imports.extend(name.map(|name| (name, path)));
        }
    }

    /// Notes the paths in the arguments of a macro, which `syn` does not parse.
    fn scan(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut rest = &tokens[..];
        while let [token, behind @ ..] = rest {
            rest = behind;
            match token {
                TokenTree::Group(group) => self.scan(group.stream()),
                TokenTree::Ident(first) => {
                    let mut names = vec![first.to_string()];
                    while let [
                        TokenTree::Punct(one),
                        TokenTree::Punct(two),
                        TokenTree::Ident(name),
                        behind @ ..,
                    ] = rest
                        && one.as_char() == ':'
                        && two.as_char() == ':'
                    {
                        names.push(name.to_string());
                        rest = behind;
                    }
                    self.note(&names, first.span());
                }
                _ => {}
            }
        }
    }
}

/// Visits the parts of a file that are not only for tests.
impl<'a> Visit<'a> for Reader {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if is_test(&item.attrs) {
            return;
        }
        let name = item.ident.to_string();
        let is_wing = self.here == self.root && self.wings.contains(&name.as_str());
        let above = &self.here[self.root.len()..];
        if !is_wing && self.name_of(above).is_none() {
            self.modules.insert(name.clone());
        }
        self.here.push(name);
        match item.content {
            Some(_) => visit::visit_item_mod(self, item),
            None => self.waiting.push(self.here.clone()),
        }
        self.here.pop();
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !is_test(&item.attrs) {
            self.import(&item.tree, &[]);
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if !is_test(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if let Some(first) = path.segments.first() {
            let names = path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string());
            self.note(&names.collect::<Vec<_>>(), first.ident.span());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'a syn::Macro) {
        self.scan(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    /// `pub(in PATH)` names modules, but uses nothing of them.
    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}
}

/// Returns whether one of the attributes is `#[cfg(test)]`.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let only = attribute.parse_args::<syn::Ident>();
        attribute.path().is_ident("cfg") && only.is_ok_and(|only| only == "test")
    })
}

#[cfg(test)]
mod tests;
