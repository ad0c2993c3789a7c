//! Visits every state that a scenario can reach.

use crate::kernel::Event;
use crate::machine::{State, Violation, World};
use std::collections::HashSet;
use std::hash::{Hash, Hasher};

/// What a search found.
pub struct Outcome {
    pub states: usize,
    /// What went wrong, and the events that led there.
    pub violation: Option<(Violation, Vec<Event>)>,
}

/// Visits all states. `check` judges each final state.
pub fn explore(
    world: &World,
    first: State,
    check: &dyn Fn(&State) -> Result<(), Violation>,
) -> Outcome {
    let mut seen = HashSet::with_hasher(Identity::default());
    let mut trail: Vec<(usize, Event)> = vec![];
    let mut to_do = vec![(first, usize::MAX)];
    let mut states = 0;
    while let Some((state, from)) = to_do.pop() {
        states += 1;
        let events = world.events(&state);
        if events.is_empty() {
            let verdict = match state.threads.iter().all(|thread| thread.is_done()) {
                true => check(&state),
                false => Err("no thread can go on".into()),
            };
            if let Err(violation) = verdict {
                let violation = Some((violation, path(&trail, from)));
                return Outcome { states, violation };
            }
            continue;
        }
        for event in events {
            let mut next = state.clone();
            trail.push((from, event));
            let at = trail.len() - 1;
            if let Err(violation) = world.perform(&mut next, event) {
                let violation = Some((violation, path(&trail, at)));
                return Outcome { states, violation };
            }
            if seen.insert(fingerprint(&next)) {
                to_do.push((next, at));
            } else {
                trail.pop();
            }
        }
    }
    Outcome {
        states,
        violation: None,
    }
}

fn path(trail: &[(usize, Event)], mut at: usize) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some((from, event)) = trail.get(at) {
        events.push(*event);
        at = *from;
    }
    events.reverse();
    events
}

/// Returns 128 bits that stand for a state. Two states with the same bits are taken for one.
fn fingerprint(state: &State) -> u128 {
    let mut hasher = Mixer([0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f]);
    state.hash(&mut hasher);
    u128::from(hasher.0[0]) << 64 | u128::from(hasher.0[1])
}

/// Two independent hashes by multiplication.
struct Mixer([u64; 2]);

impl Mixer {
    fn mix(&mut self, word: u64) {
        const FACTORS: [u64; 2] = [0xa076_1d64_78bd_642f, 0xe703_7ed1_a0b4_28db];
        for (hash, factor) in self.0.iter_mut().zip(FACTORS) {
            let product =
                u128::from(*hash ^ word ^ factor) * u128::from(factor ^ hash.rotate_left(29) | 1);
            *hash = (product as u64) ^ (product >> 64) as u64;
        }
    }
}

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0[0]
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.mix(u64::from(value));
    }

    fn write_u16(&mut self, value: u16) {
        self.mix(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.mix(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.mix(value as u64);
    }
}

/// A hasher for keys that are hashes already.
#[derive(Clone, Copy, Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}

impl std::hash::BuildHasher for Identity {
    type Hasher = Identity;

    fn build_hasher(&self) -> Identity {
        *self
    }
}
