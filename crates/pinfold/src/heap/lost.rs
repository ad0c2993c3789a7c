//! Lost blocks: blocks in use to which no pointer of the program leads.
//!
//! While each allocation is sampled, the profile knows all blocks in use. [`look`] then reads the
//! program's memory, as garbage collectors do that know no types: each aligned word whose value is
//! an address in a block is taken for a pointer to this block.
//!
//! 1. The words of all private writable mappings lead to blocks: data, stacks, thread-local data.
//!    Blocks, free memory and the allocator's own structures are left out.
//! 2. The words of each block that was found lead to further blocks.
//! 3. What was not found is lost.
//!
//! The memory is read through `/proc/self/mem`, because another thread may unmap it meanwhile, and
//! because not every mapping of a file can be read.
//!
//! A word may have the value of an address by chance, or be left over on a stack, so a lost block
//! can be missed. A block is wrongly called lost if the only pointer to it lies in a register of
//! another thread, in memory that processes share, or is encoded.

use crate::profile::{self, InUse};
use crate::slab::kmalloc;
use crate::{arena, guarded, sys};
use core::ops::Range;
use core::slice;
use pinfold_rseq::kernel::{self, Answer};

/// How many bytes are read at a time: the smallest page.
const PIECE: usize = 4096;

/// More bytes than the frames of [`look_in`] and of the functions that it calls have.
const OWN_FRAMES: usize = 64 << 10;

/// In [`Block::next`]: the block was not found, and it is the last one to read.
const UNFOUND: u32 = u32::MAX;
const LAST: u32 = u32::MAX - 1;

struct Block {
    found: InUse,
    /// The next block whose words are to be read.
    next: u32,
}

/// Which pages the process has touched, by `/proc/self/pagemap`. A program may map far more memory
/// than it uses.
struct Touched {
    file: Answer<i32>,
    /// What the kernel says of the pages with these numbers: a word for each.
    pages: Range<usize>,
    words: [u8; PIECE],
}

impl Touched {
    fn open() -> Touched {
        Touched {
            file: kernel::open(c"/proc/self/pagemap", libc::O_RDONLY | libc::O_CLOEXEC, 0),
            pages: 0..0,
            words: [0; PIECE],
        }
    }

    /// Returns whether the page of `address` was touched, or true if that is not known.
    fn has(&mut self, address: usize) -> bool {
        let page = address / sys::page_size();
        if !self.pages.contains(&page)
            && let Ok(file) = self.file
        {
            let got = kernel::read_at(file, &mut self.words, 8 * page).unwrap_or(0);
            self.pages = page..page + got / 8;
        }
        let word = self.words[8 * page.wrapping_sub(self.pages.start) % PIECE..].first_chunk();
        // The two highest bits tell whether the page is in memory or in swap space.
        !self.pages.contains(&page) || word.is_none_or(|word| u64::from_ne_bytes(*word) >> 62 != 0)
    }
}

impl Drop for Touched {
    fn drop(&mut self) {
        let _ = self.file.map(kernel::close);
    }
}

/// The blocks in use, by address.
struct Blocks {
    blocks: &'static mut [Block],
    /// From the first block to the end of the last one.
    bounds: Range<usize>,
    /// The first block whose words are to be read.
    first: u32,
    memory: i32,
    touched: Touched,
}

impl Blocks {
    /// Returns the block that contains `address`.
    fn at(&self, address: usize) -> Option<usize> {
        let behind = self
            .blocks
            .partition_point(|block| block.found.start <= address);
        let nth = behind.checked_sub(1)?;
        let InUse { start, size, .. } = self.blocks[nth].found;
        (address - start < size.max(1)).then_some(nth)
    }

    /// Takes a word for a pointer.
    fn find(&mut self, word: usize) {
        if self.bounds.contains(&word)
            && let Some(nth) = self.at(word)
            && self.blocks[nth].next == UNFOUND
        {
            self.blocks[nth].next = self.first;
            self.first = nth as u32;
        }
    }

    /// Takes the aligned words in `range` for pointers. Words that cannot be read lead nowhere.
    fn read(&mut self, range: Range<usize>) {
        let mut at = range.start.next_multiple_of(size_of::<usize>());
        while at < range.end {
            let mut piece = [0; PIECE];
            let end = range.end.min((at + 1).next_multiple_of(PIECE));
            if !self.touched.has(at) {
                at = end;
                continue;
            }
            let got = kernel::read_at(self.memory, &mut piece[..end - at], at).unwrap_or(0);
            let (words, _) = piece[..got].as_chunks();
            words
                .iter()
                .for_each(|word| self.find(usize::from_ne_bytes(*word)));
            at = end;
        }
    }

    /// Takes the words of a page of a writable mapping for pointers, if they are the program's.
    /// Returns `None` if that is not known.
    fn read_page(&mut self, page: Range<usize>) -> Option<()> {
        let at = page.start;
        let entry = arena::entry(at);
        // Only blocks from before the profile's start lie in other classes, and those that stand in
        // for samples of an earlier, longer interval.
        let is_free_or_block = arena::holds(at)
            && (entry == 0 || kmalloc::class_of_any(entry).is_some_and(kmalloc::is_sampled));
        let own = self.blocks.as_ptr_range();
        let is_own = (own.start as usize..own.end as usize).contains(&at)
            || profile::holds(at)
            || guarded::holds_slots(at)
            || arena::is_table_of_huge(at)
            || arena::is_metadata(at)?;
        // A large block begins behind the start of its run.
        let is_block = self.at(at).is_some() || self.at(page.end - 1).is_some();
        if !page.is_empty() && !is_free_or_block && !is_own && !is_block {
            self.read(page);
        }
        Some(())
    }

