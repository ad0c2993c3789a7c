//! What machine instructions do, in terms that both architectures share.

/// The number of a register. [`x86`](crate::x86) and [`arm`](crate::arm) number their own.
pub type Reg = u8;
/// The number of registers: the largest that an architecture needs.
pub const REGISTERS: usize = 52;

/// The address in front of which a function returns: no code lies there.
pub const RETURN: u64 = 0xfff0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Src {
    Reg(Reg),
    Imm(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alu {
    /// Takes the second operand.
    Mov,
    Add,
    Sub,
    And,
    Or,
    Xor,
    /// Shifts right, and fills with zeroes.
    Shr,
}

/// Which flags an instruction sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sets {
    Nothing,
    All,
    /// All except the carry, as `inc` and `dec` do.
    NotCarry,
}

pub const NEGATIVE: u8 = 1;
pub const ZERO: u8 = 2;
/// The carry. After a subtraction, x86-64 sets it if there was a borrow, and Arm if there was none.
pub const CARRY: u8 = 4;
pub const OVERFLOW: u8 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cond {
    Equal,
    Carry,
    /// Unsigned above, with the carry as x86-64 has it.
    Above,
    /// Unsigned higher, with the carry as Arm has it.
    Higher,
    Less,
    LessOrEqual,
    Negative,
    Overflow,
    /// The register is zero. The number says how many of its bytes count.
    Null(Reg, u8),
}

/// A condition, and the value that it must have.
pub type When = (Cond, bool);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Address {
    pub base: Option<Reg>,
    /// The thread pointer, for the segment `fs`.
    pub segment: Option<Reg>,
    /// A register, and how far it is shifted to the left.
    pub index: Option<(Reg, u8)>,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Plain,
    /// An acquire load or a release store.
    Ordered,
    /// An exclusive load.
    Exclusive,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Alu {
        op: Alu,
        to: Option<Reg>,
        a: Src,
        b: Src,
        bytes: u8,
        sets: Sets,
        /// Whether a subtraction sets the carry on a borrow.
        borrow: bool,
    },
    /// Computes an address.
    Lea {
        to: Reg,
        at: Address,
    },
    /// Loads `bytes` bytes, or two words for 16.
    Load {
        to: Reg,
        second: Option<Reg>,
        at: Address,
        bytes: u8,
        order: Order,
    },
    /// Stores `bytes` bytes, or two words for 16.
    Store {
        from: Src,
        second: Option<Src>,
        at: Address,
        bytes: u8,
        order: Order,
    },
    /// A release store of two words that only happens if this CPU still has the words exclusively.
    StoreExclusive {
        status: Reg,
        from: [Src; 2],
        at: Address,
    },
    Select {
        to: Reg,
        when: When,
        then: Src,
        otherwise: Src,
        bytes: u8,
    },
    /// Compares if the condition holds, and otherwise sets the flags to a constant.
    CompareIf {
        when: When,
        a: Src,
        b: Src,
        otherwise: u8,
    },
    /// Stores the flags, with the trap flag, in a register as x86-64 numbers them.
    Flags {
        to: Reg,
    },
    /// Sets one byte of a register.
    SetByte {
        to: Reg,
        when: When,
    },
    Jump {
        when: Option<When>,
        to: u64,
    },
    /// Jumps to the address in a register, and must find [`RETURN`] there.
    Return {
        to: Reg,
    },
    /// What the interpreter never runs: a call, a trap.
    Halt,
}

/// A machine instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub address: u64,
    pub length: u8,
    pub ops: Vec<Op>,
    pub text: String,
}

impl Instruction {
    /// Returns the address of the next instruction.
    pub fn end(&self) -> u64 {
        self.address + u64::from(self.length)
    }

    /// Returns the target of a jump, and whether the instruction always jumps.
    pub fn jump(&self) -> Option<(u64, bool)> {
        self.ops.iter().find_map(|op| match op {
            Op::Jump { when, to } => Some((*to, when.is_none())),
            _ => None,
        })
    }

    /// Returns whether execution never goes on with the next instruction.
    pub fn is_end(&self) -> bool {
        self.ops.iter().any(|op| {
            matches!(
                op,
                Op::Jump { when: None, .. } | Op::Return { .. } | Op::Halt
            )
        })
    }

