//! The base of a counter that states no reach.

use loom::sync::atomic::AtomicI64;
use std::ops::Deref;

#[derive(Default)]
pub struct Value(AtomicI64);

impl Deref for Value {
    type Target = AtomicI64;
    fn deref(&self) -> &AtomicI64 {
        &self.0
    }
}

impl Value {
    pub fn reach(&self) -> u64 {
        0
    }

    pub fn state(&self, reach: u64) {
        assert_eq!(reach, 0);
    }

    pub fn add_if(&self, _amount: i64, _judge: impl Fn(i64, u64) -> bool) -> bool {
        false
    }
}

pub fn is_supported() -> bool {
    false
}
