/* The malloc family as POSIX and glibc describe it. Run with the library preloaded. Prints "ok". */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* From C23, which older C libraries do not declare. */
void free_sized(void *block, size_t size);
#pragma weak free_sized

/* glibc says that `mallinfo` is old. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* Hide a value from the compiler's analysis. */
static void *hide(void *p)
{
	__asm__ volatile("" : "+r"(p));
	return p;
}
static size_t opaque(size_t n)
{
	__asm__ volatile("" : "+r"(n));
	return n;
}

static int aligned(void *p, size_t align)
{
	return (uintptr_t)p % align == 0;
}

static void sizes(void)
{
	for (size_t size = 0; size < 70000; size += 1 + size / 50) {
		unsigned char *p = malloc(size);
		CHECK(p && aligned(p, 16) && malloc_usable_size(p) >= size);
		memset(p, 0xab, malloc_usable_size(p));
		free(p);
		p = calloc(1, size);
		CHECK(p);
		for (size_t i = 0; i < size; i++)
			CHECK(p[i] == 0);
		memset(p, 0xcd, size);
		free(p);
	}
	for (size_t size = 1 << 16; size <= (size_t)64 << 20; size *= 2) {
		unsigned char *p = malloc(size + 1);
		CHECK(p && aligned(p, 16));
		p[0] = p[size] = 1;
		free(p);
		p = calloc(size, 1);
		CHECK(p && p[0] == 0 && p[size - 1] == 0 && p[size / 2] == 0);
		p[size / 2] = 1;
		free(p);
	}
}

static void bad_sizes(void)
{
	size_t huge[] = { SIZE_MAX, SIZE_MAX - 4096, SIZE_MAX / 2 + 1, (size_t)PTRDIFF_MAX };
	for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
		errno = 0;
		CHECK(malloc(opaque(huge[i])) == NULL && errno == ENOMEM);
		errno = 0;
		CHECK(calloc(opaque(huge[i]), 2) == NULL && errno == ENOMEM);
		errno = 0;
		CHECK(realloc(NULL, opaque(huge[i])) == NULL && errno == ENOMEM);
		errno = 0;
		CHECK(aligned_alloc(64, opaque(huge[i])) == NULL && errno == ENOMEM);
		errno = 0;
		CHECK(pvalloc(opaque(huge[i])) == NULL && errno == ENOMEM);
		CHECK(posix_memalign(&(void *){ 0 }, 64, opaque(huge[i])) == ENOMEM);
	}
	/* Each power of two gets a block or null, and no crash. */
	for (int shift = 40; shift < 64; shift++)
		free(hide(malloc(opaque((size_t)1 << shift))));
	char *p = malloc(100);
	memset(p, 7, 100);
	errno = 0;
	CHECK(realloc(p, opaque(SIZE_MAX - 100)) == NULL && errno == ENOMEM);
	errno = 0;
	CHECK(reallocarray(p, opaque(SIZE_MAX / 2), 3) == NULL && errno == ENOMEM);
	for (int i = 0; i < 100; i++)
		CHECK(p[i] == 7);
	free(p);
}

static void alignments(void)
{
	for (size_t align = 1; align <= (size_t)4 << 20; align *= 2)
		for (size_t size = 0; size < 200000; size = size * 3 + 7) {
			void *p = aligned_alloc(align, size);
			CHECK(p && aligned(p, align) && malloc_usable_size(p) >= size);
			memset(p, 1, size);
			free(p);
			p = memalign(align, size);
			CHECK(p && aligned(p, align));
			p = realloc(p, size + 5000);
			CHECK(p);
			free(p);
			if (align >= sizeof(void *)) {
				CHECK(posix_memalign(&p, align, size) == 0 && aligned(p, align));
				free(p);
			}
		}
	void *untouched = &untouched;
	CHECK(posix_memalign(&untouched, 0, 8) == EINVAL);
	CHECK(posix_memalign(&untouched, 4, 8) == EINVAL);
	CHECK(posix_memalign(&untouched, 24, 8) == EINVAL);
	CHECK(untouched == &untouched);
	errno = 0;
	CHECK(aligned_alloc(opaque(24), 48) == NULL && errno == EINVAL);
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *p = valloc(10);
	CHECK(p && aligned(p, page));
	free(p);
	p = pvalloc(page + 1);
	CHECK(p && aligned(p, page) && malloc_usable_size(p) >= 2 * page);
	free(p);
}

