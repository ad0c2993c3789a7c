/* The figures of mallinfo2, malloc_info and malloc_trim follow what the program holds. Run with the
 * library preloaded. With an argument, writes the XML of malloc_info to the file of that name.
 * Prints "ok". */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCKS = 60000, NOISE = 64 << 10 };

static void *blocks[BLOCKS];

/* Hides a block from the compiler, which may leave out an allocation that it sees freed. */
static void *hide(void *block)
{
	__asm__ volatile("" : "+r"(block) : : "memory");
	return block;
}

static size_t size_of(int nth)
{
	static const size_t sizes[] = { 24, 100, 500, 1000, 3000, 300, 64, 9000, 20, 700 };
	return sizes[nth % 10];
}

/* Allocates all blocks, and returns the sum of their sizes. */
static size_t fill(void)
{
	size_t sum = 0;

	for (int nth = 0; nth < BLOCKS; nth++) {
		blocks[nth] = malloc(size_of(nth));
		CHECK(blocks[nth]);
		memset(blocks[nth], 1, size_of(nth));
		sum += malloc_usable_size(blocks[nth]);
	}
	return sum;
}

static void *empty(void *unused)
{
	for (int nth = 0; nth < BLOCKS; nth++)
		free(blocks[nth]);
	return unused;
}

static struct mallinfo2 checked(void)
{
	struct mallinfo2 info = mallinfo2();

	CHECK(info.arena == info.uordblks + info.fordblks);
	CHECK(info.fsmblks <= info.fordblks && info.keepcost <= info.fordblks);
	CHECK((info.smblks == 0) == (info.fsmblks == 0) && info.usmblks == 0);
	return info;
}

static void is_near(size_t found, size_t wanted)
{
	size_t apart = found > wanted ? found - wanted : wanted - found;

	if (apart > NOISE)
		fprintf(stderr, "%zu instead of %zu\n", found, wanted);
	CHECK(apart <= NOISE);
}

/* uordblks does not count free blocks, neither those of slabs nor those in sheaves of CPUs. */
static void in_use(void)
{
	struct mallinfo2 before = checked();

	for (int turn = 0; turn < 3; turn++) {
		size_t sum = fill();
		struct mallinfo2 full = checked();
		is_near(full.uordblks, before.uordblks + sum);
		if (turn == 1) {
			/* Another thread's CPU keeps the free blocks. */
			pthread_t thread;
			CHECK(pthread_create(&thread, NULL, empty, NULL) == 0);
			CHECK(pthread_join(thread, NULL) == 0);
		} else {
			empty(NULL);
		}
		struct mallinfo2 freed = checked();
		is_near(freed.uordblks, before.uordblks);
		CHECK(freed.smblks > 0 && freed.fordblks > before.fordblks);
	}
}

/* As tests for leaks do: nothing is lost when the same is done again and again. */
static void repeated(void)
{
	struct mallinfo2 before, after;

	for (int turn = 0; turn < 2; turn++) {
		before = checked();
		for (int nth = 0; nth < 10000; nth++) {
			void *small = hide(malloc(size_of(nth)));
			void *large = hide(malloc(100000));
			CHECK(small && large);
			memset(small, 1, size_of(nth));
			free(small);
			free(large);
		}
		after = checked();
	}
	CHECK(after.uordblks == before.uordblks && after.hblkhd == before.hblkhd);
	/* One block that is not freed shows. */
	void *lost = hide(malloc(1000));
	CHECK(checked().uordblks - after.uordblks >= 1000);
	free(hide(lost));
	CHECK(checked().uordblks == after.uordblks);
}

/* malloc_trim gives back at least what keepcost says, and then finds nothing more. */
static void trimmed(void)
{
	fill();
	empty(NULL);
	struct mallinfo2 before = checked();
	CHECK(before.keepcost > 0);
	CHECK(malloc_trim(0) == 1);
	struct mallinfo2 after = checked();
	CHECK(before.arena - after.arena >= before.keepcost);
	CHECK(after.keepcost < before.keepcost && after.keepcost < 1 << 20);
	is_near(after.uordblks, before.uordblks);
	CHECK(after.smblks == 0 || getenv("PINFOLD_HARDENED"));
}

static size_t resident(void)
{
	size_t pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	CHECK(file && fscanf(file, "%*u %zu", &pages) == 1);
	fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* malloc_trim also gives back the free pages of slabs that have a few blocks in use. */
static void partly_trimmed(void)
{
	size_t sum = fill(), before = resident();

	for (int nth = 0; nth < BLOCKS; nth++)
		if (nth % 21)
			free(blocks[nth]);
	CHECK(malloc_trim(0) == 1);
	CHECK(before - resident() > sum / 2);
	for (int nth = 0; nth < BLOCKS; nth += 21) {
		for (size_t at = 0; at < size_of(nth); at++)
			CHECK(((char *)blocks[nth])[at] == 1);
		free(blocks[nth]);
	}
}

static void huge(void)
{
	struct mallinfo2 before = checked();
	char *block = hide(malloc((size_t)100 << 20));
	CHECK(block);
	block[0] = 1;
	struct mallinfo2 with = checked();
	CHECK(with.hblks == before.hblks + 1);
	CHECK(with.hblkhd - before.hblkhd >= (size_t)100 << 20);
	is_near(with.uordblks, before.uordblks);
	free(block);
	CHECK(checked().hblks == before.hblks && mallinfo2().hblkhd == before.hblkhd);
}

int main(int count, char **arguments)
{
	in_use();
	repeated();
	trimmed();
	partly_trimmed();
	huge();
	if (count > 1) {
		FILE *file = fopen(arguments[1], "w");
		CHECK(file);
		fill();
		empty(NULL);
		CHECK(malloc_info(0, file) == 0 && fclose(file) == 0);
	}
	puts("ok");
	return 0;
}
