//! Reads a built library, and takes the sections out of it.

use crate::ir::{Instruction, Op, Reg, Uses};
use crate::{arm, x86};
use anyhow::{Context, Result, bail, ensure};
use object::read::elf::{ElfFile64, FileHeader, SectionHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionKind, elf};
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    X86,
    Arm,
}

impl Arch {
    pub fn name(self) -> &'static str {
        match self {
            Arch::X86 => "x86_64",
            Arch::Arm => "aarch64",
        }
    }

    pub fn stack(self) -> Reg {
        match self {
            Arch::X86 => x86::STACK,
            Arch::Arm => arm::STACK,
        }
    }

    pub fn thread(self) -> Reg {
        match self {
            Arch::X86 => x86::THREAD,
            Arch::Arm => arm::THREAD,
        }
    }

    pub fn arguments(self) -> [Reg; 6] {
        match self {
            Arch::X86 => x86::ARGUMENTS,
            Arch::Arm => arm::ARGUMENTS,
        }
    }

    /// The bytes below the stack pointer that a function may use, and a handler may not.
    pub fn red_zone(self) -> u64 {
        match self {
            Arch::X86 => 128,
            Arch::Arm => 0,
        }
    }

    fn signature(self) -> u32 {
        match self {
            Arch::X86 => 0x5305_3053,
            Arch::Arm => 0xd428_bc00,
        }
    }
}

/// What the kernel reads of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Where the descriptor lies: the value of `rseq_cs`.
    pub at: u64,
    pub start: u64,
    pub end: u64,
    pub abort: u64,
}

/// A built library.
pub struct Image {
    pub arch: Arch,
    sections: Vec<(u64, bool, Vec<u8>)>,
    /// Words that the dynamic linker writes.
    relocated: HashMap<u64, u64>,
    symbols: BTreeMap<String, u64>,
    pub descriptors: Vec<Descriptor>,
    /// The address of `ABORTS`.
    pub aborts: u64,
}

impl Image {
    /// Reads a shared library.
    ///
    /// # Errors
    ///
    /// If the file is no library of a known architecture, or if a descriptor breaks a rule that the
    /// kernel or a debugger checks.
    pub fn parse(bytes: &[u8]) -> Result<Image> {
        let file = ElfFile64::<Endianness>::parse(bytes).context("not a 64-bit ELF file")?;
        let endian = file.endian();
        let arch = match file.elf_header().e_machine(endian) {
            elf::EM_X86_64 => Arch::X86,
            elf::EM_AARCH64 => Arch::Arm,
            machine => bail!("the checker does not know the machine {machine:?}"),
        };
        let mut image = Image {
            arch,
            sections: Vec::new(),
            relocated: HashMap::new(),
            symbols: BTreeMap::new(),
            descriptors: Vec::new(),
            aborts: 0,
        };
        for section in file.sections() {
            if section.address() != 0 && section.kind() != SectionKind::UninitializedData {
                let code = section.kind() == SectionKind::Text;
                let bytes = section.data()?.to_vec();
                image.sections.push((section.address(), code, bytes));
            }
        }
        for symbol in file.symbols() {
            image
                .symbols
                .insert(symbol.name()?.into(), symbol.address());
        }
        for section in file.elf_section_table().iter() {
            for at in section.relr(endian, bytes)?.into_iter().flatten() {
                let word = image.bytes(at, false).and_then(|rest| rest.first_chunk());
                let word = u64::from_le_bytes(*word.context("a relocation outside the file")?);
                image.relocated.insert(at, word);
            }
        }
        for (at, relocation) in file.dynamic_relocations().into_iter().flatten() {
            if !matches!(relocation.target(), RelocationTarget::Symbol(_)) {
                image.relocated.insert(at, relocation.addend() as u64);
            }
        }
        let aborts = image.symbols.iter();
        let mut aborts = aborts.filter(|(name, _)| name.contains("pinfold_rseq5stuck6ABORTS"));
        image.aborts = *aborts
            .next()
            .context("the library has no count of aborts")?
            .1;
        let list = file.section_by_name("__rseq_cs_ptr_array");
        let list = list.context("the library has no list of descriptors")?;
        for at in (list.address()..list.address() + list.size()).step_by(8) {
            let descriptor = image.word(at).context("an entry of the list")?;
            image.descriptors.push(image.descriptor(descriptor)?);
        }
        Ok(image)
    }