    /// Returns whether the instruction reads or writes memory.
    pub fn accesses_memory(&self) -> bool {
        self.ops.iter().any(|op| {
            matches!(
                op,
                Op::Load { .. } | Op::Store { .. } | Op::StoreExclusive { .. }
            )
        })
    }

    /// Returns whether the instruction writes memory.
    pub fn stores(&self) -> bool {
        let mut ops = self.ops.iter();
        ops.any(|op| matches!(op, Op::Store { .. } | Op::StoreExclusive { .. }))
    }
}

/// The bit of the carry in [`Uses`], and the bit of the other flags.
const CARRY_USE: u64 = 1 << REGISTERS;
const OTHERS_USE: u64 = 2 << REGISTERS;
/// The bits of all flags in [`Uses`].
pub const FLAGS: u64 = CARRY_USE | OTHERS_USE;

/// What an instruction reads and writes: bits of registers and flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    pub reads: u64,
    pub writes: u64,
}

impl Uses {
    fn read(&mut self, src: Src) {
        if let Src::Reg(reg) = src {
            self.reads |= 1 << reg & !self.writes;
        }
    }

    fn address(&mut self, at: &Address) {
        for reg in [at.base, at.segment, at.index.map(|(reg, _)| reg)] {
            self.read(reg.map_or(Src::Imm(0), Src::Reg));
        }
    }

    fn when(&mut self, (cond, _): When) {
        match cond {
            Cond::Null(reg, _) => self.read(Src::Reg(reg)),
            Cond::Carry => self.reads |= CARRY_USE & !self.writes,
            Cond::Above | Cond::Higher => self.reads |= FLAGS & !self.writes,
            _ => self.reads |= OTHERS_USE & !self.writes,
        }
    }

    /// Returns what `instruction` reads and writes. A read of a register that the instruction has
    /// itself written before does not count.
    pub fn of(instruction: &Instruction) -> Uses {
        let mut uses = Uses::default();
        for op in &instruction.ops {
            match op {
                Op::Alu {
                    op, to, a, b, sets, ..
                } => {
                    if !(matches!(op, Alu::Xor) && a == b) {
                        if *op != Alu::Mov {
                            uses.read(*a);
                        }
                        uses.read(*b);
                    }
                    uses.writes |= to.map_or(0, |to| 1 << to);
                    match sets {
                        Sets::Nothing => {}
                        Sets::All => uses.writes |= FLAGS,
                        Sets::NotCarry => uses.writes |= OTHERS_USE,
                    }
                }
                Op::Lea { to, at } => {
                    uses.address(at);
                    uses.writes |= 1 << to;
                }
                Op::Load { to, second, at, .. } => {
                    uses.address(at);
                    uses.writes |= 1 << to | second.map_or(0, |to| 1 << to);
                }
                Op::Store {
                    from, second, at, ..
                } => {
                    uses.address(at);
                    uses.read(*from);
                    uses.read(second.unwrap_or(Src::Imm(0)));
                }
                Op::StoreExclusive { status, from, at } => {
                    uses.address(at);
                    from.iter().for_each(|from| uses.read(*from));
                    uses.writes |= 1 << status;
                }
                Op::Select {
                    to,
                    when,
                    then,
                    otherwise,
                    ..
                } => {
                    uses.when(*when);
                    uses.read(*then);
                    uses.read(*otherwise);
                    uses.writes |= 1 << to;
                }
                Op::CompareIf { when, a, b, .. } => {
                    uses.when(*when);
                    uses.read(*a);
                    uses.read(*b);
                    uses.writes |= FLAGS;
                }
                Op::Flags { to } => {
                    uses.reads |= FLAGS & !uses.writes;
                    uses.writes |= 1 << to;
                }
                Op::SetByte { to, when } => {
                    uses.when(*when);
                    uses.read(Src::Reg(*to));
                    uses.writes |= 1 << to;
                }
                Op::Jump { when, .. } => when.iter().for_each(|when| uses.when(*when)),
                Op::Return { to } => uses.read(Src::Reg(*to)),
                Op::Halt => {}
            }
        }
        uses
    }
}