static void reallocs(void)
{
	unsigned char *p = realloc(NULL, 1);
	size_t old = 1;
	p[0] = 0;
	for (size_t size = 2; size < (size_t)48 << 20; size = size * 5 / 4 + 1) {
		p = realloc(p, size);
		CHECK(p);
		for (size_t i = 0; i < old; i += 1 + old / 97)
			CHECK(p[i] == (unsigned char)(i * 7));
		for (size_t i = 0; i < size; i++)
			p[i] = (unsigned char)(i * 7);
		old = size;
	}
	for (size_t size = old; size > 1; size = size * 3 / 5) {
		p = realloc(p, size);
		CHECK(p);
		for (size_t i = 0; i < size; i += 1 + size / 97)
			CHECK(p[i] == (unsigned char)(i * 7));
	}
	CHECK(realloc(p, opaque(0)) == NULL);
	p = reallocarray(NULL, 10, 20);
	CHECK(malloc_usable_size(p) >= 200);
	free(p);
}

/* Large blocks begin at different cache lines of a page, so that arrays that are walked side by
 * side do not compete for the same places of the caches. */
static void large_blocks(void)
{
	enum { BLOCKS = 16, SIZE = 1 << 20 };
	unsigned char *blocks[BLOCKS];
	uint64_t lines = 0;
	for (int nth = 0; nth < BLOCKS; nth++) {
		unsigned char *p = malloc(SIZE);
		CHECK(p && aligned(p, 64) && malloc_usable_size(p) >= SIZE);
		memset(p, nth, malloc_usable_size(p));
		lines |= UINT64_C(1) << ((uintptr_t)p % 4096 / 64);
		blocks[nth] = p;
	}
	CHECK(__builtin_popcountll(lines) > BLOCKS / 2);
	for (int nth = 0; nth < BLOCKS; nth++) {
		unsigned char *p = blocks[nth];
		/* In place, to other memory, to a mapping of its own, and there again. */
		size_t before = SIZE;
		for (size_t size = SIZE + 70000; size < 200u << 20; size = size * 3) {
			p = realloc(p, size);
			CHECK(p && aligned(p, 16) && malloc_usable_size(p) >= size);
			CHECK(p[0] == nth && p[SIZE / 2] == nth && p[before - 1] == nth);
			memset(p + size - 4096, nth, 4096);
			p[size - 1] = (unsigned char)nth;
			before = size;
		}
		p = realloc(p, SIZE + 5);
		CHECK(p && p[0] == nth && p[SIZE - 1] == nth);
		free(p);
	}
	for (int turn = 0; turn < 3; turn++) {
		unsigned char *p = calloc(1, SIZE + turn);
		CHECK(p);
		for (size_t i = 0; i < malloc_usable_size(p) && i < SIZE; i++)
			CHECK(p[i] == 0);
		memset(p, 1, malloc_usable_size(p));
		free(p);
	}
	for (size_t align = 64; align <= 1 << 20; align *= 2) {
		void *p = NULL;
		CHECK(posix_memalign(&p, align, SIZE) == 0 && aligned(p, align));
		memset(p, 1, malloc_usable_size(p));
		free(p);
	}
}

static void errno_is_kept(void)
{
	for (size_t size = 1; size < (size_t)128 << 20; size *= 4) {
		void *p = malloc(size);
		errno = 4711;
		free(hide(p));
		CHECK(errno == 4711);
	}
	errno = 4711;
	free(NULL);
	CHECK(errno == 4711);
}

/* Services print these in their status pages. */
static void older_figures(void)
{
	static void *keep[1000];
	struct mallinfo before = mallinfo();

	for (int i = 0; i < 1000; i++)
		memset(keep[i] = malloc(50000), 1, 50000);
	struct mallinfo now = mallinfo();
	struct mallinfo2 wide = mallinfo2();
	CHECK(now.uordblks - before.uordblks >= 50000000);
	CHECK((size_t)now.uordblks == wide.uordblks && (size_t)now.arena == wide.arena);
	CHECK((size_t)now.fordblks == wide.fordblks && (size_t)now.keepcost == wide.keepcost);
	/* A figure that does not fit is the largest int. A small machine has no room for it. */
	void *huge = hide(malloc((size_t)3 << 30));
	CHECK(!huge || mallinfo().hblkhd == INT_MAX);
	free(huge);

	char text[600] = "";
	int ends[2], errors = dup(2);
	CHECK(pipe(ends) == 0 && dup2(ends[1], 2) == 2);
	errno = 4711;
	malloc_stats();
	CHECK(errno == 4711);
	CHECK(dup2(errors, 2) == 2 && read(ends[0], text, sizeof(text) - 1) > 0);
	close(ends[0]);
	close(ends[1]);
	close(errors);
	size_t system = 0, in_use = 0;
	char *total = strstr(text, "Total (incl. mmap):");
	CHECK(strncmp(text, "Arena 0:\n", 9) == 0 && total);
	CHECK(sscanf(total, "Total (incl. mmap):\nsystem bytes = %zu\nin use bytes = %zu", &system,
		     &in_use) == 2);
	CHECK(in_use >= 50000000 && system >= in_use);
	for (int i = 0; i < 1000; i++)
		free(keep[i]);

	/* 1 for what Pinfold does, and 0 for what it does not do. */
	CHECK(mallopt(M_ARENA_MAX, 2) == 1 && mallopt(M_ARENA_MAX, 0) == 0);
	CHECK(mallopt(M_CHECK_ACTION, 3) == 1 && mallopt(M_CHECK_ACTION, 0) == 0);
	CHECK(mallopt(M_MMAP_THRESHOLD, 1 << 20) == 0 && mallopt(4711, 1) == 0);
}

