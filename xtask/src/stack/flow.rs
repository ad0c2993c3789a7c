//! The stack use of one function: the depth that it reaches itself, and its depth at each call.
//!
//! The analysis follows the control flow from the function's first instruction. At each instruction
//! it knows the *depth*: the bytes between the stack pointer and the caller's stack pointer,
//! including the return address. It also knows what some registers and words of the frame hold: an
//! address on the stack, or a function's address. It does not follow exception handlers, because
//! the library never unwinds.

use super::forward::{Bytes, Stores};
use super::image::{Image, Target};
use anyhow::{Context, Result, bail};
use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The deepest frame that the analysis accepts. A deeper frame means a loop that pushes.
const DEEPEST: i64 = 1 << 20;
/// Registers that a called function may change.
const CHANGED_BY_CALLS: [Register; 9] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
];

/// A call, or a jump to another function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    /// The address of the call.
    pub at: u64,
    /// The called function. `None` if the code does not tell it.
    pub target: Option<Target>,
    /// The depth of the stack when the called function begins, without its return address.
    pub depth: u64,
}

/// The stack use of one function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// The deepest point that the function itself reaches, including its return address.
    pub deepest: u64,
    /// The function's calls, one for each place.
    pub calls: Vec<Call>,
    /// The addresses of loads from the frame that wait for stores (see [`super::forward`]).
    pub stalls: BTreeSet<u64>,
}

/// The known content of a register or of a word of the frame.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    /// The stack pointer as it was at this depth.
    Stack(i64),
    /// The address of code or data.
    Address(u64),
    /// The address of a function.
    Function(Target),
}

/// The known facts before an instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    depth: i64,
    registers: BTreeMap<Register, Value>,
    /// Words of the frame, by their depth.
    words: BTreeMap<i64, Value>,
    /// The depth with which the code has just compared the stack pointer. This marks the end of a
    /// loop that touches a large frame page by page.
    compared: Option<i64>,
    stores: Stores,
}

impl State {
    /// Merges the state of another path to this instruction. Returns whether anything changed.
    fn join(&mut self, other: &State) -> bool {
        let before = self.clone();
        self.depth = self.depth.max(other.depth);
        self.registers
            .retain(|register, value| other.registers.get(register) == Some(value));
        self.words
            .retain(|depth, value| other.words.get(depth) == Some(value));
        self.compared = self.compared.filter(|_| self.compared == other.compared);
        self.stores.join(&other.stores);
        *self != before
    }
}

/// Returns the stack use of the function that begins at `start`. Does not follow code behind calls
/// of functions for which `ends` returns true.
///
/// # Errors
///
/// Fails on code that moves the stack pointer in a way that the analysis does not know.
pub fn frame(image: &Image, ends: &dyn Fn(&Target) -> bool, start: u64) -> Result<Frame> {
    let mut walk = Walk {
        image,
        ends,
        start,
        factory: InstructionInfoFactory::new(),
        states: BTreeMap::new(),
        waiting: BTreeSet::new(),
        tables: BTreeSet::new(),
        calls: BTreeMap::new(),
        stalls: BTreeSet::new(),
        deepest: 0,
    };
    let first = State {
        depth: 8,
        ..State::default()
    };
    walk.reach(start, &first);
    while let Some(at) = walk.waiting.pop_first() {
        let state = walk.states[&at].clone();
        walk.step(at, state)
            .with_context(|| image.name(start))
            .with_context(|| format!("at {at:#x}"))?;
    }
    Ok(Frame {
        deepest: walk.deepest as u64,
        calls: walk.calls.into_values().collect(),
        stalls: walk.stalls,
    })
}

struct Walk<'i> {
    image: &'i Image,
    ends: &'i dyn Fn(&Target) -> bool,
    start: u64,
    factory: InstructionInfoFactory,
    states: BTreeMap<u64, State>,
    waiting: BTreeSet<u64>,
    /// Addresses of data from which the function loads distances: jump tables.
    tables: BTreeSet<u64>,
    /// The calls by address, and by target where several targets are possible.
    calls: BTreeMap<(u64, Option<Target>), Call>,
    stalls: BTreeSet<u64>,
    deepest: i64,
}

