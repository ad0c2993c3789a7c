//! Text in the form of `/proc/slabinfo`, version 2.1, which tools such as `slabtop` read.
//!
//! docs/slabinfo.md explains what each column means here.

use super::info::{Info, caches};
use crate::slab::KmemCache;
use core::fmt::{self, Write};

/// The kernel's header, with its spacing.
const HEADER: &str = "slabinfo - version: 2.1\n\
    # name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> \
    : tunables <limit> <batchcount> <sharedfactor> \
    : slabdata <active_slabs> <num_slabs> <sharedavail>\n";

/// Width of the column of names, in bytes.
const NAME_WIDTH: usize = 17;

/// The caches as text, when this is displayed: two header lines, then a line for each cache.
///
/// Displaying reads each cache when it writes the cache's line. It allocates nothing, and holds no
/// lock while it writes.
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("session", Layout::new::<[u64; 4]>())?;
/// let text = cache.slabinfo().to_string();
/// assert!(text.starts_with("slabinfo - version: 2.1\n"));
/// assert!(text.lines().nth(2).expect("the cache's line").starts_with("session "));
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Slabinfo {
    only: Option<Info>,
}

/// Returns a value that displays all caches in the form of `/proc/slabinfo`, version 2.1. The
/// caches are read only when the value is displayed. A size class of malloc has a cache from its
/// first allocation on.
///
/// ```
/// print!("{}", pinfold::slab::slabinfo());
/// ```
#[doc(alias = "/proc/slabinfo")]
pub fn slabinfo() -> Slabinfo {
    Slabinfo { only: None }
}

impl Info {
    /// Returns a value that displays this cache in the form of `/proc/slabinfo`, with the header.
    /// After the cache was destroyed, the text is only the header.
    pub fn slabinfo(&self) -> Slabinfo {
        Slabinfo { only: Some(*self) }
    }
}

impl KmemCache {
    /// Returns a value that displays this cache in the form of `/proc/slabinfo`, with the header.
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

/// Writes a cache's line. Writes nothing if the cache was destroyed.
fn write_line(info: Info, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    // The capacity of sheaves may change, so it is read with the usage, before the check that the
    // cache still exists.
    let (usage, (capacity, barn)) = (info.usage(), info.sheaves());
    if info.is_destroyed() {
        return Ok(());
    }
    write_name(info.name(), f)?;
    write!(
        f,
        " {:6} {:6} {:6} {:4} {:4}",
        usage.active,
        usage.total,
        info.geometry.size,
        info.geometry.per_slab,
        info.pages_per_slab()
    )?;
    // The limit is two sheaves, because each CPU may have two. The batch is one sheaf.
    write!(f, " : tunables {:4} {capacity:4} {barn:4}", 2 * capacity)?;
    writeln!(
        f,
        " : slabdata {:6} {:6} {:6}",
        usage.slabs - usage.slabs_empty,
        usage.slabs,
        usage.barn_objects
    )
}

/// Writes a name, padded to its column. The format requires one word of printable ASCII, so other
/// characters become underscores. A leading `#` becomes an underscore too, because it would make
/// the line a comment.
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
