/*
 * A program defines malloc and free itself, over __libc_malloc and __libc_free, and no other
 * function of the family.
 *
 * The program's free takes blocks of the library's other functions. Also runs without the library.
 * Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t align, size_t size);
extern void *__libc_valloc(size_t size);
extern void *__libc_pvalloc(size_t size);
extern void __libc_free(void *block);

/* Volatile, because the compiler assumes that malloc changes no variable. */
static volatile unsigned long made, ended;

void *malloc(size_t size)
{
	made++;
	return __libc_malloc(size);
}

void free(void *block)
{
	ended++;
	__libc_free(block);
}

static void *hide(void *p)
{
	__asm__ volatile("" : "+r"(p));
	return p;
}

int main(void)
{
	for (size_t size = 1; size < 5000000; size = size * 5 / 3 + 1) {
		unsigned long before = made;
		char *block = hide(calloc(1, size));
		CHECK(block && block[size - 1] == 0);
		free(block);
		block = hide(malloc(size));
		CHECK(block && made == before + 1 && malloc_usable_size(block) >= size);
		memset(block, 7, size);
		block = hide(realloc(block, 2 * size));
		CHECK(block && block[0] == 7 && block[size - 1] == 7);
		block = hide(__libc_realloc(block, size));
		CHECK(block && block[size - 1] == 7);
		free(block);
		block = hide(aligned_alloc(64, (size + 63) & ~(size_t)63));
		CHECK(block && (uintptr_t)block % 64 == 0);
		free(block);
		block = hide(__libc_memalign(256, size));
		CHECK(block && (uintptr_t)block % 256 == 0);
		free(block);
		free(hide(__libc_calloc(size, 1)));
		free(hide(__libc_valloc(size)));
		free(hide(__libc_pvalloc(size)));
	}
	unsigned long before = made;
	char *copy = hide(strdup("allocated by the C library"));
	CHECK(made == before + 1 && copy[0] == 'a');
	free(copy);
	CHECK(ended > 100);
	puts("ok");
	return 0;
}
