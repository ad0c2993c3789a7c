//! A heap profile as a flame graph.

use crate::Error;
use crate::internal::profile::{Profile, Stack, What};
use inferno::flamegraph::color::{BackgroundColor, BasicPalette, Palette};
use inferno::flamegraph::{self, Options, TextTruncateDirection};
use std::borrow::Cow;

/// More bytes than a process can hold. A profile in a file may say any number, and the sum of all
/// call stacks must have room in a word.
const MOST: f64 = (1_u64 << 45) as f64;

/// What is drawn of a profile, and how.
#[derive(Debug)]
pub struct Picture {
    /// What the widths count.
    pub what: What,
    /// The second line of the title.
    pub subtitle: Option<String>,
    /// How many call stacks are drawn, at most: the largest ones.
    pub most: usize,
    /// Makes text from the program harmless.
    pub clean: fn(&str) -> Cow<'_, str>,
}

/// Draws the call stacks as SVG. In a difference, the width of a call stack is how much its memory
/// has changed: call stacks that have grown are red, and those that have shrunk are blue.
///
/// # Errors
///
/// Fails with [`Error::Nothing`] if no call stack holds memory.
pub fn draw(profile: &Profile, picture: Picture) -> Result<Vec<u8>, Error> {
    let Picture { what, clean, .. } = picture;
    let is_difference = profile.older.is_some();
    let mut stacks: Vec<(f64, &Stack)> = profile
        .stacks
        .iter()
        .map(|stack| (what.bytes(&stack.values).clamp(-MOST, MOST), stack))
        .filter(|(bytes, _)| *bytes >= 1.0 || (is_difference && *bytes <= -1.0))
        .collect();
    stacks.sort_by(|(a, _), (b, _)| b.abs().total_cmp(&a.abs()));
    stacks.truncate(picture.most);
    let lines: Vec<String> = stacks
        .into_iter()
        .map(|(bytes, stack)| {
            let functions = profile.functions(stack);
            let mut functions: Vec<String> = functions
                .map(|function| clean(&function).replace(';', ":"))
                .collect();
            functions.reverse();
            format!("{} {}", functions.join(";"), numbers(bytes, is_difference))
        })
        .collect();
    if lines.is_empty() {
        return Err(Error::Nothing);
    }
    let mut options = Options::default();
    let (title, word) = (clean(&profile.title), what.word());
    options.title = match is_difference {
        false => format!("Heap of {title}, bytes {word}"),
        true => format!("Heap of {title}, change of the bytes {word}"),
    };
    options.subtitle = picture.subtitle;
    options.colors = Palette::Basic(BasicPalette::Mem);
    if is_difference {
        options.bgcolors = Some(BackgroundColor::Grey);
    }
    // One function has one colour, in this graph and in others.
    options.hash = true;
    options.text_truncate_direction = TextTruncateDirection::Right;
    options.count_name = "bytes".into();
    options.factor = 1.0;
    let mut drawn = Vec::new();
    let lines = lines.iter().map(String::as_str);
    flamegraph::from_lines(&mut options, lines, &mut drawn).map_err(Error::Picture)?;
    Ok(drawn)
}

/// Returns the numbers of a call stack in the form that the drawing takes. A difference has two.
/// The second one is the width, and the sign of the second less the first chooses the colour.
fn numbers(bytes: f64, is_difference: bool) -> String {
    let width = bytes.abs().round();
    match is_difference {
        false => format!("{width:.0}"),
        true if bytes > 0.0 => format!("0 {width:.0}"),
        true => format!("{:.0} {width:.0}", 2.0 * width),
    }
}
