/*
 * pinfold.h - Pinfold's C API: malloc under prefixed names, object caches, counters, the shepherd.
 *
 * Linking with libpinfold.so or libpinfold.a also replaces the C malloc family under its own names,
 * glibc's __libc_malloc family, and C++'s operator new and operator delete. A program may still
 * define some of these itself. Pinfold's remaining functions then call the program's, as the C and
 * C++ standards require. libpinfold.a leaves the nothrow forms of operator new to the C++ runtime,
 * whose forms call plain operator new.
 *
 * Unless a comment below says otherwise:
 *
 *   - Any thread may call a function, and several threads may call it at once.
 *   - A signal handler may call it too.
 *   - A function that fails sets errno. A function that succeeds leaves errno unchanged.
 *   - A function that takes back or ends an object does nothing if the argument is NULL.
 *   - "ENOMEM" means that the system or a limit refused memory. Before an allocation fails, Pinfold
 *     gives back all free memory that the calling thread can reach, and tries once more.
 *
 * Three phrases of the comments have a fixed meaning:
 *
 *   - A "critical section" is a restartable sequence on the thread's own CPU: some 25 instructions,
 *     without a lock, an atomic instruction or a system call. Where the kernel has no restartable
 *     sequences, atomic instructions do the same.
 *   - "Interrupts the CPUs" means one membarrier call, which interrupts each CPU that runs a thread
 *     of this process, for some microseconds.
 *   - "The kernel cannot fence" means that the kernel, or a sandbox, does not offer membarrier.
 */
#ifndef PINFOLD_H
#define PINFOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Allocates a block of `size` bytes, aligned to 16. Also returns a block for a size of 0.
 *
 * Returns the block, or NULL with ENOMEM. Costs one critical section for sizes up to 32 KiB.
 */
void *pinfold_malloc(size_t size);

/*
 * Frees `block`, which came from this API. Never fails. Costs one critical section for small
 * blocks.
 *
 * An address outside Pinfold's memory ends the process with a message that names the address. A
 * second free of a small block, or a free of an address inside one, corrupts memory and is not
 * always found. PINFOLD_SLAB_DEBUG and PINFOLD_HARDENED find such faults.
 */
void pinfold_free(void *block);

/*
 * Allocates a zeroed block for `count` objects of `size` bytes.
 *
 * Returns the block, or NULL with ENOMEM, also if count * size overflows. Does not write to a large
 * block whose memory comes zeroed from the system.
 */
void *pinfold_calloc(size_t count, size_t size);

/*
 * Changes the size of `block` to `size` bytes, and keeps the content up to the smaller size.
 * Allocates if `block` is NULL. Frees the block and returns NULL if `size` is 0.
 *
 * Returns the block, which may have moved, or NULL with ENOMEM and the block unchanged. Shrinking
 * never fails. The block stays where it is while at least half of its room is in use. A block of
 * more than 575 KiB grows in place if free memory lies behind it. If possible, the kernel moves the
 * pages of a block of 2 MiB or more. Other blocks are copied.
 */
void *pinfold_realloc(void *block, size_t size);

/*
 * Changes the size of `block` to `count` objects of `size` bytes, like pinfold_realloc.
 *
 * Returns the block, or NULL with ENOMEM and the block unchanged, also if count * size overflows.
 */
void *pinfold_reallocarray(void *block, size_t count, size_t size);

/*
 * Free `block`, like pinfold_free (C23). The other arguments are ignored, because Pinfold finds the
 * size by the block's address.
 */
void pinfold_free_sized(void *block, size_t size);
void pinfold_free_aligned_sized(void *block, size_t align, size_t size);

/*
 * Allocates a block of `size` bytes at a multiple of `align`, which must be a power of two. `size`
 * need not be a multiple of `align`.
 *
 * Returns the block, or NULL with EINVAL (`align` is not a power of two) or ENOMEM.
 */
void *pinfold_aligned_alloc(size_t align, size_t size);

/*
 * Allocates a block of `size` bytes at a multiple of `align` rounded up to a power of two.
 *
 * Returns the block, or NULL with EINVAL (no such power of two) or ENOMEM.
 */
void *pinfold_memalign(size_t align, size_t size);

/*
 * Allocates a block of `size` bytes at a multiple of `align`, and stores its address in `*to`.
 * `align` must be a power of two and a multiple of sizeof(void *).
 *
 * Returns 0, EINVAL (`align`) or ENOMEM. Does not change errno. Does not write to `*to` if the call
 * fails.
 */
int pinfold_posix_memalign(void **to, size_t align, size_t size);

/*
 * Allocate a block at a multiple of the system's page size. pvalloc rounds `size` up to whole
 * pages, and 0 to one page.
 *
 * Return the block, or NULL with ENOMEM. pvalloc also fails if the rounded size overflows.
 */
void *pinfold_valloc(size_t size);
void *pinfold_pvalloc(size_t size);

/*
 * Returns how many bytes of `block` the program may use: at least the size that it asked for.
 * Returns 0 for NULL. Costs a few loads.
 */
size_t pinfold_malloc_usable_size(void *block);

/*
 * Returns the largest size for which malloc would make the same block as for `size` bytes: a
 * program that allocates this size may use all of the block. Allocates no block.
 *
 * Returns 0 if no block can be that large (sizes above PTRDIFF_MAX). A block between 575 KiB and
 * 62 MiB has up to 4032 usable bytes more, which depends on its address, and just below 62 MiB up
 * to 64 KiB more. The result is `size` if blocks end where the request ends: under
 * PINFOLD_SLAB_DEBUG, from the program's first block of a debugged size on, and while blocks are
 * guarded. In the scope of a heap, a block may have fewer bytes. Costs a few loads.
 */
size_t pinfold_good_size(size_t size);

/*
 * Allocate a block of at least `size` bytes, like pinfold_malloc and pinfold_aligned_alloc, and
 * store in `*actual` how many bytes of the block the program may use.
 *
 * Return the block, or NULL with the errno of pinfold_malloc or pinfold_aligned_alloc, and 0 in
 * `*actual`. A sized free may pass any size from `size` to `*actual`.
 */
void *pinfold_alloc_at_least(size_t size, size_t *actual);
void *pinfold_aligned_alloc_at_least(size_t align, size_t size, size_t *actual);

/*
 * Starts a heap profile of the malloc family, or changes its interval: the mean number of bytes
 * from one sampled allocation to the next, from 1 to 2^40. PINFOLD_HEAP_INTERVAL is the usual one:
 * it grows while more than some 4,000 samples a second would be taken. Other intervals stay.
 * `pinfold heap dump PID` shows the profile.
 *
 * Returns 0, or -1 and sets errno: EINVAL for a bad interval, ENOMEM if there is no memory, EBUSY
 * if another thread is starting or stopping the profile. The first start may load the unwinder's
 * library, so a signal handler must not be the first to call this.
 */
int pinfold_heap_start(uint64_t interval);
#define PINFOLD_HEAP_INTERVAL ((uint64_t)512 << 10)

/*
 * Stops the heap profile. What was sampled stays known. Returns 0, or -1 with EBUSY if another
 * thread is starting or stopping the profile.
 */
int pinfold_heap_stop(void);

/*
 * Writes the heap profile to a file for `pinfold heap dump FILE`. Replaces a regular file of this
 * user, and refuses links, FIFOs, devices and other users' files. Allocates nothing. Returns 0, or
 * -1 and sets errno: ENODATA if there was never a profile, or why the system refuses the file.
 */
int pinfold_heap_write(const char *path);

/*
 * Writes the heap profile to an open file, a pipe or a socket, at its position. The descriptor must
 * block. Returns as pinfold_heap_write does. A pipe without a reader raises SIGPIPE.
 * `pinfold heap dump FILE -o heap.pb.gz` makes a profile for pprof of what was written, and
 * `pinfold heap dump -` reads it from a pipe.
 */
int pinfold_heap_write_fd(int fd);

/*
 * Guards some blocks of the malloc family from now on: an access beyond such a block or after its
 * free raises SIGSEGV, and writes a report on standard error first. One allocation in `interval`
 * bytes is sampled on average, from 1 to 2^40, unless a heap profile has its own interval. At most
 * one sample in a millisecond becomes a guarded block.
 *
 * Returns 0, or -1 and sets errno: EINVAL for a bad interval, ENOMEM if there is no memory, EBUSY
 * if another thread is starting or stopping samples. The first start may load the unwinder's
 * library, so a signal handler must not be the first to call this.
 */
int pinfold_guard_start(uint64_t interval);

