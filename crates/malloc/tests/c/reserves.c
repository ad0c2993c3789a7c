/* Prefilled sheaves, memory pools, readers and slabinfo in C. Prints "ok". */
#include "pinfold.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define READERS 3
#define CHANGES 50000

static struct pinfold_cache *created(const char *name, size_t size)
{
	struct pinfold_cache *cache = pinfold_cache_create(name, size, 0, 0, NULL);

	CHECK(cache);
	return cache;
}

static uint64_t attribute(const struct pinfold_cache *cache, const char *name)
{
	uint64_t value = 0;

	CHECK(pinfold_cache_attribute(cache, name, &value) == 0);
	return value;
}

/* Calls `f` in a child that gets no more memory from the system. */
static void without_memory(void (*f)(struct pinfold_cache *, void *), struct pinfold_cache *cache,
			   void *reserve)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		/*
		 * The kernel takes 0 for no limit on data. RLIMIT_AS would still allow the use of
		 * mapped memory.
		 */
		const struct rlimit none = { 1, RLIM_INFINITY };

		/* The alarm ends a child that waits without end. */
		alarm(60);
		CHECK(setrlimit(RLIMIT_DATA, &none) == 0);
		f(cache, reserve);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Allocates objects until that fails, and links them through their first words. */
static void **exhaust(const struct pinfold_cache *cache, size_t *count)
{
	void **last = NULL, **object;

	for (*count = 0; (object = pinfold_cache_alloc(cache)); ++*count) {
		*object = last;
		last = object;
	}
	CHECK(errno == ENOMEM);
	return last;
}

static void sheaf_outlasts_memory(struct pinfold_cache *cache, void *reserve)
{
	struct pinfold_prefilled *sheaf = reserve;
	size_t count;

	exhaust(cache, &count);
	errno = 0;
	CHECK(pinfold_prefilled_refill(sheaf, 1000000) == -1 && errno == ENOMEM);
	CHECK(pinfold_prefilled_len(sheaf) == 500);
	errno = 0;
	CHECK(!pinfold_cache_prefill(cache, 1000) && errno == ENOMEM);
	for (int n = 0; n < 500; n++)
		CHECK(pinfold_prefilled_alloc(sheaf));
	CHECK(!pinfold_prefilled_alloc(sheaf));
}

static void sheaves(void)
{
	struct pinfold_cache *cache = created("prefilled", 1024);
	struct pinfold_prefilled *sheaf = pinfold_cache_prefill(cache, 300);
	void *objects[300];

	CHECK(sheaf && pinfold_prefilled_len(sheaf) == 300);
	for (int n = 0; n < 300; n++) {
		CHECK((objects[n] = pinfold_prefilled_alloc(sheaf)));
		memset(objects[n], n, 1024);
	}
	errno = 0;
	CHECK(!pinfold_prefilled_alloc(sheaf) && errno == ENOMEM && pinfold_prefilled_len(sheaf) == 0);
	for (int n = 0; n < 300; n++)
		CHECK(((unsigned char *)objects[n])[1023] == (unsigned char)n);
	pinfold_cache_free_bulk(cache, 300, objects);
	errno = 0;
	CHECK(pinfold_prefilled_refill(sheaf, (size_t)-1) == -1 && errno == ENOMEM);
	CHECK(pinfold_prefilled_refill(sheaf, 500) == 0 && pinfold_prefilled_refill(sheaf, 0) == 0);
	CHECK(pinfold_prefilled_len(sheaf) == 500);
	without_memory(sheaf_outlasts_memory, cache, sheaf);
	errno = 0;
	CHECK(pinfold_cache_destroy(cache) == -1 && errno == EBUSY);
	pinfold_prefilled_destroy(sheaf);
	pinfold_prefilled_destroy(NULL);
	errno = 0;
	CHECK(!pinfold_cache_prefill(cache, (size_t)-1) && errno == ENOMEM);
	sheaf = pinfold_cache_prefill(cache, 0);
	CHECK(sheaf && pinfold_prefilled_len(sheaf) == 0);
	pinfold_prefilled_destroy(sheaf);
	CHECK(pinfold_cache_validate(cache, NULL, NULL) == 0 && pinfold_cache_destroy(cache) == 0);
}

