//! Each CPU's sheaves, and how they move: the fast paths' words, idle sheaves, deferred frees.

pub(crate) mod deferred;
pub(crate) mod idle;
pub(crate) mod in_flight;
pub(crate) mod place;
pub(crate) mod sheaf;
pub(crate) mod sheaf_units;
