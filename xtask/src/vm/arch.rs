//! The differences between the emulated processor architectures.

use super::binaries::Build;
use super::machines::Machine;
use super::packages::{file, tool, unpacked};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder in which Debian's cross compilers keep libraries.
const CROSS_LIBRARIES: &str = "/usr/aarch64-linux-gnu/lib";
const ARM_TARGET: &str = "aarch64-unknown-linux-gnu";
const ARM_LINKER: &str = "aarch64-linux-gnu-gcc";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Arch {
    #[value(name = "x86_64")]
    X86,
    #[value(name = "aarch64")]
    Arm,
}

impl Arch {
    /// Returns Debian's name of the architecture.
    pub fn debian(self) -> &'static str {
        match self {
            Arch::X86 => "amd64",
            Arch::Arm => "arm64",
        }
    }

    /// Returns the emulator, and the Debian package that contains it.
    pub fn emulator(self) -> (&'static str, &'static str) {
        match self {
            Arch::X86 => ("qemu-system-x86_64", "qemu-system-x86"),
            Arch::Arm => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// Returns the emulator's options for the processor and the board.
    pub fn board(self) -> &'static [&'static str] {
        match self {
            Arch::X86 => &["-M", "q35", "-cpu", "max"],
            Arch::Arm => &["-M", "virt,gic-version=3", "-cpu", "max,pauth=off,sve=off"],
        }
    }

    /// Returns the device that plugs in a single CPU, if the architecture has one.
    pub fn cpu_device(self) -> Option<&'static str> {
        match self {
            Arch::X86 => Some("max-x86_64-cpu"),
            Arch::Arm => None,
        }
    }

    /// Installs what building for the architecture needs. Returns the path of busybox.
    pub fn prepare(self, cache: &Path) -> Result<PathBuf> {
        if self == Arch::X86 {
            tool("busybox", "busybox-static")?;
            return Ok(PathBuf::from("/bin/busybox"));
        }
        tool(ARM_LINKER, "gcc-aarch64-linux-gnu")?;
        let start = Path::new(CROSS_LIBRARIES).join("Scrt1.o");
        file(&start, "libc6-dev-arm64-cross")?;
        add_target()?;
        self.add_to_apt()?;
        let busybox = unpacked(&cache.join("busybox"), &["busybox-static:arm64".to_owned()])?;
        Ok(busybox.join("bin/busybox"))
    }

    /// Makes apt know the architecture's packages.
    pub fn add_to_apt(self) -> Result<()> {
        let known = Command::new("dpkg")
            .arg("--print-foreign-architectures")
            .output()?;
        let known = String::from_utf8_lossy(&known.stdout).contains(self.debian());
        if self == Arch::X86 || known {
            return Ok(());
        }
        let run = |program: &str, words: &[&str]| {
            let status = Command::new(program)
                .args(words)
                .stdout(Stdio::null())
                .status();
            status.is_ok_and(|status| status.success())
        };
        if !run("dpkg", &["--add-architecture", self.debian()])
            || !run("apt-get", &["update", "-qq"])
        {
            bail!(
                "apt does not know {0} packages; run as root: dpkg --add-architecture {0} && apt-get update",
                self.debian()
            );
        }
        Ok(())
    }

    pub fn build(self) -> Build {
        match self {
            Arch::X86 => Build::default(),
            Arch::Arm => Build {
                target: Some(ARM_TARGET),
                environment: vec![("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", ARM_LINKER)],
            },
        }
    }

    pub fn strip(self) -> &'static str {
        match self {
            Arch::X86 => "strip",
            Arch::Arm => "aarch64-linux-gnu-strip",
        }
    }

    /// Returns the libraries that programs need, for the architecture whose programs `ldd` cannot
    /// examine.
    pub fn libraries(self) -> Vec<PathBuf> {
        const NEEDED: [&str; 4] = [
            "ld-linux-aarch64.so.1",
            "libc.so.6",
            "libm.so.6",
            "libgcc_s.so.1",
        ];
        match self {
            Arch::X86 => Vec::new(),
            Arch::Arm => NEEDED
                .map(|name| Path::new(CROSS_LIBRARIES).join(name))
                .into(),
        }
    }

    pub fn console(self) -> &'static str {
        match self {
            Arch::X86 => "ttyS0",
            Arch::Arm => "ttyAMA0",
        }
    }

    /// Returns whether the emulator can emulate `machine`.
    pub fn can_be(self, machine: &Machine) -> bool {
        self.cpu_device().is_some() || machine.nodes.iter().all(|node| node.there)
    }
}

/// Installs the standard library for aarch64 by rustup, unless it is installed.
fn add_target() -> Result<()> {
    let sysroot = Command::new("rustc")
        .args(["--print", "sysroot"])
        .output()?;
    let sysroot = String::from_utf8_lossy(&sysroot.stdout).trim().to_owned();
    let there = Path::new(&sysroot)
        .join("lib/rustlib")
        .join(ARM_TARGET)
        .join("lib")
        .is_dir();
    let add = || {
        Command::new("rustup")
            .args(["target", "add", ARM_TARGET])
            .status()
    };
    if there || add().is_ok_and(|status| status.success()) {
        return Ok(());
    }
    bail!(
        "cannot install Rust's standard library for {ARM_TARGET}; run: rustup target add {ARM_TARGET}"
    )
}
