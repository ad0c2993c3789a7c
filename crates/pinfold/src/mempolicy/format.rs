//! Prints a policy as text.

use super::{Flags, Mempolicy};
use crate::topology::NODES_MOST;
use core::fmt;

impl fmt::Display for Mempolicy {
    /// Prints `mode[=flag[|flag]][:nodes][@home]`: the policy that the user named, in the kernel's
    /// words.
    ///
    /// A tmpfs accepts the text as `mpol=`. Exceptions are policies with `balancing`, a home node,
    /// or `all` nodes, which a tmpfs does not support.
    ///
    /// [`Mempolicy::parse`] reads the text as the same policy, [unbound](Mempolicy::unbound).
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
