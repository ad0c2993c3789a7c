//! C++'s `operator new` and `operator delete`, in all their forms.
//!
//! A program may replace `malloc` or any of these operators, and expects the other operators to use
//! its replacement: the standard says which operator calls which. A sized `delete` that freed
//! directly to this heap would free a block that the program's own `new` allocated elsewhere. So
//! each form calls the next one by its name, as the C++ runtime's operators do:
//!
//! | form | calls |
//! |---|---|
//! | `new` | `malloc` |
//! | aligned `new` | `aligned_alloc` |
//! | `new[]` | `new` of the same alignment |
//! | `delete`, aligned `delete` | `free` |
//! | `delete[]` | `delete` of the same alignment |
//! | `delete` with a size or `nothrow` | `delete` without it, of the same kind and alignment |
//! | `new` with `nothrow` | the C++ runtime's form, which calls `new` in a `try` block |
//!
//! `DIRECT` says that the program has not replaced `malloc`, `free`, `aligned_alloc` or a form of
//! `new` that throws. Then `new` and `delete` use their inlined fast paths.
//!
//! A `delete` frees without the size, because finding the class by the block's address takes fewer
//! instructions. Hardened and debugged processes check the size first, if `DIRECT` is set.
//!
//! The forms that return the block's size too (`__size_returning_new`) are those of Google's
//! tcmalloc and of LLVM. They call `new` of the same kind, and return the size that was asked for
//! if `DIRECT` is not set, as it never is in `libpinfold.a`. They ignore how often the program will
//! use the block (`hot_cold`).
//!
//! `libpinfold.so` exports all forms. `libpinfold.a` leaves the `nothrow` forms of `new` to the C++
//! runtime, and has weak symbols for the other forms, so that a program may define some itself.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_malloc::c::{SizedBlock, data as without_pointers};
use pinfold_malloc::inlined::{self, keep_frame, near};

type Block = *mut c_void;

/// The alignment of all blocks of malloc.
const MALLOC_ALIGN: usize = 16;

/// Calls the macro `$with` with the symbol and the function of each operator that both libraries
/// define.
#[macro_export]
#[doc(hidden)]
macro_rules! for_each_operator {
    ($with:ident) => {
        $with! {
            _Znwm = new(size: usize) -> *mut c_void;
            _Znam = new_array(size: usize) -> *mut c_void;
            _ZnwmSt11align_val_t = new_aligned(size: usize, align: usize) -> *mut c_void;
            _ZnamSt11align_val_t = new_array_aligned(size: usize, align: usize) -> *mut c_void;
            _ZdlPv = delete(block: *mut c_void);
            _ZdaPv = delete_array(block: *mut c_void);
            _ZdlPvm = delete_sized(block: *mut c_void, size: usize);
            _ZdaPvm = delete_array_sized(block: *mut c_void, size: usize);
            _ZdlPvRKSt9nothrow_t = delete_nothrow(block: *mut c_void, tag: *const c_void);
            _ZdaPvRKSt9nothrow_t = delete_array_nothrow(block: *mut c_void, tag: *const c_void);
            _ZdlPvSt11align_val_t = delete_aligned(block: *mut c_void, align: usize);
            _ZdaPvSt11align_val_t = delete_array_aligned(block: *mut c_void, align: usize);
            _ZdlPvmSt11align_val_t =
                delete_sized_aligned(block: *mut c_void, size: usize, align: usize);
            _ZdaPvmSt11align_val_t =
                delete_array_sized_aligned(block: *mut c_void, size: usize, align: usize);
            _ZdlPvSt11align_val_tRKSt9nothrow_t =
                delete_aligned_nothrow(block: *mut c_void, align: usize, tag: *const c_void);
            _ZdaPvSt11align_val_tRKSt9nothrow_t =
                delete_array_aligned_nothrow(block: *mut c_void, align: usize, tag: *const c_void);
            __size_returning_new = sized_new(size: usize) -> SizedBlock;
            __size_returning_new_hot_cold = sized_new_hot_cold(size: usize, heat: u8) -> SizedBlock;
            __size_returning_new_aligned =
                sized_new_aligned(size: usize, align: usize) -> SizedBlock;
            __size_returning_new_aligned_hot_cold =
                sized_new_aligned_hot_cold(size: usize, align: usize, heat: u8) -> SizedBlock;
            tcmalloc_size_returning_operator_new_nothrow =
                sized_new_nothrow(size: usize) -> SizedBlock;
            tcmalloc_size_returning_operator_new_hot_cold_nothrow =
                sized_new_hot_cold_nothrow(size: usize, heat: u8) -> SizedBlock;
            tcmalloc_size_returning_operator_new_aligned_nothrow =
                sized_new_aligned_nothrow(size: usize, align: usize) -> SizedBlock;
            tcmalloc_size_returning_operator_new_aligned_hot_cold_nothrow =
                sized_new_aligned_hot_cold_nothrow(size: usize, align: usize, heat: u8)
                -> SizedBlock;
        }
    };
}

