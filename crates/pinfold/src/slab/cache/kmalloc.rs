//! Caches by size, for callers that have no cache of their own. `malloc` is built on them.
//!
//! | bytes | step | unused part of a block, at most |
//! |---|---|---|
//! | 16 … 128 | 16 | |
//! | 160 … 1024 | a quarter of the power of two below | a fifth |
//! | 1152 … 3840 | an eighth of the power of two below | a ninth |
//! | 4160 … 65600 | the same, and 64 bytes more | a ninth |
//! | 1040, 2064, 4416 | | |
//! | 130048 … 588800 | 65536 | a half; of blocks above 128 KiB a third |
//! | aligned: 128, 256, 384 … 524288 | half the power of two below | a third |
//!
//! The size that an aligned class serves is rounded up to a multiple of the alignment first.
//!
//! Programs often ask for a power of two and a small header. The sizes of the fourth and fifth row
//! have room for a header of 16 bytes. Databases keep more beside a page of 4 KiB: SQLite asks for
//! 4368 bytes.
//!
//! A block of more than 65600 bytes takes no memory for the pages that the program never touches.
//!
//! # Where blocks begin
//!
//! If blocks of a power of two began at multiples of it, a program that walks many blocks side by
//! side, or touches the beginning of many, would use few sets of the processor's caches. So the
//! slabs have colors (`slab/node/geometry.rs`), and from 4160 bytes on, the blocks of one slab
//! begin at different lines of a page. Blocks with an alignment above 64 bytes come from *aligned*
//! classes ([`ALIGNED`]), whose slabs have no colors.
//!
//! # Classes and twins
//!
//! Each size has a *class*: the smallest block size that fits. A table maps each size up to
//! [`MAX_SMALL_SIZE`] to its class. The class of a larger size is computed. A slab of a class above
//! 65600 bytes, or of the aligned class of 65536 bytes, holds one block ([`is_alone`]).
//!
//! The cache of class c has number 10 + c in the page map and in the units. So the common path of
//! `malloc` and `free` computes the offset of a sheaf's word without looking up the cache's
//! descriptor.
//!
//! Each class has three *twins*, which have caches of their own. So the page map distinguishes
//! their blocks, and blocks of different twins share no slab. The cache of a twin is made when the
//! twin is first used.
//!
//! | twin | number | blocks |
//! |---|---|---|
//! | [`data`] | [`CLASSES`] + c | hold no pointers, as the program says |
//! | [`sampled`] | 2·`CLASSES` + c | a heap profile follows them |
//! | `sampled(data)` | 3·`CLASSES` + c | both |
//!
//! The fast path of `free` frees a small data block as any other, and leaves the blocks of other
//! twins to the slow path. Only [`class_of_any`] and the functions that say so know those twins.

mod checked;
mod defrag;
mod fragments;

pub use checked::{any_checks, ends_with_request, fits, is_in_use, requested, set_requested};
pub use defrag::{defrag, defrag_alloc, defrag_free, defrag_hint};
pub use fragments::{free_beside, release, stand_in};

use super::descriptor::Descriptor;
use super::registry::{of_class, of_class_id, pin_by_entry};
use crate::arena::{GRANULE, GRANULE_SHIFT};
use crate::cache_units::{COUNTDOWN, CacheId, MAIN, UNSAMPLED, units};
use crate::slab::cpu::place::Place;
use crate::slab::fork;
use crate::slab::node::geometry::{self, COLOR_STEP, MAX_COLORS};
use crate::slab::node::slabs::Slab;
use crate::topology::facts;
use core::alloc::Layout;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicUsize;
use pinfold_rseq::{BESIDE, near};

/// Number of classes.
pub const CLASSES: usize = crate::cache_units::CLASSES;
/// Number of classes and twins.
pub const ALL_CLASSES: usize = crate::cache_units::ALL_CLASSES;
/// The largest size that the table maps to its class, in bytes.
pub const MAX_SMALL_SIZE: usize = 32 << 10;
/// The largest class's size in bytes.
pub const MAX_CLASS_SIZE: usize = 9 * GRANULE - FOR_COLORS;

/// Every class's size and every block's address is a multiple of this.
const CLASS_ALIGN: usize = 16;