/*
 * Guards no further blocks. Returns 0, or -1 with EBUSY if another thread is starting or stopping
 * samples.
 */
int pinfold_guard_stop(void);

/*
 * Gives all free memory back to the system, including the free objects of every CPU's caches, and
 * whole pages of free objects in slabs that are in use. `pad` is ignored.
 *
 * Returns 1 if any memory went back, else 0. Interrupts the CPUs once. Where the kernel cannot
 * fence, the free objects of the CPUs' caches stay. Makes a system call for each free run, and for
 * each range of free pages in slabs that were used since the last time. Do not call this in signal
 * handlers.
 */
int pinfold_malloc_trim(size_t pad);

/*
 * Returns 1 if moving `block` helps to give memory back, else 0: its slab is partly in use and not
 * fuller than the average of its size, and other slabs have room for all the slab's blocks. Returns
 * 0 for NULL, and for blocks that share no slab: those above 65,600 bytes, sampled and guarded
 * ones, those of heaps, and all blocks of hardened and debugged processes.
 *
 * The block must be in use. Takes no lock. Approximate while other threads allocate and free.
 */
int pinfold_defrag_hint(const void *block);

/*
 * Moves `block` if pinfold_defrag_hint returns 1 for it. Returns the new block, which has the same
 * usable size and content: the program must then change all pointers to the old one, which is
 * freed. Returns NULL if the block stays where it is; errno does not change.
 *
 * A malloc and a free in its place would not help: both use the CPU's cache, from which the next
 * malloc gets the block that was just freed. Takes a lock twice.
 */
void *pinfold_defrag(void *block);

/*
 * The two halves of a move, for a program that changes pointers between them: a malloc from the
 * fullest slab of the size, and a free to the block's slab, both past the CPU's cache. Blocks of
 * either may be passed to all functions of this header. The new block lies among blocks with
 * pointers, whatever an allocation token said of the old one. pinfold_defrag keeps a block's kind.
 * Each takes a lock. Errors are those of pinfold_malloc.
 */
void *pinfold_defrag_malloc(size_t size);
void pinfold_defrag_free(void *block);

/*
 * Sets the soft limit on the memory that Pinfold holds, in bytes. 0 removes the limit. Replaces the
 * value of PINFOLD_MEMORY_LIMIT.
 *
 * Near the limit, Pinfold serves allocations from free memory of all sizes before it takes more
 * from the system, and keeps less free memory. No allocation fails because of the limit: an
 * allocation that free memory cannot serve exceeds the limit. The program's own mappings, stacks
 * and code do not count. docs/tuning.md describes the limit in full.
 *
 * Never fails. Costs a few stores. The limit takes effect at the next allocation or free that takes
 * a slow path.
 */
void pinfold_set_memory_limit(size_t bytes);

/* Returns the soft limit on the memory that Pinfold holds, in bytes; 0 if there is no limit. */
size_t pinfold_memory_limit(void);

/*
 * The fields of glibc's struct mallinfo2: numbers of blocks, and bytes.
 *
 * arena = uordblks + fordblks. Both fsmblks and keepcost are parts of fordblks.
 */
struct pinfold_mallinfo2 {
	size_t arena;    /* bytes held from the system, without huge blocks */
	size_t ordblks;  /* free blocks in slabs */
	size_t smblks;   /* free blocks that CPUs and nodes keep ready, in sheaves */
	size_t hblks;    /* huge blocks */
	size_t hblkhd;   /* bytes in huge blocks: 62 MiB and more */
	size_t usmblks;  /* 0, as in glibc */
	size_t fsmblks;  /* bytes of the blocks that smblks counts */
	size_t uordblks; /* bytes in blocks that the program holds, without huge blocks */
	size_t fordblks; /* bytes held and free */
	size_t keepcost; /* bytes that pinfold_malloc_trim would give back, at least */
};

/*
 * Returns how much memory Pinfold holds, and for which use. Never fails. Exact if no other thread
 * allocates or frees during the call. Walks the slabs that have free objects, under locks. A call
 * in a signal handler misses the slabs whose lock the interrupted code holds.
 */
struct pinfold_mallinfo2 pinfold_mallinfo2(void);

/* The same fields as in struct pinfold_mallinfo2, as int. */
struct pinfold_mallinfo {
	int arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};

/* Returns the figures of pinfold_mallinfo2, each at most INT_MAX. */
struct pinfold_mallinfo pinfold_mallinfo(void);

/*
 * Writes how much memory Pinfold holds, and how much of it is in use, to standard error, in the
 * form of glibc's malloc_stats. Keeps errno.
 */
void pinfold_malloc_stats(void);

/*
 * Returns 1 if Pinfold does what glibc's mallopt is asked for with `parameter` and `value`, else 0.
 * Changes nothing. Returns 1 for M_ARENA_MAX with 1 or more, because the number of arenas does not
 * grow with the threads, and for M_CHECK_ACTION with 3, because a fault prints a message and ends
 * the process.
 */
int pinfold_mallopt(int parameter, int value);

/*
 * Writes the state of malloc to `stream`, as XML in the form of glibc's malloc_info. `options` must
 * be 0.
 *
 * Returns 0, or -1 with EINVAL (`options`) or the errno of the stream. Do not call this in signal
 * handlers, which must not use streams.
 */
int pinfold_malloc_info(int options, FILE *stream);

/*
 * Object caches: objects of one size, kept ready per CPU.
 *
 * Each CPU has an array of free objects of each cache, a "sheaf". Each node has a "barn" of full
 * and empty sheaves. A "slab" is a piece of memory that is cut into objects. Allocating or freeing
 * an object does not touch the object.
 *
 * The functions that allocate or free objects are safe in signal handlers. There, an allocation may
 * fail with ENOMEM if the handler interrupted an allocation of the same thread. Do not call the
 * other functions of caches, sheaves and pools in signal handlers.
 *
 * A cache that makes no checks is corrupted if an object is freed twice, or freed to another cache.
 *
 *	struct pinfold_cache *sessions;
 *
 *	sessions = pinfold_cache_create("session", sizeof(struct session), 0, 0, NULL);
 *	struct session *session = pinfold_cache_alloc(sessions);
 *	...
 *	pinfold_cache_free(sessions, session);
 *	if (pinfold_cache_destroy(sessions) == -1)
 *		pinfold_cache_leaks(sessions, print, NULL);
 */
struct pinfold_cache;

/*
 * Checks of one cache, added to those that the environment variable PINFOLD_SLAB_DEBUG selects. The
 * letter is the check's name in that variable. A cache that makes checks takes a lock for each
 * object.
 */
#define PINFOLD_SLAB_CONSISTENCY_CHECKS 0x1u  /* F: freed addresses, the cache's records */
#define PINFOLD_SLAB_RED_ZONE           0x2u  /* Z: guard bytes on both sides of each object */
#define PINFOLD_SLAB_POISON             0x4u  /* P: bytes of free objects; not with a constructor */
#define PINFOLD_SLAB_STORE_USER         0x8u  /* U: backtraces of the last alloc and free */
#define PINFOLD_SLAB_TRACE              0x10u /* T: a line for each alloc and free, on stderr */

/*
 * Makes the cache hardened, or not, whatever the environment variable PINFOLD_HARDENED says. The
 * two flags exclude each other.
 *
 * A hardened cache finds double frees, frees of other addresses, and writes after a free. It zeroes
 * freed objects, and reuses them late and in an unpredictable order.
 */
#define PINFOLD_SLAB_HARDENED           0x100u
#define PINFOLD_SLAB_NOT_HARDENED       0x200u

/*
 * Aligns objects to cache lines, and small objects to even parts of a line. So no small object
 * crosses the border of a cache line.
 */
#define PINFOLD_SLAB_HWCACHE_ALIGN      0x400u

/*
 * Puts the cache's objects into heap profiles (docs/heap-profiles.md), with the call stacks that
 * allocated them. Each allocation and free of the cache then takes a slow path.
 */
#define PINFOLD_SLAB_PROFILED           0x800u

/*
 * Creates a cache of objects of `size` bytes, from 1 to 65536, at multiples of `align`.
 *
 * `name`   text in UTF-8. The cache keeps the first 32 bytes.
 * `align`  a power of two up to 65536, or 0. With 0, objects suit each type of that size which has
 *          no extended alignment.
 * `flags`  PINFOLD_SLAB_* combined, or 0.
 * `ctor`   NULL, or a function that initialises an object. The cache calls `ctor` once for each
 *          object, when its slab is made, and not at each allocation. The program frees an object
 *          in the state in which `ctor` left it. `ctor` runs under a lock: it must not use this
 *          cache, throw or longjmp.
 *
 * Returns the cache, or NULL with EINVAL (`name`, a size of 0, `align` or `flags`), E2BIG (`size`),
 * ENOSPC (3,674 caches exist) or ENOMEM.
 */
