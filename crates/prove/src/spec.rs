//! What each operation does when it runs alone, and which outcomes several operations may have.

use pinfold_rseq::shard::REFUSED;
use std::collections::HashSet;

/// An operation with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    Add(u64),
    CountUp(u64),
    CountDown(u64),
    Claim(u64),
    /// Whether the gate is open.
    AddGated(u64, bool),
    StoreIfEqual(u64, u64),
    Pop,
    PopCounted(u64),
    Push(u64),
    PopBatch(u64),
    PushBatch(Vec<u64>),
    Store(u64),
    And(u64),
    Or(u64),
    FetchAdd(u64),
    Swap(u64),
    CompareExchange(u64, u64),
    CompareExchangePair([u64; 2], [u64; 2]),
    AddPair([u64; 2]),
    StoreTwoIfEqual(u64, u64, u64),
    StoreIfBothEqual(u64, u64, u64),
    ListPush(u64),
    ListPop,
    Append([u64; 2]),
    /// Takes all that is in the unit, after a stop and a fence.
    Take,
}

/// The bytes of a slot of the ring, and of all slots.
pub const SLOT: u64 = 16;
pub const RING: u64 = 32;
/// The items that a stack holds.
pub const CAPACITY: usize = 3;

/// What a unit holds. A scenario uses only some of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Unit {
    pub words: [u64; 2],
    pub stack: Option<Vec<u64>>,
    pub list: Option<Vec<u64>>,
    pub ring: Option<Ring>,
    pub shard: Option<[u64; 4]>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ring {
    pub head: u64,
    pub tail: u64,
    pub records: Vec<[u64; 2]>,
}

use Operation as Op;

