//! Decodes the aarch64 instructions that the sections and the functions around them consist of.

use crate::ir::{Address, Alu, Cond, Instruction, Op, Order, Reg, Sets, Src, When};
use anyhow::{Context, Result};

pub const STACK: Reg = 31;
pub const THREAD: Reg = 32;
/// The link register.
pub const LINK: Reg = 30;

/// The registers of the C ABI's arguments.
pub const ARGUMENTS: [Reg; 6] = [0, 1, 2, 3, 4, 5];
pub const RESULT: Reg = 0;

/// Decodes the instruction at `address`.
///
/// # Errors
///
/// If the interpreter does not know the instruction.
pub fn decode(bytes: &[u8], address: u64) -> Result<Instruction> {
    let word = bytes.first_chunk().context("the code ends")?;
    let word = u32::from_le_bytes(*word);
    let unknown = || format!("{address:#x}: the interpreter does not know the word {word:#010x}");
    let (text, ops) = Word(word, address).ops().with_context(unknown)?;
    Ok(Instruction {
        address,
        length: 4,
        ops,
        text,
    })
}

#[derive(Clone, Copy)]
struct Word(u32, u64);

type Decoded = Option<(String, Vec<Op>)>;

impl Word {
    /// Returns `count` bits from `low` on.
    fn bits(self, low: u32, count: u32) -> u32 {
        self.0 >> low & ((1u64 << count) - 1) as u32
    }

    fn signed(self, low: u32, count: u32) -> i64 {
        let unused = 64 - count;
        (i64::from(self.bits(low, count)) << unused) >> unused
    }

    fn is(self, mask: u32, value: u32) -> bool {
        self.0 & mask == value
    }

    /// Returns 8 or 4, by the bit that says how wide the registers are.
    fn bytes(self) -> u8 {
        if self.bits(31, 1) == 1 { 8 } else { 4 }
    }

    /// Returns the source register at `low`, where 31 means zero.
    fn source(self, low: u32) -> Src {
        match self.bits(low, 5) {
            31 => Src::Imm(0),
            reg => Src::Reg(reg as Reg),
        }
    }

    /// Returns the register at `low` that is written, where 31 discards the result.
    fn target(self, low: u32) -> Option<Reg> {
        Some(self.bits(low, 5) as Reg).filter(|reg| *reg != 31)
    }

    fn target_of(self, words: i64) -> u64 {
        self.1.wrapping_add_signed(words * 4)
    }

    fn ops(self) -> Decoded {
        self.branches()
            .or_else(|| self.computes())
            .or_else(|| self.compares())
            .or_else(|| self.pairs())
            .or_else(|| self.accesses())
            .or_else(|| self.orders())
    }

    fn branches(self) -> Decoded {
        let jump = |when, to| vec![Op::Jump { when, to }];
        if self.is(0xfc00_0000, 0x1400_0000) {
            let to = self.target_of(self.signed(0, 26));
            return Some((format!("b {to:#x}"), jump(None, to)));
        }
        if self.is(0xff00_0010, 0x5400_0000) {
            let (name, when) = condition(self.bits(0, 4))?;
            let to = self.target_of(self.signed(5, 19));
            return Some((format!("b.{name} {to:#x}"), jump(Some(when), to)));
        }
        if self.is(0x7e00_0000, 0x3400_0000) {
            let is_zero = self.bits(24, 1) == 0;
            let to = self.target_of(self.signed(5, 19));
            let reg = self.target(0)?;
            let when = (Cond::Null(reg, self.bytes()), is_zero);
            let name = if is_zero { "cbz" } else { "cbnz" };
            let text = format!("{name} {}, {to:#x}", self.name(0, self.bytes()));
            return Some((text, jump(Some(when), to)));
        }
        if self.is(0xffff_fc1f, 0xd65f_0000) {
            let to = self.bits(5, 5) as Reg;
            return Some(("ret".into(), vec![Op::Return { to }]));
        }
        // Calls, `brk` and `udf`.
        let halts = self.is(0xfc00_0000, 0x9400_0000)
            || self.is(0xffe0_001f, 0xd420_0000)
            || self.is(0xffff_fc1f, 0xd63f_0000)
            || self.is(0xffff_0000, 0);
        halts.then(|| ("halt".into(), vec![Op::Halt]))
    }

    fn name(self, low: u32, bytes: u8) -> String {
        let letter = if bytes == 8 { 'x' } else { 'w' };
        match self.bits(low, 5) {
            31 => format!("{letter}zr"),
            reg => format!("{letter}{reg}"),
        }
    }