struct pinfold_cache *pinfold_cache_create(const char *name, size_t size, size_t align,
					   unsigned flags, void (*ctor)(void *));

/*
 * Ends `cache` and gives its memory back. The next cache that is made gets its descriptor. End all
 * sheaves and pools of the cache first. No other thread may use the cache during the call.
 *
 * Returns 0, or -1 with the cache unchanged: EBUSY if objects have not come back, ENOTSUP if the
 * kernel cannot fence. Interrupts the CPUs once. Waits for the readers of objects that were freed
 * by pinfold_cache_free_deferred. A reader must not call it, because it would wait for itself.
 */
int pinfold_cache_destroy(struct pinfold_cache *cache);

/*
 * Allocates an object. Its content is undefined if the cache has no constructor.
 *
 * Returns the object, or NULL with ENOMEM. Costs a call and one critical section. If the CPU's
 * sheaves are empty, the call also takes the node's lock.
 */
void *pinfold_cache_alloc(const struct pinfold_cache *cache);

/*
 * Allocates an object whose bytes are 0. Returns the object, or NULL with EINVAL (the cache has a
 * constructor) or ENOMEM.
 */
void *pinfold_cache_zalloc(const struct pinfold_cache *cache);

/*
 * Allocates an object in the memory of node `node`, or of the nearest node that has memory. -1
 * means the thread's own node. A number beyond the last node that the allocator tells apart wraps
 * around.
 *
 * Returns the object, or NULL with EINVAL (`node` is below -1) or ENOMEM. Takes the node's lock.
 */
void *pinfold_cache_alloc_node(const struct pinfold_cache *cache, int node);

/*
 * Allocates an object in the memory of node `node` and of no other node.
 *
 * Returns the object, or NULL with EINVAL (`node` is negative) or ENOMEM (the node has no memory,
 * or does not exist). Takes the node's lock.
 */
void *pinfold_cache_alloc_node_exact(const struct pinfold_cache *cache, int node);

/*
 * Frees `object`, which came from `cache`. Never fails, and leaves errno unchanged. Costs a call
 * and one critical section. If the CPU's sheaves are full, the call also takes the node's lock.
 */
void pinfold_cache_free(const struct pinfold_cache *cache, void *object);

/*
 * Allocates `count` objects and stores their addresses in `objects`. One critical section moves
 * many objects.
 *
 * Returns how many objects were stored. The program owns these objects. If they are fewer than
 * `count`, errno is ENOMEM.
 */
size_t pinfold_cache_alloc_bulk(const struct pinfold_cache *cache, size_t count, void **objects);

/*
 * Frees `count` objects of `cache`, none of them NULL. Never fails. One critical section moves many
 * objects.
 */
void pinfold_cache_free_bulk(const struct pinfold_cache *cache, size_t count, void *const *objects);

/*
 * Gives all free memory of `cache` back to the system, including the free objects of every CPU.
 *
 * Returns how many slabs went back, or -1 with ENOTSUP if the kernel cannot fence. In that case,
 * the objects in the CPUs' sheaves stay. Interrupts the CPUs once. If objects were freed by
 * pinfold_cache_free_deferred, the call waits for their readers. A reader must not call it, because
 * it would wait for itself.
 */
ptrdiff_t pinfold_cache_shrink(const struct pinfold_cache *cache);

/*
 * Sets how many objects a sheaf of `cache` holds, from 4 to 125. A value outside these bounds is
 * replaced by the nearest bound. Applies to sheaves that are filled or emptied after the call.
 * Never fails.
 *
 * Without this call a sheaf holds 129 KiB of objects, and at most 125 objects. A cache that is
 * created when the budget below is used up has sheaves of 4 objects, or of 129 KiB of objects if
 * these are fewer.
 */
void pinfold_cache_set_sheaf_capacity(const struct pinfold_cache *cache, size_t objects);

/*
 * Sets how many bytes the sheaves of all caches together may hold on one CPU. The default is 32
 * MiB. All caches get their part of it again, small sizes of malloc first, except those whose
 * capacity the program set. Sheaves keep their capacity until they are next filled or emptied.
 * Never fails.
 */
void pinfold_slab_set_sheaf_budget(size_t bytes);

/* Returns the size of an object in bytes, as given to pinfold_cache_create. */
size_t pinfold_cache_size(const struct pinfold_cache *cache);

/* Returns the cache's name. The text is valid until the cache is destroyed. */
const char *pinfold_cache_name(const struct pinfold_cache *cache);

/*
 * Returns the checks that the cache makes, PINFOLD_SLAB_CONSISTENCY_CHECKS to PINFOLD_SLAB_TRACE,
 * including those that the environment selected.
 */
unsigned pinfold_cache_debug_flags(const struct pinfold_cache *cache);

/*
 * Returns how many objects are in use. Free objects in the CPUs' and the nodes' sheaves also count
 * as in use. So do objects that wait for their readers. The number is exact after
 * pinfold_cache_shrink, and after a pinfold_cache_destroy that failed with EBUSY, if no thread uses
 * the cache meanwhile. Takes the nodes' locks and walks the slabs that have free objects.
 */
size_t pinfold_cache_in_use(const struct pinfold_cache *cache);

/* The counts of a cache's slow paths since the cache was created, and the cache's layout now. */
struct pinfold_slab_statistics {
	uint64_t alloc_slowpath; /* allocations that found the CPU's sheaf empty */
	uint64_t free_slowpath;  /* frees that found the CPU's sheaf full */
	uint64_t barn_get;       /* full sheaves taken from barns */
	uint64_t barn_put;       /* full sheaves put into barns */
	uint64_t slab_alloc;     /* slabs made */
	uint64_t slab_free;      /* slabs given back */
	size_t slabs;            /* slabs that exist now */
	size_t sheaf_capacity;   /* objects that a sheaf holds at most */
	size_t stride;           /* bytes from one object to the next */
};

/* Returns the counts of the slow paths. Takes the nodes' locks. Interrupts no other CPU. */
struct pinfold_slab_statistics pinfold_cache_statistics(const struct pinfold_cache *cache);

/* The kinds of faults that a cache can find. */
enum pinfold_slab_fault {
	PINFOLD_SLAB_OVERWRITTEN = 1,        /* bytes in or around an object were overwritten */
	PINFOLD_SLAB_DOUBLE_FREE = 2,        /* a free object was freed again */
	PINFOLD_SLAB_WRITTEN_AFTER_FREE = 3, /* a free object of a hardened cache was written to */
	PINFOLD_SLAB_NOT_AN_OBJECT = 4,      /* the freed address is not the start of an object */
	PINFOLD_SLAB_WRONG_CACHE = 5,        /* the freed object belongs to another cache */
	PINFOLD_SLAB_LEAKED = 6,             /* an object has not come back */
	PINFOLD_SLAB_RECORDS = 7,            /* the cache's own records contradict each other */
	PINFOLD_SLAB_USED_AFTER_FREE = 8,    /* realloc or malloc_usable_size got a free object */
	PINFOLD_SLAB_WRONG_SIZE = 9          /* an object was freed with a size that it cannot have */
};

/* A report of one fault. The pointers are valid during the call that receives the report. */
struct pinfold_slab_report {
	const char *text;   /* the whole report, as lines for standard error */
	const char *cache;  /* the cache's name */
	const void *object; /* the object, or the address that was freed */
	size_t size;        /* size of the object in bytes */
	ptrdiff_t offset;   /* of the first overwritten byte from the object's start; else 0 */
	int kind;           /* enum pinfold_slab_fault */
};

/*
 * The values that a report handler returns. ABORT ends the process, because its memory cannot be
 * trusted. CONTINUE repairs the overwritten bytes. It also takes objects that cannot be trusted out
 * of use for good.
 */
#define PINFOLD_SLAB_ABORT    0
#define PINFOLD_SLAB_CONTINUE 1

/*
 * Sets the function that decides about the faults which caches find, for the whole process. NULL
 * restores the default: the report goes to standard error, and the process ends.
 *
 * The cache calls `handler` with `context`, in the thread that found the fault and without a lock.
 * `handler` may allocate. It must not throw or longjmp.
 *
 * Returns 0, or -1 with ENOMEM. Each call with a handler keeps some bytes for the rest of the
 * process.
 */
