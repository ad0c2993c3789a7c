/* Blocks that pinfold_defrag moves let memory go back. Linked with the library. Prints "ok". */
#define _GNU_SOURCE
#include "check.h"
#include "pinfold.h"

#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 200000, THREADS = 4 };

static unsigned char *blocks[BLOCKS];
static unsigned random_state = 1;

static unsigned next_random(void)
{
	random_state = random_state * 1103515245 + 12345;
	return random_state >> 8;
}

static size_t size_of(int nth)
{
	static const size_t sizes[] = { 40, 100, 300, 700, 1500 };
	return sizes[nth % 5];
}

static void check_content(int nth)
{
	for (size_t at = 0; at < size_of(nth); at++)
		CHECK(blocks[nth][at] == (unsigned char)(nth + at));
}

/* Fills slabs, and frees 9 of 10 blocks at random. */
static void scatter(void)
{
	for (int nth = 0; nth < BLOCKS; nth++) {
		CHECK((blocks[nth] = malloc(size_of(nth))));
		for (size_t at = 0; at < size_of(nth); at++)
			blocks[nth][at] = (unsigned char)(nth + at);
	}
	for (int nth = 0; nth < BLOCKS; nth++)
		if (next_random() % 10) {
			free(blocks[nth]);
			blocks[nth] = NULL;
		}
}

/* Moves a block by the two halves of pinfold_defrag. */
static void *by_halves(void *block)
{
	if (!pinfold_defrag_hint(block))
		return NULL;
	size_t size = malloc_usable_size(block);
	void *moved = pinfold_defrag_malloc(size);
	CHECK(moved && malloc_usable_size(moved) == size);
	memcpy(moved, block, size);
	pinfold_defrag_free(block);
	return moved;
}

/* Moves every block as long as that helps. Returns how many moves there were. */
static int defrag(int halves)
{
	int moves = 0;

	for (int pass = 0; pass < 20; pass++) {
		int before = moves;
		for (int nth = 0; nth < BLOCKS; nth++) {
			int hint = pinfold_defrag_hint(blocks[nth]);
			errno = 4711;
			unsigned char *moved = halves ? by_halves(blocks[nth])
					      : pinfold_defrag(blocks[nth]);
			CHECK(errno == 4711);
			CHECK(blocks[nth] || (!moved && !hint));
			if (!moved)
				continue;
			CHECK(hint && moved != blocks[nth]);
			blocks[nth] = moved;
			moves++;
		}
		if (moves == before)
			break;
	}
	return moves;
}

static void free_all(void)
{
	for (int nth = 0; nth < BLOCKS; nth++) {
		if (blocks[nth])
			check_content(nth);
		free(blocks[nth]);
		blocks[nth] = NULL;
	}
}

static size_t held(void)
{
	pinfold_malloc_trim(0);
	return pinfold_mallinfo2().arena;
}

/* Caches that check move no block. */
static int any_checks(void)
{
	return getenv("PINFOLD_HARDENED") || getenv("PINFOLD_SLAB_DEBUG");
}

/* Memory held falls by more than half, and then no block moves any more. */
static void gives_back(int halves)
{
	scatter();
	size_t without = held();
	int moves = defrag(halves);
	size_t with = held();
	int checks = any_checks();
	if (!checks && (with >= without / 2 || moves >= BLOCKS))
		fprintf(stderr, "%zu of %zu bytes, %d moves\n", with, without, moves);
	CHECK(checks ? moves == 0 : with < without / 2 && moves < BLOCKS);
	CHECK(defrag(0) == 0);
	free_all();
}

/* A malloc and a free in place of a move do not help. */
static void needs_the_move(void)
{
	if (any_checks())
		return;
	scatter();
	size_t before = held();
	for (int pass = 0; pass < 3; pass++)
		for (int nth = 0; nth < BLOCKS; nth++) {
			if (!blocks[nth] || !pinfold_defrag_hint(blocks[nth]))
				continue;
			unsigned char *moved = malloc(size_of(nth));
			CHECK(moved);
			memcpy(moved, blocks[nth], size_of(nth));
			free(blocks[nth]);
			blocks[nth] = moved;
		}
	size_t copied = held();
	defrag(0);
	CHECK(held() < copied / 2 && before > 0);
	free_all();
}

static void no_slab(void)
{
	int local = 0;
	size_t sizes[] = { 64 << 10, 300000, 3 << 20, (size_t)70 << 20 };

	CHECK(!pinfold_defrag_hint(NULL) && !pinfold_defrag(NULL));
	pinfold_defrag_free(NULL);
	errno = 0;
	CHECK(!pinfold_defrag_malloc(SIZE_MAX) && errno == ENOMEM);
	CHECK(!pinfold_defrag_hint(&local) && !pinfold_defrag_hint((void *)UINTPTR_MAX));
	for (int nth = 0; nth < 4; nth++) {
		void *block = malloc(sizes[nth]);
		CHECK(block && !pinfold_defrag_hint(block) && !pinfold_defrag(block));
		pinfold_defrag_free(block);
		block = pinfold_defrag_malloc(sizes[nth]);
		CHECK(block);
		free(block);
	}
}

/* Each thread moves blocks of its own while the others allocate and free. */
static void *mover(void *unused)
{
	enum { OWN = 4000 };
	unsigned char **own = calloc(OWN, sizeof(*own));
	unsigned state = (unsigned)(uintptr_t)own;

	for (int turn = 0; turn < 20 * OWN; turn++) {
		state = state * 1103515245 + 12345;
		unsigned nth = (state >> 8) % OWN;
		if (own[nth]) {
			unsigned char *moved = pinfold_defrag(own[nth]);
			own[nth] = moved ? moved : own[nth];
			for (unsigned at = 0; at < 200; at++)
				CHECK(own[nth][at] == (unsigned char)nth);
		}
		if (!own[nth]) {
			CHECK((own[nth] = malloc(200)));
			memset(own[nth], (int)nth, 200);
		} else if (state >> 30 == 0) {
			free(own[nth]);
			own[nth] = NULL;
		}
	}
	for (int nth = 0; nth < OWN; nth++)
		free(own[nth]);
	free(own);
	return unused;
}

int main(void)
{
	pthread_t threads[THREADS];

	no_slab();
	gives_back(0);
	gives_back(1);
	needs_the_move();
	for (int nth = 0; nth < THREADS; nth++)
		CHECK(pthread_create(&threads[nth], NULL, mover, NULL) == 0);
	for (int nth = 0; nth < THREADS; nth++)
		CHECK(pthread_join(threads[nth], NULL) == 0);
	puts("ok");
	return 0;
}
