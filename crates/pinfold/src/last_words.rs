//! The message of a process that ends because an invariant was violated.

use crate::sys::Text;
use pinfold_rseq::kernel;

/// Writes a message and the name of this process to standard error. Allocates nothing.
#[cold]
pub(crate) fn write(message: core::fmt::Arguments<'_>) {
    let mut text = Text::<448>::new();
    let _ = core::fmt::write(
        &mut text,
        format_args!("pinfold: {message}\n  {ThisProcess}\n"),
    );
    let _ = kernel::write(2, text.get());
}

/// Names this process for reports: its PID, and the program's name as it was started.
pub(crate) struct ThisProcess;

impl core::fmt::Display for ThisProcess {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        /// The most bytes of the program's name that are written.
        const MOST: usize = 32;
        unsafe extern "C" {
            static program_invocation_short_name: *const core::ffi::c_char;
        }
        write!(f, "process {}", kernel::process())?;
        // SAFETY: the C library defines this pointer, and sets it when the program starts.
        let name = unsafe { program_invocation_short_name };
        if name.is_null() {
            return Ok(());
        }
        // SAFETY: a pointer that is not null is a C string that lives as long as the process.
        let name = unsafe { core::ffi::CStr::from_ptr(name) }.to_bytes();
        // The program's starter chose the name, so no byte of it may reach a terminal as it is.
        write!(f, " ({})", name[..name.len().min(MOST)].escape_ascii())
    }
}
