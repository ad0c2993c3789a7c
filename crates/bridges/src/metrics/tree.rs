//! A tree from keys to values that only grows.
//!
//! A node holds a key, its value, and eight places for further nodes. Three bits of the key's hash
//! choose the next place. A place is written once and never changes again, so that finding a key
//! takes no lock. If two threads insert at the same place, the later one continues from the node of
//! the earlier one.

use ::metrics::Key;
use std::sync::OnceLock;

/// Bits of the hash that choose a place.
const BITS: u32 = 3;
type Places<T> = [OnceLock<Box<Node<T>>>; 1 << BITS];

struct Node<T> {
    key: Key,
    value: T,
    next: Places<T>,
}

/// The places from which every search begins.
pub struct Tree<T>(Places<T>);

impl<T> Tree<T> {
    pub fn new() -> Self {
        Tree(empty())
    }

    /// Returns the value of `key`, if there is one.
    pub fn find(&self, key: &Key) -> Option<&T> {
        let (mut places, mut hash) = (&self.0, key.get_hash());
        loop {
            let node = places[place(hash)].get()?;
            if node.key == *key {
                return Some(&node.value);
            }
            places = &node.next;
            hash = hash.rotate_right(BITS);
        }
    }

    /// Returns the value of `key`: the present one, or else `value`, which is inserted.
    pub fn insert(&self, key: &Key, value: T) -> &T {
        let (mut places, mut hash) = (&self.0, key.get_hash());
        let mut new = Some(Box::new(Node {
            key: key.clone(),
            value,
            next: empty(),
        }));
        loop {
            let slot = &places[place(hash)];
            let node = slot.get_or_init(|| new.take().expect("a node is placed once"));
            if node.key == *key {
                return &node.value;
            }
            places = &node.next;
            hash = hash.rotate_right(BITS);
        }
    }
}

fn place(hash: u64) -> usize {
    (hash & ((1 << BITS) - 1)) as usize
}

fn empty<T>() -> Places<T> {
    std::array::from_fn(|_| OnceLock::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn key(number: usize) -> Key {
        Key::from_name(format!("key {number}"))
    }

    #[test]
    fn inserted_keys_are_found() {
        let tree = Tree::new();
        for number in 0..1000 {
            assert!(tree.find(&key(number)).is_none());
            tree.insert(&key(number), number);
        }
        for number in 0..1000 {
            assert_eq!(tree.find(&key(number)), Some(&number));
        }
        assert_eq!(tree.insert(&key(7), 0), &7);
    }

    #[test]
    fn threads_that_insert_at_once_get_the_same_value() {
        let tree = Tree::new();
        let seen: Vec<Vec<usize>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|own| {
                    let tree = &tree;
                    scope.spawn(move || (0..500).map(|n| *tree.insert(&key(n), own)).collect())
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(seen.iter().all(|one| *one == seen[0]));
    }
}
