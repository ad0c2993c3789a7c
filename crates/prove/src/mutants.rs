//! Makes faulty sections, and says which changes are no fault.

use crate::image::{Arch, Part, Program};
use crate::ir::{Alu, FLAGS, Instruction, Op, Order, Reg, Src, Uses};

/// A changed section.
pub struct Mutant {
    pub what: String,
    pub program: Program,
    /// Why the mutant behaves like the section. `None` for a mutant that must be found.
    pub equivalent: Option<&'static str>,
    /// Why the change is no fault if no scenario finds it: the rest of the argument is that the
    /// scenarios show no access to a place where nothing is.
    pub if_not_found: Option<&'static str>,
}

/// Returns each change of a section: every instruction deleted, every two neighbours swapped, the
/// commit moved to either side, and on Arm every release made a plain store.
pub fn mutants(program: &Program) -> Vec<Mutant> {
    let mut all = Vec::new();
    let mutable = program.mutable();
    for &slot in &mutable {
        all.push(deleted(program, slot));
        let next = program.next[slot];
        if mutable.contains(&next) {
            all.push(swapped(program, slot, next));
        }
        if program.arch == Arch::Arm && is_release(program, slot) {
            let mut weaker = program.clone();
            for op in &mut weaker.slots[slot].ops {
                if let Op::Store { order, .. } = op {
                    *order = Order::Plain;
                }
            }
            all.push(Mutant {
                what: format!("made plain: {}", program.slots[slot].text),
                program: weaker,
                equivalent: None,
                if_not_found: None,
            });
        }
    }
    all.extend(moved_ends(program));
    all
}

fn is_release(program: &Program, slot: usize) -> bool {
    let mut ops = program.slots[slot].ops.iter();
    ops.any(|op| {
        matches!(
            op,
            Op::Store {
                order: Order::Ordered,
                ..
            }
        )
    })
}

fn deleted(program: &Program, slot: usize) -> Mutant {
    let mut mutant = program.clone();
    mutant.slots[slot].ops.clear();
    Mutant {
        what: format!("deleted: {}", program.slots[slot].text),
        program: mutant,
        equivalent: deletion_is_equivalent(program, slot),
        if_not_found: None,
    }
}

fn swapped(program: &Program, first: usize, second: usize) -> Mutant {
    let mut mutant = program.clone();
    let (a, b) = (
        program.slots[first].ops.clone(),
        program.slots[second].ops.clone(),
    );
    (mutant.slots[first].ops, mutant.slots[second].ops) = (b, a);
    let [a, b] = [first, second].map(|slot| &program.slots[slot].text);
    Mutant {
        what: format!("swapped: {a} / {b}"),
        program: mutant,
        equivalent: swap_is_equivalent(program, first, second),
        if_not_found: is_early_load(program, first, second),
    }
}

/// Moves the end of the section, so that the commit lies outside, or is not the last instruction;
/// and moves the start behind the first instruction.
fn moved_ends(program: &Program) -> Vec<Mutant> {
    let section = program.section.expect("a section to change");
    let commit = program.commit().expect("each section has a commit");
    let after = program.at(section.end).expect("code follows each section");
    let start = program.at(section.start).expect("the start of the section");
    let ends = [
        (
            "the section ends before its commit",
            section.start,
            program.slots[commit].address,
        ),
        (
            "the section ends one instruction after its commit",
            section.start,
            program.slots[after].end(),
        ),
        (
            "the section starts one instruction late",
            program.slots[start].end(),
            section.end,
        ),
    ];
    let moved = ends.into_iter().map(|(what, start, end)| {
        let mut mutant = program.clone();
        mutant.section = Some(crate::image::Descriptor {
            start,
            end,
            ..section
        });
        Mutant {
            what: what.into(),
            equivalent: moved_is_equivalent(&mutant, commit),
            if_not_found: None,
            program: mutant,
        }
    });
    moved.collect()
}

/// A jump that goes where execution goes anyway.
fn deletion_is_equivalent(program: &Program, slot: usize) -> Option<&'static str> {
    let instruction = &program.slots[slot];
    let goes_on = instruction
        .jump()
        .is_some_and(|(to, _)| to == instruction.end());
    goes_on.then_some("a jump to the next instruction")
}