    fn alu(self, op: Alu, to: Option<Reg>, a: Src, b: Src, sets: bool) -> Vec<Op> {
        vec![Op::Alu {
            op,
            to,
            a,
            b,
            bytes: self.bytes(),
            sets: if sets { Sets::All } else { Sets::Nothing },
            borrow: false,
        }]
    }

    fn computes(self) -> Decoded {
        let (to, a) = (self.name(0, self.bytes()), self.name(5, self.bytes()));
        // Add and subtract a constant. 31 is the stack pointer, except as a target with flags.
        if self.is(0x1f80_0000, 0x1100_0000) {
            let sets = self.bits(29, 1) == 1;
            let op = [Alu::Add, Alu::Sub][self.bits(30, 1) as usize];
            let value = u64::from(self.bits(10, 12)) << (12 * self.bits(22, 1));
            let target = match sets {
                true => self.target(0),
                false => Some(self.bits(0, 5) as Reg),
            };
            let from = Src::Reg(self.bits(5, 5) as Reg);
            let ops = self.alu(op, target, from, Src::Imm(value), sets);
            let name = format!("{op:?}{}", if sets { "s" } else { "" }).to_lowercase();
            return Some((format!("{name} {to}, {a}, #{value}"), ops));
        }
        // Add and subtract a register that is not shifted.
        if self.is(0x1fe0_fc00, 0x0b00_0000) {
            let sets = self.bits(29, 1) == 1;
            let op = [Alu::Add, Alu::Sub][self.bits(30, 1) as usize];
            let ops = self.alu(op, self.target(0), self.source(5), self.source(16), sets);
            let name = format!("{op:?}{}", if sets { "s" } else { "" }).to_lowercase();
            let b = self.name(16, self.bytes());
            return Some((format!("{name} {to}, {a}, {b}"), ops));
        }
        // Add with a register that is shifted, for the entry of a table.
        if self.is(0xffe0_0000, 0x8b00_0000) {
            let Src::Reg(index) = self.source(16) else {
                return None;
            };
            let Src::Reg(base) = self.source(5) else {
                return None;
            };
            let at = Address {
                base: Some(base),
                index: Some((index, self.bits(10, 6) as u8)),
                ..Address::default()
            };
            let text = format!("add {to}, {a}, x{index}, lsl #{}", self.bits(10, 6));
            let to = self.target(0)?;
            return Some((text, vec![Op::Lea { to, at }]));
        }
        // And, or, with a register that is not shifted. Or with the zero register moves.
        if self.is(0x1f20_fc00, 0x0a00_0000) {
            let (op, sets) = match self.bits(29, 2) {
                0 => (Alu::And, false),
                1 => (Alu::Or, false),
                2 => (Alu::Xor, false),
                _ => (Alu::And, true),
            };
            let ops = self.alu(op, self.target(0), self.source(5), self.source(16), sets);
            let b = self.name(16, self.bytes());
            let text = match (op, self.source(5)) {
                (Alu::Or, Src::Imm(0)) => format!("mov {to}, {b}"),
                _ => format!("{op:?} {to}, {a}, {b}").to_lowercase(),
            };
            return Some((text, ops));
        }
        // And with a constant: also `tst`.
        if self.is(0x1f80_0000, 0x1200_0000) {
            let sets = self.bits(29, 2) == 3;
            let op = [Alu::And, Alu::Or, Alu::Xor, Alu::And][self.bits(29, 2) as usize];
            let value = self.mask()?;
            let target = match sets {
                true => self.target(0),
                false => Some(self.bits(0, 5) as Reg),
            };
            let ops = self.alu(op, target, self.source(5), Src::Imm(value), sets);
            let name = if sets { "tst" } else { "and" };
            return Some((format!("{name} {a}, #{value:#x}"), ops));
        }
        // Shift right by a constant.
        if self.is(0xffc0_fc00, 0xd340_fc00) {
            let by = u64::from(self.bits(16, 6));
            let ops = self.alu(
                Alu::Shr,
                self.target(0),
                self.source(5),
                Src::Imm(by),
                false,
            );
            return Some((format!("lsr {to}, {a}, #{by}"), ops));
        }
        // `movz`.
        if self.is(0x7f80_0000, 0x5280_0000) {
            let value = u64::from(self.bits(5, 16)) << (16 * self.bits(21, 2));
            let ops = self.alu(
                Alu::Mov,
                self.target(0),
                Src::Imm(0),
                Src::Imm(value),
                false,
            );
            return Some((format!("mov {to}, #{value}"), ops));
        }
        if self.is(0x9f00_0000, 0x9000_0000) {
            let pages = self.signed(5, 19) << 2 | i64::from(self.bits(29, 2));
            let value = (self.1 & !0xfff).wrapping_add_signed(pages << 12);
            let ops = vec![Op::Alu {
                op: Alu::Mov,
                to: self.target(0),
                a: Src::Imm(0),
                b: Src::Imm(value),
                bytes: 8,
                sets: Sets::Nothing,
                borrow: false,
            }];
            return Some((format!("adrp {}, {value:#x}", self.name(0, 8)), ops));
        }
        if self.is(0xffff_ffe0, 0xd53b_d040) {
            let ops = vec![Op::Lea {
                to: self.target(0)?,
                at: Address {
                    base: Some(THREAD),
                    ..Address::default()
                },
            }];
            return Some((format!("mrs {}, tpidr_el0", self.name(0, 8)), ops));
        }
        None
    }