/// Gives each function its C++ name as a weak symbol. A definition in the program, or in
/// `libpinfold.so`, overrides it.
macro_rules! weak {
    ($($name:ident = $function:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        core::arch::global_asm!(
            concat!(".weak ", stringify!($name)),
            concat!(".type ", stringify!($name), ", %function"),
            concat!(".set ", stringify!($name), ", {function}"),
            function = sym $function,
        );
    )*};
}
for_each_operator!(weak);

// A table of addresses. The linker or the loader fills in the definitions that the process uses.
// Without the table, the compiler would call this library's own definitions directly, even if the
// program replaces them.
core::arch::global_asm!(
    ".weak _ZSt15get_new_handlerv",
    ".weak _ZSt17__throw_bad_allocv",
    ".section .data.rel.ro.pinfold_used, \"aw\"",
    ".balign 8",
    ".hidden pinfold_used",
    ".globl pinfold_used",
    "pinfold_used:",
    ".quad malloc",
    ".quad free",
    ".quad aligned_alloc",
    ".quad _Znwm",
    ".quad _Znam",
    ".quad _ZnwmSt11align_val_t",
    ".quad _ZnamSt11align_val_t",
    ".quad _ZdlPv",
    ".quad _ZdaPv",
    ".quad _ZdlPvSt11align_val_t",
    ".quad _ZdaPvSt11align_val_t",
    ".quad _ZSt15get_new_handlerv",
    ".quad _ZSt17__throw_bad_allocv",
    ".text",
);

type New = unsafe extern "C-unwind" fn(usize) -> Block;
type NewAligned = unsafe extern "C-unwind" fn(usize, usize) -> Block;
type Delete = unsafe extern "C-unwind" fn(Block);
type DeleteAligned = unsafe extern "C-unwind" fn(Block, usize);
type Handler = unsafe extern "C-unwind" fn();
type GetHandler = unsafe extern "C-unwind" fn() -> Option<Handler>;
type Throw = unsafe extern "C-unwind" fn();

/// The functions that this process uses under the C and C++ names.
#[repr(C)]
struct Used {
    malloc: New,
    free: Delete,
    aligned_alloc: NewAligned,
    new: New,
    new_array: New,
    new_aligned: NewAligned,
    new_array_aligned: NewAligned,
    delete: Delete,
    delete_array: Delete,
    delete_aligned: DeleteAligned,
    delete_array_aligned: DeleteAligned,
    /// `std::get_new_handler`, if the C++ runtime was loaded at the start.
    get_new_handler: Option<GetHandler>,
    /// `std::__throw_bad_alloc`, if the C++ runtime was loaded at the start.
    throw_bad_alloc: Option<Throw>,
}

unsafe extern "C" {
    static pinfold_used: Used;
}

fn used() -> &'static Used {
    // SAFETY: `Used` has the fields of the table above in the same order. The loader fills the
    // table in before code of this library runs.
    unsafe { &pinfold_used }
}

