//! Finds out whether the program allocates by a copy of Pinfold of its own.
//!
//! A program that is linked with `libpinfold.a` calls that copy's `malloc`, also if `libpinfold.so`
//! is preloaded. The copy in `libpinfold.so` would then have a statistics segment of its own, which
//! says that the program allocates nothing, and a mailbox that no thread looks into. So the copy in
//! `libpinfold.so` stays idle: it makes neither, and counts no threads.

use core::ffi::{c_int, c_void};
use core::slice::from_raw_parts;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_malloc::at_start;
use pinfold_names::NOTE;

static IS_IDLE: AtomicBool = AtomicBool::new(false);

/// Returns whether this copy is idle. One load.
pub(crate) fn is_idle() -> bool {
    IS_IDLE.load(Relaxed)
}

/// Makes this copy idle if the file that contains `malloc` contains Pinfold, too. `malloc` is the
/// program's own. Returns whether this copy is idle now.
pub(crate) fn stay_idle_beside(malloc: *const c_void) -> bool {
    let mut search = Search {
        malloc: malloc.addr(),
        is_found: false,
    };
    // SAFETY: `see` expects a `Search`, which lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(see), (&raw mut search).cast()) };
    if search.is_found {
        // Relaxed is enough: the loader runs the constructors in one thread.
        IS_IDLE.store(true, Relaxed);
        at_start::leave_to_another_copy();
    }
    search.is_found
}

struct Search {
    malloc: usize,
    /// Whether the file that contains `malloc` has the note.
    is_found: bool,
}

/// Looks at one file. The loader calls this for each.
unsafe extern "C" fn see(file: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid file, and `stay_idle_beside` its `Search`. The headers stay
    // mapped during the call.
    let (search, base, headers) = unsafe {
        let file = &*file;
        (
            &mut *search.cast::<Search>(),
            file.dlpi_addr as usize,
            from_raw_parts(file.dlpi_phdr, usize::from(file.dlpi_phnum)),
        )
    };
    let at = |header: &libc::Elf64_Phdr| base.wrapping_add(header.p_vaddr as usize);
    let is_there = headers.iter().any(|header| {
        let offset = search.malloc.wrapping_sub(at(header));
        header.p_type == libc::PT_LOAD && offset < header.p_memsz as usize
    });
    if is_there {
        search.is_found = headers.iter().any(|header| {
            let (notes, size) = (at(header) as *const u8, header.p_memsz as usize);
            // SAFETY: the loader has mapped the file's notes.
            header.p_type == libc::PT_NOTE && has_note(unsafe { from_raw_parts(notes, size) })
        });
    }
    c_int::from(is_there)
}

/// Returns whether one of these notes has Pinfold's name.
fn has_note(notes: &[u8]) -> bool {
    // The sizes of the name and of the content, the kind, and the name.
    let note = [[8, 0, 0, 0], [0; 4], [1, 0, 0, 0]];
    notes
        .windows(20)
        .any(|there| there[..12] == *note.as_flattened() && there[12..] == NOTE[..])
}
