/*
 * The functions that Clang calls with -fsanitize=alloc-token: a block without pointers never lies
 * in a granule with other blocks, whichever function made it, through realloc, threads and samples.
 * Run with the library preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DECLARE(prefix, last)                                                              \
	_Pragma("GCC diagnostic ignored \"-Wunused-parameter\"")                           \
	extern void *prefix##malloc(size_t last) __attribute__((weak));                    \
	extern void *prefix##calloc(size_t, size_t last) __attribute__((weak));            \
	extern void *prefix##realloc(void *, size_t last) __attribute__((weak));           \
	extern void *prefix##reallocarray(void *, size_t, size_t last)                     \
		__attribute__((weak));                                                     \
	extern void *prefix##aligned_alloc(size_t, size_t last) __attribute__((weak));     \
	extern void *prefix##memalign(size_t, size_t last) __attribute__((weak));          \
	extern int prefix##posix_memalign(void **, size_t, size_t last)                    \
		__attribute__((weak));                                                     \
	extern void *prefix##valloc(size_t last) __attribute__((weak));                    \
	extern void *prefix##pvalloc(size_t last) __attribute__((weak));                   \
	extern void *prefix##_Znwm(size_t last) __attribute__((weak));                     \
	extern void *prefix##_Znam(size_t last) __attribute__((weak));                     \
	extern void *prefix##_ZnwmSt11align_val_t(size_t, size_t last)                     \
		__attribute__((weak));                                                     \
	extern void *prefix##_ZnamSt11align_val_t(size_t, size_t last)                     \
		__attribute__((weak));                                                     \
	extern void *prefix##_ZnwmRKSt9nothrow_t(size_t, const void *last)                 \
		__attribute__((weak));                                                     \
	extern void *prefix##_ZnamRKSt9nothrow_t(size_t, const void *last)                 \
		__attribute__((weak));                                                     \
	extern void *prefix##_ZnwmSt11align_val_tRKSt9nothrow_t(size_t, size_t,            \
								const void *last)          \
		__attribute__((weak));                                                     \
	extern void *prefix##_ZnamSt11align_val_tRKSt9nothrow_t(size_t, size_t,            \
								const void *last)          \
		__attribute__((weak))
#define AND_TOKEN , size_t
#define NOTHING
DECLARE(__alloc_token_0_, NOTHING);
DECLARE(__alloc_token_1_, NOTHING);
DECLARE(__alloc_token_, AND_TOKEN);

enum { FORMS = 17, GRANULE_SHIFT = 16 };

static const char nothrow;

/* Makes a block of `size` bytes by the nth form, with the token 0 or 1, in its name or not. */
#define BY_FORM(prefix, ...)                                                               \
	switch (form) {                                                                    \
	case 0: return prefix##malloc(size __VA_ARGS__);                                   \
	case 1: return prefix##calloc(1, size __VA_ARGS__);                                \
	case 2: return prefix##realloc(NULL, size __VA_ARGS__);                            \
	case 3: return prefix##reallocarray(NULL, size, 1 __VA_ARGS__);                    \
	case 4: return prefix##aligned_alloc(64, size __VA_ARGS__);                        \
	case 5: return prefix##memalign(32, size __VA_ARGS__);                             \
	case 6:                                                                            \
		return prefix##posix_memalign(&block, 128, size __VA_ARGS__) ? NULL : block; \
	case 7: return prefix##valloc(size __VA_ARGS__);                                   \
	case 8: return prefix##pvalloc(size __VA_ARGS__);                                  \
	case 9: return prefix##_Znwm(size __VA_ARGS__);                                    \
	case 10: return prefix##_Znam(size __VA_ARGS__);                                   \
	case 11: return prefix##_ZnwmSt11align_val_t(size, 64 __VA_ARGS__);                \
	case 12: return prefix##_ZnamSt11align_val_t(size, 64 __VA_ARGS__);                \
	case 13: return prefix##_ZnwmRKSt9nothrow_t(size, &nothrow __VA_ARGS__);           \
	case 14: return prefix##_ZnamRKSt9nothrow_t(size, &nothrow __VA_ARGS__);           \
	case 15:                                                                           \
		return prefix##_ZnwmSt11align_val_tRKSt9nothrow_t(                         \
			size, 256, &nothrow __VA_ARGS__);                                  \
	default:                                                                           \
		return prefix##_ZnamSt11align_val_tRKSt9nothrow_t(                         \
			size, 16, &nothrow __VA_ARGS__);                                   \
	}

