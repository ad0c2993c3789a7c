#![no_std]
//! Restartable sequences.