int pinfold_slab_on_report(int (*handler)(const struct pinfold_slab_report *report, void *context),
			   void *context);

/*
 * Checks the records of `cache`, and the guard bytes around objects of a cache that has them.
 * Repairs wrong guard bytes. Calls `each`, which may be NULL, with `context` for the first sixteen
 * faults.
 *
 * Returns how many faults there are. Takes the nodes' locks and walks all slabs.
 */
size_t pinfold_cache_validate(const struct pinfold_cache *cache,
			      void (*each)(const struct pinfold_slab_report *report, void *context),
			      void *context);

/*
 * Calls `each`, which may be NULL, with `context` for the first sixteen objects in use of a cache
 * that makes checks. With PINFOLD_SLAB_STORE_USER the reports say where each object was allocated.
 *
 * Returns how many objects are in use, and 0 for a cache that makes no checks; see
 * pinfold_cache_in_use. Takes the nodes' locks and walks all slabs.
 */
size_t pinfold_cache_leaks(const struct pinfold_cache *cache,
			   void (*each)(const struct pinfold_slab_report *report, void *context),
			   void *context);

/*
 * Prefilled sheaves and memory pools: objects set aside for work that must not fail halfway.
 *
 * A prefilled sheaf is filled before the work begins, and one thread uses it at a time. A memory
 * pool keeps a reserve for times when the system has no memory, and all threads may use it. End
 * both before their cache. Their objects are ordinary objects of the cache.
 *
 *	struct pinfold_prefilled *nodes = pinfold_cache_prefill(cache, 3);
 *	if (!nodes)
 *		return -1;
 *	...                             the next three pinfold_prefilled_alloc(nodes) cannot fail
 *	pinfold_prefilled_destroy(nodes);
 */
struct pinfold_prefilled;

/*
 * Allocates `n` objects of `cache`, and sets them aside in a new sheaf. `n` may be 0 and may be
 * more than the capacity of the CPUs' sheaves.
 *
 * Returns the sheaf, or NULL with ENOMEM and no object kept. Costs what pinfold_cache_alloc_bulk
 * costs, and a block of 1 KiB for each 125 objects.
 */
struct pinfold_prefilled *pinfold_cache_prefill(const struct pinfold_cache *cache, size_t n);

/*
 * Takes an object from `prefilled`. Free it by pinfold_cache_free.
 *
 * Returns the object, or NULL with ENOMEM if the sheaf is empty. Costs about ten instructions: no
 * lock, no system call, no critical section. Only one thread at a time may use the sheaf. A signal
 * handler may use the sheaf if it did not interrupt a user of the sheaf.
 */
void *pinfold_prefilled_alloc(struct pinfold_prefilled *prefilled);

/*
 * Returns how many objects `prefilled` holds: how many calls of pinfold_prefilled_alloc cannot
 * fail.
 */
size_t pinfold_prefilled_len(const struct pinfold_prefilled *prefilled);

/*
 * Allocates objects until `prefilled` holds `n` objects. Does nothing if it already holds as many.
 *
 * Returns 0, or -1 with ENOMEM. After a failure, the sheaf holds as many objects as before, or
 * more.
 */
int pinfold_prefilled_refill(struct pinfold_prefilled *prefilled, size_t n);

/* Ends `prefilled`, and frees the objects in it to the cache. Never fails. */
void pinfold_prefilled_destroy(struct pinfold_prefilled *prefilled);

/*
 * A reserve of objects of a cache, like the kernel's mempool_t. For a reserve of pages, make a
 * cache whose objects are pages: pinfold_cache_create(name, size, size, 0, NULL), where `size` is a
 * power of two from the page size to 64 KiB.
 */
struct pinfold_mempool;

/*
 * Creates a pool with a reserve of `min_nr` objects of `cache`.
 *
 * Returns the pool, or NULL with ENOMEM. Costs what pinfold_cache_prefill costs. Not for signal
 * handlers.
 */
struct pinfold_mempool *pinfold_mempool_create(const struct pinfold_cache *cache, size_t min_nr);

/*
 * Allocates an object from the cache, or from the reserve if the cache has no memory.
 *
 * Returns the object, or NULL with ENOMEM if the reserve is empty too, or if the caller is a signal
 * handler that interrupted a function of this pool. Costs what pinfold_cache_alloc costs. Taking
 * from the reserve also takes the pool's lock.
 */
void *pinfold_mempool_alloc(const struct pinfold_mempool *pool);

/*
 * Allocates an object like pinfold_mempool_alloc. If there is no object, waits until a thread frees
 * an object to the pool, or until the cache has memory again. The call checks the cache every 100
 * ms.
 *
 * Returns the object, and never NULL. Call it only while other threads hold objects of the pool,
 * and will free them without waiting here. Not for signal handlers.
 */
void *pinfold_mempool_alloc_wait(const struct pinfold_mempool *pool);

/*
 * Allocates an object from the reserve, even if the cache has memory.
 *
 * Returns the object, or NULL with ENOMEM if the reserve is empty, or if the caller is a signal
 * handler that interrupted a function of this pool. Takes the pool's lock.
 */
void *pinfold_mempool_alloc_preallocated(const struct pinfold_mempool *pool);

/*
 * Frees `object`, which came from this pool or from its cache. The object goes to the reserve if
 * the reserve is not full, else to the cache. Never fails, and leaves errno unchanged. Costs one
 * load more than pinfold_cache_free while the reserve is full.
 */
void pinfold_mempool_free(const struct pinfold_mempool *pool, void *object);

/*
 * Allocates `count` objects from the cache, and what the cache lacks from the reserve, and stores
 * their addresses in `objects`.
 *
 * Returns 0, or -1 with ENOMEM and no object kept. Costs what pinfold_cache_alloc_bulk costs, and
 * the pool's lock if it takes from the reserve.
 */
int pinfold_mempool_alloc_bulk(const struct pinfold_mempool *pool, size_t count, void **objects);

/*
 * Allocates `count` objects like pinfold_mempool_alloc_bulk. If there are too few, waits like
 * pinfold_mempool_alloc_wait, and holds none of them meanwhile. `count` is at most the size of the
 * reserve, or the call may never return. Not for signal handlers.
 */
void pinfold_mempool_alloc_bulk_wait(const struct pinfold_mempool *pool, size_t count,
				     void **objects);

/*
 * Frees `count` objects, which came from this pool or from its cache, none of them NULL. As many as
 * the reserve lacks go to the reserve, and the others to the cache. Never fails. Takes the pool's
 * lock once, if the reserve is not full.
 */
void pinfold_mempool_free_bulk(const struct pinfold_mempool *pool, size_t count,
			       void *const *objects);

/*
 * Sets the size of the reserve to `min_nr` objects. Allocates the objects that are missing, or
 * frees the objects that are too many.
 *
 * Returns 0, or -1 with ENOMEM. After a failure either nothing has changed, or the reserve has the
 * new size and is not full yet: later frees to the pool fill it. Not for signal handlers.
 */
int pinfold_mempool_resize(const struct pinfold_mempool *pool, size_t min_nr);

/* Returns how many objects the reserve holds at this moment. Takes the pool's lock. */
size_t pinfold_mempool_available(const struct pinfold_mempool *pool);

/*
 * Ends `pool`, and frees its reserve to the cache. Objects that were allocated from the pool stay
 * valid. No other thread may use the pool during the call. Not for signal handlers.
 */
void pinfold_mempool_destroy(struct pinfold_mempool *pool);

/*
 * Readers, and frees that wait for them.
 *
 * A reader looks at shared objects without a lock. A thread that removes a shared object must not
 * free the object at once, because a reader may still look at it. Instead, the thread frees the
 * object deferred. The cache reuses the object when all readers that were inside at the time of the
 * call have left.
 *
 *	struct pinfold_reader reader = pinfold_grace_enter();
 *	struct route *route = atomic_load(&current);
 *	...                             *route stays valid until
 *	pinfold_grace_leave(reader);
 *
 *	struct route *old = atomic_exchange(&current, new);
 *	pinfold_cache_free_deferred(routes, old);
 */
struct pinfold_reader {
	uint64_t pinfold_private[2];
};

/*
 * Makes the calling thread a reader: the thread is inside until it calls pinfold_grace_leave.
 * Readers nest, and signal handlers may be readers. In the child of a fork there are no readers.
 *
 * Returns the argument for pinfold_grace_leave. Never fails. Costs a call and one critical section,
 * and also a memory fence if the kernel cannot fence or some CPUs are isolated.
 */
struct pinfold_reader pinfold_grace_enter(void);

