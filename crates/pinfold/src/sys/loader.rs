//! What the loader is doing.

/// Returns whether no thread is loading or unloading a library. Reads `r_debug.state`, whose
/// address is the entry `DT_DEBUG` of the program's dynamic section. In a program without this
/// entry, returns true: it has no loader. Returns false if the kernel did not pass the program's
/// headers.
pub fn loader_is_idle() -> bool {
    // SAFETY: `getauxval` only reads the auxiliary vector.
    let (at, count) = unsafe {
        (
            libc::getauxval(libc::AT_PHDR) as usize,
            libc::getauxval(libc::AT_PHNUM) as usize,
        )
    };
    if at == 0 {
        return false;
    }
    // SAFETY: the kernel passes the place of the program's headers, which stay mapped.
    let headers = unsafe { core::slice::from_raw_parts(at as *const libc::Elf64_Phdr, count) };
    let find = |kind| headers.iter().find(|header| header.p_type == kind);
    let bias = find(libc::PT_PHDR).map_or(0, |own| at.wrapping_sub(own.p_vaddr as usize));
    let Some(dynamic) = find(libc::PT_DYNAMIC) else {
        return true;
    };
    let mut entry = bias.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
    loop {
        // SAFETY: the section is mapped, and ends with an entry of tag 0.
        match unsafe { *entry } {
            [0, _] | [DT_DEBUG, 0] => return true,
            // SAFETY: the loader has stored the address of its `r_debug`, which stays.
            [DT_DEBUG, debug] => return unsafe { (*(debug as *const LoaderState)).state } == 0,
            _ => entry = entry.wrapping_add(1),
        }
    }
}

/// The tag of the entry with the address of the loader's `r_debug`.
const DT_DEBUG: usize = 21;

/// The beginning of the C library's `struct r_debug`.
#[repr(C)]
struct LoaderState {
    version: i32,
    map: usize,
    breakpoint: usize,
    /// 0 while no library is added or removed.
    state: i32,
}