static void pool_outlasts_memory(struct pinfold_cache *cache, void *reserve)
{
	struct pinfold_mempool *pool = reserve;
	void *taken[150], **object, *first;
	size_t count;

	object = exhaust(cache, &count);
	CHECK(count > 0);
	for (int n = 0; n < 150; n++)
		CHECK((taken[n] = n % 2 ? pinfold_mempool_alloc(pool)
					: pinfold_mempool_alloc_wait(pool)));
	errno = 0;
	CHECK(!pinfold_mempool_alloc(pool) && errno == ENOMEM &&
	      pinfold_mempool_available(pool) == 0);
	/* The first freed objects fill the reserve; the others go to the cache. */
	while ((first = object)) {
		object = *object;
		errno = 4711;
		pinfold_mempool_free(pool, first);
		CHECK(errno == 4711);
	}
	CHECK(pinfold_mempool_available(pool) == (count < 150 ? count : 150));
	for (int n = 0; n < 150; n++)
		pinfold_mempool_free(pool, taken[n]);
	CHECK(pinfold_mempool_available(pool) == 150);
	errno = 0;
	CHECK(pinfold_mempool_resize(pool, 100000) == -1 && errno == ENOMEM);
	exhaust(cache, &count);
	CHECK(pinfold_mempool_alloc_bulk(pool, 100, taken) == 0);
	CHECK(pinfold_mempool_available(pool) == 50);
	errno = 0;
	CHECK(pinfold_mempool_alloc_bulk(pool, 50 + 1, taken + 99) == -1 && errno == ENOMEM);
	CHECK(pinfold_mempool_available(pool) == 50);
	pinfold_mempool_alloc_bulk_wait(pool, 0, NULL);
	pinfold_mempool_free_bulk(pool, 99, taken);
	CHECK(pinfold_mempool_available(pool) == 149);
	pinfold_mempool_alloc_bulk_wait(pool, 149, taken);
	CHECK(pinfold_mempool_available(pool) == 0);
}

static void pools(void)
{
	struct pinfold_cache *cache = created("pooled", 2048);
	struct pinfold_mempool *pool = pinfold_mempool_create(cache, 150);
	void *object, *many[200];

	CHECK(pool && pinfold_mempool_available(pool) == 150);
	without_memory(pool_outlasts_memory, cache, pool);
	CHECK((object = pinfold_mempool_alloc(pool)) && pinfold_mempool_available(pool) == 150);
	pinfold_mempool_free(pool, object);
	pinfold_mempool_free(pool, NULL);
	CHECK((object = pinfold_mempool_alloc_preallocated(pool)) &&
	      pinfold_mempool_available(pool) == 149);
	pinfold_mempool_free(pool, object);
	CHECK(pinfold_mempool_available(pool) == 150);
	CHECK(pinfold_mempool_alloc_bulk(pool, 200, many) == 0);
	CHECK(pinfold_mempool_available(pool) == 150);
	pinfold_mempool_free_bulk(pool, 200, many);
	pinfold_mempool_free_bulk(pool, 0, NULL);
	CHECK(pinfold_mempool_alloc_bulk(pool, 0, NULL) == 0);
	CHECK(pinfold_mempool_resize(pool, 400) == 0 && pinfold_mempool_available(pool) == 400);
	CHECK(pinfold_mempool_resize(pool, 0) == 0 && pinfold_mempool_available(pool) == 0);
	errno = 0;
	CHECK(!pinfold_mempool_alloc_preallocated(pool) && errno == ENOMEM);
	errno = 0;
	CHECK(pinfold_mempool_resize(pool, (size_t)-1) == -1 && errno == ENOMEM);
	errno = 0;
	CHECK(!pinfold_mempool_create(cache, (size_t)-1) && errno == ENOMEM);
	CHECK(pinfold_mempool_resize(pool, 5) == 0);
	errno = 0;
	CHECK(pinfold_cache_destroy(cache) == -1 && errno == EBUSY);
	pinfold_mempool_destroy(pool);
	pinfold_mempool_destroy(NULL);
	CHECK(pinfold_cache_destroy(cache) == 0);
}

