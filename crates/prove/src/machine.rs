//! The state of memory, CPUs and threads, and what one instruction does to it.

use crate::image::{Arch, Image, Part, Program};
use crate::ir::{
    Address, Alu, CARRY, Cond, FLAGS, NEGATIVE, OVERFLOW, Op, Order, REGISTERS, RETURN, Reg, Sets,
    Src, When, ZERO,
};
use std::collections::HashMap;

/// What a section must never do. The text says what happened.
pub type Violation = String;

/// How the kernel treats a thread that it has interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// Registrations of 32 bytes: the kernel writes the ids at each return to user space.
    Version1,
    /// Longer registrations: the kernel writes the ids when they change, and kills a thread that
    /// writes them.
    Version2,
    /// Linux 6.19 to 7.0.13 on Arm: preemption aborts nothing if the ids stay the same.
    Arm619,
}

/// Which threads see what is stored in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only the thread itself, and the kernel on its behalf.
    Private,
    /// All threads. The CPU may delay a store.
    Shared,
    /// No thread may store here.
    Fixed,
}

/// Which words there are.
#[derive(Clone, Default)]
pub struct Layout {
    words: HashMap<u64, (u16, Kind)>,
    pub initial: Vec<u64>,
}

impl Layout {
    /// Adds the word at `address`, or changes it.
    pub fn word(&mut self, address: u64, kind: Kind, value: u64) {
        let at = self.words.get(&address).map(|(at, _)| *at);
        let at = at.unwrap_or_else(|| {
            self.initial.push(0);
            (self.initial.len() - 1) as u16
        });
        self.words.insert(address, (at, kind));
        self.initial[usize::from(at)] = value;
    }

    pub fn find(&self, address: u64) -> Option<(u16, Kind)> {
        self.words.get(&address).copied()
    }
}

/// One operation of a thread.
#[derive(Clone, Debug)]
pub struct Call {
    pub program: usize,
    pub arguments: [u64; 6],
    /// The registers that hold the result.
    pub results: std::ops::Range<usize>,
    /// The address of private words that belong to the result, and their number.
    pub buffer: (u64, usize),
    pub act: Act,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Run,
    /// A fence. The unit of index 0 belongs to the thread afterwards.
    Fence,
    /// From here on, the unit of index 0 does not belong to the thread.
    Release,
}

pub struct Plan {
    pub cpu: u8,
    pub calls: Vec<Call>,
    /// What the handler of a signal calls. The signal may come once.
    pub handler: Option<Call>,
}

/// All that stays the same while a scenario runs.
pub struct World<'a> {
    pub image: &'a Image,
    pub rules: Rules,
    pub programs: Vec<Program>,
    /// What [`Program::live`] returns for each program.
    pub live: Vec<Vec<u64>>,
    pub layout: Layout,
    pub plans: Vec<Plan>,
    /// The number of results of the threads before each thread.
    pub results_before: Vec<usize>,
    /// The words of unit 0, which belong to the taking thread after its fence.
    pub guarded: Vec<u16>,
    pub has_cids: bool,
    pub cpus: u8,
    /// The kernel aborts at each instruction. With the trap flag if `stepped`.
    pub storm: bool,
    pub stepped: bool,
    pub may_go_offline: bool,
    /// What registers and flags hold before they are set: zeros or ones.
    pub ones: bool,
}

pub const AREA: u64 = 0x100;
/// Offsets in the rseq area.
pub const CPU_ID: u64 = 4;
pub const RSEQ_CS: u64 = 8;
pub const MM_CID: u64 = 24;

pub fn thread_pointer(thread: usize) -> u64 {
    0x20_0000 + thread as u64 * 0x1000
}

