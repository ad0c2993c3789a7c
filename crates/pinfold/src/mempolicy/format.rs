//! A policy as text.

use super::{Flags, Mempolicy};
use crate::topology::NODES_MOST;
use core::fmt;

impl fmt::Display for Mempolicy {
    /// `mode[=flag[|flag]][:nodes][@home]`: what the user said, in the kernel's words. A tmpfs takes it as `mpol=`, unless
    /// it says what a tmpfs cannot have: `balancing`, a home node, or `all` nodes to bind to.
    ///
    /// [`Mempolicy::parse`] gives the same policy back, [unbound](Mempolicy::unbound).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.mode.name())?;
        let mut before = "=";
        for (flag, name) in FLAGS {
            if self.flags.contains(flag) {
                write!(f, "{before}{name}")?;
                before = "|";
            }
        }
        match self.user.len() {
            0 => {}
            NODES_MOST => f.write_str(":all")?,
            _ => write!(f, ":{}", self.user)?,
        }
        self.home.map_or(Ok(()), |home| write!(f, "@{}", home.0))
    }
}

/// The flags' names, in the order in which they are printed.
pub(super) const FLAGS: [(Flags, &str); 3] = [
    (Flags::STATIC, "static"),
    (Flags::RELATIVE, "relative"),
    (Flags::BALANCING, "balancing"),
];