/* A pool of a cache of pages is the kernel's page pool. */
static void page_pools(void)
{
	for (size_t size = 4096; size <= 65536; size *= 2) {
		struct pinfold_cache *cache = pinfold_cache_create("pages", size, size, 0, NULL);
		struct pinfold_mempool *pool;
		void *blocks[8];

		CHECK(cache && (pool = pinfold_mempool_create(cache, 8)));
		for (int n = 0; n < 8; n++) {
			CHECK((blocks[n] = pinfold_mempool_alloc_preallocated(pool)));
			CHECK((uintptr_t)blocks[n] % size == 0);
			memset(blocks[n], n, size);
		}
		CHECK(pinfold_mempool_available(pool) == 0);
		for (int n = 0; n < 8; n++)
			CHECK(((unsigned char *)blocks[n])[size - 1] == n);
		pinfold_mempool_free_bulk(pool, 8, blocks);
		CHECK(pinfold_mempool_available(pool) == 8);
		pinfold_mempool_destroy(pool);
		CHECK(pinfold_cache_destroy(cache) == 0);
	}
}

/* The object of the readers. A freed or reused object has another canary. */
struct route {
	_Atomic uint64_t canary, inverse;
	char rest[48];
};
static _Atomic(struct route *) current;
static atomic_int done;

static struct route *made(struct pinfold_cache *cache, uint64_t canary)
{
	struct route *route = pinfold_cache_alloc(cache);

	CHECK(route);
	route->canary = canary;
	route->inverse = ~canary;
	return route;
}

static void *look(void *argument)
{
	uint64_t last = 0;

	while (!done) {
		struct pinfold_reader outer = pinfold_grace_enter();
		struct route *seen = current;
		uint64_t canary = seen->canary;
		struct pinfold_reader inner = pinfold_grace_enter();

		CHECK(canary >= last && seen->inverse == ~canary);
		for (int n = 0; n < 20; n++)
			CHECK(seen->canary == canary);
		last = canary;
		pinfold_grace_leave(inner);
		CHECK(seen->inverse == ~canary);
		pinfold_grace_leave(outer);
	}
	return argument;
}

static void readers(unsigned flags)
{
	struct pinfold_cache *cache = pinfold_cache_create("routes", sizeof(struct route), 0, flags,
							   NULL);
	pthread_t threads[READERS];

	CHECK(cache);
	done = 0;
	current = made(cache, 1);
	for (int n = 0; n < READERS; n++)
		CHECK(pthread_create(&threads[n], NULL, look, NULL) == 0);
	for (uint64_t n = 2; n < CHANGES; n++) {
		struct route *old = atomic_exchange(&current, made(cache, n));

		errno = 4711;
		pinfold_cache_free_deferred(cache, old);
		CHECK(errno == 4711);
		if (n % (CHANGES / 4) == 0)
			CHECK(pinfold_cache_flush_deferred(cache) == 0);
		if (n % (CHANGES / 4) == 1) {
			/* Waits for the readers and frees the object itself. */
			old = atomic_exchange(&current, made(cache, n));
			CHECK(pinfold_grace_synchronize() == 0);
			old->canary = old->inverse = 0;
			pinfold_cache_free(cache, old);
		}
	}
	done = 1;
	for (int n = 0; n < READERS; n++)
		CHECK(pthread_join(threads[n], NULL) == 0);
	pinfold_cache_free_deferred(cache, NULL);
	CHECK(pinfold_cache_flush_deferred(cache) == 0);
	CHECK(attribute(cache, "objects") == 1 && attribute(cache, "free_rcu_sheaf_fail") == 0);
	CHECK(attribute(cache, "free_rcu_sheaf") >= CHANGES - 100);
	/* Destroying the cache waits for objects that were freed deferred. */
	pinfold_cache_free_deferred(cache, atomic_exchange(&current, NULL));
	CHECK(pinfold_cache_validate(cache, NULL, NULL) == 0 && pinfold_cache_destroy(cache) == 0);
}

/* The cache does not reuse an object while its reader is inside. */
static void waits_for_readers(void)
{
	struct pinfold_cache *cache = created("waiting", 64);
	struct pinfold_reader reader = pinfold_grace_enter();
	void *object = pinfold_cache_alloc(cache), *others[2000];

	pinfold_cache_free_deferred(cache, object);
	for (int n = 0; n < 2000; n++)
		CHECK((others[n] = pinfold_cache_alloc(cache)) && others[n] != object);
	pinfold_grace_leave(reader);
	for (int n = 0; n < 2000; n++)
		pinfold_cache_free(cache, others[n]);
	CHECK(pinfold_cache_flush_deferred(cache) == 0 && attribute(cache, "objects") == 0);
	CHECK(pinfold_cache_destroy(cache) == 0);
}

