/*
 * pinfold.h - Pinfold's C API.
 *
 * The malloc family under prefixed names. Linking with libpinfold.so or libpinfold.a also replaces malloc, free and the
 * others under their own names, the __libc_malloc family of glibc, and C++'s operator new and operator delete. A program may
 * still define some of these itself: the others call the program's, as C and C++ say. (libpinfold.a leaves the nothrow forms
 * of operator new to the C++ runtime, which calls the plain ones.)
 *
 * Functions that fail return NULL and set errno: ENOMEM if there is no memory or a size overflows, EINVAL if an alignment is
 * invalid. Before ENOMEM, everything free that the thread can reach serves, whatever size it was freed in. Functions that
 * succeed leave errno alone. All may be called from any thread, and from signal handlers.
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

/* A block of `size` bytes, aligned to 16. A size of 0 gives a block too. */
void *pinfold_malloc(size_t size);

/* Takes a block back; NULL is none. An address outside Pinfold's memory ends the process with a message that names it; a
 * second free of a small block, or an address inside one, is found later or not at all. */
void pinfold_free(void *block);

/* `count` objects of `size` bytes, zeroed. */
void *pinfold_calloc(size_t count, size_t size);

/* Grows or shrinks a block. NULL makes a new block; a size of 0 frees the block and returns NULL. Shrinking never fails: if
 * there is no smaller block, the old one stays. A block of 2 MiB or more grows where it is, or by moving its pages. */
void *pinfold_realloc(void *block, size_t size);

/* As pinfold_realloc for `count` objects of `size` bytes, failing when that overflows. */
void *pinfold_reallocarray(void *block, size_t count, size_t size);

/* As pinfold_free (C23). `size` and `align` are ignored: the block's address says what it is. */
void pinfold_free_sized(void *block, size_t size);
void pinfold_free_aligned_sized(void *block, size_t align, size_t size);

/* A block at a multiple of `align`, a power of two. */
void *pinfold_aligned_alloc(size_t align, size_t size);

/* As pinfold_aligned_alloc, with `align` rounded up to a power of two. */
void *pinfold_memalign(size_t align, size_t size);

/* Stores a block at `*to`. Returns 0, EINVAL (no power of two, or no multiple of a pointer's size) or ENOMEM. */
int pinfold_posix_memalign(void **to, size_t align, size_t size);

/* Blocks at multiples of the OS page; pvalloc gives whole pages. */
void *pinfold_valloc(size_t size);
void *pinfold_pvalloc(size_t size);

/* Bytes that may be used of a block, at least what was asked for; 0 for NULL. */
size_t pinfold_malloc_usable_size(void *block);

/* Gives all free memory back to the system, with what CPUs have cached. Returns 1 if there was any. Interrupts the CPUs that
 * run threads of this process, once. `pad` is ignored. */
int pinfold_malloc_trim(size_t pad);

/* Sets the soft limit on the memory that Pinfold holds, in bytes; 0 removes the limit. Replaces the value of
 * PINFOLD_MEMORY_LIMIT. Near the limit, free memory of all sizes serves before the held memory grows, and less free memory is
 * kept. No allocation fails because of the limit: one that cannot be served otherwise passes it. The program's own mappings,
 * stacks and code do not count. Never fails. Costs a few stores. The limit takes effect when memory is next allocated or freed
 * in a slow path. docs/tuning.md has more. */
void pinfold_memory_set_limit(size_t bytes);

/* The soft limit on the memory that Pinfold holds, in bytes; 0 if there is none. */
size_t pinfold_memory_limit(void);

/* As glibc's struct mallinfo2; fields that mean nothing here are 0. */
struct pinfold_mallinfo2 {
	size_t arena;    /* held from the system without huge blocks */
	size_t ordblks;
	size_t smblks;
	size_t hblks;
	size_t hblkhd;   /* in huge blocks */
	size_t usmblks;
	size_t fsmblks;
	size_t uordblks; /* in blocks in use, CPUs' caches included */
	size_t fordblks; /* held and free */
	size_t keepcost; /* could be given back by pinfold_malloc_trim */
};
struct pinfold_mallinfo2 pinfold_mallinfo2(void);

