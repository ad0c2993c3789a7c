//! `cargo xtask stack`: how much stack the library uses, and what its fast paths must not do.

mod chain;
mod flow;
mod forward;
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
    "__alloc_token_0_malloc",
    "__alloc_token_0_calloc",
    "__alloc_token_0_realloc",
    "__alloc_token_1_realloc",
    "__alloc_token_0_reallocarray",
    "__alloc_token_0_aligned_alloc",
    "__alloc_token_0_posix_memalign",
    "__alloc_token_0_pvalloc",
    "pinfold_cache_alloc",
    "pinfold_cache_zalloc",
    "pinfold_cache_free",
    "pinfold_cache_alloc_bulk",
    "pinfold_cache_free_bulk",
    "pinfold_cache_alloc_node",
    "pinfold_cache_alloc_node_exact",
    "pinfold_cache_free_deferred",
    "pinfold_cache_prefill",
    "pinfold_prefilled_alloc",
    "pinfold_prefilled_refill",
    "pinfold_prefilled_destroy",
    "pinfold_mempool_alloc",
    "pinfold_mempool_free",
    "pinfold_mempool_alloc_bulk",
    "pinfold_mempool_free_bulk",
    "pinfold_pages_alloc",
    "pinfold_pages_free",
    "pinfold_grace_enter",
    "pinfold_grace_leave",
    "pinfold_counter_add",
    "pinfold_counter_add_batch",
    "pinfold_counter_sum",
    "pinfold_counter_read",
    "pinfold_counter_set",
    "pinfold_counter_swap",
    "pinfold_counter_limited_add",
    "pinfold_counter_compare",
    "pinfold_counter_tree_add",
    "pinfold_counter_tree_compare_with",
    "pinfold_counter_tree_swap",
    "pinfold_shared_counters_add",
    "pinfold_shared_counters_sum",
    "pinfold_event_add",
    "pinfold_event_sum",
    "pinfold_event_pair_add",
    "pinfold_percpu_read",
    "pinfold_percpu_write",
    "pinfold_percpu_add",
    "pinfold_percpu_add_return",
    "pinfold_percpu_and",
    "pinfold_percpu_xchg",
    "pinfold_percpu_cmpxchg",
    "pinfold_percpu_try_cmpxchg",
    "pinfold_percpu_sum",
    "pinfold_percpu_list_push",
    "pinfold_percpu_list_pop",
    "pinfold_percpu_pair_read",
    "pinfold_percpu_pair_cmpxchg",
    "pinfold_percpu_array_init",
    "pinfold_percpu_array_add",
    "pinfold_percpu_array_cmpxchg",
    "pinfold_percpu_array_sum",
    "pinfold_percpu_ring_init",
    "pinfold_percpu_ring_push",
    "pinfold_vmstat_add",
    "pinfold_vmstat_sum",
    "pinfold_vmevents_add",
    "pinfold_ref_get",
    "pinfold_ref_tryget_live",
    "pinfold_ref_put",
    "pinfold_shepherd_tick",
];

/// The calls whose fast path must not read the global offset table.
const FAST: &[&str] = &[
    "malloc",
    "free",
    "_Znwm",
    "_ZdlPv",
    "__alloc_token_0_malloc",
    "__alloc_token_1_malloc",
    "__alloc_token_0__Znwm",
    "__alloc_token_1__Znwm",
    "pinfold_cache_alloc",
    "pinfold_cache_free",
    "pinfold_event_add",
    "pinfold_event_pair_add",
];

/// The functions that run for each object, page or count, in which no load may wait for stores
/// (`forward.rs`).
const PROMPT: &[&str] = &[
    "malloc",
    "free",
    "calloc",
    "realloc",
    "_Znwm",
    "_ZdlPv",
    "__alloc_token_0_malloc",
    "__alloc_token_0_calloc",
    "__alloc_token_0_realloc",
    "__alloc_token_0__Znwm",
    "pinfold_cache_alloc",
    "pinfold_cache_free",
    "pinfold_pages_alloc",
    "pinfold_pages_free",
    "pinfold::pages::Pages::alloc_by_policy",
    "pinfold_counter_add",
    "pinfold_event_add",
    "pinfold_percpu_add",
    "pinfold_percpu_pair_cmpxchg",
    "pinfold_percpu_list_push",
    "pinfold_percpu_list_pop",
    "pinfold_percpu_ring_push",
    "pinfold_vmstat_add",
    "pinfold_vmevents_add",
    "pinfold_ref_get",
    "pinfold_ref_put",
];

/// Computes the most stack that calls of the preloaded library use.
///
/// Fails if a chain of calls is above the limit, if the fast path of an entry reads the global
/// offset table, or if a load in it waits for stores.
#[derive(clap::Args)]
pub struct Args {
    /// How many bytes of stack a call may use.
    #[arg(long, value_name = "BYTES", default_value_t = LIMIT)]
    limit: u64,
    /// The library to examine. By default, builds the preloaded library.
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// A call to examine, instead of all calls that have a limit.
    #[arg(long = "entry", value_name = "NAME", default_values = ENTRIES, hide_default_value = true)]
    entries: Vec<String>,
    /// Also lists the functions whose frames have at least this size.
    #[arg(long, value_name = "BYTES")]
    frames: Option<u64>,
    /// A function to leave out, with the functions that it calls.
    #[arg(long, value_name = "NAME")]
    without: Vec<String>,
    /// Prints the deepest chain of calls for each entry, not only for those above the limit.
    #[arg(long)]
    chains: bool,
}

pub fn main(args: Args) -> Result<()> {
    if cfg!(not(target_arch = "x86_64")) && args.library.is_none() {
        println!("left out: the stack is only measured in code for x86-64");
        return Ok(());
    }
    let library = match &args.library {
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
    rules.excluded.extend(args.without.iter().cloned());
    for name in PROMPT {
        check_loads(&image, &rules, name)?;
    }
    check(&image, &rules, &args)
}

/// Fails if a load of a function waits for stores, or if there is no such function.
fn check_loads(image: &Image, rules: &Rules, name: &str) -> Result<()> {
    let exported = image.export(name).map(|start| vec![start]);
    let starts = exported.unwrap_or_else(|| image.functions_named(name));
    if starts.is_empty() {
        bail!("the library has no function {name}");
    }
    for start in starts {
        let frame = flow::frame(image, &|target| chain::ends(image, rules, target), start)?;
        if let Some(at) = frame.stalls.first() {
            bail!(
                "{} loads bytes that several stores, or a narrower one, have just written: the \
                 load waits for them. Keep the value in registers, or store it whole",
                image.name(*at)
            );
        }
    }
    Ok(())
}

fn check(image: &Image, rules: &Rules, args: &Args) -> Result<()> {
    let mut chains = Chains::new(image, rules);
    let mut above = Vec::new();
    for entry in &args.entries {
        let start = image.export(entry);
        let start = start.with_context(|| format!("the library has no function {entry}"))?;
        let chain = chains.from(start);
        println!("{entry}: {} bytes", chain.total);
        if chain.total > args.limit {
            above.push(entry.as_str());
        }
        if chain.total > args.limit || args.chains {
            chain.links.iter().for_each(|link| print(link));
        }
    }
    if let Some(least) = args.frames {
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
        let (limit, above) = (args.limit, above.join(", "));
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
    crate::run(Command::new(env!("CARGO")).args(build))?;
    Ok(crate::target().join("release/deps/libpinfold_preload.so"))
}
