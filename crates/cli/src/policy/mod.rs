//! `pinfold policy`: what a memory policy says, and what it comes to on this machine.

mod explain;
mod fault;
mod machine;
mod words;

pub use fault::parse;
pub use machine::{Machine, listed};

use anyhow::{Context, Result, bail};
use explain::Explanation;
use pinfold::mempolicy;
use pinfold::topology::NodeId;
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Explain a memory policy: what it says, where pages go on this machine, and whether the kernel takes it.
///
/// Without POLICY, the one that this command was started with. The exit status is 0 for a policy that can be put to use here, 1
/// for one that cannot, and 2 for what is no policy.
#[derive(clap::Args)]
pub struct Args {
    /// As in interleave:0-3, bind=static:0,2, `prefer (many)=relative:0-1`, weighted-interleave, local
    #[arg(value_name = "POLICY")]
    policy: Option<OsString>,

    /// As seen from a CPU of this node, instead of the one that this runs on
    #[arg(long, value_name = "NODE")]
    from: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Look at the files below this folder instead of /
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Serialize)]
struct Answer {
    policy: Explanation,
}

pub fn main(args: Args) -> Result<ExitCode> {
    let policy = match &args.policy {
        Some(text) => parse(text)?,
        None => mempolicy::thread().context("this thread's policy")?,
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
    let in_effect = args.policy.is_none();
    let explanation = Explanation::of(&policy, &machine, from, in_effect);
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
