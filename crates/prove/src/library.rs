//! Compares the sections that are inlined in a library with those that the checker has run.

use crate::image::{Arch, Descriptor, Image, Part, Program};
use crate::ir::{Address, Alu, Cond, Instruction, Op, Reg, Src, When};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;

/// Returns how often each section is in the library.
///
/// # Errors
///
/// If the library has a section that differs from each of `known` in more than register names.
pub fn copies(image: &Image, known: &[&Program]) -> Result<BTreeMap<String, usize>> {
    let mut shapes = Vec::new();
    for program in known {
        let section = program.section.context("a section")?;
        let aborts = program.aborts;
        let code = |part: Part| {
            let slots = (0..program.slots.len()).filter(move |slot| program.parts[*slot] == part);
            slots.map(|slot| program.slots[slot].clone())
        };
        let handler: Vec<_> = code(Part::Handler).collect();
        let body: Vec<_> = code(Part::Section).collect();
        shapes.push((
            &program.name,
            shape(&body, &handler, section, aborts, program.arch),
        ));
    }
    let mut counts = BTreeMap::new();
    for section in &image.descriptors {
        let Some((body, handler)) = code_of(image, *section)? else {
            continue;
        };
        let own = shape(&body, &handler, *section, image.aborts, image.arch);
        let same = shapes.iter().find(|(_, shape)| is_renamed(shape, &own));
        let (name, _) = same.with_context(|| {
            let text: Vec<_> = body.iter().map(|slot| slot.text.as_str()).collect();
            format!("the section at {:#x} is unknown: {text:#?}", section.start)
        })?;
        *counts.entry((*name).clone()).or_insert(0) += 1;
    }
    ensure!(!counts.is_empty(), "the library has no section");
    Ok(counts)
}

type Code = (Vec<Instruction>, Vec<Instruction>);

/// Returns a section, from the store of the descriptor's address on, and its abort handler. Returns
/// `None` for the self-test's loop, whose handler does not go back.
fn code_of(image: &Image, section: Descriptor) -> Result<Option<Code>> {
    let mut handler = vec![image.decode(section.abort)?];
    while !handler.last().is_some_and(Instruction::is_end) {
        let last = handler.last().expect("not empty");
        handler.push(image.decode(last.end())?);
    }
    let jumps = handler
        .iter()
        .filter_map(Instruction::jump)
        .map(|(to, _)| to);
    let near = section.start - 32..section.start;
    let Some(enter) = jumps.into_iter().find(|to| near.contains(to)) else {
        return Ok(None);
    };
    let mut body = Vec::new();
    let mut at = enter;
    while at < section.end {
        let instruction = image.decode(at)?;
        at = instruction.end();
        body.push(instruction);
    }
    Ok(Some((body, handler)))
}

/// Each step without what differs from copy to copy, and its registers.
type Shape = Vec<(Op, Vec<Reg>, bool)>;

/// Returns the steps of a section and of its handler. Jumps lead to the number of an instruction,
/// or to the end, or elsewhere.
fn shape(
    body: &[Instruction],
    handler: &[Instruction],
    section: Descriptor,
    aborts: u64,
    arch: Arch,
) -> Shape {
    // The exit of a body stands before or behind the handler, and is not compared.
    let mut handler = handler.iter().filter(|slot| slot.address >= section.abort);
    let end = handler.clone().position(Instruction::is_end).unwrap_or(0);
    let handler: Vec<&Instruction> = handler.by_ref().take(end + 1).collect();
    const ELSEWHERE: u64 = 1000;
    const END: u64 = 1001;
    let place = |to: u64| {
        let inside = body.iter().position(|slot| slot.address == to);
        match inside {
            Some(at) => at as u64,
            None if to == section.end => END,
            None => match handler.iter().position(|slot| slot.address == to) {
                Some(at) => 2000 + at as u64,
                None => ELSEWHERE,
            },
        }
    };
    let mut page = None;
    let all = body.iter().chain(handler.iter().copied());
    let mut steps = Vec::new();
    for op in all.flat_map(|slot| &slot.ops) {
        let mut op = op.clone();
        if let Op::Jump { to, .. } = &mut op {
            *to = place(*to);
        }
        if let Op::Alu {
            op: Alu::Mov,
            b: Src::Imm(value),
            ..
        } = &mut op
            && arch == Arch::Arm
            && *value >= 0x1000
        {
            page = Some(std::mem::take(value));
        } else if let Some(base) = page {
            hide_low(&mut op, base, section.at, aborts, &mut page);
        }
        if let Op::Lea { at, .. } | Op::Load { at, .. } | Op::Store { at, .. } = &mut op {
            hide(at, section.at, aborts);
        }
        let mut registers = Vec::new();
        let mut written = false;
        visit(&mut op, &mut |register, writes| {
            registers.push(std::mem::take(register));
            written |= writes;
        });
        steps.push((op, registers, written));
    }
    steps
}