/// A cache line. From [`PAGE`] on, a class is a line larger than eighths of a power of two, so that
/// the blocks of a slab begin at different lines of a page.
const LINE: usize = 64;
/// The smallest size that gets the extra line. Several blocks of a smaller class share each page,
/// so they need none.
const PAGE: usize = 4096;

/// The room for headers in the classes that are added above 1, 2 and 4 KiB: bytes beyond the power
/// of two.
const HEADERS: [usize; 3] = [16, 16, 320];
/// The bytes that each class with one block in a slab leaves free, so that the block can begin at
/// [`MAX_COLORS`] lines.
const FOR_COLORS: usize = MAX_COLORS * COLOR_STEP;

/// The first classes after rows of the module's table: after the steps of 16 bytes, after the
/// quarters, after the eighths that have a class with room for a header before them, after the
/// other eighths, and after the classes whose slabs hold one block.
const BY_16: usize = 8;
const BY_QUARTERS: usize = BY_16 + 4 * 3;
const WITH_HEADERS: usize = BY_QUARTERS + 9 * HEADERS.len();
const BY_EIGHTHS: usize = WITH_HEADERS + 8 * 3;
const BY_GRANULES: usize = BY_EIGHTHS + 8;

/// The sizes of the aligned classes, in bytes. A block of such a class lies at a multiple of each
/// power of two, up to 64 KiB, that divides the class's size.
pub const ALIGNED: [usize; CLASSES - BY_GRANULES] = [
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6 << 10,
    8 << 10,
    12 << 10,
    16 << 10,
    24 << 10,
    32 << 10,
    48 << 10,
    64 << 10,
    96 << 10,
    128 << 10,
    192 << 10,
    256 << 10,
    384 << 10,
    512 << 10,
];
/// The size of the largest aligned class in bytes.
const MAX_ALIGNED_SIZE: usize = ALIGNED[ALIGNED.len() - 1];
/// The largest alignment that the other classes serve.
const MOST_UNALIGNED: usize = LINE;

/// The size of each class, in bytes. The aligned classes come last.
pub const SIZES: [usize; CLASSES] = {
    let mut sizes = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        sizes[class] = if class < BY_16 {
            16 * (class + 1)
        } else if class < BY_QUARTERS {
            let nth = class - BY_16;
            (128 << (nth / 4)) / 4 * (5 + nth % 4)
        } else if class < WITH_HEADERS {
            let (nth, eighth) = ((class - BY_QUARTERS) / 9, (class - BY_QUARTERS) % 9);
            match eighth {
                0 => (1024 << nth) + HEADERS[nth],
                _ => by_eighths(1024 << nth, eighth),
            }
        } else if class < BY_EIGHTHS {
            let nth = class - WITH_HEADERS;
            by_eighths((8 << 10) << (nth / 8), 1 + nth % 8)
        } else if class < BY_GRANULES {
            (class - BY_EIGHTHS + 2) * GRANULE - FOR_COLORS
        } else {
            ALIGNED[class - BY_GRANULES]
        };
        class += 1;
    }
    sizes
};

/// Returns the size of the class that is `eighths` eighths above `power`, a power of two.
const fn by_eighths(power: usize, eighths: usize) -> usize {
    let size = power / 8 * (8 + eighths);
    if size < PAGE { size } else { size + LINE }
}

type Offsets = [u16; MAX_SMALL_SIZE / 16 + 1];

/// Entry n holds the smallest class for 16·n bytes, as the offset of its cache's words in the
/// units.
///
/// The table has 4 KiB. A second, coarser table for large sizes would save memory, but the fast
/// path would need a branch to choose the table.
// `near!` needs it.
#[used]
static OFFSETS: Offsets = {
    let mut offsets = [0; MAX_SMALL_SIZE / 16 + 1];
    let (mut at, mut class) = (0, 0);
    while at < offsets.len() {
        while SIZES[class] < 16 * at {
            class += 1;
        }
        offsets[at] = CacheId::of_class(class).main() as u16;
        at += 1;
    }
    offsets
};

