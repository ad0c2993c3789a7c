/*
 * Heaps and scopes from C: blocks, limits, errno, and that malloc's functions take the blocks.
 */
#include "check.h"
#include "pinfold.h"
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t sizes[] = {1, 100, 5000, 60000, 100000, 3 << 20, 70 << 20};
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static void blocks(struct pinfold_heap *heap)
{
	for (int nth = 0; nth < SIZES; nth++) {
		size_t size = sizes[nth];
		char *block = pinfold_heap_malloc(heap, size);
		char *zeroed = pinfold_heap_calloc(heap, size, 1);
		char *aligned = pinfold_heap_aligned_alloc(heap, 4096, size);

		CHECK(block && zeroed && aligned);
		CHECK((size_t)aligned % 4096 == 0);
		CHECK(zeroed[0] == 0 && zeroed[size - 1] == 0);
		CHECK(malloc_usable_size(block) >= size);
		memset(block, 7, size);
		block = pinfold_heap_realloc(heap, block, size * 3);
		CHECK(block && block[0] == 7 && block[size - 1] == 7);
		/* The C library's names take blocks of heaps. */
		size_t held = pinfold_heap_held(heap);
		block = realloc(block, size * 7);
		CHECK(block && block[0] == 7 && pinfold_heap_held(heap) >= held);
		free(block);
		errno = 5;
		pinfold_heap_free(heap, zeroed);
		pinfold_heap_free(heap, NULL);
		CHECK(errno == 5);
		free(aligned);
	}
	CHECK(pinfold_heap_shrink(heap) == 0);
	CHECK(pinfold_heap_held(heap) == 0);
}

static void *outside(void *heap)
{
	size_t held = pinfold_heap_held(heap);
	char *block = malloc(8 << 20);

	CHECK(block && pinfold_heap_held(heap) == held);
	free(block);
	return NULL;
}

static void scopes(struct pinfold_heap *heap)
{
	pthread_t thread;
	int before = pinfold_heap_enter(heap);
	CHECK(before == 0);
	char *block = malloc(4 << 20);
	char *copy = strdup("of the heap");
	CHECK(block && copy && pinfold_heap_held(heap) > 4 << 20);
	CHECK(pthread_create(&thread, NULL, outside, heap) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	pinfold_heap_leave(before);

	size_t held = pinfold_heap_held(heap);
	char *other = malloc(4 << 20);
	CHECK(other && pinfold_heap_held(heap) == held);
	free(other);
	free(block);
	CHECK(pinfold_heap_held(heap) < 4 << 20);
	CHECK(strcmp(copy, "of the heap") == 0);

	pinfold_heap_set_limit(heap, 1 << 20);
	before = pinfold_heap_enter(heap);
	errno = 0;
	CHECK(malloc(2 << 20) == NULL && errno == ENOMEM);
	CHECK(pinfold_heap_statistics(heap).refusals > 0);
	CHECK(pinfold_heap_statistics(heap).limit == 1 << 20);
	pinfold_heap_leave(before);
	free(copy);
}

int main(void)
{
	struct pinfold_heap *heap = pinfold_heap_create("c heap", 0, 0, NULL);

	CHECK(heap != NULL);
	blocks(heap);
	scopes(heap);
	CHECK(pinfold_heap_destroy(heap) == 0);
	CHECK(pinfold_heap_destroy(NULL) == 0);
	/* The C library uses the memory of the thread that was made in the scope again. */
	pthread_t again;
	struct pinfold_heap *next = pinfold_heap_create("next", 0, 0, NULL);
	for (int nth = 0; nth < 10000; nth++)
		CHECK(memset(pinfold_heap_malloc(next, 16 + nth % 500), 0xff, 16));
	CHECK(pthread_create(&again, NULL, outside, next) == 0);
	CHECK(pthread_join(again, NULL) == 0);
	CHECK(pinfold_heap_destroy(next) == 0);

	CHECK(pinfold_heap_create(NULL, 0, 0, NULL) == NULL && errno == EINVAL);
	CHECK(pinfold_heap_create("flags", 0, 1, NULL) == NULL && errno == EINVAL);
	heap = pinfold_heap_create("hardened", 1 << 20, PINFOLD_SLAB_HARDENED, NULL);
	CHECK(heap != NULL);
	CHECK(pinfold_heap_aligned_alloc(heap, 3, 8) == NULL && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_heap_malloc(heap, 4 << 20) == NULL && errno == ENOMEM);
	/* All blocks go back at once. */
	for (int nth = 0; nth < 1000; nth++)
		CHECK(pinfold_heap_malloc(heap, 100) != NULL);
	CHECK(pinfold_heap_destroy(heap) == 0);
	puts("ok");
	return 0;
}