impl Operation {
    /// Returns the name of the section.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Add(_) => "add",
            Op::CountUp(_) => "count_up",
            Op::CountDown(_) => "count_down",
            Op::Claim(_) => "claim",
            Op::AddGated(..) => "add_gated",
            Op::StoreIfEqual(..) => "store_if_equal",
            Op::Pop => "pop",
            Op::PopCounted(_) => "pop_counted",
            Op::Push(_) => "push",
            Op::PopBatch(_) => "pop_batch",
            Op::PushBatch(_) => "push_batch",
            Op::Store(_) => "store",
            Op::And(_) => "and",
            Op::Or(_) => "or",
            Op::FetchAdd(_) => "fetch_add",
            Op::Swap(_) => "swap",
            Op::CompareExchange(..) => "compare_exchange",
            Op::CompareExchangePair(..) => "compare_exchange_pair",
            Op::AddPair(_) => "add_pair",
            Op::StoreTwoIfEqual(..) => "store_two_if_equal",
            Op::StoreIfBothEqual(..) => "store_if_both_equal",
            Op::ListPush(_) => "list_push",
            Op::ListPop => "list_pop",
            Op::Append(_) => "append",
            Op::Take => "take",
        }
    }

    /// Returns the result where there is no unit.
    pub fn failed(&self) -> Vec<u64> {
        vec![match self {
            Op::Append(_) => 1,
            Op::CountUp(_) | Op::CountDown(_) => REFUSED as u64,
            _ => 0,
        }]
    }

    /// Runs the operation on a unit, and returns its result.
    pub fn apply(&self, unit: &mut Unit) -> Vec<u64> {
        match self {
            Op::Take => return take(unit),
            Op::Append(record) => return vec![append(unit, *record)],
            Op::CountUp(n) => return vec![count(unit, *n as i64, 1)],
            Op::CountDown(n) => return vec![count(unit, *n as i64, -1)],
            Op::Claim(token) => return claim(unit, *token),
            Op::ListPush(item) => {
                let list = unit.list.get_or_insert_default();
                list.insert(0, *item);
                return vec![1];
            }
            Op::ListPop => {
                let list = unit.list.get_or_insert_default();
                let item = if list.is_empty() { 0 } else { list.remove(0) };
                return vec![item];
            }
            _ => {}
        }
        if let Some(result) = self.on_stack(unit) {
            return result;
        }
        self.on_words(unit)
    }

    fn on_stack(&self, unit: &mut Unit) -> Option<Vec<u64>> {
        let (stack, count) = (&mut unit.stack, &mut unit.words[1]);
        Some(match self {
            Op::Pop => vec![stack.as_mut().and_then(Vec::pop).unwrap_or(0)],
            Op::PopCounted(n) => {
                let enough = *count as i64 > *n as i64;
                let items = stack.as_mut().filter(|items| enough && !items.is_empty());
                let item = items.and_then(Vec::pop);
                *count -= if item.is_some() { *n } else { 0 };
                vec![item.unwrap_or(0)]
            }
            Op::Push(item) => vec![push(stack, &[*item])],
            Op::PushBatch(items) => vec![push(stack, items)],
            Op::PopBatch(room) => {
                let mut result = vec![0];
                let items = stack.as_mut().into_iter().flat_map(|items| {
                    let keep = items.len().saturating_sub(*room as usize);
                    items.split_off(keep).into_iter().rev()
                });
                result.extend(items);
                result[0] = result.len() as u64 - 1;
                result
            }
            _ => return None,
        })
    }

    fn on_words(&self, unit: &mut Unit) -> Vec<u64> {
        let [word, other] = &mut unit.words;
        let old = *word;
        let (done, new) = match self {
            Op::Add(n) => (true, old.wrapping_add(*n)),
            Op::AddGated(n, is_open) => (*is_open, old.wrapping_add(*n)),
            Op::StoreIfEqual(expected, new) => (old == *expected, *new),
            Op::Store(value) => (true, *value),
            Op::And(mask) => (true, old & mask),
            Op::Or(mask) => (true, old | mask),
            Op::FetchAdd(n) => {
                *word = old.wrapping_add(*n);
                return vec![1, old];
            }
            Op::Swap(value) => {
                *word = *value;
                return vec![1, old];
            }
            Op::CompareExchange(expected, new) => {
                *word = if old == *expected { *new } else { old };
                return vec![1, old];
            }
            Op::CompareExchangePair(expected, new) => {
                let done = unit.words == *expected;
                unit.words = if done { *new } else { unit.words };
                return vec![u64::from(done)];
            }
            Op::AddPair([first, second]) => {
                *other = other.wrapping_add(*second);
                (true, old.wrapping_add(*first))
            }
            Op::StoreTwoIfEqual(expected, new, value) => {
                *other = if old == *expected { *value } else { *other };
                (old == *expected, *new)
            }
            Op::StoreIfBothEqual(expected, new, equal) => {
                (old == *expected && *other == *equal, *new)
            }
            _ => unreachable!("the other operations are not on words"),
        };
        *word = if done { new } else { old };
        vec![u64::from(done)]
    }

    /// Reduces what the function left in registers and buffers to what has a meaning.
    pub fn normal(&self, raw: &[u64]) -> Vec<u64> {
        match self {
            Op::FetchAdd(_) | Op::Swap(_) | Op::CompareExchange(..) => match raw[0] & 0xff {
                0 => vec![0],
                done => vec![done, raw[1]],
            },
            Op::PopBatch(_) => match raw.get(..(raw[0] as usize).saturating_add(1)) {
                Some(result) => result.to_vec(),
                None => raw.to_vec(),
            },
            Op::Claim(_) => match raw[0] & 0xff {
                0 => vec![0],
                done => [&[done], &raw[1..]].concat(),
            },
            Op::Pop | Op::PopCounted(_) | Op::ListPop | Op::PushBatch(_) | Op::Append(_) => {
                vec![raw[0]]
            }
            Op::CountUp(_) | Op::CountDown(_) => vec![raw[0]],
            Op::Take => raw.to_vec(),
            _ => vec![raw[0] & 0xff],
        }
    }
}

fn push(stack: &mut Option<Vec<u64>>, items: &[u64]) -> u64 {
    let Some(stack) = stack else {
        return 0;
    };
    let fits = items.len().min(CAPACITY - stack.len());
    stack.extend(&items[..fits]);
    fits as u64
}

fn append(unit: &mut Unit, record: [u64; 2]) -> u64 {
    let ring = unit.ring.get_or_insert_default();
    if ring.head - ring.tail >= RING {
        return 2;
    }
    ring.head += SLOT;
    ring.records.push(record);
    0
}

/// Returns the distance of a shard.
fn distance([up, down, folded, _]: [u64; 4]) -> i128 {
    i128::from(up.wrapping_sub(down).wrapping_sub(folded) as i64)
}

fn count(unit: &mut Unit, n: i64, sign: i128) -> u64 {
    let shard = unit.shard.get_or_insert_default();
    let batch = i128::from(shard[3] as i64);
    let after = distance(*shard) * sign + i128::from(n);
    if after > 2 * batch || after < -2 * batch {
        return REFUSED as u64;
    }
    let word = if sign > 0 {
        &mut shard[0]
    } else {
        &mut shard[1]
    };
    *word = word.wrapping_add_signed(n);
    (batch - after) as u64
}

fn claim(unit: &mut Unit, token: u64) -> Vec<u64> {
    let shard = unit.shard.get_or_insert_default();
    let [up, down, folded, batch] = *shard;
    let is_near = distance(*shard).unsigned_abs() < 1 << 60;
    if !is_near || batch as i64 <= 0 {
        return vec![0];
    }
    let net = up.wrapping_sub(down);
    shard[2] = net.wrapping_add(token);
    vec![1, net, folded, batch]
}