/// Returns the offset in the units of the words of the class for `size` bytes. `size` is at most
/// [`MAX_SMALL_SIZE`].
#[inline(always)]
fn offset_of(size: usize) -> usize {
    // The sum cannot overflow: every caller checks that the size is at most `MAX_SMALL_SIZE`.
    let at = (size + 15) >> 4;
    // SAFETY: every caller checks that the size is at most `MAX_SMALL_SIZE`, and the table has an
    // entry for each of these sizes.
    usize::from(*unsafe { near!(OFFSETS, Offsets).get_unchecked(at) })
}

/// Returns the smallest class for `size` bytes. `size` is at most [`MAX_CLASS_SIZE`].
#[inline]
pub fn class_of(size: usize) -> usize {
    debug_assert!(size <= MAX_CLASS_SIZE);
    if size <= MAX_SMALL_SIZE {
        (offset_of(size) - CacheId::of_class(0).main()) / 8
    } else if size <= GRANULE + LINE {
        // Class sizes from 32832 to 65600 bytes are 4 KiB apart. The shift gives 7 for the first of
        // them, which is class `BY_EIGHTHS - 9`.
        BY_EIGHTHS - 16 + ((size - 1 - LINE) >> 12)
    } else {
        BY_EIGHTHS - 1 + ((size - 1 + FOR_COLORS) >> GRANULE_SHIFT)
    }
}

/// Returns the smallest class for `size` bytes whose blocks all lie at multiples of `align`, a
/// power of two. Returns `None` if there is none.
#[inline]
pub fn class_of_aligned(size: usize, align: usize) -> Option<usize> {
    let whole = size.max(1).checked_next_multiple_of(align)?;
    if align > MOST_UNALIGNED {
        let fits = whole <= MAX_ALIGNED_SIZE && align <= GRANULE;
        return fits.then(|| aligned_class_of(whole));
    }
    // The smallest class for a multiple of 32 or 64 bytes is itself a multiple of it.
    (whole <= MAX_CLASS_SIZE).then(|| class_of(whole))
}

/// Returns the smallest [aligned](ALIGNED) class for `whole` bytes, at most 512 KiB and a multiple
/// of an alignment above 64 bytes.
///
/// The blocks of the class have this alignment. With P the largest power of two below `whole`, the
/// class has 1.5·P or 2·P bytes. 1.5·P is a multiple of every alignment up to P/2. With an
/// alignment of P or 2·P, `whole` is 2·P.
#[inline(always)]
fn aligned_class_of(whole: usize) -> usize {
    // The power of two below.
    let power = (whole - 1).ilog2() as usize;
    BY_GRANULES
        + match power {
            ..7 => 0,
            7 => 1,
            _ => 2 * (power - 7) + usize::from(whole > 3 << (power - 1)),
        }
}

/// Returns the size of a class, or of a twin, with the alignment that all its blocks have.
fn layout_of_class(class: usize) -> Option<Layout> {
    let size = size_of_class(class);
    let most = match is_aligned(class) {
        true => GRANULE,
        false => MOST_UNALIGNED,
    };
    Layout::from_size_align(size, (1 << size.trailing_zeros()).min(most)).ok()
}

/// Returns whether a class, or a twin, is one of the [aligned](ALIGNED) classes.
#[inline]
pub const fn is_aligned(class: usize) -> bool {
    class % CLASSES >= BY_GRANULES
}

/// Returns whether each block of a class, or of a twin, has a slab of its own.
#[inline]
pub const fn is_alone(class: usize) -> bool {
    geometry::is_alone(size_of_class(class), 0)
}

/// Returns the class whose blocks serve `layout`, if there is one.
#[inline]
pub fn class_of_layout(layout: Layout) -> Option<usize> {
    if layout.align() > CLASS_ALIGN {
        class_of_aligned(layout.size(), layout.align())
    } else if layout.size() <= MAX_CLASS_SIZE {
        Some(class_of(layout.size()))
    } else {
        None
    }
}

/// Returns the bytes of a block of a class, or of a twin.
#[inline]
pub const fn size_of_class(class: usize) -> usize {
    SIZES[class % CLASSES]
}

