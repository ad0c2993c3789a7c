//! The Linux kernel's per-CPU memory machinery for user-space programs.
#![no_std]

pub mod segment;