/// Set if the process uses this library's `malloc`, `free`, `aligned_alloc` and throwing forms of
/// `new`. Then an operator may call the heap directly instead of the next form.
// `near!` needs it.
#[used]
static DIRECT: AtomicBool = AtomicBool::new(false);

#[inline(always)]
fn is_direct() -> bool {
    near!(DIRECT, AtomicBool).load(Relaxed)
}

/// Opens the fast paths of `new` and `delete` if this library defines each function that these
/// operators would call. `is_own` tells whether a function is this library's.
pub fn open_fast_paths(is_own: impl Fn(*const c_void) -> bool) {
    let used = used();
    let behind = [
        used.malloc as *const c_void,
        used.free as *const c_void,
        used.aligned_alloc as *const c_void,
        used.new as *const c_void,
        used.new_array as *const c_void,
        used.new_aligned as *const c_void,
        used.new_array_aligned as *const c_void,
    ];
    // Relaxed is enough: the flag publishes no data. A thread that sees the old value takes the
    // slow path to the same heap.
    DIRECT.store(behind.into_iter().all(is_own), Relaxed);
}

/// Is `operator new(size)`.
#[inline(always)]
pub extern "C-unwind" fn new(size: usize) -> Block {
    if is_direct() {
        let block = inlined::alloc_fast(size);
        if !block.is_null() {
            return block.cast();
        }
        return new_direct(size);
    }
    new_slow(size)
}

/// Is `operator new(size)` if `malloc` is this library's, and its fast path has no block. All calls
/// come here while a heap profile is on.
#[inline(never)]
extern "C-unwind" fn new_direct(size: usize) -> Block {
    keep_frame();
    let block = inlined::alloc_slow(size);
    if block.is_null() {
        return new_slow(size);
    }
    block.cast()
}

#[cold]
#[inline(never)]
extern "C-unwind" fn new_slow(size: usize) -> Block {
    keep_frame();
    // A program's `malloc` may return null for a size of 0, but `new` must not.
    // SAFETY: `malloc` takes any size.
    let block = || unsafe { (used().malloc)(size.max(1)) };
    until_there_is_one(size, block, true)
}

/// Is `operator new(size, align)`.
pub extern "C-unwind" fn new_aligned(size: usize, align: usize) -> Block {
    aligned(size, align, true)
}

fn aligned(size: usize, align: usize, throws: bool) -> Block {
    keep_frame();
    aligned_by(used().aligned_alloc, size, align, throws)
}

/// Allocates by `alloc`, which is `aligned_alloc` or has its interface.
fn aligned_by(alloc: NewAligned, size: usize, align: usize, throws: bool) -> Block {
    keep_frame();
    // Sizes are rounded up to the alignment of malloc's blocks at least, as the check of a sized
    // `delete` expects.
    let align = align.max(MALLOC_ALIGN);
    // A program's `aligned_alloc` may refuse a size that is not a multiple of the alignment.
    let whole = size
        .max(1)
        .checked_add(align - 1)
        .map(|size| size & !(align - 1));
    let Some(whole) = whole.filter(|_| align.is_power_of_two()) else {
        return failed(size, throws);
    };
    // SAFETY: `aligned_alloc` takes any size and a power of two.
    until_there_is_one(size, || unsafe { alloc(align, whole) }, throws)
}

/// Calls `alloc` until it returns a block, and the program's new handler after each failure. If no
/// handler is set, throws `std::bad_alloc`, or returns null. If it returns a block, leaves errno
/// unchanged.
fn until_there_is_one(size: usize, alloc: impl Fn() -> Block, throws: bool) -> Block {
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { *libc::__errno_location() };
    loop {
        let block = alloc();
        if !block.is_null() {
            // SAFETY: errno is the calling thread's own.
            unsafe { *libc::__errno_location() = errno };
            return block;
        }
        match new_handler() {
            // SAFETY: the program set this function as its new handler. If the handler throws,
            // nothing here needs to be undone.
            Some(handler) => unsafe { handler() },
            None => return failed(size, throws),
        }
    }
}

