//! A heap profile as a flame graph.

use crate::Error;
use crate::internal::profile::{Profile, What};
use inferno::flamegraph::{self, Options};
use std::borrow::Cow;

/// Draws the call stacks as SVG. In a difference, leaves out the call stacks that hold less than
/// before. `clean` makes text from the program harmless.
///
/// # Errors
///
/// Fails with [`Error::Nothing`] if no call stack holds memory.
pub fn draw(
    profile: &Profile,
    what: What,
    clean: fn(&str) -> Cow<'_, str>,
) -> Result<Vec<u8>, Error> {
    let lines: Vec<String> = profile
        .stacks
        .iter()
        .filter(|stack| what.bytes(&stack.values) >= 1.0)
        .map(|stack| {
            let mut functions: Vec<String> = profile
                .functions(stack)
                .map(|function| clean(&function).replace(';', ":"))
                .collect();
            functions.reverse();
            format!("{} {:.0}", functions.join(";"), what.bytes(&stack.values))
        })
        .collect();
    if lines.is_empty() {
        return Err(Error::Nothing);
    }
    let mut options = Options::default();
    options.title = match &profile.older {
        None => format!("Heap of {}, bytes {}", clean(&profile.title), what.word()),
        Some((old, ..)) => format!(
            "Heap of {}, growth of the bytes {} since {}",
            clean(&profile.title),
            what.word(),
            clean(old)
        ),
    };
    options.count_name = "bytes".into();
    options.factor = 1.0;
    let mut picture = Vec::new();
    let lines = lines.iter().map(String::as_str);
    flamegraph::from_lines(&mut options, lines, &mut picture).map_err(Error::Picture)?;
    Ok(picture)
}