fn take(unit: &mut Unit) -> Vec<u64> {
    if let Some(shard) = &mut unit.shard {
        return std::mem::take(shard).to_vec();
    }
    if let Some(stack) = &mut unit.stack {
        let items = std::mem::take(stack);
        let count = std::mem::take(&mut unit.words[1]);
        return [vec![count], items].concat();
    }
    if let Some(list) = &mut unit.list {
        return std::mem::take(list);
    }
    if let Some(ring) = &mut unit.ring {
        let ring = std::mem::take(ring);
        return vec![ring.head, ring.tail];
    }
    std::mem::take(&mut unit.words).to_vec()
}

/// The results of all calls, and what the units hold in the end.
pub type Final = (Vec<Option<Vec<u64>>>, Vec<Option<Unit>>);

/// The operations of a scenario, as the outcomes depend on them.
pub struct Program {
    /// For each thread, where its results begin, and its operations. `None` has no effect here.
    pub threads: Vec<(usize, Vec<Option<Operation>>)>,
    /// Handlers, which may run once: where the result goes, and the operation.
    pub handlers: Vec<(usize, Operation)>,
    pub results: usize,
    /// An operation may find no unit, because it is stopped meanwhile.
    pub may_fail: bool,
    /// No operation finds a unit.
    pub must_fail: bool,
    /// The units that an operation may use.
    pub only_unit: Option<usize>,
    /// How often a counted pop may subtract without taking an item.
    pub losses: u64,
}

impl Program {
    /// Returns every outcome that some order of the operations has.
    pub fn outcomes(&self, units: Vec<Option<Unit>>) -> HashSet<Final> {
        let mut found = HashSet::new();
        let at = Position {
            next: vec![0; self.threads.len()],
            handled: vec![false; self.handlers.len()],
            results: vec![None; self.results],
            units,
            losses: self.losses,
        };
        self.visit(at, &mut found);
        found
    }

    fn visit(&self, at: Position, found: &mut HashSet<Final>) {
        let mut ended = true;
        for (thread, (first, operations)) in self.threads.iter().enumerate() {
            let next = at.next[thread];
            let Some(operation) = operations.get(next) else {
                continue;
            };
            ended = false;
            let mut after = at.clone();
            after.next[thread] += 1;
            match operation {
                Some(operation) => self.run(operation, first + next, after, found),
                None => self.visit(after, found),
            }
        }
        for (handler, (result, operation)) in self.handlers.iter().enumerate() {
            if !at.handled[handler] {
                let mut after = at.clone();
                after.handled[handler] = true;
                self.run(operation, *result, after, found);
            }
        }
        if ended {
            found.insert((at.results, at.units));
        }
    }

    fn run(&self, operation: &Operation, result: usize, at: Position, found: &mut HashSet<Final>) {
        let is_take = *operation == Op::Take;
        let mut go = |mut at: Position, value: Vec<u64>| {
            at.results[result] = Some(value);
            self.visit(at, found);
        };
        if (self.may_fail || self.must_fail) && !is_take {
            for at in self.with_losses(operation, &at) {
                go(at, operation.failed());
            }
        }
        if self.must_fail {
            return;
        }
        for unit in 0..at.units.len() {
            if is_take && unit != 0 || self.only_unit.is_some_and(|only| only != unit) {
                continue;
            }
            for mut at in self.with_losses(operation, &at) {
                let value = match &mut at.units[unit] {
                    Some(unit) => operation.apply(unit),
                    None => operation.failed(),
                };
                go(at, value);
            }
        }
    }

    /// Returns the positions after aborted attempts of a counted pop, which may have subtracted.
    fn with_losses(&self, operation: &Operation, at: &Position) -> Vec<Position> {
        let mut positions = vec![at.clone()];
        let Op::PopCounted(n) = operation else {
            return positions;
        };
        let mut done = 0;
        while done < positions.len() {
            for unit in 0..at.units.len() {
                let mut lost = positions[done].clone();
                let Some(Unit { words, stack, .. }) = &mut lost.units[unit] else {
                    continue;
                };
                // An attempt subtracts only if it would take an item.
                let is_empty = stack.as_ref().is_none_or(Vec::is_empty);
                if lost.losses == 0 || is_empty || words[1] as i64 <= *n as i64 {
                    continue;
                }
                words[1] -= n;
                lost.losses -= 1;
                positions.push(lost);
            }
            done += 1;
        }
        positions
    }
}

#[derive(Clone)]
struct Position {
    next: Vec<usize>,
    handled: Vec<bool>,
    results: Vec<Option<Vec<u64>>>,
    units: Vec<Option<Unit>>,
    losses: u64,
}
