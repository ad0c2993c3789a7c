/*
 * pinfold.h - Pinfold's C API.
 *
 * The malloc family under prefixed names. Linking with the shared library also replaces malloc, free and the
 * others under their own names. Functions that fail return NULL and set errno: ENOMEM for want of memory and for sizes
 * that overflow, EINVAL for bad alignments. All may be called from any thread, and from signal handlers.
 */
#ifndef PINFOLD_H
#define PINFOLD_H

#include <stddef.h>
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

/* Grows or shrinks a block. NULL makes a new one; a size of 0 frees it and returns NULL. */
void *pinfold_realloc(void *block, size_t size);

/* As pinfold_realloc for `count` objects of `size` bytes, failing when that overflows. */
void *pinfold_reallocarray(void *block, size_t count, size_t size);

/* As pinfold_free (C23). */
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

/* Gives all free memory back to the system, what CPUs have cached included; 1 when there was any. Interrupts the CPUs
 * that run threads of this process, once. `pad` is ignored. */
int pinfold_malloc_trim(size_t pad);

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

#ifdef __cplusplus
}
#endif

#endif /* PINFOLD_H */