fn new_handler() -> Option<Handler> {
    let get = used().get_new_handler.or_else(|| {
        let found = of_runtime(c"_ZSt15get_new_handlerv");
        // SAFETY: the C++ runtime's function of that name has this type.
        found.map(|found| unsafe { transmute::<Block, GetHandler>(found) })
    });
    // SAFETY: `std::get_new_handler` has no preconditions.
    get.and_then(|get| unsafe { get() })
}

/// Throws `std::bad_alloc` if `throws` is true, and returns null otherwise. Ends the process if it
/// must throw and no C++ runtime is loaded.
fn failed(size: usize, throws: bool) -> Block {
    if !throws {
        return null_mut();
    }
    let throw = used().throw_bad_alloc.or_else(|| {
        let found = of_runtime(c"_ZSt17__throw_bad_allocv");
        // SAFETY: the C++ runtime's function of that name has this type.
        found.map(|found| unsafe { transmute::<Block, Throw>(found) })
    });
    if let Some(throw) = throw {
        // SAFETY: `std::__throw_bad_alloc` has no preconditions. When it throws, nothing here needs
        // to be undone.
        unsafe { throw() };
    }
    pinfold::internal::abort(format_args!(
        "operator new: no memory for {size} bytes, and no C++ runtime in this program that could throw std::bad_alloc"
    ))
}

/// Is `operator new[](size)`.
pub extern "C-unwind" fn new_array(size: usize) -> Block {
    // SAFETY: `operator new` takes any size.
    unsafe { (used().new)(size) }
}

/// Is `operator new[](size, align)`.
pub extern "C-unwind" fn new_array_aligned(size: usize, align: usize) -> Block {
    // SAFETY: aligned `operator new` takes any size and alignment.
    unsafe { (used().new_aligned)(size, align) }
}

/// Is `operator new(size, std::nothrow)`.
pub extern "C-unwind" fn new_nothrow(size: usize, tag: *const c_void) -> Block {
    new_nothrow_by(c"_ZnwmRKSt9nothrow_t", size, tag)
}

/// Is `operator new[](size, std::nothrow)`.
pub extern "C-unwind" fn new_array_nothrow(size: usize, tag: *const c_void) -> Block {
    new_nothrow_by(c"_ZnamRKSt9nothrow_t", size, tag)
}

fn new_nothrow_by(name: &CStr, size: usize, tag: *const c_void) -> Block {
    keep_frame();
    if is_direct() {
        // Tries the slow path too, so that the runtime's form is called only if there is no memory.
        let block = inlined::alloc(size);
        if !block.is_null() {
            return block.cast();
        }
    }
    type Next = unsafe extern "C-unwind" fn(usize, *const c_void) -> Block;
    if let Some(next) = of_runtime(name) {
        // SAFETY: the C++ runtime's operator of that name has this type, and takes any size.
        return unsafe { transmute::<Block, Next>(next)(size, tag) };
    }
    // SAFETY: `malloc` takes any size.
    until_there_is_one(size, || unsafe { (used().malloc)(size.max(1)) }, false)
}

/// Is `operator new(size, align, std::nothrow)`.
pub extern "C-unwind" fn new_aligned_nothrow(
    size: usize,
    align: usize,
    tag: *const c_void,
) -> Block {
    new_aligned_nothrow_by(c"_ZnwmSt11align_val_tRKSt9nothrow_t", size, align, tag)
}

/// Is `operator new[](size, align, std::nothrow)`.
pub extern "C-unwind" fn new_array_aligned_nothrow(
    size: usize,
    align: usize,
    tag: *const c_void,
) -> Block {
    new_aligned_nothrow_by(c"_ZnamSt11align_val_tRKSt9nothrow_t", size, align, tag)
}

