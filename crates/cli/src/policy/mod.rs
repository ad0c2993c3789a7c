//! `pinfold policy`: what a memory policy says, and what it comes to on this machine.

mod explain;
mod fault;
mod machine;
mod words;

pub use fault::parse;
pub use machine::{Machine, listed};

use anyhow::{Context, Result, bail};
use explain::{Explanation, Source};
use pinfold::mempolicy::{self, Mempolicy, PolicyError};
use pinfold::topology::NodeId;
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

/// Explain a memory policy: what it says, where pages go on this machine, and whether the kernel takes it.
///
/// Without POLICY, the one in PINFOLD_POLICY; where that is not set, the one that this command was started with. The exit status is 0 for a policy that can be put to use here, 1
/// for one that cannot, and 2 for what is no policy.
#[derive(clap::Args)]
pub struct Args {
    /// As in interleave:0-3, bind=static:0,2, prefer-many=relative:0-1, weighted-interleave, local
    #[arg(value_name = "POLICY")]
    policy: Option<OsString>,

    /// As seen from a CPU of this node, instead of the one that this runs on
    #[arg(long, value_name = "NODE", value_parser = node)]
    from: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Look at the files below this folder instead of /
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

fn node(text: &str) -> Result<usize, &'static str> {
    number(text).ok_or("give a node's number, like 0")
}

/// A number in decimal digits, without a sign.
pub fn number<N: FromStr>(text: &str) -> Option<N> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

#[derive(Serialize)]
struct Answer {
    policy: Explanation,
}

/// The library looks at no policy that is longer than this.
const VARIABLE_MOST: usize = 4096;

/// The policy in PINFOLD_POLICY, read as the library reads it; nothing where the variable is not set, or empty.
pub fn of_variable() -> Result<Option<Mempolicy>> {
    let Some(text) = std::env::var_os(mempolicy::VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    if text.len() > VARIABLE_MOST {
        bail!(
            "{}: {} bytes are more than the library reads, {VARIABLE_MOST}; use ranges like 0-3",
            mempolicy::VARIABLE,
            text.len()
        );
    }
    parse(&text).context(mempolicy::VARIABLE).map(Some)
}

/// The policy that was asked for, and whose it is.
fn wanted(argument: Option<&OsStr>) -> Result<(Mempolicy, Source)> {
    if let Some(text) = argument {
        return Ok((parse(text)?, Source::Argument));
    }
    if let Some(policy) = of_variable()? {
        return Ok((policy, Source::Variable));
    }
    let own = mempolicy::thread().context("this thread's policy")?;
    Ok((own, Source::Thread))
}

pub fn main(args: Args) -> Result<ExitCode> {
    let (policy, source) = match wanted(args.policy.as_deref()) {
        // Nothing is wrong with what was written; policies cannot be asked for here.
        Err(error) if error.is::<PolicyError>() => {
            eprintln!("pinfold: {error:#}");
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
    let usable = explanation.usable;
    let text = if args.json {
        let answer = Answer {
            policy: explanation,
        };
        serde_json::to_string_pretty(&answer)? + "\n"
    } else {
        explanation.to_string()
    };
    crate::figures::print(&text)?;
    Ok(ExitCode::from(u8::from(!usable)))
}