/* Writes an XML description to `stream`. `options` must be 0, else -1 and EINVAL. */
int pinfold_malloc_info(int options, FILE *stream);

/*
 * Object caches: objects of one size, kept ready per CPU. To allocate or to free costs a call and one critical section on this CPU's
 * array of free objects, which are not touched. All functions may be called from any thread; from signal handlers those that allocate
 * or free, of which an allocation may fail there with ENOMEM when it has interrupted another. Who frees an object to another cache than
 * its own, or twice, corrupts caches that make no checks.
 *
 *	struct pinfold_cache *sessions = pinfold_cache_create("session", sizeof(struct session), 0, 0, NULL);
 *	struct session *session = pinfold_cache_alloc(sessions);
 *	...
 *	pinfold_cache_free(sessions, session);
 *	if (pinfold_cache_destroy(sessions) == -1)
 *		pinfold_cache_leaks(sessions, print, NULL);
 */
struct pinfold_cache;

/* Checks, beside those that the environment variable PINFOLD_SLAB_DEBUG asks for, and the letters that these have there. A cache that
 * checks takes a lock for each object. */
#define PINFOLD_SLAB_CONSISTENCY_CHECKS 0x1u /* F: every address that is freed, and what the cache knows of it */
#define PINFOLD_SLAB_RED_ZONE           0x2u /* Z: bytes on both sides of each object */
#define PINFOLD_SLAB_POISON             0x4u /* P: the bytes of free objects, unless there is a constructor */
#define PINFOLD_SLAB_STORE_USER         0x8u /* U: who allocated and who freed each object last, with backtraces */
#define PINFOLD_SLAB_TRACE              0x10u /* T: a line on standard error for each allocation and free */

/* Finds double frees, frees of what is not the cache's and writes after the free; zeroes what is freed, and gives it out late and in no
 * order that could be foretold. Or not, whatever PINFOLD_HARDENED says. */
#define PINFOLD_SLAB_HARDENED           0x100u
#define PINFOLD_SLAB_NOT_HARDENED       0x200u

/* Objects begin at cache lines, small ones at even parts of them. */
#define PINFOLD_SLAB_HWCACHE_ALIGN      0x400u

/* A cache of objects of `size` bytes, from 1 to 65536, at multiples of `align`, a power of two up to 65536; 0 suits any type of
 * that size without an alignment of its own. `name` is kept up to 32 bytes. `ctor` may be NULL; else it initialises each object when the
 * slab of it is made, once, not at each allocation: who frees an object leaves it as `ctor` did. It runs under a lock: it must not
 * use this cache, throw or longjmp. NULL with EINVAL (name, size 0, align or flags), E2BIG (size), ENOSPC (4096 caches), or ENOMEM. */
struct pinfold_cache *pinfold_cache_create(const char *name, size_t size, size_t align, unsigned flags, void (*ctor)(void *));

/* Ends a cache; NULL is none. A descriptor of some hundred bytes stays: caches are for kinds of objects, not for one use. Its sheaves and pools end before it. What was freed deferred is waited for. 0, or -1 and the cache is as it
 * was: with EBUSY when objects have not come back, with ENOTSUP where the kernel has no fence. Interrupts the CPUs that run threads of this process, once. */
int pinfold_cache_destroy(struct pinfold_cache *cache);

/* An object, uninitialised unless there is a constructor, or NULL with ENOMEM. */
void *pinfold_cache_alloc(const struct pinfold_cache *cache);

/* An object that reads as zeroes; NULL with EINVAL when there is a constructor. */
void *pinfold_cache_zalloc(const struct pinfold_cache *cache);

/* An object of node `node`'s memory, or of the nearest with memory; -1 is the thread's own node, -2 and so on are EINVAL. Nodes count
 * modulo those that the allocator tells apart. Takes the node's lock. */
