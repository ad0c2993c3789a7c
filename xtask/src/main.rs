//! Developers' chores: `cargo xtask tidy`, `stack`, `install` and `vm`.
#![forbid(unsafe_code)]

mod install;
mod stack;
mod tidy;
mod vm;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask tidy
           the house rules: dependencies point down, files are short, no unsafe block without a reason
       cargo xtask stack [--limit BYTES] [--library FILE] [--entry NAME]... [--frames BYTES]
           how much stack the calls of the preloaded library use at most; fails above the limit (4096)
           --chains        prints the deepest chain of calls of each, and not only of those above the limit
           --without NAME  leaves a function out, and what it calls
           --frames BYTES  lists the functions with frames of at least that size too
       cargo xtask install --prefix DIR [--destdir DIR]
           builds and installs the command, the libraries, the headers and the pkg-config file
       cargo xtask vm [--arch x86_64|aarch64] [--machine NAME]... [--kernel-args WORDS] [-- TESTS]
           runs tests, all or those with one of these words in their names (=NAME: the whole name), on an emulated machine (vm/README.md)
           --list          the machines there are; nodes4 (aarch64: nodes2) without --machine
           --shell COMMAND runs a command there instead of tests
           --prepare       only gets what it takes, and fails when it cannot be had
           --seconds N     how long the machine may take (900)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["tidy"] => tidy::main(),
        ["stack", options @ ..] => stack::main(options),
        ["install", options @ ..] => install::main(options),
        ["vm", options @ ..] => vm::main(options),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
