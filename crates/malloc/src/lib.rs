//! The C malloc family.