    /// Returns the constant of a logical instruction: a run of ones, rotated, and repeated.
    fn mask(self) -> Option<u64> {
        let (n, rotate, ones) = (self.bits(22, 1), self.bits(16, 6), self.bits(10, 6));
        let size = 1 << (n << 6 | !ones & 0x3f).checked_ilog2()?;
        let width = size as u32;
        let (ones, rotate) = (ones & (width - 1), rotate & (width - 1));
        let element: u64 = (1 << (ones + 1)) - 1;
        let all = u64::MAX >> (64 - size);
        let turned = match rotate {
            0 => element,
            _ => (element >> rotate | element << (width - rotate)) & all,
        };
        let repeated = (0..64 / width).fold(0, |mask, at| mask | turned << (at * width));
        Some(if self.bytes() == 4 {
            repeated & u64::from(u32::MAX)
        } else {
            repeated
        })
    }

    fn compares(self) -> Decoded {
        // `ccmp` with a register.
        if self.is(0x7fe0_0c10, 0x7a40_0000) {
            let (name, when) = condition(self.bits(12, 4))?;
            let nzcv = self.bits(0, 4);
            let flag = |bit: u32, flag: u8| if nzcv >> bit & 1 == 1 { flag } else { 0 };
            use crate::ir::{CARRY, NEGATIVE, OVERFLOW, ZERO};
            let otherwise = flag(3, NEGATIVE) | flag(2, ZERO) | flag(1, CARRY) | flag(0, OVERFLOW);
            let (a, b) = (self.name(5, 8), self.name(16, 8));
            let ops = vec![Op::CompareIf {
                when,
                a: self.source(5),
                b: self.source(16),
                otherwise,
            }];
            return Some((format!("ccmp {a}, {b}, #{nzcv}, {name}"), ops));
        }
        // `csel` and `csinc`, of which `cset` and `cinc` are forms.
        if self.is(0x7fe0_0800, 0x1a80_0000) {
            let (name, when) = condition(self.bits(12, 4))?;
            let to = self.target(0)?;
            let bytes = self.bytes();
            let mut ops = vec![Op::Select {
                to,
                when,
                then: self.source(5),
                otherwise: self.source(16),
                bytes,
            }];
            let mut text = "csel";
            if self.bits(10, 1) == 1 {
                text = "csinc";
                let plus = Address {
                    base: self.target(16),
                    offset: 1,
                    ..Address::default()
                };
                let sum = 33;
                ops.insert(0, Op::Lea { to: sum, at: plus });
                ops[1] = Op::Select {
                    to,
                    when,
                    then: self.source(5),
                    otherwise: Src::Reg(sum),
                    bytes,
                };
            }
            let (a, b) = (self.name(5, bytes), self.name(16, bytes));
            let to = self.name(0, bytes);
            return Some((format!("{text} {to}, {a}, {b}, {name}"), ops));
        }
        None
    }

    fn pairs(self) -> Decoded {
        if !self.is(0xfe00_0000, 0xa800_0000) {
            return None;
        }
        let base = self.bits(5, 5) as Reg;
        let by = self.signed(15, 7) * 8;
        let (before, after) = match self.bits(23, 2) {
            1 => (0, by),
            2 => (by, 0),
            3 => (by, i64::MIN),
            _ => return None,
        };
        let at = Address {
            base: Some(base),
            offset: before,
            ..Address::default()
        };
        let loads = self.bits(22, 1) == 1;
        let access = match loads {
            true => Op::Load {
                to: self.target(0)?,
                second: Some(self.target(10)?),
                at,
                bytes: 16,
                order: Order::Plain,
            },
            false => Op::Store {
                from: self.source(0),
                second: Some(self.source(10)),
                at,
                bytes: 16,
                order: Order::Plain,
            },
        };
        let name = if loads { "ldp" } else { "stp" };
        let text = format!(
            "{name} {}, {}, [x{base}, #{by}]",
            self.name(0, 8),
            self.name(10, 8)
        );
        Some((text, written_back(access, base, before, after)))
    }

