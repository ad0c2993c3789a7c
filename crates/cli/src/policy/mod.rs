//! `pinfold policy`: what a memory policy says, what it means on this machine, and which pages of a
//! process lie elsewhere.

mod check;
mod explain;
mod fault;
mod machine;
mod words;

#[cfg(fuzzing)]
pub use check::Checked;
pub use fault::parse;
pub use machine::{Machine, listed};

use crate::output;
use anyhow::{Context, Result, bail};
use explain::{Explanation, Source};
use pinfold::mempolicy::{self, Mempolicy, PolicyError};
use pinfold::topology::NodeId;
use pinfold_malloc::settings::POLICY;
use pinfold_rseq::env::MAX_TEXT;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

/// Explain a memory policy: what it says, where pages go on this machine, and whether the kernel
/// accepts it
///
/// Without POLICY, explains the policy in PINFOLD_POLICY, or if that is not set, the policy that
/// this command was started with. The exit status is 0 for a policy that can be used here, 1 for a
/// policy that cannot, and 2 for text that is not a policy.
///
/// With `--check`, reports the pages of a running process that do not lie on the nodes that their
/// policy wants. The exit status is 0 if none is known to be misplaced, 1 if any is, and 2 if the
/// process cannot be read.
#[derive(clap::Args)]
pub struct Args {
    /// The policy, like interleave:0-3, bind=static:0,2, prefer-many=relative:0-1,
    /// weighted-interleave or local
    #[arg(value_name = "POLICY")]
    policy: Option<OsString>,

    /// Show where pages go if a CPU of this node touches them; by default the node of this command
    #[arg(long, value_name = "NODE", value_parser = node)]
    from: Option<usize>,

    /// Report the misplaced pages of a process, which need not use Pinfold
    #[arg(long, value_name = "PID", conflicts_with_all = ["policy", "from"], value_parser = crate::live::pid)]
    check: Option<u32>,

    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,

    /// Read the files below this folder instead of /
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

fn node(text: &str) -> Result<usize, &'static str> {
    number(text).ok_or("give a node's number, like 0")
}

/// Parses a number in decimal digits, without a sign.
pub fn number<N: FromStr>(text: &str) -> Option<N> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// Parses PINFOLD_POLICY as the library does. Returns `None` if the variable is not set or empty.
pub fn of_variable() -> Result<Option<Mempolicy>> {
    let Some(text) = std::env::var_os(POLICY).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    if text.len() > MAX_TEXT {
        bail!(
            "{POLICY} has {} bytes, but the library reads at most {MAX_TEXT}; write ranges like 0-3",
            text.len()
        );
    }
    parse(&text).context(POLICY).map(Some)
}

/// Returns the policy to explain, and where it comes from.
fn wanted(argument: Option<&OsStr>) -> Result<(Mempolicy, Source)> {
    if let Some(text) = argument {
        return Ok((parse(text)?, Source::Argument));
    }
    if let Some(policy) = of_variable()? {
        return Ok((policy, Source::Variable));
    }
    let own = mempolicy::thread().context("reading this thread's policy")?;
    Ok((own, Source::Thread))
}

pub fn main(args: Args) -> Result<ExitCode> {
    if let Some(pid) = args.check {
        let checked = check::check(&args.root, pid)?;
        output::show(args.json, "policy --check", &checked, || {
            checked.to_string()
        })?;
        return Ok(ExitCode::from(u8::from(checked.is_misplaced())));
    }
    let (policy, source) = match wanted(args.policy.as_deref()) {
        // No text was wrong: the system cannot tell this thread's policy. So the status is 1, not
        // 2.
        Err(error) if error.is::<PolicyError>() => {
            output::note(format_args!("{error:#}"));
            return Ok(ExitCode::FAILURE);
        }
        wanted => wanted?,
    };
    let machine = Machine::read(&args.root)?;
    let from = match args.from.map(NodeId) {
        Some(node) if !machine.topology.nodes.contains(node.0) => {
            let nodes = listed(&machine.topology.nodes);
            bail!(
                "--from {}: there is no such node; this machine has {nodes}",
                node.0
            );
        }
        Some(node) => node,
        None => machine.local(),
    };
    let explanation = Explanation::of(&policy, &machine, from, source);
    output::show(args.json, "policy", &explanation, || {
        explanation.to_string()
    })?;
    Ok(ExitCode::from(u8::from(!explanation.usable)))
}