/// Removes the address of a descriptor or of the count of aborts.
fn hide(at: &mut Address, descriptor: u64, aborts: u64) {
    let offset = at.offset as u64;
    if at.base.is_none() && (offset == descriptor || offset == aborts) {
        at.offset = i64::from(offset == aborts);
    }
}

/// Removes the low part of such an address.
fn hide_low(op: &mut Op, base: u64, descriptor: u64, aborts: u64, page: &mut Option<u64>) {
    match op {
        Op::Alu {
            op: Alu::Add,
            b: Src::Imm(value),
            ..
        } if base + *value == descriptor => {
            (*value, *page) = (0, None);
        }
        Op::Load { at, .. } | Op::Store { at, .. }
            if base.wrapping_add_signed(at.offset) == aborts =>
        {
            at.offset = 1;
        }
        _ => {}
    }
}

/// Returns whether two shapes differ by a renaming of registers only, in which no two registers
/// become one unless the section writes neither.
fn is_renamed(known: &Shape, own: &Shape) -> bool {
    if known.len() != own.len() {
        return false;
    }
    let mut names: BTreeMap<Reg, Reg> = BTreeMap::new();
    for ((a, from, _), (b, to, _)) in known.iter().zip(own) {
        if !same(a, b) || from.len() != to.len() {
            return false;
        }
        for (from, to) in from.iter().zip(to) {
            if *names.entry(*from).or_insert(*to) != *to {
                return false;
            }
        }
    }
    let mut written: Vec<Reg> = Vec::new();
    for (op, registers, _) in known {
        let (mut op, mut next) = (op.clone(), registers.iter());
        visit(&mut op, &mut |_, writes| {
            let register = next.next().expect("as many registers");
            if writes && !written.contains(register) {
                written.push(*register);
            }
        });
    }
    written.iter().all(|one| {
        let others = names.iter().filter(|(from, _)| *from != one);
        others.into_iter().all(|(_, to)| *to != names[one])
    })
}

/// Returns whether two steps are the same, but for the offset of the word that a counted pop
/// counts in, which is a constant of the caller's.
fn same(a: &Op, b: &Op) -> bool {
    const COUNT: i64 = 72;
    if a == b {
        return true;
    }
    let mut b = b.clone();
    if let (
        Op::Load { at: known, .. } | Op::Store { at: known, .. },
        Op::Load { at, .. } | Op::Store { at, .. },
    ) = (a, &mut b)
        && known.offset == COUNT
        && at.offset % 8 == 0
    {
        at.offset = COUNT;
    }
    *a == b
}

/// Calls `found` with each register of a step, and whether the step writes it.
fn visit(op: &mut Op, found: &mut dyn FnMut(&mut Reg, bool)) {
    fn src(src: &mut Src, found: &mut dyn FnMut(&mut Reg, bool)) {
        if let Src::Reg(register) = src {
            found(register, false);
        }
    }
    fn address(at: &mut Address, found: &mut dyn FnMut(&mut Reg, bool)) {
        let index = at.index.as_mut().map(|(register, _)| register);
        let all = [at.base.as_mut(), at.segment.as_mut(), index];
        for register in all.into_iter().flatten() {
            found(register, false);
        }
    }
    fn when(when: &mut When, found: &mut dyn FnMut(&mut Reg, bool)) {
        if let Cond::Null(register, _) = &mut when.0 {
            found(register, false);
        }
    }
    match op {
        Op::Alu { to, a, b, .. } => {
            src(a, found);
            src(b, found);
            to.iter_mut().for_each(|to| found(to, true));
        }
        Op::Lea { to, at } => {
            address(at, found);
            found(to, true);
        }
        Op::Load { to, second, at, .. } => {
            address(at, found);
            found(to, true);
            second.iter_mut().for_each(|to| found(to, true));
        }
        Op::Store {
            from, second, at, ..
        } => {
            address(at, found);
            src(from, found);
            second.iter_mut().for_each(|from| src(from, found));
        }
        Op::StoreExclusive { status, from, at } => {
            address(at, found);
            from.iter_mut().for_each(|from| src(from, found));
            found(status, true);
        }
        Op::Select {
            to,
            when: cond,
            then,
            otherwise,
            ..
        } => {
            when(cond, found);
            src(then, found);
            src(otherwise, found);
            found(to, true);
        }
        Op::CompareIf {
            when: cond, a, b, ..
        } => {
            when(cond, found);
            src(a, found);
            src(b, found);
        }
        Op::Flags { to } => found(to, true),
        Op::SetByte { to, when: cond } => {
            when(cond, found);
            found(to, true);
        }
        Op::Jump { when: cond, .. } => cond.iter_mut().for_each(|cond| when(cond, found)),
        Op::Return { to } => found(to, false),
        Op::Halt => {}
    }
}
