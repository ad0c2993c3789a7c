//! Decodes the x86-64 instructions that the sections and the functions around them consist of.

use crate::ir::{Address, Alu, Cond, Instruction, Op, Order, Reg, Sets, Src, When};
use anyhow::{Result, bail};
use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, Formatter, IntelFormatter, Mnemonic, OpKind, Register,
};

pub const STACK: Reg = 4;
pub const THREAD: Reg = 16;
const TEMPORARY: Reg = 17;
const SECOND: Reg = 18;
/// The first half of `xmm0`. Two numbers follow for each register.
const VECTORS: Reg = 20;

/// The registers of the C ABI's arguments.
pub const ARGUMENTS: [Reg; 6] = [7, 6, 2, 1, 8, 9];
pub const RESULT: Reg = 0;

/// Decodes the instruction at `address`.
///
/// # Errors
///
/// If the interpreter does not know the instruction.
pub fn decode(bytes: &[u8], address: u64) -> Result<Instruction> {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    let decoded = decoder.decode();
    let mut text = String::new();
    IntelFormatter::new().format(&decoded, &mut text);
    let Some(ops) = (Decoding(&decoded)).ops()? else {
        bail!("{address:#x}: the interpreter does not know `{text}`");
    };
    let length = decoded.len() as u8;
    Ok(Instruction {
        address,
        length,
        ops,
        text,
    })
}

struct Decoding<'a>(&'a iced_x86::Instruction);