/// Returns the twin of a size class for blocks without pointers. Returns the class itself if its
/// blocks share no slab with others.
#[inline]
pub const fn data(class: usize) -> usize {
    if is_alone(class) {
        class
    } else {
        CLASSES + class
    }
}

/// Returns whether a class is a twin for blocks without pointers, sampled or not.
#[inline]
pub const fn is_data(class: usize) -> bool {
    class % UNSAMPLED >= CLASSES
}

/// Returns the twin of a class, which may be a [data](data) class, for sampled blocks.
#[inline]
pub const fn sampled(class: usize) -> usize {
    UNSAMPLED + class
}

/// Returns whether a class is a twin for sampled blocks.
#[inline]
pub const fn is_sampled(class: usize) -> bool {
    class >= UNSAMPLED
}

/// Returns the class or twin whose cache `entry`, an entry of the page map, names. Returns `None`
/// if it names no such cache.
#[inline]
pub fn class_of_any(entry: u16) -> Option<usize> {
    CacheId::from_entry(entry).any_class()
}

/// Returns the class, or the data twin, whose cache `entry`, an entry of the page map, names.
/// Returns `None` for a data twin above 1536 bytes or of an aligned class, a sampled twin and any
/// other cache.
#[inline]
pub fn class_of_entry(entry: u16) -> Option<usize> {
    CacheId::from_entry(entry).class()
}

/// Prepares the allocator: reads the facts of the machine, makes the first class's cache, and
/// chooses the backend.
///
/// Returns false if there is no memory, and while the backend is being chosen by another thread or
/// by the frame that this signal handler interrupted. Until a call has returned true, also returns
/// false while another thread forks. Calls after the first cost two loads.
///
/// The cache of any other class is made when it is first used. A small program uses few classes,
/// and each cache touches about 900 bytes.
pub fn init() -> bool {
    of_class(0)
        .or_else(|| {
            fork::register().then_some(())?;
            let layout = layout_of_class(0)?;
            with_name(0, |name| Descriptor::create_first(name, layout))
        })
        .is_some_and(|_| facts::choose_backend())
}

/// Returns the cache of the class with number `id`, and makes the cache if it does not exist yet.
///
/// Returns `None` before [`init`], and if there is no memory. May return `None` while another
/// thread forks, and in a signal handler that interrupted the allocator.
#[inline]
fn cache_of(id: CacheId) -> Option<&'static Descriptor> {
    of_class_id(id).or_else(|| {
        of_class(0)?;
        create(id.any_class()?)
    })
}

#[cold]
#[inline(never)]
fn create(class: usize) -> Option<&'static Descriptor> {
    let layout = layout_of_class(class)?;
    with_name(class, |name| {
        Descriptor::create_class(name, layout, is_aligned(class), class)
    })
}

/// Calls `f` with the name of the class's cache. The name of an aligned class ends with `-align`. A
/// twin's name is the class's name, and `-data`, `-sampled` or both. So `kmalloc-*` matches all.
fn with_name<R>(class: usize, f: impl FnOnce(&str) -> R) -> R {
    let mut name = *b"kmalloc-00000-align-data-sampled";
    let mut rest = size_of_class(class);
    let digits = if rest < 100_000 { 5 } else { 6 };
    let mut end = 8 + digits;
    for digit in name[8..end].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let ends: [(bool, &[u8]); 3] = [
        (is_aligned(class), b"-align"),
        (is_data(class), b"-data"),
        (is_sampled(class), b"-sampled"),
    ];
    for (_, with) in ends.into_iter().filter(|&(is_so, _)| is_so) {
        name[end..end + with.len()].copy_from_slice(with);
        end += with.len();
    }
    f(core::str::from_utf8(&name[..end]).unwrap_or("kmalloc"))
}

/// Returns words that the caller of [`alloc_fast`] and [`free_fast`] may use for its own purposes.
/// They lie in the cache line that these functions read.
#[inline(always)]
pub fn beside() -> &'static [AtomicUsize; BESIDE] {
    units().beside()
}

/// Returns whether [`alloc_fast`] and [`free_fast`] may be called. They may if the backend has
/// restartable sequences and the units have a copy of its offsets. Once true, always true.
pub fn has_fast_paths() -> bool {
    units().learn().is_some()
}

