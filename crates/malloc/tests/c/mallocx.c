/* jemalloc's functions that allocate, as programs that are linked with jemalloc mix them with the
 * malloc family. Run with the library preloaded. Prints "ok". */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ZERO = 0x40, TCACHE_NONE = 1 << 8 };

#pragma weak mallocx
void *mallocx(size_t size, int flags);
#pragma weak rallocx
void *rallocx(void *block, size_t size, int flags);
#pragma weak xallocx
size_t xallocx(void *block, size_t size, size_t extra, int flags);
#pragma weak sallocx
size_t sallocx(const void *block, int flags);
#pragma weak dallocx
void dallocx(void *block, int flags);
#pragma weak sdallocx
void sdallocx(void *block, size_t size, int flags);
#pragma weak nallocx
size_t nallocx(size_t size, int flags);
#pragma weak mallctl
int mallctl(const char *name, void *old, size_t *length, void *fresh, size_t fresh_length);

static void *dirty(size_t size)
{
	void *p = malloc(size);
	CHECK(p);
	return memset(p, 0xab, malloc_usable_size(p));
}

static size_t opaque(size_t n)
{
	__asm__ volatile("" : "+r"(n));
	return n;
}

int main(void)
{
	CHECK(mallocx && rallocx && xallocx && sallocx && dallocx && sdallocx && nallocx);
	/* Programs take it as the sign that all figures are jemalloc's. */
	CHECK(!mallctl);
	for (size_t size = 1; size < 3000000; size += 1 + size / 20)
		for (int log = 0; log <= 17; log++) {
			free(dirty(size));
			unsigned char *p = mallocx(size, log | ZERO | TCACHE_NONE);
			CHECK(p && (uintptr_t)p % ((uintptr_t)1 << log) == 0);
			for (size_t i = 0; i < size; i += 1 + size / 97)
				CHECK(p[i] == 0);
			/* Beyond the size too: rallocx zeroes only what the block gains. */
			size_t room = sallocx(p, 0);
			for (size_t i = size; i < room; i += 1 + room / 977)
				CHECK(p[i] == 0);
			CHECK(room == malloc_usable_size(p) && room >= nallocx(size, log));
			CHECK(nallocx(size, log) >= size);
			CHECK(xallocx(p, size * 2, 0, log) == room);
			memset(p, 7, room);
			free(dirty(room + size));
			p = rallocx(p, room + size, log | ZERO);
			CHECK(p && (uintptr_t)p % ((uintptr_t)1 << log) == 0);
			CHECK(p[0] == 7 && p[room - 1] == 7);
			for (size_t i = room; i < room + size; i += 1 + size / 97)
				CHECK(p[i] == 0);
			p = rallocx(p, size, log);
			CHECK(p && p[0] == 7 && p[size - 1] == 7);
			/* Each function that frees takes the block, and the others' blocks. */
			if (log % 3 == 0)
				free(p);
			else if (log % 3 == 1)
				dallocx(p, TCACHE_NONE);
			else
				sdallocx(p, size, log);
		}
	dallocx(malloc(100), 0);
	char *p = rallocx(calloc(1, 50), 5000, 0);
	CHECK(p && p[49] == 0);
	CHECK(!rallocx(p, opaque(SIZE_MAX), 0) && p[49] == 0);
	CHECK(!rallocx(p, opaque(SIZE_MAX), 12) && p[49] == 0);
	free(p);
	CHECK(!mallocx(opaque(SIZE_MAX), 0) && !mallocx(1, 63));
	CHECK(nallocx(SIZE_MAX, 0) == 0 && nallocx(1, 63) == 0);
	puts("ok");
	return 0;
}
