/*
 * A program for ThreadSanitizer, linked with the library. Its threads run on one CPU, and one
 * thread gets the objects that another has freed, or that a constructor has initialised in another
 * thread. Only the caches order the accesses. Then each thread frees objects deferred, for longer
 * than the background work needs to begin. Prints "ok".
 */
#define _GNU_SOURCE
#include "pinfold.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { SECONDS = 2 };
enum { OBJECTS = 300, TURNS = 40, SIZE = 64 };
static const struct pinfold_cache *plain, *constructed;
static struct pinfold_mempool *pool;
static int turn;

static void construct(void *object)
{
	memset(object, 7, SIZE);
}

static void use(void **objects, int count, int me)
{
	for (int i = 0; i < count; i++)
		if (objects[i])
			memset(objects[i], me, SIZE);
}

static void take_and_free(const struct pinfold_cache *cache, int me)
{
	void *objects[OBJECTS];
	for (int i = 0; i < OBJECTS; i++)
		objects[i] = i % 2 ? pinfold_cache_alloc(cache) : pinfold_cache_alloc_node(cache, 0);
	use(objects, OBJECTS, me);
	for (int i = 0; i < OBJECTS; i++)
		if (objects[i])
			pinfold_cache_free(cache, objects[i]);
	size_t count = pinfold_cache_alloc_bulk(cache, OBJECTS, objects);
	use(objects, (int)count, me);
	pinfold_cache_free_bulk(cache, count, objects);
}

static void free_deferred(int me)
{
	for (time_t end = time(NULL) + SECONDS; time(NULL) < end; sched_yield())
		for (int i = 0; i < OBJECTS; i++) {
			void *object = pinfold_cache_alloc(plain);
			use(&object, 1, me);
			if (object)
				pinfold_cache_free_deferred(plain, object);
		}
}

static void *work(void *number)
{
	int me = (int)(intptr_t)number;
	for (int i = 0; i < TURNS; i++) {
		/* Relaxed: says whose turn it is, and orders no other memory. */
		while (__atomic_load_n(&turn, __ATOMIC_RELAXED) % 2 != me)
			sched_yield();
		take_and_free(plain, me);
		take_and_free(constructed, me);
		void *reserved[2] = { pinfold_mempool_alloc_preallocated(pool),
			pinfold_mempool_alloc(pool) };
		use(reserved, 2, me);
		for (int j = 0; j < 2; j++)
			if (reserved[j])
				pinfold_mempool_free(pool, reserved[j]);
		__atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED);
	}
	free_deferred(me);
	return NULL;
}

int main(void)
{
	pthread_t threads[2];
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	sched_setaffinity(0, sizeof one, &one);
	plain = pinfold_cache_create("plain", SIZE, 8, 0, NULL);
	constructed = pinfold_cache_create("constructed", SIZE, 8, 0, construct);
	pool = plain ? pinfold_mempool_create(plain, 4) : NULL;
	if (!plain || !constructed || !pool)
		return 1;
	for (intptr_t i = 0; i < 2; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)i))
			return 1;
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	puts("ok");
	return 0;
}
