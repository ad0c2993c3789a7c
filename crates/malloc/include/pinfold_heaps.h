/*
 * Pinfold: heaps, which are blocks of any size that are counted, limited and destroyed together.
 * pinfold.h includes this header.
 *
 *	struct pinfold_heap *tenant;
 *
 *	tenant = pinfold_heap_create("tenant-7", 64 << 20, 0, NULL);
 *	char *name = pinfold_heap_malloc(tenant, 100);
 *	...
 *	pinfold_heap_destroy(tenant);
 *
 * The last call frees `name` too. docs/heaps.md tells when to use heaps, and what they cost.
 */
#ifndef PINFOLD_HEAPS_H
#define PINFOLD_HEAPS_H

#include <stddef.h>
#include <stdint.h>

#include "pinfold_policy.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pinfold_heap;

/*
 * Creates a heap.
 *
 * `name`   text in UTF-8. The heap keeps the first 32 bytes.
 * `limit`  the most bytes that the heap may hold, or 0 for no limit. Free memory in its slabs and
 *          in the CPUs' sheaves counts too.
 * `flags`  PINFOLD_SLAB_HARDENED, PINFOLD_SLAB_NOT_HARDENED, or 0.
 * `policy` where the heap's memory lies, or NULL for the process's policy.
 *
 * Returns the heap, or NULL with EINVAL (`name`, `flags`, or none of the policy's nodes can be used
 * here), ENOSPC (3,674 heaps and caches exist) or ENOMEM.
 */
struct pinfold_heap *pinfold_heap_create(const char *name, size_t limit, unsigned flags,
					 const pinfold_mempolicy_t *policy);

/*
 * Allocate a block, like malloc, calloc and aligned_alloc. `align` is a power of two. Return NULL
 * with ENOMEM if the heap may not hold more or the system has no memory, and with EINVAL for a
 * wrong `align`. pinfold_heap_malloc of up to 64 KiB costs about as much as malloc.
 *
 * free, realloc and malloc_usable_size of Pinfold's malloc also accept the blocks.
 */
void *pinfold_heap_malloc(struct pinfold_heap *heap, size_t size);
void *pinfold_heap_calloc(struct pinfold_heap *heap, size_t count, size_t size);
void *pinfold_heap_aligned_alloc(struct pinfold_heap *heap, size_t align, size_t size);

/*
 * Resizes a block of `heap`. Allocates a block if `block` is NULL. A `size` of 0 is served like any
 * other. Returns NULL with ENOMEM and leaves the block as it is if the block cannot grow.
 */
void *pinfold_heap_realloc(struct pinfold_heap *heap, void *block, size_t size);

/* Frees a block of any heap. Does nothing if `block` is NULL. Keeps errno. */
void pinfold_heap_free(struct pinfold_heap *heap, void *block);

/*
 * Destroys the heap and frees all its blocks at once. No thread may use the heap or a block of it
 * any more, and none may be in a scope of it. After a scope, the blocks include what the C library
 * and other code allocated there and kept: buffers of standard streams, thread-local values, tables
 * that were filled at their first use. Interrupts the CPUs that run threads of this process, once,
 * and walks the page map: two bytes for each 64 KiB of the process's memory. Does nothing if `heap`
 * is NULL.
 *
 * Returns 0, or -1 with ENOTSUP if the kernel cannot fence, and EBUSY in a signal handler that
 * interrupted the allocator. The heap is unusable then, and its memory stays for good.
 */
int pinfold_heap_destroy(struct pinfold_heap *heap);

/* Sets the most bytes that the heap may hold, or 0 for no limit. Frees nothing. */
void pinfold_heap_set_limit(struct pinfold_heap *heap, size_t limit);

/* What a heap holds, in bytes. */
struct pinfold_heap_statistics {
	size_t held;          /* what it holds now, including free memory */
	size_t peak;          /* the most that it ever held */
	size_t limit;         /* the most that it may hold, or 0 */
	size_t refusals;      /* how often the limit refused memory */
	size_t free_in_slabs; /* the part of `held` that is free objects in slabs */
	size_t large;         /* the part of `held` that is runs and mappings */
};

/* Returns what the heap holds. Takes the locks of the heap's caches. */
struct pinfold_heap_statistics pinfold_heap_statistics(const struct pinfold_heap *heap);

/* Returns how many bytes the heap holds. One load. */
size_t pinfold_heap_held(const struct pinfold_heap *heap);

/*
 * Gives the heap's free memory back, including what the CPUs' sheaves hold. Interrupts the CPUs
 * that run threads of this process. Returns 0, or -1 with ENOTSUP if the kernel cannot fence, and
 * EBUSY in a signal handler that interrupted the allocator or another thread's operation that does
 * not end.
 */
int pinfold_heap_shrink(struct pinfold_heap *heap);

/*
 * Begin and end a scope: until its end, Pinfold's malloc, calloc, realloc and C++'s operators
 * allocate from `heap` in the calling thread, also in signal handlers that interrupt it. Any thread
 * may free the blocks. Code of other threads is not concerned, also not of threads that are made in
 * the scope. Scopes of a thread end in the reverse order of their beginnings. If the heap cannot
 * serve a block for another reason than its limit, malloc serves it, and does not count it.
 *
 *	int before = pinfold_heap_enter(tenant);
 *	serve(request);
 *	pinfold_heap_leave(before);
 *
 * The first scope of a process closes malloc's fast path for good, which costs each later malloc of
 * any thread some nanoseconds. A scope itself costs a few stores. Heap profiles and counts of calls
 * leave the heap's blocks out.
 *
 * pinfold_heap_enter returns what to pass to pinfold_heap_leave, or -1 with ENOTSUP on a processor
 * architecture without scopes, and if there is no memory to start the allocator. For -1,
 * pinfold_heap_leave does nothing.
 */
int pinfold_heap_enter(struct pinfold_heap *heap);
void pinfold_heap_leave(int before);

#ifdef __cplusplus
}
#endif

#endif
