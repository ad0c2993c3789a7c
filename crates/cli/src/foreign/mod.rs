//! Reads what other processes chose: their files in `/proc`, and the files that they have mapped.
//!
//! Another process chooses its name, its arguments, the paths of its files, how many descriptors
//! and mappings it has, and what a file holds. A process that wants to harm its reader can make
//! each of them as long, as numerous or as misleading as the kernel allows, and can change them
//! while they are read. So this module keeps these rules, and the rest of the command reads other
//! processes only by it:
//!
//! - A text is bytes, and not UTF-8.
//! - Each read and each list has a limit. Beyond it, the read fails. A thread that looks at many
//!   processes has a [`Deadline`], too.
//! - Only the errors that [`has_ended`] names mean that a process or thread has ended. Every other
//!   error means that nothing is known.
//! - A process is held by a descriptor of its folder ([`Process`]), so that another process that
//!   gets its PID later is never read by mistake.
//! - A file that a process chose is looked at before it is opened: devices, pipes and sockets are
//!   never opened, and no link leads out of the process's root ([`open_mapped`]).
//! - Files are read, and not mapped: a file that shrinks while it is mapped would end this command.

mod content;
mod deadline;
mod identity;
mod maps;
mod memory;
mod open;
mod process;

pub use content::Content;
pub use deadline::Deadline;
pub use identity::Identity;
pub use maps::Mapping;
pub use memory::Memory;
pub use open::{
    Unopened, open_beneath, open_mapped, open_own, open_regular, regular, reopen_for_writing,
};
pub use process::{NO_PROC, Process, has_ended, is_proc_there, number, pids, system_fields};