impl Decoding<'_> {
    fn ops(&self) -> Result<Option<Vec<Op>>> {
        let bytes = self.bytes();
        Ok(Some(match self.0.mnemonic() {
            Mnemonic::Mov => self.mov()?,
            Mnemonic::Add => self.alu(Alu::Add, Sets::All)?,
            Mnemonic::Sub => self.alu(Alu::Sub, Sets::All)?,
            Mnemonic::And => self.alu(Alu::And, Sets::All)?,
            Mnemonic::Or => self.alu(Alu::Or, Sets::All)?,
            Mnemonic::Xor => self.alu(Alu::Xor, Sets::All)?,
            Mnemonic::Shr => self.alu(Alu::Shr, Sets::All)?,
            Mnemonic::Inc => self.change(Alu::Add, Some(Src::Imm(1)), Sets::NotCarry, true)?,
            Mnemonic::Dec => self.change(Alu::Sub, Some(Src::Imm(1)), Sets::NotCarry, true)?,
            Mnemonic::Cmp => self.change(Alu::Sub, None, Sets::All, false)?,
            Mnemonic::Test => self.test()?,
            Mnemonic::Lea => vec![Op::Lea {
                to: gpr(self.0.op0_register())?,
                at: self.address()?,
            }],
            Mnemonic::Jmp => vec![self.jump(None)],
            Mnemonic::Pushfq => vec![
                self.move_stack(-8),
                Op::Flags { to: TEMPORARY },
                store(Src::Reg(TEMPORARY), STACK_TOP, 8),
            ],
            Mnemonic::Push => vec![
                self.move_stack(-8),
                store(Src::Reg(gpr(self.0.op0_register())?), STACK_TOP, 8),
            ],
            Mnemonic::Pop => vec![
                load(gpr(self.0.op0_register())?, STACK_TOP, 8),
                self.move_stack(8),
            ],
            Mnemonic::Ret => vec![
                load(TEMPORARY, STACK_TOP, 8),
                self.move_stack(8),
                Op::Return { to: TEMPORARY },
            ],
            Mnemonic::Movq => {
                let to = vector(self.0.op0_register())?;
                let from = Src::Reg(gpr(self.0.op1_register())?);
                vec![mov(to, from, 8), mov(to + 1, Src::Imm(0), 8)]
            }
            Mnemonic::Punpcklqdq => {
                let to = vector(self.0.op0_register())?;
                let from = Src::Reg(vector(self.0.op1_register())?);
                vec![mov(to + 1, from, 8)]
            }
            Mnemonic::Movaps if self.0.op0_kind() == OpKind::Memory => {
                let from = vector(self.0.op1_register())?;
                vec![Op::Store {
                    from: Src::Reg(from),
                    second: Some(Src::Reg(from + 1)),
                    at: self.address()?,
                    bytes: 16,
                    order: Order::Ordered,
                }]
            }
            Mnemonic::Paddq if self.0.op1_kind() == OpKind::Memory => {
                let (to, at) = (vector(self.0.op0_register())?, self.address()?);
                let words = Op::Load {
                    to: TEMPORARY,
                    second: Some(SECOND),
                    at,
                    bytes: 16,
                    order: Order::Ordered,
                };
                vec![words, add(to, TEMPORARY), add(to + 1, SECOND)]
            }
            Mnemonic::Call | Mnemonic::Ud1 | Mnemonic::Ud2 | Mnemonic::Int3 => vec![Op::Halt],
            Mnemonic::Nop => vec![],
            _ => {
                let Some(when) = condition(self.0.condition_code()) else {
                    return Ok(None);
                };
                if self.0.is_jcc_short_or_near() {
                    vec![self.jump(Some(when))]
                } else if self.0.mnemonic().to_string_lossy().starts_with("Cmov") {
                    let to = gpr(self.0.op0_register())?;
                    vec![Op::Select {
                        to,
                        when,
                        then: Src::Reg(gpr(self.0.op1_register())?),
                        otherwise: Src::Reg(to),
                        bytes,
                    }]
                } else if bytes == 1 {
                    vec![Op::SetByte {
                        to: gpr(self.0.op0_register())?,
                        when,
                    }]
                } else {
                    return Ok(None);
                }
            }
        }))
    }

    fn bytes(&self) -> u8 {
        match self.0.op0_kind() {
            OpKind::Memory => self.0.memory_size().size() as u8,
            OpKind::Register => self.0.op0_register().size() as u8,
            _ => 8,
        }
    }

    fn address(&self) -> Result<Address> {
        let (base, index) = (self.0.memory_base(), self.0.memory_index());
        let mut at = Address {
            offset: self.0.memory_displacement64() as i64,
            ..Address::default()
        };
        if base != Register::RIP && base != Register::None {
            at.base = Some(gpr(base)?);
        }
        if index != Register::None {
            at.index = Some((gpr(index)?, self.0.memory_index_scale().ilog2() as u8));
        }
        if self.0.memory_segment() == Register::FS {
            at.segment = Some(THREAD);
        }
        Ok(at)
    }

    fn operand(&self, at: u32) -> Result<Option<Src>> {
        Ok(match self.0.op_kind(at) {
            OpKind::Memory => None,
            OpKind::Register => Some(Src::Reg(gpr(self.0.op_register(at))?)),
            _ => Some(Src::Imm(self.0.immediate(at))),
        })
    }

    fn mov(&self) -> Result<Vec<Op>> {
        let bytes = self.bytes();
        let (to, from) = (self.operand(0)?, self.operand(1)?);
        Ok(match (to, from) {
            (Some(Src::Reg(to)), Some(from)) if bytes >= 4 => vec![mov(to, from, bytes)],
            (Some(Src::Reg(to)), None) if bytes >= 4 => vec![load(to, self.address()?, bytes)],
            (None, Some(from)) => vec![store(from, self.address()?, bytes)],
            // Compiled code sets one byte to a constant for a `bool`.
            (Some(Src::Reg(to)), Some(Src::Imm(value))) => vec![Op::SetByte {
                to,
                when: (Cond::Null(TEMPORARY, 0), value & 1 == 1),
            }],
            _ => bail!(
                "{:#x}: a move that the interpreter does not know",
                self.0.ip()
            ),
        })
    }

    fn alu(&self, op: Alu, sets: Sets) -> Result<Vec<Op>> {
        self.change(op, None, sets, true)
    }

    /// Returns the steps of an instruction that computes with its first operand, and stores the
    /// result there if `keeps`.
    fn change(&self, op: Alu, second: Option<Src>, sets: Sets, keeps: bool) -> Result<Vec<Op>> {
        let bytes = self.bytes();
        let first = self.operand(0)?;
        let second = match second {
            Some(second) => Some(second),
            None => self.operand(1)?,
        };
        let compute = |to, a, b| Op::Alu {
            op,
            to,
            a,
            b,
            bytes,
            sets,
            borrow: true,
        };
        Ok(match (first, second) {
            (Some(Src::Reg(to)), Some(b)) => {
                vec![compute(keeps.then_some(to), Src::Reg(to), b)]
            }
            (Some(Src::Reg(to)), None) => vec![
                load(SECOND, self.address()?, bytes),
                compute(keeps.then_some(to), Src::Reg(to), Src::Reg(SECOND)),
            ],
            (None, Some(b)) => {
                let at = self.address()?;
                let mut ops = vec![
                    load(TEMPORARY, at, bytes),
                    compute(Some(TEMPORARY), Src::Reg(TEMPORARY), b),
                ];
                if keeps {
                    ops.push(store(Src::Reg(TEMPORARY), at, bytes));
                }
                ops
            }
            _ => bail!(
                "{:#x}: operands that the interpreter does not know",
                self.0.ip()
            ),
        })
    }

    fn test(&self) -> Result<Vec<Op>> {
        // `test ah, 1` is the only test of a second byte.
        if self.0.op0_register() == Register::AH {
            let mask = Src::Imm(self.0.immediate(1) << 8);
            return Ok(vec![and(Src::Reg(RESULT), mask, 4)]);
        }
        self.change(Alu::And, None, Sets::All, false)
    }

    fn move_stack(&self, by: i64) -> Op {
        Op::Lea {
            to: STACK,
            at: Address {
                offset: by,
                ..STACK_TOP
            },
        }
    }

    fn jump(&self, when: Option<When>) -> Op {
        match self.0.op0_kind() {
            OpKind::NearBranch64 => Op::Jump {
                when,
                to: self.0.near_branch64(),
            },
            _ => Op::Halt,
        }
    }
}