void *pinfold_cache_alloc_node(const struct pinfold_cache *cache, int node);

/* An object of node `node`'s memory or none: NULL with ENOMEM when that node has none or is not there, with EINVAL below 0. */
void *pinfold_cache_alloc_node_exact(const struct pinfold_cache *cache, int node);

/* Takes an object back; NULL is none. Never fails, and leaves errno alone. */
void pinfold_cache_free(const struct pinfold_cache *cache, void *object);

/* Fills `objects` with `count` objects, many in one critical section; returns how many, fewer only with ENOMEM. */
size_t pinfold_cache_alloc_bulk(const struct pinfold_cache *cache, size_t count, void **objects);

/* Takes `count` objects back, none of them NULL. */
void pinfold_cache_free_bulk(const struct pinfold_cache *cache, size_t count, void *const *objects);

/* Gives everything that is free back to the system, what CPUs have cached included; returns how many slabs. -1 with ENOTSUP
 * where the kernel has no fence; then what CPUs have cached stays. Interrupts as destroy does. */
ptrdiff_t pinfold_cache_shrink(const struct pinfold_cache *cache);

/* Sets how many objects a sheaf of the cache holds, from 4 to 125, for those filled or emptied from now on. Without this it
 * is 128 KiB of objects, and the least that works for caches that are created when one CPU's sheaves of all caches together could
 * hold the budget already, 32 MiB at first. */
void pinfold_cache_set_sheaf_capacity(const struct pinfold_cache *cache, size_t objects);
void pinfold_slab_set_sheaf_budget(size_t bytes);

/* Bytes of an object, as the cache was created with. */
size_t pinfold_cache_size(const struct pinfold_cache *cache);
/* Its name. Stays as long as the cache does. */
const char *pinfold_cache_name(const struct pinfold_cache *cache);
/* The checks that it makes, from PINFOLD_SLAB_CONSISTENCY_CHECKS to PINFOLD_SLAB_TRACE; the environment's are among them. */
unsigned pinfold_cache_debug_flags(const struct pinfold_cache *cache);
/* Objects in use, with those that CPUs have cached. Exact after a shrink or a destroy that found objects in use. */
size_t pinfold_cache_in_use(const struct pinfold_cache *cache);

/* What the slow paths have counted. */
struct pinfold_slab_statistics {
	uint64_t alloc_slowpath; /* allocations that found the CPU's array empty */
	uint64_t free_slowpath;  /* frees that found it full */
	uint64_t barn_get;       /* full arrays taken from the node */
	uint64_t barn_put;       /* full arrays given to the node */
	uint64_t slab_alloc;     /* slabs made */
	uint64_t slab_free;      /* slabs given back */
	size_t slabs;            /* slabs there are */
	size_t sheaf_capacity;   /* objects that an array holds at most */
	size_t stride;           /* bytes from one object to the next */
};
struct pinfold_slab_statistics pinfold_cache_statistics(const struct pinfold_cache *cache);

/* What was found wrong. */
enum pinfold_slab_fault {
	PINFOLD_SLAB_OVERWRITTEN = 1,        /* bytes in or around an object: somebody wrote there */
	PINFOLD_SLAB_DOUBLE_FREE = 2,        /* an object was freed that is free */
	PINFOLD_SLAB_WRITTEN_AFTER_FREE = 3, /* a free object of a hardened cache was written to */
	PINFOLD_SLAB_NOT_AN_OBJECT = 4,      /* an address was freed that is no object's */
	PINFOLD_SLAB_WRONG_CACHE = 5,        /* an object was freed to this cache that is another's */
	PINFOLD_SLAB_LEAKED = 6,             /* an object has not come back */
	PINFOLD_SLAB_RECORDS = 7             /* the cache's own records contradict each other */
};

