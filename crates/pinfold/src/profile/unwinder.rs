//! Finds out whether the unwinder takes the loader's lock.
//!
//! For each frame, the unwinder looks for the library that contains the frame's code. The unwinder
//! of GCC 12 and later asks `_dl_find_object` of glibc 2.35 and later, which takes no lock. Others
//! ask `dl_iterate_phdr`, which takes a lock of the loader's. A walk that waits for this lock can
//! wait forever: a callback of `dl_iterate_phdr` holds the lock, and may wait for a lock of the
//! program's that the walking thread holds.
//!
//! An unwinder that asks `_dl_find_object` has a relocation against that name. So this module reads
//! the relocations of the library that contains the unwinder.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::slice::from_raw_parts;

const DT_PLTRELSZ: usize = 2;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_RELA: usize = 7;
const DT_RELASZ: usize = 8;
const DT_JMPREL: usize = 23;

/// What [`see`] has learned.
#[derive(Default)]
struct Seen {
    /// An address in the unwinder.
    address: usize,
    /// Whether the first object, the program, was seen.
    program: bool,
    /// Whether the program has a loader.
    loader: bool,
    /// Whether `libgcc_s.so.1` asks `_dl_find_object`. `None` if it is not loaded.
    libgcc: Option<bool>,
    /// The same for the object that contains the address.
    unwinder: Option<bool>,
    /// Whether that object also contains this code.
    is_own: bool,
}

/// Returns whether a walk of the stack may take the loader's lock. Takes this lock itself.
///
/// `address` is that of `_Unwind_Backtrace`. The caller has walked the stack, so the unwinder's
/// library is loaded.
pub(super) fn takes_loader_lock(address: usize) -> bool {
    let mut seen = Seen {
        address,
        ..Seen::default()
    };
    // SAFETY: `see` expects a `Seen`, which lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(see), (&raw mut seen).cast()) };
    // In `libpinfold.so`, and in a program at a fixed address, the name stands for code that jumps
    // to the unwinder's library. So the relocations of `libgcc_s.so.1` decide.
    let asks_without_lock = match seen.libgcc {
        Some(libgcc) if seen.is_own => libgcc,
        _ => seen.unwinder.unwrap_or(false),
    };
    seen.loader && !asks_without_lock
}

/// Looks at one object. The loader calls this for the program first, then for each library.
unsafe extern "C" fn see(object: *mut libc::dl_phdr_info, _: usize, seen: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid object, and `takes_loader_lock` its `Seen`. The headers and
    // the name stay as long as the loader's lock is held.
    let (seen, base, headers, name) = unsafe {
        let object = &*object;
        (
            &mut *seen.cast::<Seen>(),
            object.dlpi_addr as usize,
            from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)),
            object.dlpi_name,
        )
    };
    let has = |kind| headers.iter().any(|header| header.p_type == kind);
    if !seen.program {
        seen.program = true;
        seen.loader = has(libc::PT_INTERP);
    }
    let contains = |address: usize| {
        headers.iter().any(|header| {
            header.p_type == libc::PT_LOAD
                && address.wrapping_sub(base.wrapping_add(header.p_vaddr as usize))
                    < header.p_memsz as usize
        })
    };
    let is_unwinder = contains(seen.address);
    let is_libgcc = is_libgcc(name);
    if is_unwinder || is_libgcc {
        let dynamic = headers
            .iter()
            .find(|header| header.p_type == libc::PT_DYNAMIC);
        let asks = dynamic.is_some_and(|dynamic| {
            let section = base.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
            // SAFETY: the loader has loaded the object, so its dynamic section is mapped.
            unsafe { asks_without_lock(base, section) }
        });
        if is_libgcc {
            seen.libgcc = Some(asks);
        }
        if is_unwinder {
            seen.unwinder = Some(asks);
            seen.is_own = contains(takes_loader_lock as *const () as usize);
        }
    }
    0
}

fn is_libgcc(name: *const c_char) -> bool {
    if name.is_null() {
        return false;
    }
    // SAFETY: the loader's name of an object is a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    file.starts_with(b"libgcc_s.so")
}

/// Returns whether the object has a relocation against `_dl_find_object`.
///
/// # Safety
///
/// `section` is the dynamic section of an object that is loaded at `base`.
unsafe fn asks_without_lock(base: usize, mut section: *const [usize; 2]) -> bool {
    let mut values = [0; DT_JMPREL + 1];
    loop {
        // SAFETY: the caller promises the section, which ends with an entry of tag 0.
        let [tag, value] = unsafe { *section };
        match values.get_mut(tag) {
            _ if tag == 0 => break,
            Some(place) => *place = value,
            None => {}
        }
        section = section.wrapping_add(1);
    }
    // glibc has added the base to the addresses. Other loaders leave the section as it is.
    let address = |tag: usize| match values[tag] {
        value if value < base => base + value,
        value => value,
    };
    let tables = [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)];
    let (symbols, names) = (address(DT_SYMTAB), address(DT_STRTAB));
    tables.into_iter().any(|(table, bytes)| {
        let count = values[bytes] / size_of::<libc::Elf64_Rela>();
        if values[table] == 0 || values[DT_SYMTAB] == 0 || values[DT_STRTAB] == 0 {
            return false;
        }
        // SAFETY: the object's tables are mapped, and as long as its dynamic section says.
        let relocations =
            unsafe { from_raw_parts(address(table) as *const libc::Elf64_Rela, count) };
        relocations.iter().any(|relocation| {
            let nth = (relocation.r_info >> 32) as usize;
            // SAFETY: a relocation names a symbol of the object's table, and the symbol's name is
            // in the table of strings.
            nth != 0
                && unsafe {
                    let symbol = &*(symbols as *const libc::Elf64_Sym).add(nth);
                    CStr::from_ptr((names + symbol.st_name as usize) as *const c_char)
                        == c"_dl_find_object"
                }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether an object that this process has loaded asks without a lock.
    fn asks(address: usize) -> Option<bool> {
        let mut seen = Seen {
            address,
            ..Seen::default()
        };
        // SAFETY: `see` expects a `Seen`, which lives until the call returns.
        unsafe { libc::dl_iterate_phdr(Some(see), (&raw mut seen).cast()) };
        seen.unwinder
    }

    /// The C library has no relocation against its own function.
    #[test]
    #[cfg_attr(
        target_env = "musl",
        ignore = "the program is static, without relocations"
    )]
    fn only_the_unwinder_asks_without_a_lock() {
        // SAFETY: the name is a C string.
        let known = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
        // SAFETY: the name is a C string.
        let unwinder = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_Unwind_GetIP".as_ptr()) };
        assert_eq!(asks(libc::atoi as *const () as usize), Some(false));
        assert_eq!(asks(unwinder as usize), Some(!known.is_null()));
        assert_eq!(asks(1), None);
    }
}
