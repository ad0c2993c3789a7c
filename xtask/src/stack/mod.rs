//! `cargo xtask stack`: how much stack the library uses.

mod chain;
mod flow;
mod image;
mod rules;
mod table;
#[cfg(test)]
mod tests;

use anyhow::{Context, Result, bail};
use chain::{Chains, Link};
use image::Image;
use rules::Rules;
use std::path::PathBuf;
use std::process::Command;

const LIBRARY: &str = "target/release/deps/libpinfold_preload.so";
/// The bytes that a call may use.
const LIMIT: u64 = 4096;

/// The calls whose stack has a limit.
const ENTRIES: &[&str] = &[
    "malloc",
    "free",
    "calloc",
    "realloc",
    "reallocarray",
    "free_sized",
    "free_aligned_sized",
    "aligned_alloc",
    "memalign",
    "posix_memalign",
    "valloc",
    "pvalloc",
    "malloc_usable_size",
    "malloc_trim",
    "pinfold_cache_alloc",
    "pinfold_cache_zalloc",
    "pinfold_cache_free",
    "pinfold_cache_alloc_bulk",
    "pinfold_cache_free_bulk",
    "pinfold_cache_alloc_node",
    "pinfold_cache_alloc_node_exact",
    "pinfold_cache_free_deferred",
    "pinfold_cache_prefill",
    "pinfold_sheaf_alloc",
    "pinfold_sheaf_refill",
    "pinfold_sheaf_return",
    "pinfold_mempool_alloc",
    "pinfold_mempool_free",
    "pinfold_pages_alloc",
    "pinfold_pages_free",
    "pinfold_grace_enter",
    "pinfold_grace_leave",
    "pinfold_counter_add",
    "pinfold_counter_sum",
    "pinfold_counter_read",
    "pinfold_counter_set",
    "pinfold_counter_swap",
    "pinfold_counter_limited_add",
    "pinfold_counter_compare",
    "pinfold_event_add",
    "pinfold_event_sum",
    "pinfold_shepherd_tick",
];

/// The calls whose fast path must not read the global offset table.
const FAST: &[&str] = &[
    "malloc",
    "free",
    "_Znwm",
    "_ZdlPv",
    "pinfold_cache_alloc",
    "pinfold_cache_free",
    "pinfold_event_add",
];

struct Options {
    limit: u64,
    library: Option<PathBuf>,
    entries: Vec<String>,
    /// The size of the smallest listed frame.
    frames: Option<u64>,
    /// Functions that are left out.
    without: Vec<String>,
    /// Whether chains below the limit are printed too.
    chains: bool,
}

fn options(words: &[&str]) -> Result<Options> {
    let mut options = Options {
        limit: LIMIT,
        library: None,
        entries: Vec::new(),
        frames: None,
        without: Vec::new(),
        chains: false,
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || {
            words
                .next()
                .with_context(|| format!("{word} needs a value"))
        };
        let bytes = |text: &str| {
            let number = text.parse::<u64>();
            number.with_context(|| format!("{word} takes a number of bytes"))
        };
        match *word {
            "--chains" => options.chains = true,
            "--limit" => options.limit = bytes(value()?)?,
            "--frames" => options.frames = Some(bytes(value()?)?),
            "--without" => options.without.push((*value()?).into()),
            "--library" => options.library = Some(value()?.into()),
            "--entry" => options.entries.push((*value()?).into()),
            other => bail!("unknown option {other}; cargo xtask lists the options of `stack`"),
        }
    }
    if options.entries.is_empty() {
        options.entries = ENTRIES.iter().map(|&entry| entry.into()).collect();
    }
    Ok(options)
}

/// Prints the deepest chain of calls from each entry. Fails if a chain is above the limit, or if
/// the fast path of an entry reads the global offset table.
pub fn main(words: &[&str]) -> Result<()> {
    let options = options(words)?;
    if cfg!(not(target_arch = "x86_64")) && options.library.is_none() {
        println!("left out: the stack is only measured in code for x86-64");
        return Ok(());
    }
    let library = match &options.library {
        Some(library) => library.clone(),
        None => build()?,
    };
    let bytes = std::fs::read(&library).with_context(|| library.display().to_string())?;
    let image = Image::parse(&bytes).with_context(|| library.display().to_string())?;
    for entry in FAST {
        let start = image.export(entry);
        let start = start.with_context(|| format!("the library has no function {entry}"))?;
        if let Some(at) = table::first_read(&image, start) {
            bail!("the fast path of {entry} reads the global offset table at {at:#x}");
        }
    }
    let mut rules = rules::pinfold();
    rules.excluded.extend(options.without.iter().cloned());
    check(&image, &rules, &options)
}

fn check(image: &Image, rules: &Rules, options: &Options) -> Result<()> {
    let mut chains = Chains::new(image, rules);
    let mut above = Vec::new();
    for entry in &options.entries {
        let start = image.export(entry);
        let start = start.with_context(|| format!("the library has no function {entry}"))?;
        let chain = chains.from(start);
        println!("{entry}: {} bytes", chain.total);
        if chain.total > options.limit {
            above.push(entry.as_str());
        }
        if chain.total > options.limit || options.chains {
            chain.links.iter().for_each(|link| print(link));
        }
    }
    if let Some(least) = options.frames {
        println!("frames of at least {least} bytes:");
        let frames = chains.frames();
        frames
            .iter()
            .filter(|link| link.frame >= least)
            .for_each(print);
    }
    let problems = chains.problems();
    for problem in problems {
        eprintln!("{problem}");
    }
    if !problems.is_empty() {
        let count = problems.len();
        bail!("no rule explains {count} calls; add rules to xtask/src/stack/rules.rs");
    }
    if !above.is_empty() {
        let (limit, above) = (options.limit, above.join(", "));
        bail!("these functions use more than {limit} bytes of stack: {above}");
    }
    Ok(())
}

fn print(link: &Link) {
    println!("{:>8}  {}", link.frame, link.name);
}

fn build() -> Result<PathBuf> {
    let build = [
        "build",
        "--quiet",
        "--release",
        "--package",
        "pinfold-preload",
    ];
    if !Command::new(env!("CARGO")).args(build).status()?.success() {
        bail!("the library does not build");
    }
    let target = std::env::var_os("CARGO_TARGET_DIR");
    Ok(match target {
        Some(target) => PathBuf::from(target).join("release/deps/libpinfold_preload.so"),
        None => LIBRARY.into(),
    })
}