/*
 * Ends a reader. The thread that called pinfold_grace_enter calls this function, once for each
 * entry. Costs as much as pinfold_grace_enter.
 */
void pinfold_grace_leave(struct pinfold_reader reader);

/*
 * Waits until all readers that are inside at the time of the call have left.
 *
 * Returns 0, or -1 with ENOTSUP if the kernel can no longer fence. In that case, readers may still
 * be inside. While the call waits, it interrupts the CPUs at each step if no CPU is isolated. A
 * reader must not call it, because it would wait for itself. Not for signal handlers.
 */
int pinfold_grace_synchronize(void);

/*
 * Frees `object` when all readers that are inside at the time of the call have left. Readers that
 * enter later must not be able to find the object.
 *
 * Never fails, and leaves errno unchanged. Costs what pinfold_cache_free costs, and a fence for
 * each few hundred objects. Readers and signal handlers may call it. It waits only if the system
 * has no memory to note the object. Then it checks a hundred times, 100 us apart, whether the
 * readers have left. If they have not left by then, the object's memory is lost. The attribute
 * free_rcu_sheaf_fail counts lost objects.
 */
void pinfold_cache_free_deferred(const struct pinfold_cache *cache, void *object);

/*
 * Waits until `cache` has freed all objects that were passed to pinfold_cache_free_deferred before
 * the call.
 *
 * Returns 0, or -1 with ENOTSUP if the kernel cannot fence. In that case, the objects go on
 * waiting. Interrupts the CPUs once or more if any object was ever freed deferred. A reader must
 * not call it, because it would wait for itself. Not for signal handlers.
 */
int pinfold_cache_flush_deferred(const struct pinfold_cache *cache);

/*
 * Functions that return the state of caches. They interrupt no other CPU. Their numbers are exact
 * if no thread uses the cache meanwhile. docs/slabinfo.md explains each number. Not for signal
 * handlers.
 */

/*
 * Writes the state of `cache`, or of all caches if `cache` is NULL, as text in the format of
 * /proc/slabinfo, version 2.1. Writes at most `size` bytes, including the NUL, like snprintf.
 * `buffer` may be NULL if `size` is 0. A size class of malloc has a cache from its first allocation
 * on.
 *
 * Returns the length of the whole text without the NUL. The next call may find another length.
 * Takes the nodes' locks.
 */
size_t pinfold_slabinfo(const struct pinfold_cache *cache, char *buffer, size_t size);

/*
 * Stores in `*value` the number that the kernel would show in /sys/kernel/slab/<cache>/<name>:
 * object_size, objects, slabs, alloc_slowpath and so on.
 *
 * Returns 0, or -1 with EINVAL if there is no attribute of that name. Takes the nodes' locks.
 */
int pinfold_cache_attribute(const struct pinfold_cache *cache, const char *name, uint64_t *value);

/* A cache as pinfold_caches_for_each shows it. `name` is valid during the call that gets it. */
struct pinfold_cache_info {
	const char *name;
	/* Bytes of an object, and bytes from one object to the next. */
	size_t object_size, slab_size;
	/* Objects in use, and objects in all slabs. */
	size_t objects, total_objects;
	/* Free objects in the CPUs' sheaves, and in the nodes' barns. */
	size_t cpu_objects, barn_objects;
	size_t slabs;
	/* The checks that the cache makes, and PINFOLD_SLAB_HARDENED. */
	unsigned flags;
};

/*
 * Calls `each`, which may be NULL, with `context` for all caches of the process, including those of
 * malloc. A size class of malloc has a cache from its first allocation on. No lock is held during
 * the calls: `each` may allocate. A cache that is created or destroyed meanwhile may be missing.
 *
 * Returns how many caches there were.
 */
size_t pinfold_caches_for_each(void (*each)(const struct pinfold_cache_info *info, void *context),
			       void *context);

/*
 * Counters. Each CPU adds to words of its own, so most adds take no lock and make no system call.
 * Sums are exact all the same.
 *
 * A counter's "batch" is how much each CPU may keep to itself before it adds to the total. A larger
 * batch makes adds cheaper and reads less exact. Batches are from 1 to 2^40. The value wraps around
 * at 2^63. After fork the child goes on with copies.
 *
 * Signal handlers may add, also with a limit, read and sum. They must not create or destroy a
 * counter, set or swap its value, or change a batch. Adding and reading never fail. If there is no
 * memory for a counter's words, the counter works as one atomic.
 *
 * The child of a vfork must not count. It shares the parent's memory, but the kernel does not
 * protect its counting from the parent's threads: counts of the child and of the parent may be
 * lost, in that call and in later ones.
 *
 *	static struct pinfold_counter open_files = PINFOLD_COUNTER_INIT(0);
 *	...
 *	pinfold_counter_inc(&open_files);
 *	printf("%lld\n", (long long)pinfold_counter_sum(&open_files));
 */

/*
 * A counter that goes up and down. The struct takes 152 bytes, so that adds to one element of an
 * array do not slow down adds to the next. From the first add on, a counter takes 32 bytes more for
 * each CPU that adds, and for the total. Functions that write a counter take a pointer without
 * const: a counter must not be const.
 */
struct pinfold_counter {
	uint64_t pinfold_private[19];
};

/*
 * Initialises a static counter to `value`, with the default batch. Do not destroy such a counter.
 */
#define PINFOLD_COUNTER_INIT(value) \
	{ { 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, (uint64_t)(value), 0, 0, 0, 0, 0, 0, 0, 0 } }

/* Stands for the default batch: 1024, or twice the number of CPUs if that is more. */
#define PINFOLD_BATCH_DEFAULT UINT64_MAX

/*
 * The largest batch. With it, adds stay on their CPU, like the kernel's percpu_counter_add_local.
 * pinfold_counter_sum finds them always, and pinfold_counter_read only after pinfold_counter_fold
 * or a shepherd has looked. For a counter that is written often and read seldom.
 */
#define PINFOLD_BATCH_LOCAL ((uint64_t)1 << 40)

/*
 * Creates a counter at `value`, with `batch` from 1 to 2^40 or PINFOLD_BATCH_DEFAULT.
 *
 * Returns the counter, or NULL with EINVAL (`batch`) or ENOMEM.
 */
struct pinfold_counter *pinfold_counter_create(int64_t value, uint64_t batch);

/*
 * Creates a counter at `value` that widens its batch by itself, while its error bound stays at most
 * `drift`, which is at least 1. Where the kernel can fence, the counter may widen the batch beyond
 * `drift` divided by the number of CPUs. Then a CPU's first add may halve the batch. Halving the
 * batch interrupts the CPUs.
 *
 * Returns the counter, or NULL with EINVAL (a `drift` of 0) or ENOMEM.
 */
struct pinfold_counter *pinfold_counter_create_max_drift(int64_t value, uint64_t drift);

/* Ends a counter of pinfold_counter_create or pinfold_counter_create_max_drift. */
void pinfold_counter_destroy(struct pinfold_counter *counter);

/*
 * Add `n`, subtract `n`, add 1, subtract 1. Never fail, and never wait. Cost a call and one
 * critical section. Once for each batch and a half counted in one direction, an add also folds: it
 * makes one atomic add to the total. An add larger than the batch is one atomic add.
 */
void pinfold_counter_add(struct pinfold_counter *counter, int64_t n);
void pinfold_counter_sub(struct pinfold_counter *counter, int64_t n);
void pinfold_counter_inc(struct pinfold_counter *counter);
void pinfold_counter_dec(struct pinfold_counter *counter);

/*
 * Adds `n` with a batch for this call: after the call, the CPU on which it ran keeps less than
 * `batch` to itself, unless another thread folds this CPU's words at that moment, or the calling
 * thread moved to another CPU. The error bound stays what it is, and holds. A `batch` above the
 * counter's is the counter's. With a `batch` of 0 or 1 the add and all that the CPU had kept are
 * visible to pinfold_counter_read at once. Never fails, and never waits.
 */
void pinfold_counter_add_batch(struct pinfold_counter *counter, int64_t n, uint64_t batch);

/*
 * Returns the value approximately: at some moment during the call it was off by at most the error
 * bound. Costs a few loads.
 */
int64_t pinfold_counter_read(const struct pinfold_counter *counter);

/*
 * Return what pinfold_counter_read and pinfold_counter_sum return, or 0 if that is negative.
 */
int64_t pinfold_counter_read_positive(const struct pinfold_counter *counter);
int64_t pinfold_counter_sum_positive(const struct pinfold_counter *counter);