/* A report. What it points to lasts as long as the call that it is given to. */
struct pinfold_slab_report {
	const char *text;   /* all of it, in lines, as standard error would have it */
	const char *cache;  /* the cache's name */
	const void *object; /* the object, or the address that was freed */
	size_t size;        /* bytes of the object */
	ptrdiff_t offset;   /* of overwritten bytes the first one's distance from the object's start; else 0 */
	int kind;           /* enum pinfold_slab_fault */
};

/* What to do about a report: end the process, as what comes next cannot be trusted; or go on: bytes are put right, and an object that
 * cannot be trusted is never used again. */
#define PINFOLD_SLAB_ABORT    0
#define PINFOLD_SLAB_CONTINUE 1

/* Has `handler` decide about what caches find from now on, in the whole process. NULL: reports go to standard error and the process
 * ends, as it is at first. 0, or -1 with ENOMEM. It is called without any lock in the thread that has found it, and may allocate; it must
 * not throw or longjmp. */
int pinfold_slab_on_report(int (*handler)(const struct pinfold_slab_report *report, void *context), void *context);

/* Looks the cache over: its records, and the bytes around objects where it checks these, which are put right. Returns how many faults there
 * are and hands the first sixteen to `each`, which may be NULL. */
size_t pinfold_cache_validate(const struct pinfold_cache *cache, void (*each)(const struct pinfold_slab_report *report, void *context),
			      void *context);

/* Returns how many objects are in use in a cache that checks and hands the first sixteen to `each`, which may be NULL, with who allocated
 * them if it keeps that. Other caches do not know: 0; see pinfold_cache_in_use. */
size_t pinfold_cache_leaks(const struct pinfold_cache *cache, void (*each)(const struct pinfold_slab_report *report, void *context),
			   void *context);

/*
 * Objects that are certain, for work that must not fail halfway. A sheaf is filled before the work begins and is one thread's at a time; a
 * pool keeps a reserve for when the system has no more memory, and is anyone's. Both end before their cache does. An object of theirs is as
 * any other of the cache.
 *
 *	struct pinfold_sheaf *nodes = pinfold_cache_prefill(cache, 3);
 *	if (!nodes)
 *		return -1;
 *	...                                             up to three of pinfold_sheaf_alloc(nodes), none of which fails
 *	pinfold_sheaf_return(nodes);
 */
struct pinfold_sheaf;

/* Sets `n` objects apart, any number, and fetches them now. NULL with ENOMEM, and nothing is kept. */
struct pinfold_sheaf *pinfold_cache_prefill(const struct pinfold_cache *cache, size_t n);

/* An object, without lock, system call or critical section; NULL with ENOMEM when none is left. pinfold_cache_free takes it back. */
void *pinfold_sheaf_alloc(struct pinfold_sheaf *sheaf);

/* How many allocations are certain. */
size_t pinfold_sheaf_len(const struct pinfold_sheaf *sheaf);

/* Fetches what is missing for `n` certain allocations. 0, or -1 with ENOMEM; there are as many then as before, or more. */
int pinfold_sheaf_refill(struct pinfold_sheaf *sheaf, size_t n);

/* Ends a sheaf: what is left goes back to the cache. NULL is none. */
void pinfold_sheaf_return(struct pinfold_sheaf *sheaf);

struct pinfold_mempool;

/* A pool with a reserve of `min_nr` objects. NULL with ENOMEM. */
struct pinfold_mempool *pinfold_mempool_create(const struct pinfold_cache *cache, size_t min_nr);

/* An object of the cache, or where that has no memory, of the reserve; NULL with ENOMEM when that is empty too. */
void *pinfold_mempool_alloc(const struct pinfold_mempool *pool);

/* As pinfold_mempool_alloc, but waits: until somebody frees an object to the pool, or there is memory again. Only while others hold objects
 * that they free without waiting here, and not in signal handlers. */
void *pinfold_mempool_alloc_wait(const struct pinfold_mempool *pool);

/* An object of the reserve, also when the cache has some; NULL with ENOMEM. */
void *pinfold_mempool_alloc_preallocated(const struct pinfold_mempool *pool);