    /// Finds the blocks to which the program's mappings lead. `stack` is where the words in use of
    /// this thread's stack begin.
    fn read_mappings(&mut self, stack: usize) -> Option<()> {
        let mut known = Some(());
        for_each_mapping(|mapping| {
            // This function's own frames have copies of what it has read. What lies below the first
            // thread's frames is left over. Other stacks may share a mapping.
            let below = match mapping.contains(&sys::stack_address()) {
                true => stack - mapping.start.min(stack),
                false => OWN_FRAMES,
            };
            let unused = stack.saturating_sub(below)..stack;
            for page in mapping.step_by(PIECE).map(|start| start..start + PIECE) {
                if !self.touched.has(page.start) {
                    continue;
                }
                let start = match unused.contains(&page.start) {
                    true => unused.end.min(page.end),
                    false => page.start,
                };
                known = known.and_then(|()| self.read_page(start..page.end));
            }
        })
        .ok()?;
        known
    }

    /// Finds the blocks to which those lead that were found.
    fn read_blocks(&mut self) {
        while let Some(block) = self.blocks.get(self.first as usize) {
            let InUse { start, size, .. } = block.found;
            self.first = block.next;
            self.read(start..start + size);
        }
    }
}

/// Calls `f` with the process's private writable mappings.
fn for_each_mapping(mut f: impl FnMut(Range<usize>)) -> Answer<()> {
    let maps = kernel::open(c"/proc/self/maps", libc::O_RDONLY | libc::O_CLOEXEC, 0)?;
    let mut piece = [0; PIECE];
    // Of the line that is being read: the two addresses, and how many of its fields have ended.
    let (mut numbers, mut field) = ([0_usize; 2], 0);
    // The letters of the third field.
    let (mut letters, mut count) = ([0; 4], 0);
    let done = loop {
        let got = match kernel::read(maps, &mut piece) {
            Ok(0) => break Ok(()),
            Ok(got) => got,
            Err(error) => break Err(error),
        };
        for &byte in &piece[..got] {
            match (field, byte) {
                (_, b'\n') => (numbers, field, count) = ([0; 2], 0, 0),
                (0, b'-') | (1, b' ') => field += 1,
                (0 | 1, digit) => {
                    let digit = char::from(digit).to_digit(16).unwrap_or(0);
                    numbers[field] = numbers[field] << 4 | digit as usize;
                }
                (2, b' ') => {
                    field += 1;
                    if letters.starts_with(b"rw") && letters[3] == b'p' {
                        f(numbers[0]..numbers[1]);
                    }
                }
                (2, letter) if count < letters.len() => {
                    letters[count] = letter;
                    count += 1;
                }
                _ => {}
            }
        }
    };
    let _ = kernel::close(maps);
    done
}

/// Looks for lost blocks, and notes them in the profile, if each allocation is sampled. Costs about
/// a second for each GiB of the program's memory.
pub fn look() {
    if !profile::is_exact() {
        return;
    }
    profile::note_look(false);
    let Ok(memory) = kernel::open(c"/proc/self/mem", libc::O_RDONLY | libc::O_CLOEXEC, 0) else {
        return;
    };
    if look_in(memory, sys::here()).is_some() {
        profile::note_look(true);
    }
    let _ = kernel::close(memory);
}

/// Notes the lost blocks. Returns `None` if the memory cannot be told apart, or there is too little
/// of it.
fn look_in(memory: i32, stack: usize) -> Option<()> {
    let mut count = 0;
    profile::for_each_in_use(|_| count += 1);
    let bytes = (count * size_of::<Block>()).next_multiple_of(sys::page_size());
    let room = sys::map_memory(bytes.max(sys::page_size()))?;
    let mut used = 0;
    profile::for_each_in_use(|found| {
        // Another thread may have allocated a block since the blocks were counted.
        if used < count {
            let block = Block {
                found,
                next: UNFOUND,
            };
            // SAFETY: the mapping has room for `count` blocks, and only this function uses it.
            unsafe { room.cast::<Block>().add(used).write(block) };
            used += 1;
        }
    });
    // SAFETY: `used` blocks were written, and the mapping stays until the last use below.
    let blocks = unsafe { slice::from_raw_parts_mut(room.cast::<Block>().as_ptr(), used) };
    blocks.sort_unstable_by_key(|block| block.found.start);
    let start = blocks.first().map_or(0, |first| first.found.start);
    let end = blocks
        .last()
        .map_or(0, |last| last.found.start + last.found.size.max(1));
    let mut blocks = Blocks {
        blocks,
        bounds: start..end,
        first: LAST,
        memory,
        touched: Touched::open(),
    };
    let done = blocks.read_mappings(stack);
    if done.is_some() {
        blocks.read_blocks();
        let lost = blocks.blocks.iter().filter(|block| block.next == UNFOUND);
        lost.for_each(|block| profile::lost(&block.found));
    }
    // SAFETY: nothing refers to the mapping any more.
    unsafe { sys::unmap(room.as_ptr(), bytes.max(sys::page_size())) };
    done
}