fn new_aligned_nothrow_by(name: &CStr, size: usize, align: usize, tag: *const c_void) -> Block {
    keep_frame();
    if is_direct() && align.is_power_of_two() {
        let block = pinfold_malloc::c::pinfold_aligned_alloc(align, size);
        if !block.is_null() {
            return block;
        }
    }
    type Next = unsafe extern "C-unwind" fn(usize, usize, *const c_void) -> Block;
    if let Some(next) = of_runtime(name) {
        // SAFETY: the C++ runtime's operator of that name has this type, and takes any size and
        // alignment.
        return unsafe { transmute::<Block, Next>(next)(size, align, tag) };
    }
    aligned(size, align, false)
}

/// Is `operator new(size)` of a type without pointers if `data` is true, and with pointers if not.
/// If `DIRECT` is not set, calls `operator new`, as the forms below do.
#[inline(always)]
pub extern "C-unwind" fn typed_new(size: usize, data: bool) -> Block {
    if !is_direct() {
        // SAFETY: `operator new` takes any size.
        return unsafe { (used().new)(size) };
    }
    if !data {
        return new(size);
    }
    let block = inlined::alloc_data_fast(size);
    if !block.is_null() {
        return block.cast();
    }
    new_data_slow(size)
}

#[cold]
#[inline(never)]
extern "C-unwind" fn new_data_slow(size: usize) -> Block {
    keep_frame();
    until_there_is_one(size, || inlined::alloc_data_slow(size).cast(), true)
}

/// Is `operator new[](size)`, with `data` as for [`typed_new`].
#[inline(always)]
pub extern "C-unwind" fn typed_new_array(size: usize, data: bool) -> Block {
    if is_direct() {
        return typed_new(size, data);
    }
    // SAFETY: `operator new[]` takes any size.
    unsafe { (used().new_array)(size) }
}

/// Is `operator new(size, align)`, with `data` as for [`typed_new`].
pub extern "C-unwind" fn typed_new_aligned(size: usize, align: usize, data: bool) -> Block {
    keep_frame();
    if is_direct() && data {
        return aligned_by(without_pointers::aligned_alloc, size, align, true);
    }
    // SAFETY: aligned `operator new` takes any size and alignment.
    unsafe { (used().new_aligned)(size, align) }
}

/// Is `operator new[](size, align)`, with `data` as for [`typed_new`].
pub extern "C-unwind" fn typed_new_array_aligned(size: usize, align: usize, data: bool) -> Block {
    keep_frame();
    if is_direct() {
        return typed_new_aligned(size, align, data);
    }
    // SAFETY: aligned `operator new[]` takes any size and alignment.
    unsafe { (used().new_array_aligned)(size, align) }
}

/// Is `operator new(size, std::nothrow)`, and `operator new[]` if `DIRECT` is set, with `data` as
/// for [`typed_new`]. Returns `None` if the form without a token must serve: for pointers, if
/// `DIRECT` is not set, and if there is no memory.
pub fn typed_new_nothrow(size: usize, data: bool) -> Option<Block> {
    keep_frame();
    let block = || inlined::alloc_data(size);
    (data && is_direct())
        .then(block)
        .filter(|block| !block.is_null())
        .map(|block| block.cast())
}

/// Is `operator new(size, align, std::nothrow)`, as [`typed_new_nothrow`].
pub fn typed_new_aligned_nothrow(size: usize, align: usize, data: bool) -> Option<Block> {
    keep_frame();
    let is_ours = data && is_direct() && align.is_power_of_two();
    let block = || without_pointers::aligned_alloc(align, size);
    is_ours.then(block).filter(|block| !block.is_null())
}

/// Returns `block`, made for `size` bytes, with the bytes that the program may use.
fn sized(block: Block, size: usize) -> SizedBlock {
    if block.is_null() {
        return SizedBlock::NONE;
    }
    let size = match is_direct() {
        // SAFETY: `DIRECT` is set, so `new` took the block from this library. It is new.
        true => unsafe { inlined::usable_size(block.cast()) },
        false => size,
    };
    SizedBlock { block, size }
}