    fn descriptor(&self, at: u64) -> Result<Descriptor> {
        let word = |offset| {
            self.word(at + offset)
                .context("a descriptor outside the file")
        };
        let (start, length, abort) = (word(8)?, word(16)?, word(24)?);
        let signature = self
            .bytes(abort - 4, true)
            .and_then(|rest| rest.first_chunk());
        let signature = signature.map(|bytes| u32::from_le_bytes(*bytes));
        ensure!(
            at.is_multiple_of(32),
            "the descriptor {at:#x} is not aligned"
        );
        ensure!(
            word(0)? == 0,
            "the descriptor {at:#x} has a version or flags"
        );
        ensure!(
            signature == Some(self.arch.signature()),
            "no signature is before the abort handler {abort:#x}"
        );
        ensure!(
            !(start..start + length).contains(&abort),
            "the abort handler {abort:#x} lies inside its section"
        );
        Ok(Descriptor {
            at,
            start,
            end: start + length,
            abort,
        })
    }

    fn bytes(&self, address: u64, of_code: bool) -> Option<&[u8]> {
        self.sections.iter().find_map(|(start, code, bytes)| {
            let at = usize::try_from(address.checked_sub(*start)?).ok()?;
            let rest = bytes.get(at..)?;
            (*code == of_code && !rest.is_empty()).then_some(rest)
        })
    }

    /// Returns the word at `address` of the library's data, as a running program sees it.
    pub fn word(&self, address: u64) -> Option<u64> {
        let relocated = self.relocated.get(&address).copied();
        relocated.or_else(|| {
            let bytes = self.bytes(address, false)?.first_chunk()?;
            Some(u64::from_le_bytes(*bytes))
        })
    }

    /// Decodes the instruction at `address`.
    ///
    /// # Errors
    ///
    /// If no code is there, or if the interpreter does not know the instruction.
    pub fn decode(&self, address: u64) -> Result<Instruction> {
        let bytes = self.bytes(address, true);
        let bytes = bytes.with_context(|| format!("no code at {address:#x}"))?;
        match self.arch {
            Arch::X86 => x86::decode(bytes, address),
            Arch::Arm => arm::decode(bytes, address),
        }
    }

    /// Returns all instructions that the function `name` can reach without a call, with those of
    /// the abort handlers of its sections.
    ///
    /// # Errors
    ///
    /// If there is no such function, or if the interpreter does not know one of its instructions.
    pub fn function(&self, name: &str) -> Result<Program> {
        let entry = self.symbols.get(name).copied();
        let entry = entry.with_context(|| format!("the library has no function {name}"))?;
        let mut code = BTreeMap::new();
        let mut to_do = vec![entry];
        while let Some(at) = to_do.pop() {
            if code.contains_key(&at) {
                continue;
            }
            let instruction = self.decode(at)?;
            to_do.extend(instruction.jump().map(|(to, _)| to));
            if !instruction.is_end() {
                to_do.push(instruction.end());
            }
            let starts = self
                .descriptors
                .iter()
                .filter(|section| section.start == at);
            for section in starts {
                to_do.push(section.abort);
            }
            code.insert(at, instruction);
        }
        let slots: Vec<Instruction> = code.into_values().collect();
        let section = self.descriptors.iter();
        let mut section =
            section.filter(|section| slots.iter().any(|s| s.address == section.start));
        let (section, more) = (section.next().copied(), section.next().is_some());
        ensure!(!more, "{name} has two sections");
        Program::new(name, self.arch, slots, entry, section, self.aborts)
    }
}

/// Part of a section: what its instructions are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Compiled code around the section, which runs in one step.
    Around,
    /// From the store of the descriptor's address to the end of the section.
    Section,
    /// The abort handler, and the exit of a body that finds nothing to do.
    Handler,
    /// The first instruction behind the section.
    After,
}

/// Code that the interpreter runs.
#[derive(Clone)]
pub struct Program {
    pub name: String,
    pub arch: Arch,
    /// The instructions, by address. A mutant changes what an instruction does, not where it lies.
    pub slots: Vec<Instruction>,
    /// For each slot, the slot that follows it, or the number of slots.
    pub next: Vec<usize>,
    pub parts: Vec<Part>,
    by_address: HashMap<u64, usize>,
    pub entry: usize,
    pub section: Option<Descriptor>,
    pub aborts: u64,
}

impl Program {
    /// Makes a program of instructions in the order of their addresses.
    ///
    /// # Errors
    ///
    /// If the section has not the shape that the macro `template!` gives it.
    pub fn new(
        name: &str,
        arch: Arch,
        slots: Vec<Instruction>,
        entry: u64,
        section: Option<Descriptor>,
        aborts: u64,
    ) -> Result<Program> {
        let by_address: HashMap<_, _> = slots.iter().map(|slot| slot.address).zip(0..).collect();
        let find = |at: u64| by_address.get(&at).copied();
        let next = slots
            .iter()
            .map(|slot| find(slot.end()).unwrap_or(slots.len()))
            .collect();
        let mut program = Program {
            name: name.into(),
            arch,
            parts: vec![Part::Around; slots.len()],
            next,
            entry: find(entry).context("no entry")?,
            slots,
            by_address,
            section,
            aborts,
        };
        if let Some(section) = section {
            program.mark(section)?;
        } else {
            program.parts.fill(Part::Section);
        }
        Ok(program)
    }