/* Takes an object of the pool or of its cache back: into the reserve if that lacks one. NULL is none. Leaves errno alone. */
void pinfold_mempool_free(const struct pinfold_mempool *pool, void *object);

/* Keeps `min_nr` objects from now on. 0, or -1 with ENOMEM: then the reserve is as before, or has what there was and fills up from what
 * is freed. */
int pinfold_mempool_resize(const struct pinfold_mempool *pool, size_t min_nr);

/* How many objects the reserve has at this moment. */
size_t pinfold_mempool_available(const struct pinfold_mempool *pool);

/* Ends a pool: its reserve goes back to the cache. Objects taken from it stay. NULL is none. */
void pinfold_mempool_destroy(struct pinfold_mempool *pool);

/*
 * Readers look at objects without a lock. Who takes an object out of their sight frees it deferred: it is free when every reader of that
 * moment has left. To enter and to leave costs a call and one critical section each; where the kernel has no fence or CPUs are isolated,
 * a memory fence more. Both may be called in signal handlers, and readers nest.
 *
 *	struct pinfold_reader reader = pinfold_grace_enter();
 *	struct route *route = atomic_load(&current);
 *	...                                             stays as it is until
 *	pinfold_grace_leave(reader);
 *
 *	struct route *old = atomic_exchange(&current, new);
 *	pinfold_cache_free_deferred(routes, old);
 */
struct pinfold_reader {
	uint64_t pinfold_private[2];
};

/* Becomes a reader; leave in the same thread, once. In the child of a fork there are no readers. */
struct pinfold_reader pinfold_grace_enter(void);
void pinfold_grace_leave(struct pinfold_reader reader);

/* Returns when every reader of this moment has left: 0, or -1 with ENOTSUP when the kernel has become unable to fence. Interrupts as
 * destroy does. Not for readers, who would wait for themselves, nor for signal handlers. */
int pinfold_grace_synchronize(void);

/* Takes an object back that readers may still look at; those who enter from now on do not find it. NULL is none. Costs what
 * pinfold_cache_free does, and never waits, but where there is no memory to note what waits: then up to 10 ms, and if readers stay in as
 * long, the object is lost (attribute free_rcu_sheaf_fail). Leaves errno alone. */
void pinfold_cache_free_deferred(const struct pinfold_cache *cache, void *object);

/* Returns when everything that was freed deferred to this cache is free: 0, or -1 with ENOTSUP. For whom, as synchronize. */
int pinfold_cache_flush_deferred(const struct pinfold_cache *cache);

/* What caches say of themselves. Disturbs nobody; exact when nobody uses them meanwhile. docs/slabinfo.md explains all numbers. */

/* A cache, or all for NULL, as text in the form of /proc/slabinfo, version 2.1. As snprintf: writes at most `size` bytes, the NUL among
 * them, and returns the length of all of it, which another call may find changed. `buffer` may be NULL when `size` is 0. */
size_t pinfold_slabinfo(const struct pinfold_cache *cache, char *buffer, size_t size);

/* Stores what /sys/kernel/slab/<cache>/<name> would say: object_size, objects, slabs, alloc_slowpath and so on. 0, or -1 with EINVAL when
 * there is no such attribute here. */
int pinfold_cache_attribute(const struct pinfold_cache *cache, const char *name, uint64_t *value);

/* A cache for those who look on; see the attributes of these names. The name lasts as long as the call that it is given to. */
struct pinfold_cache_info {
	const char *name;
	size_t object_size, slab_size; /* bytes of an object, and from one to the next */
	size_t objects, total_objects; /* in use; in all slabs */
	size_t cpu_objects, barn_objects; /* free, in CPUs' and in nodes' arrays */
	size_t slabs;
	unsigned flags; /* as given to pinfold_cache_create: the checks, PINFOLD_SLAB_HARDENED */
};

/* Hands all caches of the process to `each`, malloc's among them, and returns how many. No lock is held meanwhile: `each` may allocate,
 * and caches that are made or ended meanwhile are or are not among them. */