static void figures(void)
{
	void *big = hide(malloc((size_t)64 << 20));
	void *small = hide(malloc(100));
	struct mallinfo2 info = mallinfo2();
	CHECK(info.hblkhd >= (size_t)64 << 20 && info.arena > 0 && info.uordblks > 0);
	free(small);
	free(big);
	static void *blocks[20000];
	for (int i = 0; i < 20000; i++)
		memset(blocks[i] = malloc(1000), 1, 1000);
	for (int i = 0; i < 20000; i++)
		free(blocks[i]);
	CHECK(malloc_trim(0) == 1);
	CHECK(mallinfo2().arena < (size_t)20000 * 1000);
	char *text = NULL;
	size_t length = 0;
	FILE *stream = open_memstream(&text, &length);
	CHECK(malloc_info(0, stream) == 0);
	fclose(stream);
	CHECK(strstr(text, "<malloc version=\"1\">"));
	free(text);
	errno = 0;
	CHECK(malloc_info(1, stdout) == -1 && errno == EINVAL);
}

/* A block has the size that pinfold_good_size foretells, and all of it can be used. */
static void good_sizes(void)
{
	size_t (*good_size)(size_t) = dlsym(RTLD_DEFAULT, "pinfold_good_size");
	void *(*alloc_at_least)(size_t, size_t *) = dlsym(RTLD_DEFAULT, "pinfold_alloc_at_least");
	void *(*aligned_at_least)(size_t, size_t, size_t *) =
		dlsym(RTLD_DEFAULT, "pinfold_aligned_alloc_at_least");
	size_t actual, largest = (size_t)PTRDIFF_MAX & ~(size_t)(sysconf(_SC_PAGESIZE) - 1);
	CHECK(good_size && alloc_at_least && aligned_at_least);
	for (size_t size = 0; size < (size_t)70 << 20; size += 1 + size / 50) {
		size_t good = good_size(size);
		CHECK(good >= size && good_size(good) == good);
		for (int turn = 0; turn < 3; turn++) {
			unsigned char *p = turn == 0 ? alloc_at_least(size, &actual)
					 : turn == 1 ? aligned_at_least(64, size, &actual)
						     : alloc_at_least(good, &actual);
			CHECK(p && actual == malloc_usable_size(p));
			CHECK(turn == 1 ? actual >= size && aligned(p, 64) : actual >= good);
			/* Blocks that begin at one of 64 cache lines differ by less than a page.
			 * While blocks may be guarded, the size is the one asked for. */
			CHECK(turn != 2 || actual == good || getenv("PINFOLD_GUARD") ||
			      (actual - good < 4096 && size > 575 << 10 && size < 62 << 20));
			if (actual)
				p[0] = p[actual - 1] = 1;
			free_sized(p, actual);
		}
	}
	CHECK(good_size(largest) == largest && good_size(SIZE_MAX) == 0);
	CHECK(good_size((size_t)PTRDIFF_MAX + 1) == 0);
	errno = 0;
	actual = 1;
	CHECK(!alloc_at_least(SIZE_MAX, &actual) && actual == 0 && errno == ENOMEM);
	errno = 0;
	actual = 1;
	CHECK(!aligned_at_least(24, 1, &actual) && actual == 0 && errno == EINVAL);
}

int main(void)
{
	sizes();
	good_sizes();
	bad_sizes();
	alignments();
	reallocs();
	large_blocks();
	errno_is_kept();
	figures();
	older_figures();
	puts("ok");
	return 0;
}
