//! What a cache tells about itself.

pub(crate) mod attributes;
pub(crate) mod blocks;
pub(crate) mod events;
pub(crate) mod info;
pub(crate) mod slabinfo;