    fn accesses(self) -> Decoded {
        let bytes: u8 = match self.bits(30, 2) {
            3 => 8,
            2 => 4,
            _ => return None,
        };
        let loads = match self.bits(22, 2) {
            0 => false,
            1 => true,
            _ => return None,
        };
        let base = self.bits(5, 5) as Reg;
        let (mut at, mut after) = (
            Address {
                base: Some(base),
                ..Address::default()
            },
            0,
        );
        let place;
        if self.is(0x3f00_0000, 0x3900_0000) {
            at.offset = i64::from(self.bits(10, 12)) * i64::from(bytes);
            place = format!("[x{base}, #{}]", at.offset);
        } else if self.is(0x3f20_0c00, 0x3820_0800) {
            // Only `lsl` of a 64-bit register.
            if self.bits(13, 3) != 3 {
                return None;
            }
            let shift = self.bits(12, 1) as u8 * bytes.ilog2() as u8;
            let index = self.target(16)?;
            at.index = Some((index, shift));
            place = format!("[x{base}, x{index}, lsl #{shift}]");
        } else if self.is(0x3f20_0000, 0x3800_0000) {
            let by = self.signed(12, 9);
            match self.bits(10, 2) {
                0 => at.offset = by,
                1 => after = by,
                3 => (at.offset, after) = (by, i64::MIN),
                _ => return None,
            }
            place = format!(
                "[x{base}, #{by}]{}",
                ["", " after", "", "!"][self.bits(10, 2) as usize]
            );
        } else {
            return None;
        }
        let access = match loads {
            true => Op::Load {
                to: self.target(0)?,
                second: None,
                at,
                bytes,
                order: Order::Plain,
            },
            false => Op::Store {
                from: self.source(0),
                second: None,
                at,
                bytes,
                order: Order::Plain,
            },
        };
        let name = if loads { "ldr" } else { "str" };
        let text = format!("{name} {}, {place}", self.name(0, bytes));
        Some((text, written_back(access, base, at.offset, after)))
    }

    fn orders(self) -> Decoded {
        let base = self.bits(5, 5) as Reg;
        let at = Address {
            base: Some(base),
            ..Address::default()
        };
        let (first, place) = (self.name(0, 8), format!("[x{base}]"));
        let ordered = Order::Ordered;
        if self.is(0xffff_fc00, 0xc8df_fc00) {
            let (to, second, bytes) = (self.target(0)?, None, 8);
            let op = Op::Load {
                to,
                second,
                at,
                bytes,
                order: ordered,
            };
            return Some((format!("ldar {first}, {place}"), vec![op]));
        }
        if self.is(0xffff_fc00, 0xc89f_fc00) {
            let (from, second, bytes) = (self.source(0), None, 8);
            let op = Op::Store {
                from,
                second,
                at,
                bytes,
                order: ordered,
            };
            return Some((format!("stlr {first}, {place}"), vec![op]));
        }
        if self.is(0xffff_8000, 0xc87f_0000) {
            let op = Op::Load {
                to: self.target(0)?,
                second: Some(self.target(10)?),
                at,
                bytes: 16,
                order: Order::Exclusive,
            };
            return Some((
                format!("ldxp {first}, {}, {place}", self.name(10, 8)),
                vec![op],
            ));
        }
        if self.is(0xffe0_8000, 0xc820_8000) {
            let op = Op::StoreExclusive {
                status: self.target(16)?,
                from: [self.source(0), self.source(10)],
                at,
            };
            let (status, second) = (self.name(16, 4), self.name(10, 8));
            return Some((
                format!("stlxp {status}, {first}, {second}, {place}"),
                vec![op],
            ));
        }
        None
    }
}

/// Returns an access, and the change of its base register. `after` is `i64::MIN` if the base takes
/// the address of the access itself.
fn written_back(access: Op, base: Reg, before: i64, after: i64) -> Vec<Op> {
    let by = if after == i64::MIN { before } else { after };
    if by == 0 || (before != 0 && after == 0) {
        return vec![access];
    }
    let at = Address {
        base: Some(base),
        offset: by,
        ..Address::default()
    };
    vec![access, Op::Lea { to: base, at }]
}

fn condition(code: u32) -> Option<(&'static str, When)> {
    let (name, cond) = match code >> 1 {
        0 => (["eq", "ne"], Cond::Equal),
        1 => (["hs", "lo"], Cond::Carry),
        3 => (["vs", "vc"], Cond::Overflow),
        4 => (["hi", "ls"], Cond::Higher),
        5 => (["ge", "lt"], Cond::Less),
        6 => (["gt", "le"], Cond::LessOrEqual),
        _ => return None,
    };
    let holds = (code & 1 == 0) != matches!(code >> 1, 5 | 6);
    Some((name[(code & 1) as usize], (cond, holds)))
}
