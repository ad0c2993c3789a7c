/*
 * A program for the compilers' sanitizers. Its threads run on one CPU, and one thread gets the
 * blocks that another has freed. Nothing but the allocator orders their accesses. Prints "ok". A
 * sanitizer that finds a fault, or that cannot start, ends the program with another status than 0.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 200, TURNS = 50 };
static const size_t sizes[] = { 16, 100, 1000, 10000, 100000, 1000000 };
static int turn, met;
static uintptr_t seen[BLOCKS];

static void pass_blocks(int me, size_t size)
{
	char *blocks[BLOCKS];
	int count = size < 100000 ? BLOCKS : 3;
	for (int i = 0; i < count; i++) {
		blocks[i] = i % 3 ? malloc(size) : realloc(malloc(size / 2), size);
		memset(blocks[i], me, size);
		for (int j = 0; j < count; j++)
			if (__atomic_load_n(&seen[j], __ATOMIC_RELAXED) == (uintptr_t)blocks[i])
				__atomic_fetch_add(&met, 1, __ATOMIC_RELAXED);
	}
	for (int i = 0; i < count; i++) {
		__atomic_store_n(&seen[i], (uintptr_t)blocks[i], __ATOMIC_RELAXED);
		free(blocks[i]);
	}
}

static void *work(void *number)
{
	int me = (int)(intptr_t)number;
	for (int i = 0; i < TURNS; i++) {
		/* Relaxed: says whose turn it is, and orders no other memory. */
		while (__atomic_load_n(&turn, __ATOMIC_RELAXED) % 2 != me)
			sched_yield();
		pass_blocks(me, sizes[i % (sizeof sizes / sizeof *sizes)]);
		__atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[2];
	cpu_set_t all, one;
	int cpu = 0;
	if (sched_getaffinity(0, sizeof all, &all) == 0) {
		while (cpu < CPU_SETSIZE && !CPU_ISSET(cpu, &all))
			cpu++;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof one, &one);
	}
	for (intptr_t i = 0; i < 2; i++)
		pthread_create(&threads[i], NULL, work, (void *)i);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	puts("ok");
	return 0;
}