    /// Returns the slot at `address`.
    pub fn at(&self, address: u64) -> Option<usize> {
        self.by_address.get(&address).copied()
    }

    /// Finds out which slots belong to the section.
    fn mark(&mut self, section: Descriptor) -> Result<()> {
        let abort = self.at(section.abort).context("no abort handler")?;
        let end = self
            .at(section.end)
            .context("nothing follows the section")?;
        // The handler is a straight run of instructions up to a jump that ends the operation. One
        // of its conditional jumps goes back to where the section is entered.
        let mut last = abort;
        while !self.slots[last].is_end() {
            last = self.next[last];
            ensure!(last < self.slots.len(), "the abort handler has no end");
        }
        let handler = abort..=last;
        let jumps = self.slots[handler.clone()]
            .iter()
            .filter_map(Instruction::jump);
        let mut enters = jumps.filter_map(|(to, _)| self.at(to)).filter(|to| {
            self.slots[*to].address < section.start && section.start - 32 < self.slots[*to].address
        });
        let enter = enters
            .next()
            .context("the abort handler does not go back to the start")?;
        let inside =
            |slot: &Instruction| (self.slots[enter].address..section.end).contains(&slot.address);
        let inside: Vec<usize> = (0..self.slots.len())
            .filter(|at| inside(&self.slots[*at]))
            .collect();
        for at in inside {
            self.parts[at] = Part::Section;
        }
        for at in handler {
            self.parts[at] = Part::Handler;
        }
        // The exit of a body that finds nothing to do: one instruction and a jump to the end.
        let (given_up, _) = self.slots[last]
            .jump()
            .context("the abort handler returns")?;
        let exit = self.at(given_up).context("no exit")?;
        let back = self
            .next
            .get(exit)
            .and_then(|next| self.slots.get(*next)?.jump());
        let beside = given_up == self.slots[last].end()
            || (self.arch == Arch::Arm && given_up + 12 == section.abort);
        if beside && back == Some((section.end, true)) {
            self.parts[exit] = Part::Handler;
            self.parts[self.next[exit]] = Part::Handler;
        }
        if self.parts[end] == Part::Around {
            self.parts[end] = Part::After;
        }
        Ok(())
    }

    /// Returns the slots that a mutant may change: those of the section and of its handler, and an
    /// instruction behind the section that goes back to the handler.
    pub fn mutable(&self) -> Vec<usize> {
        let abort = self.section.map_or(0, |section| section.abort);
        let goes_back = |at: usize| self.slots[at].jump() == Some((abort, false));
        (0..self.slots.len())
            .filter(|at| match self.parts[*at] {
                Part::Section | Part::Handler => true,
                Part::After => goes_back(*at),
                Part::Around => false,
            })
            .collect()
    }

    /// Returns the slot of the commit: the last of the section.
    pub fn commit(&self) -> Option<usize> {
        let end = self.section?.end;
        self.slots.iter().position(|slot| slot.end() == end)
    }

    /// Returns whether other threads, or a disturbance, may come before this slot.
    pub fn is_step(&self, slot: usize) -> bool {
        self.parts[slot] != Part::Around
    }

    /// Returns for each slot which registers, and whether the flags, are read from there on before
    /// they are written. The bits of `results` are the registers of the function's result.
    pub fn live(&self, results: u64) -> Vec<u64> {
        let uses: Vec<Uses> = self.slots.iter().map(Uses::of).collect();
        let kept = self.kept() | results;
        let abort = self.section.and_then(|section| self.at(section.abort));
        let mut live = vec![0; self.slots.len()];
        loop {
            let before = live.clone();
            for slot in (0..self.slots.len()).rev() {
                let instruction = &self.slots[slot];
                let target = instruction.jump().map(|(to, _)| self.at(to));
                let next = Some(self.next[slot]).filter(|_| !instruction.is_end());
                let follows = [target.flatten(), next].into_iter().flatten();
                let returns = matches!(instruction.ops.last(), Some(Op::Return { .. }));
                let mut after = if returns { kept } else { 0 };
                for follow in follows {
                    after |= live.get(follow).copied().unwrap_or(0);
                }
                live[slot] = uses[slot].reads | after & !uses[slot].writes;
                if let Some(abort) = abort.filter(|_| self.is_step(slot)) {
                    live[slot] |= live[abort];
                }
            }
            if live == before {
                return live;
            }
        }
    }

    /// Returns the registers that a function must keep, as bits.
    pub fn kept(&self) -> u64 {
        match self.arch {
            // rbx, rsp, rbp, r12 to r15, and the thread pointer.
            Arch::X86 => 0x1_f038,
            // x19 to x31, and the thread pointer.
            Arch::Arm => 0x1_fff8_0000,
        }
    }
}