/*
 * Returns by how much pinfold_counter_read may be off: twice the batches of all CPUs that have
 * added, and what the last fold by another CPU found there, at most twice their batches. Costs
 * two loads.
 */
uint64_t pinfold_counter_error_bound(const struct pinfold_counter *counter);

/*
 * Returns the exact value at one moment during the call, even if other threads add meanwhile. Reads
 * the words of each CPU that has added, at least twice. Takes no lock, makes no system call and
 * interrupts no CPU. Waits only while the process forks.
 */
int64_t pinfold_counter_sum(const struct pinfold_counter *counter);

/*
 * Stores two numbers in `*low` and `*high`. At some moment during the call the value was between
 * them, both included. The numbers differ by the amounts that other threads added meanwhile. Reads
 * the words of each CPU twice. Takes no lock.
 */
void pinfold_counter_bounds(const struct pinfold_counter *counter, int64_t *low, int64_t *high);

/*
 * Returns -1, 0 or 1 if the value is below, at or above `with`. The answer is exact. If the value
 * and `with` are farther apart than the error bound, costs as much as pinfold_counter_read.
 * Otherwise costs as much as pinfold_counter_sum.
 */
int pinfold_counter_compare(const struct pinfold_counter *counter, int64_t with);

/*
 * Adds `amount` if this does not move the value past `limit`: above the limit for a positive
 * `amount`, below the limit for a negative one.
 *
 * Returns whether it added; always true for an amount of 0. Exact, even if other threads add
 * meanwhile. It takes the counter's locks, unless the value is beyond the limit by more than the
 * error bound. If it cannot decide near the limit, it interrupts the CPUs. It may refuse an amount
 * that fits in three cases: in a signal handler that interrupted a function of this library, if
 * another thread holds the counter's locks for a tenth of a second, and near the limit if the
 * kernel cannot fence.
 */
bool pinfold_counter_limited_add(struct pinfold_counter *counter, int64_t limit, int64_t amount);

/*
 * Set the value. swap returns the value before. An add at the same time counts exactly once, either
 * before or after the call. Never fail. Interrupt the CPUs if another CPU has ever added within its
 * batch.
 */
void pinfold_counter_set(struct pinfold_counter *counter, int64_t value);
int64_t pinfold_counter_swap(struct pinfold_counter *counter, int64_t value);

/*
 * Folds: adds up the amounts that the CPUs keep to themselves, so that pinfold_counter_read sees
 * them. The error bound grows by their sum, because it becomes old when the CPUs add again.
 *
 * Returns how many CPUs keep something, or 0 if the sum has not changed since the last fold. Does
 * nothing, and returns 0, if another thread folds the counter or changes its batch. Runs on the
 * calling thread's CPU alone, writes no other CPU's words, and interrupts no other CPU.
 */
size_t pinfold_counter_fold(struct pinfold_counter *counter);

/*
 * Counters in a file, for example of memfd_create, that several processes map. A process that is
 * killed loses nothing that it added, and blocks no other process. No process may truncate the
 * file.
 */
struct pinfold_shared_counters;

/*
 * Maps `count` counters, from 1 to 2^20, in the file `fd`, which is open for reading and writing.
 * An empty file gets its size and counters at 0. `fd` may be closed afterwards.
 *
 * Returns the counters, or NULL with errno: EINVAL if `count` is out of range or differs from the
 * file's, or if the file is too small or has another content; ENOMEM; or the errno of fstat,
 * ftruncate or mmap.
 */
struct pinfold_shared_counters *pinfold_shared_counters_create(int fd, size_t count);

/* Unmaps the counters. The file keeps the counts. */
void pinfold_shared_counters_destroy(struct pinfold_shared_counters *counters);

/*
 * Adds `n` to counter number `nth`, the first being 0: one locked add on the CPU's own line.
 *
 * Returns 0, or -1 with EINVAL if there is no such counter.
 */
int pinfold_shared_counters_add(struct pinfold_shared_counters *counters, size_t nth, int64_t n);

/*
 * Store the value of counter number `nth` in `*value`. read is off by at most what is added and
 * subtracted during the call. sum is exact at one moment during the call.
 *
 * Return 0, or -1 with EINVAL if there is no such counter.
 */
int pinfold_shared_counters_read(const struct pinfold_shared_counters *counters, size_t nth,
				 int64_t *value);
int pinfold_shared_counters_sum(const struct pinfold_shared_counters *counters, size_t nth,
				int64_t *value);

/* Returns the batch. */
uint64_t pinfold_counter_batch(const struct pinfold_counter *counter);

/*
 * Sets the batch, from 1 to 2^40, for all CPUs at once. The error bound follows.
 *
 * Returns 0, or -1 with EINVAL (`batch`), ENOMEM, or ENOTSUP (a lower batch needs a fence, and the
 * kernel cannot fence, or a thread was in the middle of a fold for a second). A lower batch
 * interrupts the CPUs.
 */
int pinfold_counter_set_batch(struct pinfold_counter *counter, uint64_t batch);

/*
 * Many counters, packed together. Each is used like any other counter. They are destroyed together.
 */
struct pinfold_counters;

/*
 * Creates `count` counters at the values `values[0]` to `values[count - 1]`, all with `batch`, from
 * 1 to 2^40.
 *
 * Returns the counters, or NULL with EINVAL (`batch`) or ENOMEM.
 */
struct pinfold_counters *pinfold_counters_create(const int64_t *values, size_t count,
						 uint64_t batch);

/*
 * Returns counter number `nth`, from 0, or NULL with EINVAL if there are not so many. The pointer
 * is valid until pinfold_counters_destroy. Do not destroy the counter itself.
 */
struct pinfold_counter *pinfold_counters_at(const struct pinfold_counters *counters, size_t nth);

/* Ends all counters of `counters`. */
void pinfold_counters_destroy(struct pinfold_counters *counters);

/*
 * A counter that goes up and down, for machines with many CPUs: amounts go through a tree before
 * they reach the total. So the batch stays small, 32 by default, and the error of a read grows with
 * N log N on N CPUs. This is the kernel's percpu_counter_tree.
 *
 * The struct takes 160 bytes. From the first add on, a tree takes 32 bytes more for each CPU that
 * adds, and for the total, and 64 bytes for each node of the tree: 6 for 16 CPUs, 36 for 256. A
 * tree must not be const.
 */
struct pinfold_counter_tree {
	uint64_t pinfold_private[20];
};

/*
 * Initialises a static tree to `value`, with the default batch. Do not destroy such a tree.
 */
#define PINFOLD_COUNTER_TREE_INIT(value) \
	{ { 64, 32, ~(uint64_t)32, 0, 0, 0, 0, 0, 0, 0, (uint64_t)(value), 0, 0, 0, 0, 0, 0, 0, \
	    0, 0 } }

/*
 * Creates a tree at `value`, with `batch` from 1 to 2^40, or PINFOLD_BATCH_DEFAULT, which is 32.
 *
 * Returns the tree, or NULL with EINVAL (`batch`) or ENOMEM.
 */
struct pinfold_counter_tree *pinfold_counter_tree_create(int64_t value, uint64_t batch);

/* Ends a tree of pinfold_counter_tree_create. */
void pinfold_counter_tree_destroy(struct pinfold_counter_tree *tree);

/*
 * Add `n`, subtract `n`. Never fail, and never wait. Cost a call and one critical section. Once for
 * each batch and a half counted in one direction, an add also carries: it makes one or two atomic
 * operations for each level of the tree that the amount reaches. An add larger than the batch is
 * one atomic add.
 */
void pinfold_counter_tree_add(struct pinfold_counter_tree *tree, int64_t n);
void pinfold_counter_tree_sub(struct pinfold_counter_tree *tree, int64_t n);

/*
 * Returns the value approximately: at some moment during the call it was off by at most the error
 * bound. Costs a few loads.
 */
int64_t pinfold_counter_tree_read(const struct pinfold_counter_tree *tree);

/* Returns by how much pinfold_counter_tree_read may be off, upwards or downwards. */
uint64_t pinfold_counter_tree_error_bound(const struct pinfold_counter_tree *tree);

/*
 * Returns the exact value at one moment during the call, even if other threads add meanwhile. Costs
 * what pinfold_counter_sum costs.
 */
int64_t pinfold_counter_tree_sum(const struct pinfold_counter_tree *tree);

/*
 * Return -1, 0 or 1 if the value is below, at or above `with`, or the value of `other`. The answer
 * is exact. If the two are farther apart than the error bounds, costs two reads. Otherwise costs a
 * sum, or two. The values of two trees are those at two moments during the call. The kernel's
 * percpu_counter_tree_..._compare_value return the opposite sign: where the given value lies.
 */