const STACK_TOP: Address = Address {
    base: Some(STACK),
    segment: None,
    index: None,
    offset: 0,
};

fn mov(to: Reg, from: Src, bytes: u8) -> Op {
    Op::Alu {
        op: Alu::Mov,
        to: Some(to),
        a: Src::Imm(0),
        b: from,
        bytes,
        sets: Sets::Nothing,
        borrow: true,
    }
}

/// Adds a half of a vector register, which sets no flags.
fn add(to: Reg, from: Reg) -> Op {
    Op::Alu {
        op: Alu::Add,
        to: Some(to),
        a: Src::Reg(to),
        b: Src::Reg(from),
        bytes: 8,
        sets: Sets::Nothing,
        borrow: true,
    }
}

fn and(a: Src, b: Src, bytes: u8) -> Op {
    Op::Alu {
        op: Alu::And,
        to: None,
        a,
        b,
        bytes,
        sets: Sets::All,
        borrow: true,
    }
}

fn load(to: Reg, at: Address, bytes: u8) -> Op {
    Op::Load {
        to,
        second: None,
        at,
        bytes,
        order: Order::Ordered,
    }
}

/// Every store of x86-64 is a release.
fn store(from: Src, at: Address, bytes: u8) -> Op {
    Op::Store {
        from,
        second: None,
        at,
        bytes,
        order: Order::Ordered,
    }
}

fn gpr(register: Register) -> Result<Reg> {
    if !register.is_gpr() || matches!(register, Register::AH | Register::BH) {
        bail!("the interpreter does not know the register {register:?}");
    }
    Ok((register.full_register() as u32 - Register::RAX as u32) as Reg)
}

fn vector(register: Register) -> Result<Reg> {
    if !register.is_xmm() {
        bail!("the interpreter does not know the register {register:?}");
    }
    Ok(VECTORS + 2 * (register as u32 - Register::XMM0 as u32) as Reg)
}

fn condition(code: ConditionCode) -> Option<When> {
    Some(match code {
        ConditionCode::e => (Cond::Equal, true),
        ConditionCode::ne => (Cond::Equal, false),
        ConditionCode::b => (Cond::Carry, true),
        ConditionCode::ae => (Cond::Carry, false),
        ConditionCode::a => (Cond::Above, true),
        ConditionCode::be => (Cond::Above, false),
        ConditionCode::l => (Cond::Less, true),
        ConditionCode::ge => (Cond::Less, false),
        ConditionCode::le => (Cond::LessOrEqual, true),
        ConditionCode::g => (Cond::LessOrEqual, false),
        ConditionCode::s => (Cond::Negative, true),
        ConditionCode::ns => (Cond::Negative, false),
        ConditionCode::o => (Cond::Overflow, true),
        ConditionCode::no => (Cond::Overflow, false),
        _ => return None,
    })
}

/// Names of mnemonics, to tell `cmov` from `set`.
trait Name {
    fn to_string_lossy(&self) -> String;
}

impl Name for Mnemonic {
    fn to_string_lossy(&self) -> String {
        format!("{self:?}")
    }
}
