//! Text in the form of `/proc/slabinfo`, version 2.1: what `slabtop` and its like read.
//!
//! docs/slabinfo.md says what each column means here.

use super::KmemCache;
use super::info::{Info, caches};
use core::fmt::{self, Write};

/// The kernel's header, in its own spacing.
const HEADER: &str = "slabinfo - version: 2.1\n\
    # name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> \
    : tunables <limit> <batchcount> <sharedfactor> \
    : slabdata <active_slabs> <num_slabs> <sharedavail>\n";

/// Bytes of the column of names.
const NAME_WIDTH: usize = 17;

/// All caches, or one, as text: two header lines, then a line for each cache. Numbers are read while it is written, cache by
/// cache; nothing is allocated, and no lock is held while text is written.
#[derive(Clone, Copy, Debug)]
pub struct Slabinfo {
    only: Option<Info>,
}

/// All caches in the form of `/proc/slabinfo`, version 2.1.
///
/// ```
/// print!("{}", pinfold::slab::slabinfo());
/// ```
#[doc(alias = "/proc/slabinfo")]
pub fn slabinfo() -> Slabinfo {
    Slabinfo { only: None }
}

impl Info {
    /// This cache in the form of `/proc/slabinfo`, with its header. Only that of a destroyed one.
    pub fn slabinfo(&self) -> Slabinfo {
        Slabinfo { only: Some(*self) }
    }
}

impl KmemCache {
    /// This cache in the form of `/proc/slabinfo`, with its header.
    pub fn slabinfo(&self) -> Slabinfo {
        self.info().slabinfo()
    }
}

impl fmt::Display for Slabinfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEADER)?;
        match self.only {
            Some(info) => write_line(info, f),
            None => caches().try_for_each(|info| write_line(info, f)),
        }
    }
}

/// Writes a cache's line, if the cache is still there.
fn write_line(info: Info, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (cache, usage) = (info.cache, info.usage());
    if info.is_destroyed() {
        return Ok(());
    }
    write_name(info.name(), f)?;
    write!(
        f,
        " {:6} {:6} {:6} {:4} {:4}",
        usage.active,
        usage.total,
        cache.size,
        cache.per_slab,
        info.pages_per_slab()
    )?;
    // A CPU has two sheaves, and moves one of them at once.
    let (capacity, barn) = info.sheaves();
    write!(f, " : tunables {:4} {capacity:4} {barn:4}", 2 * capacity)?;
    writeln!(
        f,
        " : slabdata {:6} {:6} {:6}",
        usage.slabs - usage.slabs_empty,
        usage.slabs,
        usage.barn_objects
    )
}

/// Writes a name as one word of printable ASCII, which the format needs, padded to its column. What is not becomes an underscore, and
/// so does a leading `#`, which would make the line a comment.
fn write_name(name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let name = if name.is_empty() { "(unnamed)" } else { name };
    let mut length = 0;
    for char in name.chars() {
        let fine = char.is_ascii_graphic() && (char != '#' || length > 0);
        f.write_char(if fine { char } else { '_' })?;
        length += 1;
    }
    let width = NAME_WIDTH.saturating_sub(length);
    write!(f, "{:width$}", "")
}