/// Is `__size_returning_new(size)`.
pub extern "C-unwind" fn sized_new(size: usize) -> SizedBlock {
    keep_frame();
    // SAFETY: `operator new` takes any size.
    sized(unsafe { (used().new)(size) }, size)
}

/// Is `__size_returning_new_aligned(size, align)`.
pub extern "C-unwind" fn sized_new_aligned(size: usize, align: usize) -> SizedBlock {
    keep_frame();
    // SAFETY: aligned `operator new` takes any size and alignment.
    sized(unsafe { (used().new_aligned)(size, align) }, size)
}

/// What stands for `std::nothrow`, whose value no operator reads.
static NOTHROW: u8 = 0;

/// Is `tcmalloc_size_returning_operator_new_nothrow(size)`.
pub extern "C-unwind" fn sized_new_nothrow(size: usize) -> SizedBlock {
    keep_frame();
    sized(new_nothrow(size, (&raw const NOTHROW).cast()), size)
}

/// Is `tcmalloc_size_returning_operator_new_aligned_nothrow(size, align)`.
pub extern "C-unwind" fn sized_new_aligned_nothrow(size: usize, align: usize) -> SizedBlock {
    keep_frame();
    let block = new_aligned_nothrow(size, align, (&raw const NOTHROW).cast());
    sized(block, size)
}

/// Defines forms that ignore how often the program will use the block.
macro_rules! hot_cold {
    ($($name:ident = $to:ident($($arg:ident),*);)*) => {$(
        #[doc = concat!("Calls [`", stringify!($to), "`].")]
        pub extern "C-unwind" fn $name($($arg: usize,)* _heat: u8) -> SizedBlock {
            keep_frame();
            $to($($arg),*)
        }
    )*};
}

hot_cold! {
    sized_new_hot_cold = sized_new(size);
    sized_new_aligned_hot_cold = sized_new_aligned(size, align);
    sized_new_hot_cold_nothrow = sized_new_nothrow(size);
    sized_new_aligned_hot_cold_nothrow = sized_new_aligned_nothrow(size, align);
}

/// Is `operator delete(block)`.
///
/// # Safety
///
/// `block` is null or came from the `operator new` that belongs to this form, and is not used any
/// more.
#[inline(always)]
pub unsafe extern "C-unwind" fn delete(block: Block) {
    if is_direct() {
        // SAFETY: the caller passes ownership of a block from `new`. `DIRECT` is set, so `new` took
        // the block from this library.
        unsafe { inlined::free(block.cast()) };
    } else {
        // SAFETY: the caller passes ownership of a block from `new`, which took the block from
        // `malloc`.
        unsafe { (used().free)(block) };
    }
}

/// Is `operator delete(block, align)`.
///
/// # Safety
///
/// `block` is null or came from the `operator new` that belongs to this form, and is not used any
/// more.
#[inline(always)]
pub unsafe extern "C-unwind" fn delete_aligned(block: Block, _align: usize) {
    // SAFETY: the caller passes ownership of a block from aligned `new`, which took the block from
    // `aligned_alloc`. `free` takes such blocks.
    unsafe { delete(block) };
}

/// Defines sized operators, which check the size and call the operator without it.
macro_rules! sized {
    ($($what:literal $name:ident(block, size $(, $align:ident)?) = $to:ident by $by:expr;)*) => {$(
        #[doc = concat!("Is `operator ", $what, "`.")]
        ///
        /// # Safety
        ///
        /// `block` is null or came from the `operator new` that belongs to this form, and is not
        /// used any more.
        pub unsafe extern "C-unwind" fn $name(block: Block, size: usize $(, $align: usize)?) {
            if !inlined::checks() || !is_direct() || inlined::fits(block.cast(), size, $by) {
                // SAFETY: the caller passes ownership of a block from the `operator new` that
                // belongs to this form, as the called form requires.
                unsafe { (used().$to)(block $(, $align)?) }
            }
        }
    )*};
}