int pinfold_counter_tree_compare(const struct pinfold_counter_tree *tree, int64_t with);
int pinfold_counter_tree_compare_with(const struct pinfold_counter_tree *tree,
				      const struct pinfold_counter_tree *other);

/*
 * Return -1 or 1 as the functions without "try" do, or 0 if reads alone do not tell. Never sum.
 */
int pinfold_counter_tree_try_compare(const struct pinfold_counter_tree *tree, int64_t with);
int pinfold_counter_tree_try_compare_with(const struct pinfold_counter_tree *tree,
					  const struct pinfold_counter_tree *other);

/*
 * Set the value. swap returns the value before. Promise and cost what pinfold_counter_swap does.
 * Not for signal handlers.
 */
void pinfold_counter_tree_set(struct pinfold_counter_tree *tree, int64_t value);
int64_t pinfold_counter_tree_swap(struct pinfold_counter_tree *tree, int64_t value);

/* A counter that only goes up, modulo 2^64. Takes 8 bytes for each CPU that counts. */
struct pinfold_event {
	uint64_t pinfold_private[2];
};

/* Initialises a static event counter to 0. Do not destroy such a counter. */
#define PINFOLD_EVENT_INIT { { 0, 0 } }

/* Creates an event counter at 0. Returns it, or NULL with ENOMEM. */
struct pinfold_event *pinfold_event_create(void);

/* Ends an event counter of pinfold_event_create. */
void pinfold_event_destroy(struct pinfold_event *event);

/* Add 1; add `n`. Never fail, and never wait. Cost a call and one critical section. */
void pinfold_event_inc(struct pinfold_event *event);
void pinfold_event_add(struct pinfold_event *event, uint64_t n);

/*
 * Returns the count: at least the count when the call began, at most the count when it ended. Reads
 * one word for each CPU that has counted. Pauses for some hundred nanoseconds if the count is
 * moving.
 */
uint64_t pinfold_event_sum(const struct pinfold_event *event);

/*
 * Two counts of things that happen together, for example packets and their bytes. Both only go up,
 * modulo 2^64. Take 16 bytes for each CPU that counts.
 */
struct pinfold_event_pair {
	uint64_t pinfold_private[3];
};

/* Initialises a static pair to 0 and 0. Do not destroy such a pair. */
#define PINFOLD_EVENT_PAIR_INIT { { 0, 0, 0 } }

/* Creates a pair at 0 and 0. Returns it, or NULL with ENOMEM. */
struct pinfold_event_pair *pinfold_event_pair_create(void);

/* Ends a pair of pinfold_event_pair_create. */
void pinfold_event_pair_destroy(struct pinfold_event_pair *pair);

/*
 * Adds `first` to the first count and `second` to the second one. Never fails, and never waits.
 * Costs a call and one critical section for both.
 */
void pinfold_event_pair_add(struct pinfold_event_pair *pair, uint64_t first, uint64_t second);

/*
 * Stores both counts: each at least what it was when the call began, and at most what it was when
 * the call ended. An add during the call may be in one of them only. Reads two words for each CPU
 * that has counted.
 */
void pinfold_event_pair_sum(const struct pinfold_event_pair *pair, uint64_t *first,
			    uint64_t *second);

/*
 * Counts by zone and item, as in the kernel's vmstat. A zone is the memory of a node in pages of
 * one size. Nodes are numbered from 0, as in pinfold_cache_alloc_node. Each CPU keeps a difference
 * of at most the zone's threshold to itself; the rest is in totals.
 *
 *	enum { NR_FREE, NR_DIRTY, NR_ITEMS };
 *	struct pinfold_vmstat *pool = pinfold_vmstat_create(NR_ITEMS, 0);
 *
 *	pinfold_vmstat_add(pool, PINFOLD_ZONE_NORMAL(0), NR_FREE, 1000);
 */
struct pinfold_vmstat;

/* A node's memory in pages of the usual size, and in huge pages. */
#define PINFOLD_ZONE_NORMAL(node) (2 * (node))
#define PINFOLD_ZONE_HUGE(node)   (2 * (node) + 1)

/*
 * Creates counts of `items` items, at most 256, in each zone of the machine. All are 0. A
 * `threshold` of 0 stands for the kernel's thresholds, which follow from the zone's memory and the
 * number of CPUs. Takes 160 bytes for each zone and item, and 32 bytes for each of them on each CPU
 * that counts; the number of items is rounded up to a power of two.
 *
 * Returns the counts, or NULL with EINVAL (`items`, or a threshold above 2^40), ENOMEM or ENOTSUP.
 */
struct pinfold_vmstat *pinfold_vmstat_create(size_t items, uint64_t threshold);

/* Ends the counts. */
void pinfold_vmstat_destroy(struct pinfold_vmstat *stat);

/*
 * Add `delta`; add 1; subtract 1. Any thread and any signal handler may count. They never wait.
 * Cost a call and one critical section. An add for a zone that does not exist is not counted,
 * except by pinfold_vmstat_lost. If there is no item `item`, these and the functions below set
 * errno to EINVAL, change nothing, and return 0.
 */
void pinfold_vmstat_add(struct pinfold_vmstat *stat, int zone, size_t item, int64_t delta);
void pinfold_vmstat_inc(struct pinfold_vmstat *stat, int zone, size_t item);
void pinfold_vmstat_dec(struct pinfold_vmstat *stat, int zone, size_t item);

/*
 * Return an item's total over all zones, and in one zone. A read takes a few loads for each zone,
 * and is off by at most pinfold_vmstat_error_bound, or, in a zone, by at most four thresholds for
 * each CPU that counts. A sum is exact: each zone's part was its value at one moment during the
 * call. It reads the words of each CPU, and interrupts none.
 */
int64_t pinfold_vmstat_read(const struct pinfold_vmstat *stat, size_t item);
int64_t pinfold_vmstat_read_zone(const struct pinfold_vmstat *stat, int zone, size_t item);
uint64_t pinfold_vmstat_error_bound(const struct pinfold_vmstat *stat, size_t item);
int64_t pinfold_vmstat_sum(const struct pinfold_vmstat *stat, size_t item);
int64_t pinfold_vmstat_sum_zone(const struct pinfold_vmstat *stat, int zone, size_t item);

/*
 * Stores the sums of the first `count` items in `values`, one after the other. Returns 0, or -1
 * with EINVAL, and stores nothing, if there are fewer items.
 */
int pinfold_vmstat_snapshot(const struct pinfold_vmstat *stat, int64_t *values, size_t count);

/* Returns the number of zones: two for each node. */
size_t pinfold_vmstat_zones(const struct pinfold_vmstat *stat);

/*
 * Returns a zone's threshold, or 0 if the zone does not exist. Sets the threshold of all zones and
 * items; 0 stands for the kernel's. Lowering it interrupts each CPU that runs a thread of the
 * process, once for each zone and item that other CPUs have counted. Not for signal handlers.
 * Returns 0, or -1 with EINVAL, ENOMEM or ENOTSUP.
 */
uint64_t pinfold_vmstat_threshold(const struct pinfold_vmstat *stat, int zone);
int pinfold_vmstat_set_threshold(struct pinfold_vmstat *stat, uint64_t threshold);

/* Folds what every CPU has counted into the totals. Returns how many CPUs' parts had changed. */
size_t pinfold_vmstat_fold(struct pinfold_vmstat *stat);

/* Returns how many adds were not counted, because their zone does not exist. */
uint64_t pinfold_vmstat_lost(const struct pinfold_vmstat *stat);

/*
 * A set of counters of events, which only go up: the kernel's vm_event counts. Each CPU that counts
 * takes 8 bytes for each item; the number of items is rounded up to a power of two.
 */
struct pinfold_vmevents;

/* Creates counters for `items` kinds of events, at most 256. Returns NULL with EINVAL or ENOMEM. */
struct pinfold_vmevents *pinfold_vmevents_create(size_t items);

/* Ends the counters. */
void pinfold_vmevents_destroy(struct pinfold_vmevents *events);

/*
 * Count `n` events of `item`; count one. Never wait. Cost a call and one critical section. If there
 * is no item `item`, they set errno to EINVAL and count nothing.
 */
void pinfold_vmevents_add(struct pinfold_vmevents *events, size_t item, uint64_t n);
void pinfold_vmevents_inc(struct pinfold_vmevents *events, size_t item);