impl Walk<'_> {
    fn reach(&mut self, at: u64, state: &State) {
        let changed = match self.states.get_mut(&at) {
            Some(known) => known.join(state),
            None => {
                self.states.insert(at, state.clone());
                true
            }
        };
        if changed {
            self.waiting.insert(at);
        }
    }

    fn call(&mut self, at: u64, target: Option<Target>, depth: i64) {
        let call = Call {
            at,
            target: target.clone(),
            depth: depth as u64,
        };
        let known = self
            .calls
            .entry((at, target))
            .or_insert_with(|| call.clone());
        known.depth = known.depth.max(call.depth);
    }

    /// Follows one instruction to its successors.
    fn step(&mut self, at: u64, mut state: State) -> Result<()> {
        let code = self.image.code(at).context("no code here")?;
        let mut decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
        let instruction = decoder.decode();
        self.deepest = self.deepest.max(self.touched(&instruction, &state));
        let next = instruction.next_ip();
        self.forward(&instruction, &mut state);
        match instruction.flow_control() {
            FlowControl::Next => {
                self.apply(&instruction, &mut state)?;
                if !(0..=DEEPEST).contains(&state.depth) {
                    bail!("the depth of the stack has no bound");
                }
                self.deepest = self.deepest.max(state.depth);
                self.reach(next, &state);
            }
            FlowControl::ConditionalBranch if state.compared.is_some() => {
                state.depth = state.compared.take().unwrap_or(state.depth);
                self.deepest = self.deepest.max(state.depth);
                self.reach(next, &state);
            }
            FlowControl::ConditionalBranch => {
                self.jump(at, instruction.near_branch_target(), &state);
                self.reach(next, &state);
            }
            FlowControl::UnconditionalBranch => {
                self.jump(at, instruction.near_branch_target(), &state);
            }
            FlowControl::IndirectBranch => self.jump_by_pointer(&instruction, &state)?,
            FlowControl::Call | FlowControl::IndirectCall => {
                // In a system call, the kernel uses a stack of its own.
                if instruction.mnemonic() != Mnemonic::Syscall {
                    let target = match instruction.flow_control() {
                        FlowControl::Call => Some(Target::Own(instruction.near_branch_target())),
                        _ => self.pointed(&instruction, &state),
                    };
                    if target.as_ref().is_some_and(self.ends) {
                        return Ok(());
                    }
                    self.call(at, target, state.depth);
                }
                for register in CHANGED_BY_CALLS {
                    state.registers.remove(&register);
                }
                state.stores.clear();
                self.reach(next, &state);
            }
            FlowControl::Return | FlowControl::Exception => {}
            // A system call by a trap uses no stack of this thread.
            FlowControl::Interrupt | FlowControl::XbeginXabortXend => {}
        }
        Ok(())
    }

    /// Follows a jump. A jump to another function is a call that uses this function's return
    /// address.
    fn jump(&mut self, at: u64, target: u64, state: &State) {
        if (self.ends)(&Target::Own(target)) {
            return;
        }
        if target != self.start && self.image.function_at(target).is_some() {
            self.call(at, Some(Target::Own(target)), state.depth - 8);
        } else {
            self.reach(target, state);
        }
    }

    fn jump_by_pointer(&mut self, instruction: &Instruction, state: &State) -> Result<()> {
        let at = instruction.ip();
        if let Some(target) = self.pointed(instruction, state) {
            self.call(at, Some(target), state.depth - 8);
            return Ok(());
        }
        let within = self
            .image
            .function_at(self.start)
            .map(|f| self.start..f.end);
        let within = within.context("a jump by pointer in code without a function name")?;
        let mut found = false;
        let instructions = self.instructions(&within)?;
        // A jump table holds distances of 32 bits from its own beginning.
        for table in self.tables.clone() {
            let entries = self.image.data(table).unwrap_or_default().chunks_exact(4);
            for (nth, entry) in entries.enumerate() {
                // Another table may follow, whose distances may lead into this function too.
                let at = table + 4 * nth as u64;
                if at != table && self.tables.contains(&at) {
                    break;
                }
                let distance = i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
                let target = table.wrapping_add_signed(i64::from(distance));
                if !instructions.contains(&target) {
                    break;
                }
                found = true;
                self.reach(target, state);
            }
        }
        if !found {
            self.call(at, None, state.depth - 8);
        }
        Ok(())
    }

    /// Returns the addresses of a function's instructions.
    fn instructions(&self, within: &Range<u64>) -> Result<BTreeSet<u64>> {
        let code = self.image.code(within.start).context("no code here")?;
        let length = code.len().min((within.end - within.start) as usize);
        let options = DecoderOptions::NONE;
        let decoder = Decoder::with_ip(64, &code[..length], within.start, options);
        Ok(decoder.into_iter().map(|one| one.ip()).collect())
    }

    /// Returns the function that the operand of a call or jump points to.
    fn pointed(&self, instruction: &Instruction, state: &State) -> Option<Target> {
        let value = match instruction.op0_kind() {
            OpKind::Register => state.registers.get(&instruction.op0_register()).cloned(),
            OpKind::Memory => self.load(instruction, state),
            _ => None,
        };
        match value? {
            Value::Function(target) => Some(target),
            Value::Address(address) => {
                self.image.function_at(address)?;
                Some(Target::Own(address))
            }
            Value::Stack(_) => None,
        }
    }

    /// Returns the depth of the memory operand, if the operand lies on the stack.
    fn depth_of(&self, instruction: &Instruction, state: &State) -> Option<i64> {
        if instruction.memory_index() != Register::None {
            return None;
        }
        let base = match instruction.memory_base() {
            Register::RSP => state.depth,
            register => match state.registers.get(&register)? {
                Value::Stack(depth) => *depth,
                _ => return None,
            },
        };
        Some(base - instruction.memory_displacement64() as i64)
    }

    /// Returns the known content of the memory operand.
    fn load(&self, instruction: &Instruction, state: &State) -> Option<Value> {
        if instruction.is_ip_rel_memory_operand() {
            let target = self.image.pointed(instruction.ip_rel_memory_address())?;
            return Some(Value::Function(target.clone()));
        }
        let depth = self.depth_of(instruction, state)?;
        state.words.get(&depth).cloned()
    }

    /// Returns the depth of the memory that the instruction uses, which may lie below the stack
    /// pointer.
    fn touched(&self, instruction: &Instruction, state: &State) -> i64 {
        let memory = instruction.op_kinds().any(|kind| kind == OpKind::Memory);
        let used = memory && instruction.mnemonic() != Mnemonic::Lea;
        let depth = used.then(|| self.depth_of(instruction, state)).flatten();
        depth.unwrap_or(0).max(state.depth)
    }

    /// Notes the instruction's loads from the frame that wait, and its stores to the frame.
    fn forward(&mut self, instruction: &Instruction, state: &mut State) {
        let used = self.factory.info(instruction).used_memory().to_vec();
        for memory in used {
            let depth = match (memory.base(), memory.index()) {
                (Register::RSP, Register::None) => Some(state.depth),
                (base, Register::None) => match state.registers.get(&base) {
                    Some(Value::Stack(depth)) => Some(*depth),
                    _ => None,
                },
                _ => None,
            };
            let Some(depth) = depth else { continue };
            let start = memory.displacement() as i64 - depth;
            let bytes: Bytes = start..start + memory.memory_size().size() as i64;
            use OpAccess::{CondRead, CondWrite, Read, ReadCondWrite, ReadWrite, Write};
            let access = memory.access();
            if matches!(access, Read | CondRead | ReadWrite | ReadCondWrite)
                && state.stores.stalls(&bytes)
            {
                self.stalls.insert(instruction.ip());
            }
            if instruction.mnemonic() == Mnemonic::Push {
                // A saved register, which is loaded whole.
                state.stores.forget(&bytes);
            } else if matches!(access, Write | CondWrite | ReadWrite | ReadCondWrite) {
                state.stores.store(&bytes);
            }
        }
    }

    /// Applies the instruction's effect to the known facts.
    fn apply(&mut self, instruction: &Instruction, state: &mut State) -> Result<()> {
        let (to, from) = (instruction.op0_register(), instruction.op1_register());
        state.compared = None;
        let constant = || match instruction.op1_kind() {
            OpKind::Immediate8to64 | OpKind::Immediate32to64 => {
                Some(instruction.immediate(1) as i64)
            }
            _ => None,
        };
        match instruction.mnemonic() {
            Mnemonic::Push => {
                state.depth += 8;
                let value = state.registers.get(&to).cloned();
                set(&mut state.words, state.depth, value);
            }
            Mnemonic::Pop if to != Register::RSP => {
                let value = state.words.get(&state.depth).cloned();
                state.depth -= 8;
                set(&mut state.registers, to.full_register(), value);
            }
            Mnemonic::Cmp if to == Register::RSP => {
                if let Some(Value::Stack(depth)) = state.registers.get(&from) {
                    state.compared = Some(*depth);
                }
            }
            Mnemonic::Pushfq => state.depth += 8,
            Mnemonic::Popfq => state.depth -= 8,
            Mnemonic::Leave => {
                let Some(Value::Stack(depth)) = state.registers.get(&Register::RBP) else {
                    bail!("`leave` without a frame pointer");
                };
                let depth = *depth;
                let value = state.words.get(&depth).cloned();
                state.depth = depth - 8;
                set(&mut state.registers, Register::RBP, value);
            }
            Mnemonic::Sub if to == Register::RSP => {
                state.depth += constant().context("a frame of varying size")?;
            }
            Mnemonic::Add if to == Register::RSP => {
                state.depth -= constant().context("a frame of varying size")?;
            }
            Mnemonic::And if to == Register::RSP => {
                // The alignment skips at most its size less one word.
                state.depth += -constant().context("an alignment that varies")? - 8;
            }
            Mnemonic::Lea if instruction.is_ip_rel_memory_operand() => {
                let address = instruction.ip_rel_memory_address();
                set(&mut state.registers, to, Some(Value::Address(address)));
            }
            Mnemonic::Lea => {
                let depth = self.depth_of(instruction, state);
                self.assign(to, depth.map(Value::Stack), state)?;
            }
            Mnemonic::Mov
                if instruction.code() == Code::Mov_r64_rm64
                    || instruction.code() == Code::Mov_rm64_r64
                        && instruction.op0_kind() == OpKind::Register =>
            {
                let value = match (instruction.op1_kind(), from) {
                    (OpKind::Register, Register::RSP) => Some(Value::Stack(state.depth)),
                    (OpKind::Register, from) => state.registers.get(&from).cloned(),
                    _ => self.load(instruction, state),
                };
                self.assign(to, value, state)?;
            }
            Mnemonic::Mov if instruction.code() == Code::Mov_rm64_r64 => {
                if let Some(depth) = self.depth_of(instruction, state) {
                    let value = state.registers.get(&from).cloned();
                    set(&mut state.words, depth, value);
                }
            }
            _ => {
                let base = state.registers.get(&instruction.memory_base());
                if instruction.mnemonic() == Mnemonic::Movsxd
                    && instruction.memory_index_scale() == 4
                    && let Some(Value::Address(table)) = base
                {
                    self.tables.insert(*table);
                }
                let memory = instruction.op_kinds().any(|kind| kind == OpKind::Memory);
                if let Some(depth) = memory.then(|| self.depth_of(instruction, state)).flatten() {
                    state.words.remove(&depth);
                }
                for used in self.factory.info(instruction).used_registers() {
                    let writes = matches!(
                        used.access(),
                        OpAccess::Write
                            | OpAccess::CondWrite
                            | OpAccess::ReadWrite
                            | OpAccess::ReadCondWrite
                    );
                    let register = used.register().full_register();
                    if writes && register == Register::RSP {
                        bail!("{instruction} moves the stack pointer");
                    }
                    if writes {
                        state.registers.remove(&register);
                    }
                }
            }
        }
        Ok(())
    }

    /// Stores a value in a register, which may be the stack pointer.
    fn assign(&self, to: Register, value: Option<Value>, state: &mut State) -> Result<()> {
        if to != Register::RSP {
            set(&mut state.registers, to.full_register(), value);
            return Ok(());
        }
        match value {
            Some(Value::Stack(depth)) => state.depth = depth,
            _ => bail!("the stack pointer comes from memory"),
        }
        Ok(())
    }
}

/// Records the content of a place, or that it is unknown.
fn set<K: Ord>(places: &mut BTreeMap<K, Value>, place: K, value: Option<Value>) {
    match value {
        Some(value) => _ = places.insert(place, value),
        None => _ = places.remove(&place),
    }
}