sized! {
    "delete(block, size)" delete_sized(block, size) = delete by MALLOC_ALIGN;
    "delete[](block, size)" delete_array_sized(block, size) = delete_array by MALLOC_ALIGN;
    "delete(block, size, align)"
        delete_sized_aligned(block, size, align) = delete_aligned by align;
    "delete[](block, size, align)" delete_array_sized_aligned(block, size, align)
        = delete_array_aligned by align;
}

/// Defines operators that call another operator through the table.
macro_rules! forwarded {
    ($($what:literal $name:ident($($arg:ident: $type:ty),*) = $to:ident($($passed:ident),*);)*) => {$(
        #[doc = concat!("Is `operator ", $what, "`.")]
        ///
        /// # Safety
        ///
        /// `block` is null or came from the `operator new` that belongs to this form, and is not
        /// used any more.
        pub unsafe extern "C-unwind" fn $name($($arg: $type),*) {
            // SAFETY: the caller passes ownership of a block from the `operator new` that belongs
            // to this form, as the called form requires.
            unsafe { (used().$to)($($passed),*) }
        }
    )*};
}

forwarded! {
    "delete[](block)" delete_array(block: Block) = delete(block);
    "delete(block, std::nothrow)" delete_nothrow(block: Block, _tag: *const c_void) = delete(block);
    "delete[](block, std::nothrow)"
        delete_array_nothrow(block: Block, _tag: *const c_void) = delete_array(block);
    "delete[](block, align)"
        delete_array_aligned(block: Block, align: usize) = delete_aligned(block, align);
    "delete(block, align, std::nothrow)"
        delete_aligned_nothrow(block: Block, align: usize, _tag: *const c_void)
        = delete_aligned(block, align);
    "delete[](block, align, std::nothrow)"
        delete_array_aligned_nothrow(block: Block, align: usize, _tag: *const c_void)
        = delete_array_aligned(block, align);
}

/// Finds the C++ runtime's function `name`. Returns `None` if no runtime is loaded.
///
/// Reached if there is no memory, and by the `nothrow` forms of `new` if the program has replaced a
/// function of the table. `dlsym` does not find a runtime that the program has loaded for a plugin
/// alone (`dlopen` with `RTLD_LOCAL`), so this function looks for the runtime's file name among the
/// loaded libraries.
#[cold]
fn of_runtime(name: &CStr) -> Option<Block> {
    // SAFETY: the name ends with a NUL.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !next.is_null() {
        return Some(next);
    }
    let mut path = [0 as c_char; PATH];
    // SAFETY: the callback writes at most `PATH` bytes to `path`.
    if unsafe { libc::dl_iterate_phdr(Some(runtime_path), (&raw mut path).cast()) } == 0 {
        return None;
    }
    // With the loader's own name for the library, `dlopen` looks for no file. The handle is never
    // closed, so the functions stay loaded.
    // SAFETY: the path ends with a NUL.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: `dlopen` returned the handle, and the name ends with a NUL.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

const PATH: usize = 512;

/// Copies the path of a loaded C++ runtime to `to`, and returns 1. Returns 0 for another library.
/// The loader holds its lock during the call, so this function must not call the loader.
unsafe extern "C" fn runtime_path(
    object: *mut libc::dl_phdr_info,
    _size: usize,
    to: *mut c_void,
) -> c_int {
    // SAFETY: `dl_iterate_phdr` passes an object whose name ends with a NUL.
    let path = unsafe { CStr::from_ptr((*object).dlpi_name) }.to_bytes_with_nul();
    let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    let is_runtime = [&b"libstdc++.so"[..], b"libc++.so"]
        .iter()
        .any(|name| file.starts_with(name));
    if !is_runtime || path.len() > PATH {
        return 0;
    }
    // SAFETY: `of_runtime` passes `PATH` bytes, and the path is not longer.
    unsafe { core::ptr::copy_nonoverlapping(path.as_ptr(), to.cast(), path.len()) };
    1
}