static void nodes(void)
{
	struct pinfold_cache *cache = created("near", 64);
	void *object = pinfold_cache_alloc_node_exact(cache, 0);

	CHECK(object);
	pinfold_cache_free(cache, object);
	errno = 0;
	CHECK(!pinfold_cache_alloc_node_exact(cache, 1000) && errno == ENOMEM);
	errno = 0;
	CHECK(!pinfold_cache_alloc_node_exact(cache, -1) && errno == EINVAL);
	CHECK(pinfold_cache_destroy(cache) == 0);
}

static void note(const struct pinfold_cache_info *info, void *context)
{
	struct pinfold_cache_info *found = context;

	if (strcmp(info->name, "told of") == 0)
		*found = *info;
	/* The callback may allocate. */
	free(strdup(info->name));
}

static void say(void)
{
	struct pinfold_cache *cache = pinfold_cache_create("told of", 100, 0, PINFOLD_SLAB_RED_ZONE,
							   NULL);
	struct pinfold_cache_info found = { 0 };
	void *objects[7];
	char text[1024], little[20], *all, name[40];
	unsigned long active, total, size, per_slab, pages;
	size_t length, caches;
	uint64_t value = 4711;

	CHECK(cache && pinfold_cache_alloc_bulk(cache, 7, objects) == 7);
	length = pinfold_slabinfo(cache, text, sizeof(text));
	CHECK(length == strlen(text) && strncmp(text, "slabinfo - version: 2.1\n# name ", 31) == 0);
	CHECK(strchr(text, ':') && text[length - 1] == '\n');
	CHECK(sscanf(strchr(strchr(text, '\n') + 1, '\n'), "%39s %lu %lu %lu %lu %lu : tunables",
		     name, &active, &total, &size,
		     &per_slab, &pages) == 6);
	CHECK(strcmp(name, "told_of") == 0 && active == 7 && total >= 7 && size >= 100 &&
	      per_slab > 0 && pages > 0);

	/* A short buffer gets a part, like that of snprintf. */
	CHECK(pinfold_slabinfo(cache, NULL, 0) == length);
	memset(little, 'x', sizeof(little));
	CHECK(pinfold_slabinfo(cache, little, 10) == length && strcmp(little, "slabinfo ") == 0 &&
	      little[10] == 'x');
	/* A size class has a cache from its first allocation on. */
	free(malloc(64));
	length = pinfold_slabinfo(NULL, NULL, 0) + 1000;
	CHECK((all = malloc(length)) && pinfold_slabinfo(NULL, all, length) < length);
	CHECK(strstr(all, "\ntold_of ") && strstr(all, "\nkmalloc-00064 "));
	free(all);

	CHECK(attribute(cache, "object_size") == 100 && attribute(cache, "slab_size") == size);
	CHECK(attribute(cache, "objects") == 7 && attribute(cache, "total_objects") == total);
	CHECK(attribute(cache, "red_zone") == 1 && attribute(cache, "slabs") == total / per_slab);
	errno = 0;
	CHECK(pinfold_cache_attribute(cache, "cache_dma", &value) == -1 && errno == EINVAL &&
	      value == 4711);
	errno = 0;
	CHECK(pinfold_cache_attribute(cache, "\xff", &value) == -1 && errno == EINVAL);

	caches = pinfold_caches_for_each(note, &found);
	CHECK(caches > 1 && caches <= pinfold_caches_for_each(NULL, NULL));
	caches = pinfold_caches_for_each(NULL, NULL);
	CHECK(found.object_size == 100 && found.slab_size == size && found.objects == 7 &&
	      found.total_objects == total);
	CHECK(found.slabs == total / per_slab && (found.flags & PINFOLD_SLAB_RED_ZONE));
	pinfold_cache_free_bulk(cache, 7, objects);
	CHECK(pinfold_cache_destroy(cache) == 0);
	CHECK(pinfold_caches_for_each(NULL, NULL) == caches - 1);
}

int main(void)
{
	sheaves();
	pools();
	page_pools();
	waits_for_readers();
	readers(0);
	readers(PINFOLD_SLAB_HARDENED);
	readers(PINFOLD_SLAB_CONSISTENCY_CHECKS | PINFOLD_SLAB_RED_ZONE | PINFOLD_SLAB_POISON);
	nodes();
	say();
	puts("ok");
	return 0;
}