/// Allocates a block from the CPU's main sheaf. Returns null if there is no such sheaf, or if it is
/// empty.
///
/// For a caller whose own fast path must contain no call. If this returns null, the caller calls
/// [`alloc`].
///
/// # Safety
///
/// [`has_fast_paths`] has returned true, and `size` is at most [`MAX_SMALL_SIZE`].
#[inline(always)]
pub unsafe fn alloc_fast(size: usize) -> *mut u8 {
    let offset = offset_of(size);
    // SAFETY: every unit has a word for the class's main sheaf at this offset. `has_fast_paths`
    // returned true, as the caller promises, so the backend has restartable sequences.
    unsafe { units().known_area().pop(offset) }
}

/// Allocates a block at a multiple of `align`, a power of two below 64 KiB, as [`alloc_fast`] does.
///
/// # Safety
///
/// [`has_fast_paths`] has returned true, `size` is at most [`MAX_SMALL_SIZE`], and `align` is a
/// power of two below 64 KiB.
#[inline(always)]
pub unsafe fn alloc_fast_aligned(size: usize, align: usize) -> *mut u8 {
    // Does not exceed `MAX_SMALL_SIZE`, which is a multiple of every alignment below 64 KiB. So the
    // block is not alone in its slab, and has no mark that `take_fresh` would have to clear.
    let whole = (size.max(1) + align - 1) & !(align - 1);
    let offset = match align > MOST_UNALIGNED {
        true => CacheId::of_class(aligned_class_of(whole)).main(),
        false => offset_of(whole),
    };
    // SAFETY: every unit has a word for the class's main sheaf at this offset. `has_fast_paths`
    // returned true, as the caller promises, so the backend has restartable sequences.
    unsafe { units().known_area().pop(offset) }
}

/// Allocates a block without pointers, as [`alloc_fast`] does.
///
/// # Safety
///
/// [`has_fast_paths`] has returned true, and `size` is at most [`MAX_SMALL_SIZE`].
#[inline(always)]
pub unsafe fn alloc_fast_data(size: usize) -> *mut u8 {
    // The words of the data twins lie behind those of the classes, in the same order.
    let offset = offset_of(size) + 8 * data(0);
    // SAFETY: every unit has a word for the twin's main sheaf at this offset. `has_fast_paths`
    // returned true, as the caller promises, so the backend has restartable sequences.
    unsafe { units().known_area().pop(offset) }
}

/// Allocates a block as [`alloc_fast`] does, and counts its bytes for the heap profile.
///
/// Returns null if there is no such block, or if a sample is due. In both cases no block is
/// counted. The caller then asks [`profile::due`](crate::profile::due). Costs one critical section.
///
/// # Safety
///
/// The same as for [`alloc_fast`].
#[inline(always)]
pub unsafe fn alloc_counted(size: usize) -> *mut u8 {
    let offset = offset_of(size);
    // SAFETY: every unit has a word for the class's main sheaf at this offset, and one at
    // `COUNTDOWN`. `has_fast_paths` returned true, as the caller promises, so the backend has
    // restartable sequences.
    unsafe {
        let area = units().known_area();
        area.pop_counted::<COUNTDOWN>(offset, size as i64)
    }
}

/// Frees a block. `entry` is the block's entry in the page map. Does not test which backend is in
/// use.
///
/// # Safety
///
/// The caller owns the block, which is of the class with this entry, and gives it up.
/// [`has_fast_paths`] has returned true.
#[inline(always)]
pub unsafe fn free_fast(block: *mut u8, entry: u16) {
    let offset = usize::from(entry) * 8;
    // SAFETY: every unit has a word for the class's main sheaf at this offset. The caller passes
    // ownership of the block. `has_fast_paths` returned true, as the caller promises, so the
    // backend has restartable sequences.
    if !unsafe { units().known_area().push(offset, block) } {
        // SAFETY: the caller passes ownership of the block, and promises that it is of the class at
        // this offset.
        unsafe { free_slow(block, offset) };
    }
}

