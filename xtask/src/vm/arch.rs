//! What differs between the processors that are emulated.

use super::machines::Machine;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    X86,
    Arm,
}

impl Arch {
    pub fn named(name: &str) -> Option<Arch> {
        match name {
            "x86_64" => Some(Arch::X86),
            "aarch64" => Some(Arch::Arm),
            _ => None,
        }
    }

    /// As Debian calls it.
    pub fn debian(self) -> &'static str {
        match self {
            Arch::X86 => "amd64",
            Arch::Arm => "arm64",
        }
    }

    /// The emulator, and the package it is in.
    pub fn emulator(self) -> (&'static str, &'static str) {
        match self {
            Arch::X86 => ("qemu-system-x86_64", "qemu-system-x86"),
            Arch::Arm => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// What the emulator is told of the processor and the board. `-accel tcg,thread=multi`: a thread of this machine for each CPU.
    pub fn board(self) -> &'static [&'static str] {
        match self {
            Arch::X86 => &["-M", "q35", "-cpu", "max"],
            Arch::Arm => &["-M", "virt,gic-version=3", "-cpu", "max,pauth=off,sve=off"],
        }
    }

    /// The device that is a CPU to plug in, where single ones can be.
    pub fn cpu_device(self) -> Option<&'static str> {
        match self {
            Arch::X86 => Some("max-x86_64-cpu"),
            Arch::Arm => None,
        }
    }

    pub fn console(self) -> &'static str {
        match self {
            Arch::X86 => "ttyS0",
            Arch::Arm => "ttyAMA0",
        }
    }

    /// Whether the emulator can be such a machine.
    pub fn can_be(self, machine: &Machine) -> bool {
        self.cpu_device().is_some() || machine.nodes.iter().all(|node| node.there)
    }
}
