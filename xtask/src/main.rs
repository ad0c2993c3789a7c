//! Chores for developers: `cargo xtask tidy`, `stack`, `install` and `vm`.
#![forbid(unsafe_code)]

mod install;
mod prose;
mod stack;
mod tidy;
mod vm;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask tidy
           checks the house rules: dependencies point down, files are short, unsafe blocks have reasons
       cargo xtask stack [--limit BYTES] [--library FILE] [--entry NAME]... [--frames BYTES]
           computes the most stack that calls of the preloaded library use; fails above the limit (4096)
           --chains        prints the deepest chain of calls for each entry, not only for those above the limit
           --without NAME  leaves out a function and the functions that it calls
           --frames BYTES  also lists the functions whose frames have at least this size
       cargo xtask install --prefix DIR [--destdir DIR]
           builds and installs the command, the libraries, the headers and the pkg-config file
       cargo xtask vm [--arch x86_64|aarch64] [--machine NAME]... [--kernel-args WORDS] [-- TESTS]
           runs tests on an emulated machine (vm/README.md): all, or those whose name contains a word (=NAME: the exact name)
           --list          lists the machines; the default is nodes4, for aarch64 nodes2
           --shell COMMAND runs a command on the machine instead of tests
           --prepare       only downloads and installs what the machine needs; fails if that is impossible
           --seconds N     limits the machine's run time (900)";

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
