//! From keys to values, growing only.
//!
//! A node holds a key and eight places for further nodes; three bits of the key's hash say which place comes next. A place
//! is written once and never again, so finding takes no lock, and of two threads that add at the same place the later one
//! walks on from the earlier one's node.

use ::metrics::Key;
use std::sync::OnceLock;

const BITS: u32 = 3;
type Places<T> = [OnceLock<Box<Node<T>>>; 1 << BITS];

struct Node<T> {
    key: Key,
    value: T,
    next: Places<T>,
}

/// See the module.
pub struct Tree<T>(Places<T>);

impl<T> Tree<T> {
    pub fn new() -> Self {
        Tree(empty())
    }

    /// What `key` leads to.
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

    /// What `key` leads to: `value`, unless someone was earlier.
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
    fn what_was_inserted_is_found() {
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
    fn threads_agree_on_the_first() {
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
