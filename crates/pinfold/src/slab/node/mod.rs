//! A cache on a node: its barn and its slabs.

pub(crate) mod geometry;
pub(crate) mod handler_frees;
pub(crate) mod look;
pub(crate) mod objects;
pub(crate) mod part;
pub(crate) mod parts;
pub(crate) mod purge;
pub(crate) mod refuse;
pub(crate) mod remote;
pub(crate) mod slab_bits;
pub(crate) mod slabs;
pub(crate) mod survey;
