//! Developers' chores: `cargo xtask tidy` and `cargo xtask install`.
#![forbid(unsafe_code)]

mod install;
mod tidy;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask tidy
           the house rules: dependencies point down, files are short, no unsafe block without a reason
       cargo xtask install --prefix DIR [--destdir DIR]
           builds and installs the command, the libraries, the headers and the pkg-config file";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["tidy"] => tidy::main(),
        ["install", options @ ..] => install::main(options),
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