pub fn stack_top(thread: usize, level: usize) -> u64 {
    0x70_0000 + (thread * 2 + level) as u64 * 0x1000
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pending {
    pub at: u16,
    pub words: u8,
    pub values: [u64; 2],
    pub release: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Cpu {
    pub running: Option<u8>,
    pub online: bool,
    /// Stores that other CPUs do not see yet.
    pub buffer: Vec<Pending>,
    /// The interrupt of a fence is on its way.
    pub interrupt: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Frame {
    pub registers: [u64; REGISTERS],
    pub flags: u8,
    pub call: u8,
    pub slot: u16,
    pub program: u8,
    /// Instructions since the call began, or since it was aborted.
    pub steps: u16,
    /// The stack pointer with which the section was entered.
    pub stack: u64,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Thread {
    pub frames: Vec<Frame>,
    pub call: u8,
    pub cpu: u8,
    pub cid: u8,
    pub signalled: bool,
    /// The word that an exclusive load reserved.
    pub reserved: Option<u16>,
}

impl Thread {
    pub fn is_done(&self) -> bool {
        self.frames.is_empty()
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub memory: Vec<u64>,
    pub cpus: Vec<Cpu>,
    pub threads: Vec<Thread>,
    /// The result of each call, the handlers' last.
    pub results: Vec<Option<Vec<u64>>>,
    /// Disturbances that may still come.
    pub budget: u8,
    pub owned: bool,
    pub fencing: Option<u8>,
}

/// The instructions after which an operation counts as endless.
const ENOUGH_STEPS: u16 = 400;

impl World<'_> {
    fn arch(&self) -> Arch {
        self.image.arch
    }

    /// Starts a call of a thread, on top of what it does.
    pub fn begin(&self, state: &mut State, thread: usize, at: usize) -> Result<(), Violation> {
        let plan = &self.plans[thread];
        let call = match plan.calls.get(at) {
            Some(call) => call,
            None => plan.handler.as_ref().expect("only a handler follows"),
        };
        let program = &self.programs[call.program];
        let poison = if self.ones { 0x5a5a_5a5a_5a5a_5a5f } else { 0 };
        let level = state.threads[thread].frames.len();
        let mut registers = [poison; REGISTERS];
        for (register, value) in self.arch().arguments().iter().zip(call.arguments) {
            registers[usize::from(*register)] = value;
        }
        let mut stack = stack_top(thread, level) - 8 * u64::from(self.arch() == Arch::X86);
        if self.arch() == Arch::X86 {
            let (word, _) = self.layout.find(stack).expect("each frame has a stack");
            state.memory[usize::from(word)] = RETURN;
        } else {
            registers[usize::from(crate::arm::LINK)] = RETURN;
            stack &= !15;
        }
        registers[usize::from(self.arch().stack())] = stack;
        registers[usize::from(self.arch().thread())] = thread_pointer(thread);
        state.threads[thread].frames.push(Frame {
            registers,
            flags: if self.ones { 15 } else { 0 },
            call: at as u8,
            slot: program.entry as u16,
            program: call.program as u8,
            steps: 0,
            stack: 0,
        });
        match call.act {
            Act::Run => {}
            Act::Fence => return Ok(()),
            Act::Release => state.owned = false,
        }
        self.run_around(state, thread)
    }

    /// Runs code outside the section until a step follows.
    fn run_around(&self, state: &mut State, thread: usize) -> Result<(), Violation> {
        loop {
            let Some(frame) = state.threads[thread].frames.last_mut() else {
                return Ok(());
            };
            let program = &self.programs[usize::from(frame.program)];
            let slot = usize::from(frame.slot);
            if slot >= program.slots.len() {
                return Err("execution runs out of the function".into());
            }
            if program.is_step(slot) {
                if frame.stack == 0 {
                    frame.stack = frame.registers[usize::from(self.arch().stack())];
                }
                return Ok(());
            }
            let depth = state.threads[thread].frames.len();
            self.execute(state, thread)?;
            if state.threads[thread].frames.len() != depth {
                return Ok(());
            }
        }
    }

    /// Runs the next instruction of a thread, and what follows outside the section.
    pub fn step(&self, state: &mut State, thread: usize) -> Result<(), Violation> {
        let depth = state.threads[thread].frames.len();
        self.execute(state, thread)?;
        if state.threads[thread].frames.len() == depth {
            self.run_around(state, thread)?;
        }
        self.forget(state, thread);
        Ok(())
    }

    /// Returns whether the next instruction concerns no other thread: it accesses no memory, or
    /// only the thread's own.
    pub fn is_local(&self, frame: &Frame) -> bool {
        let program = &self.programs[usize::from(frame.program)];
        let ops = &program.slots[usize::from(frame.slot)].ops;
        let mut changed = false;
        ops.iter().all(|op| match op {
            Op::Halt | Op::Return { .. } | Op::StoreExclusive { .. } => false,
            Op::Load { at, .. } | Op::Store { at, .. } => {
                let address = frame.address(*at) & !7;
                let kind = self.layout.find(address).map(|(_, kind)| kind);
                let is_count = address == self.image.aborts & !7;
                !changed && kind == Some(Kind::Private) && !is_count
            }
            _ => {
                changed = true;
                true
            }
        })
    }

    /// Clears what the thread cannot read any more, so that more states are equal.
    pub fn forget(&self, state: &mut State, thread: usize) {
        let Some(frame) = state.threads[thread].frames.last_mut() else {
            return;
        };
        let live = self.live[usize::from(frame.program)][usize::from(frame.slot)];
        for (at, register) in frame.registers.iter_mut().enumerate() {
            if live >> at & 1 == 0 {
                *register = 0;
            }
        }
        if live & FLAGS == 0 {
            frame.flags = 0;
        }
    }

    fn execute(&self, state: &mut State, thread: usize) -> Result<(), Violation> {
        let frame = state.threads[thread].frames.last_mut().expect("it runs");
        let program = &self.programs[usize::from(frame.program)];
        let slot = usize::from(frame.slot);
        frame.steps += 1;
        if frame.steps > ENOUGH_STEPS {
            return Err("the operation does not end".into());
        }
        let mut next = program.next[slot];
        for op in &program.slots[slot].ops {
            match op {
                Op::Jump { when, to } => {
                    let frame = state.threads[thread].frames.last().expect("it runs");
                    if when.is_none_or(|when| frame.holds(when)) {
                        next = program.at(*to).ok_or("a jump out of the function")?;
                    }
                }
                Op::Return { to } => {
                    let frame = state.threads[thread].frames.last().expect("it runs");
                    let stack = frame.registers[usize::from(self.arch().stack())];
                    let level = state.threads[thread].frames.len() - 1;
                    if frame.registers[usize::from(*to)] != RETURN
                        || stack != stack_top(thread, level)
                    {
                        return Err("the function returns to a wrong place".into());
                    }
                    return self.finish(state, thread);
                }
                Op::Halt => return Err("execution reaches a call or a trap".into()),
                _ => self.operate(state, thread, op, program.parts[slot])?,
            }
        }
        if next >= program.slots.len() {
            return Err("execution runs out of the function".into());
        }
        let frame = state.threads[thread].frames.last_mut().expect("it runs");
        frame.slot = next as u16;
        Ok(())
    }

    /// Ends a call, and begins the thread's next one.
    pub fn finish(&self, state: &mut State, thread: usize) -> Result<(), Violation> {
        let frame = state.threads[thread].frames.pop().expect("it runs");
        let plan = &self.plans[thread];
        let at = usize::from(frame.call);
        let call = plan.calls.get(at).or(plan.handler.as_ref());
        let call = call.expect("the call that runs");
        let mut result = frame.registers[call.results.clone()].to_vec();
        for word in 0..call.buffer.1 {
            let (at, _) = self
                .layout
                .find(call.buffer.0 + 8 * word as u64)
                .expect("a buffer");
            result.push(state.memory[usize::from(at)]);
        }
        state.results[self.results_before[thread] + at] = Some(result);
        if state.threads[thread].frames.is_empty() && at + 1 < plan.calls.len() {
            state.threads[thread].call += 1;
            return self.begin(state, thread, at + 1);
        }
        Ok(())
    }

    fn operate(
        &self,
        state: &mut State,
        thread: usize,
        op: &Op,
        part: Part,
    ) -> Result<(), Violation> {
        let frame = state.threads[thread].frames.last_mut().expect("it runs");
        match *op {
            Op::Lea { to, at } => frame.registers[usize::from(to)] = frame.address(at),
            Op::Flags { to } => {
                let bit = |flag: u8, bit: u32| u64::from(frame.flags & flag != 0) << bit;
                let flags = bit(CARRY, 0) | bit(ZERO, 6) | bit(NEGATIVE, 7) | bit(OVERFLOW, 11);
                frame.registers[usize::from(to)] = flags | u64::from(self.stepped) << 8;
            }
            Op::SetByte { to, when } => {
                let byte = u64::from(frame.holds(when));
                let register = &mut frame.registers[usize::from(to)];
                *register = *register & !0xff | byte;
            }
            Op::Select {
                to,
                when,
                then,
                otherwise,
                bytes,
            } => {
                let src = if frame.holds(when) { then } else { otherwise };
                frame.registers[usize::from(to)] = frame.value(src) & mask(bytes);
            }
            Op::CompareIf {
                when,
                a,
                b,
                otherwise,
            } => {
                frame.flags = match frame.holds(when) {
                    true => compute(Alu::Sub, frame.value(a), frame.value(b), 8, false).1,
                    false => otherwise,
                }
            }
            Op::Alu {
                op,
                to,
                a,
                b,
                bytes,
                sets,
                borrow,
            } => frame.alu((op, to, a, b), bytes, sets, borrow),
            Op::Load {
                to,
                second,
                at,
                bytes,
                order,
            } => {
                let address = frame.address(at);
                let value = self.load(state, thread, address, bytes.min(8))?;
                let more = match second {
                    Some(_) => self.load(state, thread, address + 8, 8)?,
                    None => 0,
                };
                let frame = state.threads[thread].frames.last_mut().expect("it runs");
                frame.registers[usize::from(to)] = value;
                if let Some(second) = second {
                    frame.registers[usize::from(second)] = more;
                }
                if order == Order::Exclusive {
                    let word = self.layout.find(address).map(|(at, _)| at);
                    state.threads[thread].reserved = word;
                }
            }
            Op::Store {
                from,
                second,
                at,
                bytes,
                order,
            } => {
                let address = frame.address(at);
                let below = frame.stack.wrapping_sub(address);
                if part == Part::Handler && below <= self.arch().red_zone() && below > 0 {
                    return Err("the abort handler writes to the red zone".into());
                }
                let values = [Some(from), second].map(|src| src.map(|src| frame.value(src)));
                let release = order == Order::Ordered;
                self.store(state, thread, (address, bytes), values, release)?;
            }
            Op::StoreExclusive { status, from, at } => {
                let address = frame.address(at);
                let values = from.map(|src| Some(frame.value(src)));
                let word = self.layout.find(address).map(|(at, _)| at);
                let succeeds = word.is_some() && state.threads[thread].reserved == word;
                state.threads[thread].reserved = None;
                if succeeds {
                    self.store(state, thread, (address, 16), values, true)?;
                    // The store is in memory at once, after all that was stored before.
                    self.drain(state, usize::from(state.threads[thread].cpu));
                }
                let frame = state.threads[thread].frames.last_mut().expect("it runs");
                frame.registers[usize::from(status)] = u64::from(!succeeds);
            }
            Op::Jump { .. } | Op::Return { .. } | Op::Halt => unreachable!("not for this function"),
        }
        Ok(())
    }

    fn check_owner(&self, state: &State, thread: usize, word: u16) -> Result<(), Violation> {
        let taker = self.plans[thread]
            .calls
            .iter()
            .any(|call| call.act == Act::Fence);
        if state.owned && !taker && self.guarded.contains(&word) {
            return Err("a section works on a unit that is stopped and fenced".into());
        }
        Ok(())
    }

    /// Returns what the thread sees in the word at `address`.
    fn load(
        &self,
        state: &State,
        thread: usize,
        address: u64,
        bytes: u8,
    ) -> Result<u64, Violation> {
        let word = address & !7;
        if !address.is_multiple_of(u64::from(bytes)) {
            return Err(format!("a load from {address:#x}, which is not aligned"));
        }
        let value = match self.layout.find(word) {
            Some((at, _)) => {
                self.check_owner(state, thread, at)?;
                self.seen(state, usize::from(state.threads[thread].cpu), at)
            }
            // The library's constants.
            None => match self.image.word(word) {
                Some(value) => value,
                None => return Err(format!("a load from {address:#x}, where nothing is")),
            },
        };
        Ok(value >> (8 * (address - word)) & mask(bytes))
    }

    /// Returns what a CPU sees in a word.
    pub fn seen(&self, state: &State, cpu: usize, at: u16) -> u64 {
        let mut newest = state.cpus[cpu].buffer.iter().rev();
        newest
            .find_map(|pending| {
                let half = usize::from(at.checked_sub(pending.at)?);
                (half < usize::from(pending.words)).then(|| pending.values[half])
            })
            .unwrap_or(state.memory[usize::from(at)])
    }

    fn store(
        &self,
        state: &mut State,
        thread: usize,
        (address, bytes): (u64, u8),
        values: [Option<u64>; 2],
        release: bool,
    ) -> Result<(), Violation> {
        let Some((at, kind)) = self.layout.find(address & !7) else {
            return Err(format!("a store to {address:#x}, where nothing is"));
        };
        // A pair on x86-64 must be aligned as a whole; Arm's pairs of registers need not be.
        let aligned = if self.arch() == Arch::X86 {
            bytes
        } else {
            bytes.min(8)
        };
        if !address.is_multiple_of(u64::from(aligned)) {
            return Err(format!("a store to {address:#x}, which is not aligned"));
        }
        self.check_owner(state, thread, at)?;
        let [Some(value), more] = values else {
            unreachable!("each store has a value");
        };
        match kind {
            Kind::Fixed => return Err(format!("a store to {address:#x}, which must not change")),
            Kind::Private => {
                let shift = 8 * (address & 7);
                let bits = mask(bytes.min(8)) << shift;
                let word = &mut state.memory[usize::from(at)];
                *word = *word & !bits | value << shift & bits;
                if let Some(more) = more {
                    state.memory[usize::from(at) + 1] = more;
                }
            }
            Kind::Shared => {
                if bytes < 8 {
                    return Err(format!("a store of {bytes} bytes to {address:#x}"));
                }
                if more.is_some()
                    && self
                        .layout
                        .find(address + 8)
                        .is_none_or(|(n, _)| n != at + 1)
                {
                    return Err(format!("a store of two words to {address:#x}"));
                }
                let cpu = usize::from(state.threads[thread].cpu);
                state.cpus[cpu].buffer.push(Pending {
                    at,
                    words: 1 + u8::from(more.is_some()),
                    values: [value, more.unwrap_or(0)],
                    release,
                });
            }
        }
        Ok(())
    }

    /// Returns whether the store at `which` in a CPU's buffer may become visible next.
    pub fn may_flush(&self, state: &State, cpu: usize, which: usize) -> bool {
        if self.arch() == Arch::X86 {
            return which == 0;
        }
        let buffer = &state.cpus[cpu].buffer;
        let overlaps = |a: &Pending, b: &Pending| {
            a.at < b.at + u16::from(b.words) && b.at < a.at + u16::from(a.words)
        };
        let store = &buffer[which];
        let earlier = &buffer[..which];
        let waits = store.release && which > 0;
        !waits && !earlier.iter().any(|other| overlaps(other, store))
    }

    /// Makes a store visible to all CPUs.
    pub fn flush(&self, state: &mut State, cpu: usize, which: usize) {
        let store = state.cpus[cpu].buffer.remove(which);
        for half in 0..usize::from(store.words) {
            state.memory[usize::from(store.at) + half] = store.values[half];
        }
        for thread in &mut state.threads {
            let touches = |at: u16| (store.at..store.at + u16::from(store.words)).contains(&at);
            let pair = |at: u16| touches(at) || touches(at + 1);
            if usize::from(thread.cpu) != cpu && thread.reserved.is_some_and(pair) {
                thread.reserved = None;
            }
        }
    }

    /// Makes all stores of a CPU visible.
    pub fn drain(&self, state: &mut State, cpu: usize) {
        while !state.cpus[cpu].buffer.is_empty() {
            self.flush(state, cpu, 0);
        }
    }
}

impl Frame {
    fn value(&self, src: Src) -> u64 {
        match src {
            Src::Reg(reg) => self.registers[usize::from(reg)],
            Src::Imm(value) => value,
        }
    }

    fn address(&self, at: Address) -> u64 {
        let value = |reg: Option<Reg>| reg.map_or(0, |reg| self.registers[usize::from(reg)]);
        let index = at.index.map_or(0, |(reg, shift)| value(Some(reg)) << shift);
        value(at.base)
            .wrapping_add(value(at.segment))
            .wrapping_add(index)
            .wrapping_add_signed(at.offset)
    }

    fn holds(&self, (cond, wanted): When) -> bool {
        let flag = |flag| self.flags & flag != 0;
        let less = flag(NEGATIVE) != flag(OVERFLOW);
        let holds = match cond {
            Cond::Equal => flag(ZERO),
            Cond::Carry => flag(CARRY),
            Cond::Above => !flag(CARRY) && !flag(ZERO),
            Cond::Higher => flag(CARRY) && !flag(ZERO),
            Cond::Less => less,
            Cond::LessOrEqual => less || flag(ZERO),
            Cond::Negative => flag(NEGATIVE),
            Cond::Overflow => flag(OVERFLOW),
            Cond::Null(reg, bytes) => self.registers[usize::from(reg)] & mask(bytes) == 0,
        };
        holds == wanted
    }

    fn alu(
        &mut self,
        (op, to, a, b): (Alu, Option<Reg>, Src, Src),
        bytes: u8,
        sets: Sets,
        borrow: bool,
    ) {
        let (result, mut flags) = compute(op, self.value(a), self.value(b), bytes, borrow);
        if let Some(to) = to {
            let register = &mut self.registers[usize::from(to)];
            // A write of 4 bytes clears the rest; one of a byte keeps the rest.
            *register = if bytes == 1 {
                *register & !0xff | result
            } else {
                result
            };
        }
        match sets {
            Sets::Nothing => return,
            Sets::NotCarry => flags = flags & !CARRY | self.flags & CARRY,
            Sets::All => {}
        }
        self.flags = flags;
    }
}

fn mask(bytes: u8) -> u64 {
    match bytes {
        0 => 0,
        8.. => u64::MAX,
        _ => (1 << (8 * bytes)) - 1,
    }
}

/// Returns a result and the flags.
fn compute(op: Alu, a: u64, b: u64, bytes: u8, borrow: bool) -> (u64, u8) {
    let mask = mask(bytes);
    let top = (mask >> 1) + 1;
    let (a, b) = (a & mask, b & mask);
    let result = mask
        & match op {
            Alu::Mov => b,
            Alu::Add => a.wrapping_add(b),
            Alu::Sub => a.wrapping_sub(b),
            Alu::And => a & b,
            Alu::Or => a | b,
            Alu::Xor => a ^ b,
            Alu::Shr => a >> b,
        };
    let (carry, overflow) = match op {
        Alu::Add => (result < a, (a ^ result) & (b ^ result) & top != 0),
        Alu::Sub => ((a < b) == borrow, (a ^ b) & (a ^ result) & top != 0),
        _ => (false, false),
    };
    let mut flags = 0;
    for (flag, is_set) in [
        (NEGATIVE, result & top != 0),
        (ZERO, result == 0),
        (CARRY, carry),
        (OVERFLOW, overflow),
    ] {
        flags |= if is_set { flag } else { 0 };
    }
    (result, flags)
}