/*
 * Returns how often `item` occurred, or 0 with EINVAL. Stores how often the first `count` items
 * occurred, and returns 0, or -1 with EINVAL if there are fewer. Read one word for each CPU and
 * item.
 */
uint64_t pinfold_vmevents_sum(const struct pinfold_vmevents *events, size_t item);
int pinfold_vmevents_snapshot(const struct pinfold_vmevents *events, uint64_t *values,
			      size_t count);

/* Returns how many adds were not counted, because there was no memory. */
uint64_t pinfold_vmevents_lost(const struct pinfold_vmevents *events);

/*
 * A histogram: how often values of each size were recorded. Recording is safe in signal handlers.
 * The functions that read a histogram take some 32 KiB of stack, and read 15 KiB for each CPU that
 * has recorded.
 */
struct pinfold_histogram;

/* Creates an empty histogram. Returns it, or NULL with ENOMEM. Not for signal handlers. */
struct pinfold_histogram *pinfold_histogram_create(void);

/* Ends `histogram`. Not for signal handlers. */
void pinfold_histogram_destroy(struct pinfold_histogram *histogram);

/* Records `value`. Never fails, and never waits. Costs a call and two critical sections. */
void pinfold_histogram_record(struct pinfold_histogram *histogram, uint64_t value);

/* Returns how many values were recorded. */
uint64_t pinfold_histogram_count(const struct pinfold_histogram *histogram);

/* Returns the sum of the recorded values, exactly, modulo 2^64. */
uint64_t pinfold_histogram_sum(const struct pinfold_histogram *histogram);

/*
 * Returns a value such that at least the part `q` of the recorded values is at most this value. `q`
 * is from 0 to 1. The result is too large by at most a 32nd. Returns 0 if nothing was recorded.
 */
uint64_t pinfold_histogram_quantile(const struct pinfold_histogram *histogram, double q);

/*
 * The shepherd folds watched counters from another CPU: without an interrupt, a wake-up or a
 * context switch on the CPUs that add. One round of folding is a tick. A thread on the housekeeping
 * CPUs ticks, or the program calls pinfold_shepherd_tick. A watched counter is folded by all
 * shepherds of the process.
 *
 * Do not call these functions in signal handlers.
 */
struct pinfold_shepherd;

/*
 * Folds the counts of CPUs that are isolated or without a periodic tick too. Without this flag, a
 * shepherd neither reads nor writes the counts of these CPUs. On a machine with such CPUs, Pinfold
 * keeps counts by CPU number, unless PINFOLD_RSEQ=cid asks for concurrency ids: then all counts are
 * folded. A fold interrupts no CPU, but costs the CPU a cache miss at its next add.
 */
#define PINFOLD_SHEPHERD_FOLD_ISOLATED 2u

/*
 * Creates a shepherd whose thread ticks every `interval_ms` milliseconds, at most 86400000; 0 means
 * 1000. When nothing moves, the thread ticks less often. `flags` is 0 or
 * PINFOLD_SHEPHERD_FOLD_ISOLATED.
 *
 * Returns the shepherd, or NULL with EINVAL (an argument) or ENOMEM. Starts no thread.
 */
struct pinfold_shepherd *pinfold_shepherd_create(uint64_t interval_ms, unsigned flags);

/*
 * Sets the interval of `shepherd` to `interval_ms` milliseconds, at most 86400000; 0 means 1000. If
 * its thread runs and sleeps, the thread wakes up, ticks, and follows the new interval. While
 * `pinfold set PID shepherd-interval` gives all shepherds of the process one interval, the thread
 * goes by that one. No other thread may use the shepherd meanwhile.
 *
 * Returns 0, or -1 with EINVAL.
 */
int pinfold_shepherd_set_interval(struct pinfold_shepherd *shepherd, uint64_t interval_ms);

/*
 * Has the thread of `shepherd` run on the CPUs in `cpus` only, from its next start on. `cpus` is a
 * list in the kernel's format, as "0-3,8". NULL means all CPUs that the starting thread may use,
 * which is the default. Of these, the thread uses those that are online and in the process's
 * cgroup, and avoids isolated CPUs if there are others. No other thread may use the shepherd
 * meanwhile.
 *
 * Returns 0, or -1 with EINVAL (no such list, or an empty one).
 */
int pinfold_shepherd_set_cpus(struct pinfold_shepherd *shepherd, const char *cpus);

/* Stops the thread of `shepherd` if it runs, waits for its end, and ends the shepherd. */
void pinfold_shepherd_destroy(struct pinfold_shepherd *shepherd);

/*
 * Have every shepherd of the process fold one counter, or all counters of `counters`, until
 * pinfold_shepherd_unwatch or until they are destroyed.
 *
 * Return 0, or -1 with ENOMEM.
 */
int pinfold_shepherd_watch(const struct pinfold_counter *counter);
int pinfold_shepherd_watch_many(const struct pinfold_counters *counters);

/* Stops watching `counter`. */
void pinfold_shepherd_unwatch(const struct pinfold_counter *counter);

/*
 * Folds the watched counters now, and gives back memory that idle caches hold.
 *
 * Returns how many CPUs keep something of counters of which they keep more or less than at the last
 * tick. Reads four words for each watched counter and CPU that adds, and writes none of these.
 */
size_t pinfold_shepherd_tick(const struct pinfold_shepherd *shepherd);

/*
 * Starts the thread of `shepherd`. Does nothing if the thread already runs. The thread blocks all
 * signals that other threads and processes send. In the child of a fork, the thread does not run.
 * One thread at a time may start, stop or destroy a shepherd.
 *
 * Returns 0, or -1 with ENOMEM, with EINVAL if none of the shepherd's CPUs can be used, or with the
 * errno that kept the thread from starting.
 */
int pinfold_shepherd_start(struct pinfold_shepherd *shepherd);

/* Stops the thread of `shepherd` if it runs, and waits for its end. */
void pinfold_shepherd_stop(struct pinfold_shepherd *shepherd);

/*
 * Isolation on demand: a thread that is pinned to one CPU asks the library to leave this CPU alone.
 * Until the thread leaves, other threads neither fold the CPU's counters, nor take objects from it,
 * nor fence it, nor give memory back to the system, if that can wait. docs/isolation.md has what
 * cannot.
 *
 * Do not call these functions in signal handlers. The thread that entered calls the others.
 */
struct pinfold_isolation;

/*
 * What disturbed an isolated CPU. The first four count what this library did in other threads: each
 * may have disturbed the CPU. The others come from the kernel, and count everything.
 */
struct pinfold_isolation_report {
	size_t cpu;
	uint64_t fences;     /* membarrier: an interrupt each */
	uint64_t given_back; /* calls by which memory went back: perhaps a TLB shootdown each */
	uint64_t folds;      /* counters that the program folded: a cache miss each */
	uint64_t drains;     /* how often the CPU's free objects were taken away */
	uint64_t switches;   /* context switches of the thread */
	uint64_t faults;     /* page faults of the thread */
	uint64_t interrupts; /* of the CPU; 0 if /proc/interrupts cannot be read, as the next three */
	uint64_t timer;      /* of these, the local timer's (x86 only) */
	uint64_t calls;      /* of these, function calls from other CPUs (x86 only) */
	uint64_t flushes;    /* of these, TLB shootdowns (x86 only) */
};

/*
 * Isolates the CPU to which the calling thread is pinned: folds the CPU's watched counters, moves
 * its free objects to where other CPUs find them, makes the words of caches and counters resident
 * (20 KiB or more for each CPU that has run the program), and waits for the shepherds to leave the
 * CPU, at most 0.1 s. In the child of a fork, no CPU is isolated.
 *
 * Returns the isolation, or NULL with EINVAL (the thread may run on several CPUs), EBUSY (the CPU
 * is isolated already), ENOSPC (64 CPUs are isolated) or ENOMEM.
 */
struct pinfold_isolation *pinfold_isolate_enter(void);

/* Returns what disturbed the CPU so far. Reads /proc/interrupts. */
struct pinfold_isolation_report
pinfold_isolate_report(const struct pinfold_isolation *isolation);

/*
 * Ends the isolation, and returns what disturbed the CPU. Does nothing if `isolation` is NULL, and
 * returns zeroes.
 */
struct pinfold_isolation_report pinfold_isolate_leave(struct pinfold_isolation *isolation);

#ifdef __cplusplus
}
#endif

/* Which nodes memory comes from. */
#include "pinfold_percpu.h"
#include "pinfold_policy.h"
#include "pinfold_heaps.h"
#include "pinfold_show.h"

#endif /* PINFOLD_H */