static void *data(int form, size_t size)
{
	void *block = NULL;
	BY_FORM(__alloc_token_0_);
}

static void *pointers(int form, size_t size)
{
	void *block = NULL;
	BY_FORM(__alloc_token_1_);
}

static void *by_token(int form, size_t size, size_t token)
{
	void *block = NULL;
	BY_FORM(__alloc_token_, , token);
}

static uintptr_t granule(const void *block)
{
	return (uintptr_t)block >> GRANULE_SHIFT;
}

/* The granules in which blocks without pointers were seen, and other blocks. No block is freed
 * before the check, so no granule is used twice. */
enum { MOST = 1 << 16 };
static uintptr_t seen[2][MOST];
static size_t count[2];

static void note(const void *block, int has_pointers)
{
	uintptr_t *list = seen[has_pointers];
	size_t *n = &count[has_pointers];
	CHECK(block && *n < MOST);
	/* Blocks of one class follow each other, so most of them are in the granule before. */
	if (*n == 0 || list[*n - 1] != granule(block))
		list[(*n)++] = granule(block);
}

static int by_value(const void *a, const void *b)
{
	uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
	return (x > y) - (x < y);
}

static void check_apart(void)
{
	qsort(seen[0], count[0], sizeof *seen[0], by_value);
	qsort(seen[1], count[1], sizeof *seen[1], by_value);
	for (size_t i = 0, j = 0; i < count[0] && j < count[1];) {
		CHECK(seen[0][i] != seen[1][j]);
		if (seen[0][i] < seen[1][j])
			i++;
		else
			j++;
	}
	count[0] = count[1] = 0;
}

static void fill_and_check(void *block, size_t size)
{
	CHECK(malloc_usable_size(block) >= size);
	memset(block, 0x5a, size);
}

/* Every form, every size class and beyond: with tokens, and without as libraries allocate. */
static void forms(void)
{
	static void *blocks[MOST];
	size_t n = 0;
	for (int form = 0; form < FORMS; form++)
		for (size_t size = 1; size < 700000; size += size < 300 ? 7 : size / 5) {
			void *of_data[] = {data(form, size), by_token(form, size, 0),
					   by_token(form, size, SIZE_MAX / 2 - 1),
					   by_token(form, size, (size_t)1 << 40)};
			void *others[] = {pointers(form, size), by_token(form, size, 1),
					  by_token(form, size, SIZE_MAX / 2),
					  by_token(form, size, SIZE_MAX),
					  by_token(form, size, 300), malloc(size)};
			for (size_t i = 0; i < sizeof of_data / sizeof *of_data; i++) {
				note(of_data[i], 0);
				fill_and_check(blocks[n++] = of_data[i], size);
			}
			for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
				note(others[i], 1);
				fill_and_check(blocks[n++] = others[i], size);
			}
			CHECK(n + 10 < MOST);
		}
	check_apart();
	while (n > 0)
		free(blocks[--n]);
}

static void zeroed(void)
{
	for (size_t size = 1; size < 300000; size = size * 3 / 2 + 1) {
		unsigned char *block = data(0, size);
		memset(block, 0xab, size);
		free(block);
		block = data(1, size);
		for (size_t i = 0; i < size; i++)
			CHECK(block[i] == 0);
		free(block);
	}
}

/* A reference block of each kind, of the class of `size`. In the same granule lie blocks of the
 * same class and kind. */
static int is_data(const void *block, size_t size)
{
	static void *kept[4096];
	for (int i = 0; i < 4096; i++)
		kept[i] = data(0, size);
	int found = 0;
	for (int i = 0; i < 4096; i++) {
		found |= granule(kept[i]) == granule(block);
		free(kept[i]);
	}
	return found;
}