/// Allocates a block of at least `size` bytes, at most [`MAX_CLASS_SIZE`], aligned to 16 bytes.
/// Returns null if the system has no memory or [`init`] has not run.
///
/// Costs one critical section on the common path.
#[inline(always)]
pub fn alloc(size: usize) -> *mut u8 {
    alloc_from(class_of(size), size)
}

/// Allocates a block of class `class`. Returns null if the system has no memory or [`init`] has not
/// run.
///
/// Costs one critical section on the common path.
#[inline(always)]
pub fn alloc_class(class: usize) -> *mut u8 {
    alloc_from(class, SIZES[class])
}

/// Allocates a block of class `class`, and makes the class's cache first if need be. Waits while
/// another thread forks.
#[inline]
pub fn alloc_of_class(class: usize) -> Option<NonNull<u8>> {
    NonNull::new(alloc_class(class)).or_else(|| alloc_of_class_slow(class))
}

#[cold]
fn alloc_of_class_slow(class: usize) -> Option<NonNull<u8>> {
    // While another thread forks, the caches of size classes may refuse to allocate. `malloc` then
    // serves the block from a mapping. But a layout with a class must get a block of the class,
    // because the free derives the class from the layout. So this thread waits for the fork to end.
    crate::fork::retry(|| {
        init().then_some(())?;
        NonNull::new(alloc_class(class))
    })
}

/// Allocates a block of class `class`, or of a twin, for `size` bytes. Returns null as
/// [`alloc_class`] does.
#[inline(always)]
pub fn alloc_from(class: usize, size: usize) -> *mut u8 {
    let main = Place::of(CacheId::of_class(class), MAIN);
    let mut block = main.pop_fast();
    if block.is_null() {
        block = alloc_slow(main.offset(), size);
    }
    take_fresh(class, block);
    block
}

/// Allocates a block of class `class`, or of a twin, for `size` bytes, as [`alloc_class`] does, for
/// a caller that has just found the CPU's main sheaf empty.
pub fn alloc_missed(class: usize, size: usize) -> *mut u8 {
    let block = alloc_slow(CacheId::of_class(class).main(), size);
    take_fresh(class, block);
    block
}

/// Allocates a block of class `class`, or of a twin, whose first `size` bytes read as zeroes, for a
/// caller that has just found the CPU's main sheaf empty. Returns null if the system has no memory
/// or [`init`] has not run.
///
/// Writes zeroes to every block, except to a block that is alone in its slab ([`is_alone`]) and was
/// not used since its memory came from the system.
pub fn alloc_zeroed(class: usize, size: usize) -> *mut u8 {
    let block = alloc_slow(CacheId::of_class(class).main(), size);
    if !take_fresh(class, block) && !block.is_null() {
        // SAFETY: the block was just allocated, and has at least `size` bytes.
        unsafe { block.write_bytes(0, size) };
    }
    block
}

/// Returns whether `block` of class `class`, just allocated or null, is known to read as zeroes.
#[inline(always)]
fn take_fresh(class: usize, block: *mut u8) -> bool {
    let has_own_slab = is_alone(class) && !block.is_null();
    // SAFETY: the block is the only object of its slab, and was just allocated to this thread.
    has_own_slab && unsafe { Slab::take_fresh(block) }
}

#[cold]
#[inline(never)]
extern "C" fn alloc_slow(offset: usize, size: usize) -> *mut u8 {
    let cache = cache_of(CacheId::of_main(offset));
    cache.map_or(null_mut(), |cache| match &cache.slot_layout {
        Some(slot_layout) => cache.alloc_debugged_here(slot_layout, size),
        None => cache.alloc_slow(),
    })
}

/// Frees a block of class `class`, or of a twin. Costs one critical section on the common path.
///
/// # Safety
///
/// The caller owns the block, which is of that class, and gives it up.
#[inline(always)]
pub unsafe fn free_class(block: *mut u8, class: usize) {
    let main = Place::of(CacheId::of_class(class), MAIN);
    // SAFETY: the caller passes ownership of the block.
    if !unsafe { main.push_fast(block) } {
        // SAFETY: the caller passes ownership of the block, and promises that it is of the class at
        // this offset.
        unsafe { free_slow(block, main.offset()) };
    }
}

