//! A heap profile as a flame graph.

use crate::Error;
use crate::internal::profile::{Profile, Stack, What};
use inferno::flamegraph::color::{BackgroundColor, BasicPalette, Palette};
use inferno::flamegraph::{self, Options, TextTruncateDirection};
use std::borrow::Cow;

/// More bytes than a process can hold. A profile in a file may say any number, and the sum of all
/// call stacks must have room in a word.
const MOST: f64 = (1_u64 << 45) as f64;

/// The most characters of a function's name that are drawn.
const LONGEST: usize = 256;

/// The most bytes of names that are drawn. A process chooses its names, and how many functions each
/// call stack has.
const MOST_TEXT: usize = 8 << 20;

/// What is drawn of a profile, and how.
#[derive(Debug)]
pub struct Picture {
    /// What the widths count.
    pub what: What,
    /// The second line of the title.
    pub subtitle: Option<String>,
    /// How many call stacks are drawn, at most: the largest ones. Call stacks beyond 8 MiB of text
    /// are left out as well.
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
    let mut lines: Vec<String> = Vec::new();
    let mut text = 0;
    for (bytes, stack) in stacks {
        let functions = profile.functions(stack);
        let mut functions: Vec<String> = functions.map(|name| drawn_name(&name, clean)).collect();
        functions.reverse();
        let line = format!("{} {}", functions.join(";"), numbers(bytes, is_difference));
        text += line.len();
        if text > MOST_TEXT {
            break;
        }
        lines.push(line);
    }
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

/// Returns a function's name as it is drawn. A semicolon would end it.
fn drawn_name(name: &str, clean: fn(&str) -> Cow<'_, str>) -> String {
    let end = name.char_indices().nth(LONGEST);
    let start = end.map_or(name, |(end, _)| &name[..end]);
    clean(start).replace(';', ":")
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::internal::profile::{Line, Location, Values};

    /// A process chooses the names, by its files and by `/tmp/perf-PID.map`.
    #[test]
    fn a_picture_of_long_names_is_bounded() {
        let location = |nth: usize| Location {
            address: 0,
            mapping: None,
            lines: vec![Line {
                function: format!("{nth}{}", "\u{e9}".repeat(4000)),
                file: String::new(),
                line: 0,
            }],
            symbol: String::new(),
        };
        let stack = |nth: usize| Stack {
            locations: (0..64).map(|frame| (nth + frame) % 2000).collect(),
            values: Values {
                bytes: 100.0,
                ..Values::default()
            },
        };
        let profile = Profile {
            locations: (0..2000).map(location).collect(),
            stacks: (0..2000).map(stack).collect(),
            ..Profile::default()
        };
        let picture = Picture {
            what: What::InUse,
            subtitle: None,
            most: usize::MAX,
            clean: |text| text.into(),
        };
        let drawn = draw(&profile, picture).unwrap();
        assert!(drawn.len() < 64 << 20, "{}", drawn.len());
        let drawn = String::from_utf8(drawn).unwrap();
        assert!(drawn.contains(&"\u{e9}".repeat(250)) && !drawn.contains(&"\u{e9}".repeat(257)));
    }
}