size_t pinfold_caches_each(void (*each)(const struct pinfold_cache_info *info, void *context), void *context);

/*
 * Counters. Every CPU adds to words of its own; no add takes a lock or a system call, and sums are exact all the same.
 * Batches are from 1 to 2^40. The value wraps around at 2^63. After fork the child goes on with copies. All functions may
 * be called from any thread; from signal handlers those that add, read or sum, and not those that create, destroy, set, swap,
 * limit or change a batch.
 *
 * The child of a vfork must not count. It shares the parent's memory, but the kernel does not
 * protect its counting from the parent's threads: counts of the child and of the parent may be
 * lost, in this call and in later ones.
 *
 *	static struct pinfold_counter open_files = PINFOLD_COUNTER_INIT(0);
 *	...
 *	pinfold_counter_inc(&open_files);
 *	printf("%lld\n", (long long)pinfold_counter_sum(&open_files));
 */

/* A counter that goes up and down. It takes 128 bytes, so that adds do not slow down those to its
 * neighbours in an array, and 32 more for each CPU that adds and for the total, from the first add
 * on. Functions that write a counter take no pointer to const: a counter must not be const. */
struct pinfold_counter {
	uint64_t pinfold_private[16] __attribute__((aligned(16))); /* as malloc aligns */
};
/* For statics: a counter at `value` with the default batch. It need not be destroyed. */
#define PINFOLD_COUNTER_INIT(value) \
	{ { 64, 0, 0, 0, 0, 0, 0, 0, (uint64_t)(value), 0, 0, 0, 0, 0, 0, 0 } }

/* The default batch: 1024, or twice the number of CPUs if that is more. */
#define PINFOLD_BATCH_DEFAULT UINT64_MAX

/* A counter at `value` of which each CPU may keep `batch` to itself. NULL with EINVAL or ENOMEM. */
struct pinfold_counter *pinfold_counter_create(int64_t value, uint64_t batch);

/* A counter that widens its batch by itself while its error bound stays at most `drift`. NULL with EINVAL or ENOMEM. */
struct pinfold_counter *pinfold_counter_create_max_drift(int64_t value, uint64_t drift);

/* Ends a counter of the two functions above; NULL is none. */
void pinfold_counter_destroy(struct pinfold_counter *counter);

/* Any thread, any signal handler; never waits. */
void pinfold_counter_add(struct pinfold_counter *counter, int64_t n);
void pinfold_counter_sub(struct pinfold_counter *counter, int64_t n);
void pinfold_counter_inc(struct pinfold_counter *counter);
void pinfold_counter_dec(struct pinfold_counter *counter);

/* The value at once, off by at most the error bound. */
int64_t pinfold_counter_read(const struct pinfold_counter *counter);
uint64_t pinfold_counter_error_bound(const struct pinfold_counter *counter);

/* The value exactly, as it was at one moment during the call, however many add meanwhile. */
int64_t pinfold_counter_sum(const struct pinfold_counter *counter);

/* Two numbers between which the value was at a moment during the call; disturbs nobody. */
void pinfold_counter_bounds(const struct pinfold_counter *counter, int64_t *low, int64_t *high);

/* -1, 0 or 1: the value is below, at or above `with`. Exact, and quick when they are far apart. */
int pinfold_counter_compare(const struct pinfold_counter *counter, int64_t with);

/* Adds `amount` unless the value would pass `limit` by it, upwards or, for a negative amount,
 * downwards. Returns whether it did; true for an amount of 0. Far from the limit it takes no lock. */
bool pinfold_counter_limited_add(struct pinfold_counter *counter, int64_t limit, int64_t amount);

/* Sets the value; swap returns what it was, and nothing that is added meanwhile is lost. These interrupt the CPUs that run
 * threads of this process, if another CPU has added within its batch since the last set or swap. */
void pinfold_counter_set(struct pinfold_counter *counter, int64_t value);
int64_t pinfold_counter_swap(struct pinfold_counter *counter, int64_t value);