/// Frees a block after the push to the CPU's main sheaf has failed.
///
/// # Safety
///
/// The caller owns the block, which is of the cache whose words are at `offset`, and gives it up.
#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(block: *mut u8, offset: usize) {
    if let Some(cache) = of_class_id(CacheId::of_main(offset)) {
        // SAFETY: the caller passes ownership of the block, and promises that it is of this cache.
        unsafe { cache.free_slow(block) };
    }
}

/// Returns whether the class's cache checks its blocks, because the process was started with
/// debugging or hardening. Also returns true until the cache is made.
pub fn checks(class: usize) -> bool {
    of_class(class).is_none_or(|cache| cache.checks())
}

/// Returns the name of the cache that `entry`, an entry of the page map, names.
pub fn name_of_entry(entry: u16) -> Option<impl core::fmt::Display> {
    pin_by_entry(entry).map(|cache| cache.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::node::geometry::Geometry;
    use std::borrow::ToOwned;
    use std::string::String;
    use std::vec::Vec;

    #[test]
    fn every_size_has_the_smallest_class_that_fits() {
        for size in 0..=MAX_CLASS_SIZE {
            let class = class_of(size);
            assert!(SIZES[class] >= size, "{size}");
            assert!(class == 0 || SIZES[class - 1] < size, "{size}");
        }
        assert_eq!(SIZES[BY_GRANULES - 1], MAX_CLASS_SIZE);
        assert!(SIZES.iter().all(|size| size.is_multiple_of(16)));
    }

    #[test]
    fn twins_are_told_apart() {
        let mut names: Vec<String> = Vec::new();
        for (class, size) in SIZES.into_iter().enumerate() {
            let layout = layout_of_class(class).unwrap();
            let geometry = Geometry::new(size, layout.align(), 0, is_aligned(class));
            let is_alone = geometry.per_slab == 1;
            assert_eq!(data(class) == class, is_alone, "{class}");
            assert_eq!(is_data(data(class)), !is_alone, "{class}");
            assert!(!is_data(class) && !is_data(sampled(class)) && !is_sampled(data(class)));
            assert_eq!(is_data(sampled(data(class))), !is_alone, "{class}");
            for twin in [class, data(class), sampled(class), sampled(data(class))] {
                assert_eq!(size_of_class(twin), size);
                assert_eq!(class_of_any(CacheId::of_class(twin).entry()), Some(twin));
                with_name(twin, |name| names.push(name.to_owned()));
            }
        }
        // A class whose blocks are alone in their slabs is its own data twin.
        names.sort();
        names.dedup();
        let alone = (0..CLASSES).filter(|&class| is_alone(class)).count();
        assert_eq!(names.len(), 2 * CLASSES + 2 * (CLASSES - alone));
    }

    #[test]
    fn waste_is_bounded() {
        let (classes, _) = SIZES.split_at(BY_GRANULES);
        for pair in classes.windows(2).filter(|pair| pair[0] >= 128) {
            let part = match pair[0] {
                0..1024 => 4,
                1024..4096 => 8,
                4096..65536 => 8,
                _ => 1,
            };
            assert!((pair[1] - pair[0]) * part <= pair[0], "{pair:?}");
        }
    }

    #[test]
    fn aligned_classes_are_aligned() {
        for align in (0..=16).map(|bit| 1 << bit) {
            for size in (0..MAX_CLASS_SIZE).step_by(97) {
                let most = match align > MOST_UNALIGNED {
                    true => MAX_ALIGNED_SIZE,
                    false => MAX_CLASS_SIZE,
                };
                if let Some(class) = class_of_aligned(size, align) {
                    assert!(
                        layout_of_class(class)
                            .is_some_and(|layout| layout.size() >= size && layout.align() >= align),
                        "{size}"
                    );
                    let fits = |least: &&usize| **least >= size && least.is_multiple_of(align);
                    let smallest = ALIGNED.iter().find(fits);
                    assert!(
                        align <= MOST_UNALIGNED || smallest == Some(&size_of_class(class)),
                        "{size} {align}"
                    );
                } else {
                    assert!(size.next_multiple_of(align) > most, "{size} {align}");
                }
            }
        }
        assert_eq!(class_of_aligned(1 << 17, 1 << 17), None);
    }
}
