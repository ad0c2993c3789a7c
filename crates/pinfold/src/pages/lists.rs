//! Reports the state of the page lists.

use crate::nodes;
use crate::slab::KmemCache;
use crate::sys::{Text, whole_characters};
use crate::topology::NodeId;
use core::fmt::{self, Write};

/// The page lists of all CPUs for one node's pages, in the terms of the kernel's zoneinfo.
///
/// ```
/// use pinfold::pages::Pages;
///
/// let pool = Pages::new("watched")?;
/// let page = pool.alloc(0).expect("there is memory for a page");
/// assert_eq!(pool.lists().map(|list| list.active).sum::<usize>(), 1);
/// // SAFETY: the page came from this pool and is not used afterwards.
/// unsafe { pool.free(page) };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct List {
    /// The node; `None` for the pages that the kernel places by the process's policy.
    pub node: Option<NodeId>,
    /// Pages on the CPUs' lists.
    pub count: usize,
    /// The most pages that a list holds before it gives some back. Adapts to use.
    pub high: usize,
    /// Pages that are allocated.
    pub active: usize,
    /// Pages that the slabs of this node hold, allocated or free.
    pub present: usize,
}

impl List {
    pub(super) fn of(node: usize, cache: &KmemCache) -> List {
        let (statistics, usage) = (cache.statistics(), cache.info().usage());
        let kernels = nodes::is_the_kernels(node);
        List {
            node: (!kernels).then(|| NodeId(nodes::id(node))),
            count: usage.cpu_objects,
            high: statistics.sheaf_capacity,
            active: usage.active,
            present: usage.total,
        }
    }
}

/// Prints a line in the style of `/proc/zoneinfo`.
impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "Node {}", node.0)?,
            None => write!(f, "By policy")?,
        }
        let List {
            count,
            high,
            active,
            present,
            ..
        } = self;
        write!(
            f,
            ", count: {count} high: {high} active: {active} present: {present}"
        )
    }
}

/// Returns the name of a node's cache: the pool's name `pool`, cut to fit, and the node's number.
pub(super) fn name(pool: &str, node: usize) -> Text<33> {
    let mut text = Text::new();
    // Leaves room for the colon and the longest number.
    let most = whole_characters(pool, 27);
    let written = write!(text, "{}:{node}", &pool[..most]);
    debug_assert!(written.is_ok());
    text
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn names_are_cut_between_characters() {
        assert_eq!(name("pool", 63).as_str(), "pool:63");
        let long = "pufferspeicherfürseitenundmehr";
        let cut = name(long, 7);
        assert!(long.starts_with(cut.as_str().strip_suffix(":7").unwrap()));
    }
}
