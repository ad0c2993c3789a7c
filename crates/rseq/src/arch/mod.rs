//! The critical sections: one file per architecture, with the same functions in each.
//!
//! `docs/rseq.md` gives every section in pseudocode. All sections of a file share its macro
//! `template!`. The macro stores the address of the section's descriptor, which tells the kernel
//! where the section begins and ends. Then it runs the body. After an abort it starts again from
//! the store.
#![allow(unsafe_code, reason = "this is where the assembly lives")]

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod none;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use none::*;