/// Returns whether nothing reads what two neighbours would exchange.
fn swap_is_equivalent(program: &Program, first: usize, second: usize) -> Option<&'static str> {
    if program.parts[first] != program.parts[second] {
        return None;
    }
    // A jump to the second would skip the first, or not skip it.
    let mut jumps = program.slots.iter().filter_map(Instruction::jump);
    if jumps.any(|(to, _)| program.at(to) == Some(second)) {
        return None;
    }
    // The commit stays last, and the store of the descriptor's address stays before the start.
    let section = program.section?;
    let commit = program.commit();
    let at_edge = |slot: usize| Some(slot) == commit || program.slots[slot].end() == section.start;
    if at_edge(first) || at_edge(second) {
        return None;
    }
    let (a, b) = (&program.slots[first], &program.slots[second]);
    let (mut one, mut two) = (Uses::of(a), Uses::of(b));
    if may_ignore_flags(a, b) && is_dead(program, program.next[second], FLAGS) {
        for uses in [&mut one, &mut two] {
            uses.reads &= !FLAGS;
            uses.writes &= !FLAGS;
        }
    }
    let apart = one.writes & (two.reads | two.writes) == 0 && two.writes & one.reads == 0;
    let in_section = program.parts[first] == Part::Section;
    if let Some((to, always)) = a.jump() {
        // A computation that comes before the jump that it followed.
        let target = program.at(to)?;
        let harmless = !always && b.jump().is_none() && !b.accesses_memory() && !b.is_end();
        let dead = is_dead(program, target, two.writes);
        if in_section && !always && b.stores() && Some(second) != commit {
            return early_store(program, Some(target) == commit);
        }
        return (harmless && apart && dead).then_some("the jump's target does not read the result");
    }
    if b.jump().is_some() || b.is_end() {
        return None;
    }
    let ordered = |program: &Program, slot: usize| {
        let mut ops = program.slots[slot].ops.iter();
        ops.any(|op| {
            matches!(
                op,
                Op::Load {
                    order: Order::Ordered,
                    ..
                }
            )
        }) && program.arch == Arch::Arm
    };
    let is_one_sum = sum(a).is_some() && sum(a) == sum(b) && !a.stores() && !b.stores();
    if is_one_sum && in_section && (one.writes | two.writes) & FLAGS == 0 {
        return Some("two sums, which are the same in either order");
    }
    let accesses = [a, b].iter().filter(|slot| slot.accesses_memory()).count();
    let loads = in_section && !a.stores() && !b.stores() && !ordered(program, second);
    if apart && accesses <= 1 {
        return Some("neither needs the other, and one at most accesses memory");
    }
    (apart && loads).then_some("two loads of words that no other thread writes meanwhile")
}

/// A store that comes before the conditional jump that it followed.
fn early_store(program: &Program, at_commit: bool) -> Option<&'static str> {
    match program.name.as_str() {
        "probe_pop_batch" if at_commit => {
            Some("the caller's buffer has room for the null, and means nothing beyond the count")
        }
        "probe_store_two_if_equal" => {
            Some("the contract allows that the second word changes without the commit")
        }
        _ => None,
    }
}

/// A load that comes before the conditional jump that it followed, if the jump's target does not
/// read the result.
fn is_early_load(program: &Program, first: usize, second: usize) -> Option<&'static str> {
    let (jump, load) = (&program.slots[first], &program.slots[second]);
    let (to, always) = jump.jump()?;
    let (one, two) = (Uses::of(jump), Uses::of(load));
    let only_loads = load.accesses_memory() && !load.stores() && load.jump().is_none();
    let apart = two.writes & one.reads == 0;
    let dead = is_dead(program, program.at(to)?, two.writes);
    (!always && only_loads && apart && dead)
        .then_some("a load before a jump, whose target does not read the result")
}

/// An exclusive store fails after every interruption, so the section need not cover it.
fn moved_is_equivalent(mutant: &Program, commit: usize) -> Option<&'static str> {
    let mut ops = mutant.slots[commit].ops.iter();
    let exclusive = ops.any(|op| matches!(op, Op::StoreExclusive { .. }));
    let ends_early = mutant.section?.end == mutant.slots[commit].address;
    (exclusive && ends_early).then_some("an exclusive store fails after every interruption")
}

/// Returns whether two neighbours use the flags only to leave them behind.
fn may_ignore_flags(a: &Instruction, b: &Instruction) -> bool {
    let mut ops = a.ops.iter().chain(&b.ops);
    ops.all(|op| {
        matches!(
            op,
            Op::Alu { .. } | Op::Lea { .. } | Op::Load { .. } | Op::Store { .. }
        )
    })
}

/// Returns the register to which the instruction adds something other, or from which it subtracts
/// something: a register, a constant, or a word.
fn sum(instruction: &Instruction) -> Option<Reg> {
    let (loaded, last) = match &instruction.ops[..] {
        [last] => (None, last),
        [Op::Load { to, at, .. }, last] => (Some((*to, at)), last),
        _ => return None,
    };
    let Op::Alu {
        op: Alu::Add | Alu::Sub,
        to: Some(to),
        a: Src::Reg(from),
        b,
        ..
    } = last
    else {
        return None;
    };
    let own = Src::Reg(*to);
    let from_other = match loaded {
        None => *b != own,
        Some((word, at)) => {
            *b == Src::Reg(word) && at.base != Some(*to) && at.index.is_none_or(|(by, _)| by != *to)
        }
    };
    (from == to && from_other).then_some(*to)
}

/// Returns whether no path from `slot` on reads one of the registers in `set` before it is written.
/// The result of the function and the registers that it must keep count as read.
fn is_dead(program: &Program, slot: usize, set: u64) -> bool {
    let mut to_do = vec![(slot, set)];
    let mut seen = Vec::new();
    while let Some((slot, set)) = to_do.pop() {
        if set == 0 || seen.contains(&(slot, set)) {
            continue;
        }
        seen.push((slot, set));
        let Some(instruction) = program.slots.get(slot) else {
            return false;
        };
        let uses = Uses::of(instruction);
        let returns = instruction
            .ops
            .iter()
            .any(|op| matches!(op, Op::Return { .. }));
        let kept = program.kept() | 1;
        if uses.reads & set != 0 || returns && set & kept != 0 {
            return false;
        }
        let left = set & !uses.writes;
        if let Some((to, always)) = instruction.jump() {
            match program.at(to) {
                Some(target) => to_do.push((target, left)),
                None => return false,
            }
            if always {
                continue;
            }
        }
        if !instruction.is_end() {
            to_do.push((program.next[slot], left));
        }
    }
    true
}