/* Brings what every CPU has added into what read returns; returns how many CPUs' words had moved. Runs here alone. */
size_t pinfold_counter_fold(struct pinfold_counter *counter);

/* The batch; a lower one interrupts as set does. 0, or -1 with EINVAL, ENOMEM, or ENOTSUP where the kernel has no fence. */
uint64_t pinfold_counter_batch(const struct pinfold_counter *counter);
int pinfold_counter_set_batch(struct pinfold_counter *counter, uint64_t batch);

/* Thousands of counters, packed, with `values` to begin with. NULL with EINVAL or ENOMEM. Its counters are used as any
 * other and destroyed together. `at` gives NULL with EINVAL when there are not so many. */
struct pinfold_counters;
struct pinfold_counters *pinfold_counters_create(const int64_t *values, size_t count, uint64_t batch);
struct pinfold_counter *pinfold_counters_at(const struct pinfold_counters *counters, size_t nth);
void pinfold_counters_destroy(struct pinfold_counters *counters);

/* A counter that only goes up, modulo 2^64: 8 bytes for each CPU that counts. */
struct pinfold_event {
	uint64_t pinfold_private[2];
};
#define PINFOLD_EVENT_INIT { { 0, 0 } }
struct pinfold_event *pinfold_event_create(void);
void pinfold_event_destroy(struct pinfold_event *event);
void pinfold_event_inc(struct pinfold_event *event);
void pinfold_event_add(struct pinfold_event *event, uint64_t n);
uint64_t pinfold_event_sum(const struct pinfold_event *event);

/* How often values of each size occurred; quantiles are at most a 32nd too large. Reading one takes
 * some 32 KiB of stack. */
struct pinfold_histogram;
struct pinfold_histogram *pinfold_histogram_create(void);
void pinfold_histogram_destroy(struct pinfold_histogram *histogram);
void pinfold_histogram_record(struct pinfold_histogram *histogram, uint64_t value);
uint64_t pinfold_histogram_count(const struct pinfold_histogram *histogram);
uint64_t pinfold_histogram_sum(const struct pinfold_histogram *histogram);
uint64_t pinfold_histogram_quantile(const struct pinfold_histogram *histogram, double q);

/*
 * The shepherd folds watched counters from afar: without an interrupt, a wake-up or a context switch on the CPUs that add. It is a
 * thread on housekeeping CPUs, or whoever calls tick. What is watched is the process's affair, whichever shepherd looks.
 */
struct pinfold_shepherd;

/* Do not even read the counts of isolated CPUs (where counts are kept by CPU number). */
#define PINFOLD_SHEPHERD_SPARE_ISOLATED 1u

/* Looks every `interval_ms` milliseconds, 0 for 1000. NULL with EINVAL or ENOMEM. */
struct pinfold_shepherd *pinfold_shepherd_create(uint64_t interval_ms, unsigned flags);
void pinfold_shepherd_destroy(struct pinfold_shepherd *shepherd);

/* 0, or -1 with ENOMEM. A counter that is destroyed is watched no more. */
int pinfold_shepherd_watch(const struct pinfold_shepherd *shepherd, const struct pinfold_counter *counter);
int pinfold_shepherd_watch_many(const struct pinfold_shepherd *shepherd, const struct pinfold_counters *counters);
void pinfold_shepherd_unwatch(const struct pinfold_shepherd *shepherd, const struct pinfold_counter *counter);

/* Folds now; returns how many CPUs' words had moved. */
size_t pinfold_shepherd_tick(const struct pinfold_shepherd *shepherd);

/* Starts the thread, 0 or -1 with errno; stops it and waits for it. One thread at a time may do so. */
int pinfold_shepherd_start(struct pinfold_shepherd *shepherd);
void pinfold_shepherd_stop(struct pinfold_shepherd *shepherd);

#ifdef __cplusplus
}
#endif

/* Which nodes memory comes from. */
#include "pinfold_policy.h"

#endif /* PINFOLD_H */