static void *grown(void *block, size_t from, size_t to, void *(*by)(void *, size_t))
{
	for (size_t i = 0; i < from; i++)
		((unsigned char *)block)[i] = (unsigned char)(i * 7);
	block = by(block, to);
	CHECK(block && malloc_usable_size(block) >= to);
	for (size_t i = 0; i < from && i < to; i++)
		CHECK(((unsigned char *)block)[i] == (unsigned char)(i * 7));
	return block;
}

static void resized(void)
{
	/* With token 0 and without a token, a block stays among its kind. */
	void *block = grown(data(0, 100), 100, 900, __alloc_token_0_realloc);
	CHECK(is_data(block, 900));
	block = grown(block, 900, 2000, realloc);
	CHECK(is_data(block, 2000));
	block = grown(block, 2000, 100, realloc);
	CHECK(is_data(block, 100));
	/* With token 1 it may hold pointers, so it leaves, also where it would have room. */
	block = grown(block, 100, 100, __alloc_token_1_realloc);
	CHECK(!is_data(block, 100));
	/* Token 0 also means that the type is unknown, so a block with pointers does not enter. */
	block = grown(block, 100, 1000, __alloc_token_0_realloc);
	CHECK(!is_data(block, 1000));
	free(block);
	/* A large block has granules of its own. What it shrinks to lies where the token says. */
	for (int token = 0; token < 2; token++) {
		block = grown(data(0, 100), 100, 300000,
			      token ? __alloc_token_1_realloc : __alloc_token_0_realloc);
		block = grown(block, 300000, 3000000, realloc);
		block = grown(block, 3000000, 500,
			      token ? __alloc_token_1_realloc : __alloc_token_0_realloc);
		CHECK(is_data(block, 500) == !token);
		free(block);
	}
	/* So does a block that is as large as a granule or a few. */
	for (int token = 0; token < 2; token++) {
		block = grown(data(0, 300000), 300000, 500,
			      token ? __alloc_token_1_realloc : __alloc_token_0_realloc);
		CHECK(is_data(block, 500) == !token);
		free(block);
	}
	CHECK(!__alloc_token_0_realloc(data(0, 10), 0));
	CHECK(!__alloc_token_1_realloc(data(0, 10), 0));
	CHECK(!__alloc_token_0_reallocarray(NULL, SIZE_MAX / 2, 4) && errno == ENOMEM);
	CHECK(!__alloc_token_0_calloc(SIZE_MAX / 2, 4) && errno == ENOMEM);
	CHECK(!__alloc_token_0_aligned_alloc(3, 8) && errno == EINVAL);
	void *to = NULL;
	CHECK(__alloc_token_0_posix_memalign(&to, 2, 8) == EINVAL && !to);
}

/* Threads free each other's blocks. */
static void *blocks_of[2][20000];

static void *make(void *n)
{
	void **blocks = blocks_of[(uintptr_t)n];
	for (int i = 0; i < 20000; i++) {
		blocks[i] = i % 2 ? data(0, (size_t)i + 1) : pointers(0, (size_t)i + 1);
		CHECK(blocks[i]);
		*(char *)blocks[i] = 1;
	}
	return NULL;
}

static void *drop(void *n)
{
	for (int i = 0; i < 20000; i++)
		free(blocks_of[!(uintptr_t)n][i]);
	return NULL;
}

static void threads(void)
{
	for (int turn = 0; turn < 3; turn++)
		for (int step = 0; step < 2; step++) {
			pthread_t ids[2];
			for (uintptr_t n = 0; n < 2; n++)
				CHECK(pthread_create(&ids[n], NULL, step ? drop : make,
						     (void *)n) == 0);
			for (int n = 0; n < 2; n++)
				CHECK(pthread_join(ids[n], NULL) == 0);
			if (step == 0) {
				for (int n = 0; n < 2; n++)
					for (int i = 0; i < 20000; i++)
						note(blocks_of[n][i], i % 2 == 0);
				check_apart();
			}
		}
}

int main(void)
{
	CHECK(__alloc_token_0_malloc && __alloc_token_1_malloc && __alloc_token_malloc);
	forms();
	zeroed();
	resized();
	threads();
	puts("ok");
	return 0;
}
