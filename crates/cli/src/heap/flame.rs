//! A heap profile as a flame graph.

use super::report::What;
use super::symbols::{Profile, Stack};
use crate::output::{self, escaped};
use anyhow::{Context, Result, bail};
use inferno::flamegraph::color::{BackgroundColor, BasicPalette, Palette};
use inferno::flamegraph::{self, Options, TextTruncateDirection};
use pinfold_lab::figures::date;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// More bytes than a process can hold. A profile in a file may say any number, and the sum of all
/// call stacks must have room in a word.
const MOST: f64 = (1_u64 << 45) as f64;

/// Draws the call stacks to an SVG file. `older` is when the profile that was subtracted was read or
/// written, in nanoseconds since the epoch.
pub fn draw(profile: &Profile, older: Option<i64>, what: What, path: &Path) -> Result<()> {
    let picture = svg(profile, older, what).with_context(|| path.display().to_string())?;
    output::write("the flame graph", path, &picture)
}

/// Returns the call stacks as SVG. In a difference, the width of a call stack is how much its memory
/// has changed: call stacks that have grown are red, and those that have shrunk are blue.
pub fn svg(profile: &Profile, older: Option<i64>, what: What) -> Result<Vec<u8>> {
    let is_difference = profile.older.is_some();
    let lines: Vec<String> = profile
        .stacks
        .iter()
        .filter_map(|stack| line(profile, stack, what, is_difference))
        .collect();
    if lines.is_empty() {
        bail!("no call stack holds memory to draw");
    }
    let mut options = Options::default();
    let (title, word) = (escaped(&profile.title), what.word());
    options.title = match is_difference {
        false => format!("Heap of {title}, bytes {word}"),
        true => format!("Heap of {title}, change of the bytes {word}"),
    };
    options.subtitle = Some(match older {
        None => moment(profile.time_ns),
        Some(older) => format!(
            "{} to {}; red has grown, blue has shrunk",
            moment(older),
            moment(profile.time_ns)
        ),
    });
    options.colors = Palette::Basic(BasicPalette::Mem);
    if is_difference {
        options.bgcolors = Some(BackgroundColor::Grey);
    }
    // One function has one colour, in this graph and in others.
    options.hash = true;
    options.text_truncate_direction = TextTruncateDirection::Right;
    options.count_name = "bytes".into();
    options.factor = 1.0;
    let mut picture = Vec::new();
    let lines = lines.iter().map(String::as_str);
    flamegraph::from_lines(&mut options, lines, &mut picture).context("cannot draw")?;
    Ok(picture)
}

/// Returns a call stack in the form that the drawing takes: the functions, the outermost first, and
/// the bytes. A difference has two numbers. The second one is the width, and the sign of the second
/// less the first chooses the colour.
fn line(profile: &Profile, stack: &Stack, what: What, is_difference: bool) -> Option<String> {
    let bytes = what.bytes(&stack.values);
    let width = bytes.abs().min(MOST);
    if width < 1.0 || (bytes < 0.0 && !is_difference) {
        return None;
    }
    let mut functions: Vec<String> = profile
        .functions(stack)
        .map(|function| escaped(&function).replace(';', ":"))
        .collect();
    functions.reverse();
    let functions = functions.join(";");
    Some(match is_difference {
        false => format!("{functions} {width:.0}"),
        true if bytes > 0.0 => format!("{functions} 0 {width:.0}"),
        true => format!("{functions} {:.0} {width:.0}", 2.0 * width.round()),
    })
}

/// Formats a moment in UTC, from nanoseconds since the epoch.
fn moment(nanoseconds: i64) -> String {
    let since = Duration::from_nanos(nanoseconds.try_into().unwrap_or(0));
    let (day, time) = date(UNIX_EPOCH + since);
    format!("{day} {time} UTC")
}
