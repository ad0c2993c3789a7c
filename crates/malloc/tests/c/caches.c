/* Object caches in C. Prints "ok". */
#include "pinfold.h"
#include "check.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define OBJECTS 5000
#define THREADS 4
#define ROUNDS 20000
#define ALL_CHECKS                                                                           \
	(PINFOLD_SLAB_CONSISTENCY_CHECKS | PINFOLD_SLAB_RED_ZONE | PINFOLD_SLAB_POISON |     \
	 PINFOLD_SLAB_STORE_USER)

static void *objects[OBJECTS];

/* The last report, and the number of reports. */
static struct {
	int count, kind;
	ptrdiff_t offset;
	size_t size;
	const void *object;
	char cache[40], text[16384];
} reported;

static void note(const struct pinfold_slab_report *report, void *context)
{
	CHECK(context == &reported);
	reported.count++;
	reported.kind = report->kind;
	reported.offset = report->offset;
	reported.size = report->size;
	reported.object = report->object;
	snprintf(reported.cache, sizeof(reported.cache), "%s", report->cache);
	snprintf(reported.text, sizeof(reported.text), "%s", report->text);
	/* A handler may allocate. */
	free(strdup(report->text));
}

static int go_on(const struct pinfold_slab_report *report, void *context)
{
	note(report, context);
	return PINFOLD_SLAB_CONTINUE;
}

static struct pinfold_cache *created(const char *name, size_t size, unsigned flags)
{
	struct pinfold_cache *cache = pinfold_cache_create(name, size, 0, flags, NULL);

	CHECK(cache);
	memset(&reported, 0, sizeof(reported));
	return cache;
}

static void singles(struct pinfold_cache *cache, size_t size, size_t align)
{
	for (size_t n = 0; n < OBJECTS; n++) {
		objects[n] = pinfold_cache_alloc(cache);
		CHECK(objects[n] && (uintptr_t)objects[n] % align == 0);
		memset(objects[n], (int)n, size);
	}
	CHECK(pinfold_cache_in_use(cache) >= OBJECTS);
	for (size_t n = 0; n < OBJECTS; n++) {
		const unsigned char *bytes = objects[n];

		CHECK(bytes[0] == (unsigned char)n && bytes[size - 1] == (unsigned char)n);
		errno = 4711;
		pinfold_cache_free(cache, objects[n]);
		CHECK(errno == 4711);
	}
}

static void bulks(struct pinfold_cache *cache, size_t size)
{
	CHECK(pinfold_cache_alloc_bulk(cache, OBJECTS, objects) == OBJECTS);
	for (size_t n = 0; n < OBJECTS; n++)
		memset(objects[n], 1, size);
	pinfold_cache_free_bulk(cache, OBJECTS, objects);
	CHECK(pinfold_cache_alloc_bulk(cache, 0, NULL) == 0);
	pinfold_cache_free_bulk(cache, 0, NULL);
}

static void others(struct pinfold_cache *cache, size_t size)
{
	static const unsigned char zeroes[65536];
	void *object = pinfold_cache_alloc_node(cache, 0);

	CHECK(object);
	memset(object, 1, size);
	pinfold_cache_free(cache, object);
	object = pinfold_cache_alloc_node(cache, -1);
	CHECK(object);
	memset(object, 1, size);
	pinfold_cache_free(cache, object);
	pinfold_cache_free(cache, NULL);
	for (int n = 0; n < 100; n++) {
		object = pinfold_cache_zalloc(cache);
		CHECK(object && memcmp(object, zeroes, size) == 0);
		memset(object, 1, size);
		pinfold_cache_free(cache, object);
	}
	CHECK(pinfold_cache_validate(cache, NULL, NULL) == 0);
	CHECK(pinfold_cache_shrink(cache) >= 0);
	pinfold_slab_set_sheaf_budget((size_t)16 << 20);
	pinfold_cache_set_sheaf_capacity(cache, 20);
	CHECK(pinfold_cache_in_use(cache) == 0);
}

static void works(void)
{
	static const struct {
		size_t size, align, aligned;
	} layouts[] = {
		{ 1, 0, 1 }, { 8, 0, 8 }, { 24, 0, 8 }, { 48, 0, 16 }, { 64, 64, 64 },
		{ 100, 32, 32 }, { 1000, 0, 8 },    { 4096, 4096, 4096 }, { 20000, 0, 16 },
	};
	static const unsigned flags[] = { 0, PINFOLD_SLAB_HARDENED, PINFOLD_SLAB_NOT_HARDENED,
					  PINFOLD_SLAB_PROFILED, ALL_CHECKS };

	for (size_t n = 0; n < sizeof(layouts) / sizeof(*layouts); n++)
		for (size_t with = 0; with < sizeof(flags) / sizeof(*flags); with++) {
			size_t size = layouts[n].size;
			struct pinfold_cache *cache =
				pinfold_cache_create("layout", size, layouts[n].align, flags[with],
						     NULL);
			struct pinfold_slab_statistics counted;

			CHECK(cache);
			CHECK(pinfold_cache_size(cache) == size);
			CHECK(strcmp(pinfold_cache_name(cache), "layout") == 0);
			CHECK(pinfold_cache_debug_flags(cache) == (flags[with] & ALL_CHECKS));
			singles(cache, size, layouts[n].aligned);
			bulks(cache, size);
			counted = pinfold_cache_statistics(cache);
			CHECK(counted.slab_alloc > 0 && counted.alloc_slowpath > 0 &&
			      counted.slabs > 0);
			CHECK((counted.sheaf_capacity > 0) == !(flags[with] & ALL_CHECKS) &&
			      counted.stride >= size);
			others(cache, size);
			CHECK(pinfold_cache_destroy(cache) == 0);
		}
}

static void aligned_to_lines(void)
{
	struct pinfold_cache *lines = created("lines", 100, PINFOLD_SLAB_HWCACHE_ALIGN);
	struct pinfold_cache *quarters = created("quarters", 12, PINFOLD_SLAB_HWCACHE_ALIGN);

	CHECK(pinfold_cache_statistics(lines).stride == 128);
	CHECK(pinfold_cache_statistics(quarters).stride == 16);
	CHECK(pinfold_cache_destroy(lines) == 0 && pinfold_cache_destroy(quarters) == 0);
}

static void no_cache(const char *name, size_t size, size_t align, unsigned flags, int error)
{
	errno = 0;
	CHECK(pinfold_cache_create(name, size, align, flags, NULL) == NULL);
	CHECK(errno == error);
}

static void bad_input(void)
{
	struct pinfold_cache *cache;
	const char *long_name = "a name that is longer than the 32 bytes that are kept";

	no_cache(NULL, 8, 0, 0, EINVAL);
	no_cache("\xff", 8, 0, 0, EINVAL);
	no_cache("none", 0, 0, 0, EINVAL);
	no_cache("none", 8, 24, 0, EINVAL);
	no_cache("none", 8, 131072, 0, EINVAL);
	no_cache("none", 8, SIZE_MAX, 0, EINVAL);
	no_cache("none", 8, 0, 0x80000000u, EINVAL);
	no_cache("none", 8, 0, PINFOLD_SLAB_HARDENED | PINFOLD_SLAB_NOT_HARDENED, EINVAL);
	no_cache("none", 8, 0, PINFOLD_SLAB_PROFILED << 1, EINVAL);
	no_cache("none", 65537, 0, 0, E2BIG);
	no_cache("none", SIZE_MAX, 0, 0, E2BIG);
	no_cache("none", SIZE_MAX, 65536, 0, E2BIG);
	CHECK(pinfold_cache_destroy(NULL) == 0);
	cache = created(long_name, 65536, 0);
	CHECK(strlen(pinfold_cache_name(cache)) == 32 &&
	      strncmp(pinfold_cache_name(cache), long_name, 32) == 0);
	errno = 0;
	CHECK(pinfold_cache_alloc_node(cache, -2) == NULL && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_cache_alloc_node(cache, INT_MIN) == NULL && errno == EINVAL);
	pinfold_cache_free(cache, pinfold_cache_alloc_node(cache, INT_MAX));
	CHECK(pinfold_cache_destroy(cache) == 0);
}

static void too_many(void)
{
	static struct pinfold_cache *caches[5000];
	size_t made = 0;

	errno = 0;
	while (made < 5000 && (caches[made] = pinfold_cache_create("one of many", 32, 0, 0, NULL)))
		made++;
	CHECK(made > 3000 && made < 4096 && errno == ENOSPC);
	while (made > 0)
		CHECK(pinfold_cache_destroy(caches[--made]) == 0);
}

struct made {
	long magic, used;
};
static int constructed;

static void construct(void *object)
{
	struct made *made = object;

	made->magic = 4711;
	made->used = 0;
	constructed++;
}

static void constructors(void)
{
	static const unsigned flags[] = { 0, PINFOLD_SLAB_HARDENED, ALL_CHECKS };

	for (size_t with = 0; with < sizeof(flags) / sizeof(*flags); with++) {
		struct pinfold_cache *cache =
			pinfold_cache_create("made", sizeof(struct made), 0, flags[with],
					     construct);

		CHECK(cache);
		constructed = 0;
		for (int n = 0; n < OBJECTS; n++) {
			struct made *made = objects[n] = pinfold_cache_alloc(cache);

			CHECK(made && made->magic == 4711 && made->used == 0);
			made->used = n;
		}
		CHECK(constructed >= OBJECTS);
		for (int n = 0; n < OBJECTS; n++) {
			struct made *made = objects[n];

			CHECK(made->used == n);
			made->used = 0;
			pinfold_cache_free(cache, made);
		}
		errno = 0;
		CHECK(pinfold_cache_zalloc(cache) == NULL && errno == EINVAL);
		CHECK(pinfold_cache_destroy(cache) == 0);
	}
}

static void report_is(int kind, const char *cache, const void *object, const char *text)
{
	CHECK(reported.count == 1);
	CHECK(reported.kind == kind);
	CHECK(strcmp(reported.cache, cache) == 0);
	CHECK(reported.object == object);
	if (!strstr(reported.text, text)) {
		printf("not '%s' but\n%s", text, reported.text);
		exit(1);
	}
	memset(&reported, 0, sizeof(reported));
}

static void overwritten(void)
{
	struct pinfold_cache *cache = created("zoned", 32, ALL_CHECKS);
	volatile unsigned char *object = pinfold_cache_alloc(cache);

	object[32] = object[33] = 0xab;
	CHECK(pinfold_cache_validate(cache, note, &reported) == 1);
	CHECK(reported.offset == 32 && reported.size == 32);
	CHECK(strstr(reported.text, "at offset 32: 0xab instead of 0xcc, 2 wrong in all"));
	CHECK(strstr(reported.text, "allocated by thread"));
	report_is(PINFOLD_SLAB_OVERWRITTEN, "zoned", (void *)object, "right red zone overwritten");
	CHECK(pinfold_cache_validate(cache, note, &reported) == 0 && reported.count == 0);
	object[-1] = 1;
	pinfold_cache_free(cache, (void *)object);
	report_is(PINFOLD_SLAB_OVERWRITTEN, "zoned", (void *)object, "left red zone overwritten");
	CHECK(pinfold_cache_destroy(cache) == 0 || errno == EBUSY);
	CHECK(reported.count == 0);

	cache = created("poisoned", 64, ALL_CHECKS);
	object = pinfold_cache_alloc(cache);
	pinfold_cache_free(cache, (void *)object);
	object[10] = 1;
	CHECK(pinfold_cache_validate(cache, note, &reported) == 1 && reported.offset == 10);
	report_is(PINFOLD_SLAB_OVERWRITTEN, "poisoned", (void *)object, "poison overwritten");
	CHECK(pinfold_cache_destroy(cache) == 0);
}

static void wrong_frees(unsigned flags)
{
	struct pinfold_cache *cache = created("owner", 64, flags);
	struct pinfold_cache *other = created("other", 64, flags);
	char *object = pinfold_cache_alloc(cache), *kept = pinfold_cache_alloc(cache);
	char *foreign = pinfold_cache_alloc(other);

	pinfold_cache_free(cache, object);
	pinfold_cache_free(cache, object);
	report_is(PINFOLD_SLAB_DOUBLE_FREE, "owner", object, "object freed twice");
	pinfold_cache_free(cache, foreign);
	report_is(PINFOLD_SLAB_WRONG_CACHE, "owner", foreign, "of cache other");
	pinfold_cache_free(cache, kept + 8);
	report_is(PINFOLD_SLAB_NOT_AN_OBJECT, "owner", kept + 8, "not the start of an object");
	pinfold_cache_free(cache, kept);
	pinfold_cache_free(other, foreign);
	CHECK(reported.count == 0);
	CHECK(pinfold_cache_destroy(cache) == 0 && pinfold_cache_destroy(other) == 0);
}

static void written_after_free(void)
{
	struct pinfold_cache *cache = created("hard", 64, PINFOLD_SLAB_HARDENED);
	volatile char *object = pinfold_cache_alloc(cache);

	pinfold_cache_free(cache, (void *)object);
	object[0] ^= 1;
	for (int n = 0; reported.count == 0 && n < 200000; n++)
		pinfold_cache_free(cache, pinfold_cache_alloc(cache));
	report_is(PINFOLD_SLAB_WRITTEN_AFTER_FREE, "hard", (void *)object,
		  "written to after it was freed");
	CHECK(pinfold_cache_destroy(cache) == -1 && errno == EBUSY);
}

static void leaks(void)
{
	struct pinfold_cache *cache = created("leaky", 40, ALL_CHECKS), *plain =
		created("plain", 40, 0);
	void *object = pinfold_cache_alloc(cache), *other = pinfold_cache_alloc(plain);

	errno = 0;
	CHECK(pinfold_cache_destroy(cache) == -1 && errno == EBUSY);
	CHECK(pinfold_cache_in_use(cache) == 1);
	CHECK(pinfold_cache_leaks(cache, note, &reported) == 1);
	CHECK(strstr(reported.text, "allocated by thread"));
	report_is(PINFOLD_SLAB_LEAKED, "leaky", object, "object not freed");
	CHECK(pinfold_cache_leaks(cache, NULL, NULL) == 1);
	errno = 0;
	CHECK(pinfold_cache_destroy(plain) == -1 && errno == EBUSY);
	CHECK(pinfold_cache_in_use(plain) == 1 && pinfold_cache_leaks(plain, note, &reported) == 0);
	/* Both work as before. */
	pinfold_cache_free(cache, object);
	pinfold_cache_free(plain, other);
	CHECK(pinfold_cache_leaks(cache, note, &reported) == 0 && reported.count == 0);
	CHECK(pinfold_cache_destroy(cache) == 0 && pinfold_cache_destroy(plain) == 0);
}

static struct pinfold_cache *shared;
static void *handed[THREADS][64];
static pthread_barrier_t meet;

/* Each thread frees the objects that its neighbour has allocated. */
static void *work(void *argument)
{
	size_t me = (size_t)(uintptr_t)argument, next = (me + 1) % THREADS;

	for (int round = 0; round < ROUNDS / 64; round++) {
		size_t got = round % 2 ? pinfold_cache_alloc_bulk(shared, 64, handed[me]) : 0;

		for (size_t n = got; n < 64; n++)
			CHECK((handed[me][n] = pinfold_cache_alloc(shared)));
		for (size_t n = 0; n < 64; n++)
			memset(handed[me][n], (int)me, 96);
		pthread_barrier_wait(&meet);
		for (size_t n = 0; n < 64; n++)
			CHECK(((unsigned char *)handed[next][n])[95] == next);
		if (round % 3)
			pinfold_cache_free_bulk(shared, 64, handed[next]);
		else
			for (size_t n = 0; n < 64; n++)
				pinfold_cache_free(shared, handed[next][n]);
		if (round % 50 == 0 && me == 0)
			CHECK(pinfold_cache_shrink(shared) >= 0 &&
			      pinfold_cache_validate(shared, NULL, NULL) == 0);
		pthread_barrier_wait(&meet);
	}
	return NULL;
}

static void threads(unsigned flags)
{
	pthread_t workers[THREADS];

	shared = created("shared", 96, flags);
	CHECK(pthread_barrier_init(&meet, NULL, THREADS) == 0);
	for (size_t n = 0; n < THREADS; n++)
		CHECK(pthread_create(&workers[n], NULL, work, (void *)(uintptr_t)n) == 0);
	for (size_t n = 0; n < THREADS; n++)
		CHECK(pthread_join(workers[n], NULL) == 0);
	pthread_barrier_destroy(&meet);
	CHECK(pinfold_cache_destroy(shared) == 0 && reported.count == 0);
}

static volatile int done;

static void *churn(void *argument)
{
	while (!done) {
		pinfold_cache_alloc_bulk(shared, 64, handed[0]);
		pinfold_cache_free_bulk(shared, 64, handed[0]);
		CHECK(pinfold_cache_shrink(shared) >= 0);
	}
	return argument;
}

/* A child has a working copy, whatever the parent's threads were doing at the fork. */
static void forks(void)
{
	pthread_t worker;

	shared = created("forked", 96, 0);
	CHECK(pthread_create(&worker, NULL, churn, NULL) == 0);
	for (int n = 0; n < 30; n++) {
		int status;
		char *before = pinfold_cache_alloc(shared);
		pid_t child;

		memset(before, n, 96);
		child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			struct pinfold_cache *own = created("child's", 96, 0);

			CHECK(before[95] == n);
			pinfold_cache_free(shared, before);
			for (int k = 0; k < 1000; k++)
				CHECK((objects[k] = pinfold_cache_alloc(k % 2 ? own : shared)));
			for (int k = 0; k < 1000; k++)
				pinfold_cache_free(k % 2 ? own : shared, objects[k]);
			CHECK(pinfold_cache_validate(shared, NULL, NULL) == 0 &&
			      pinfold_cache_destroy(own) == 0);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		pinfold_cache_free(shared, before);
	}
	done = 1;
	CHECK(pthread_join(worker, NULL) == 0);
	CHECK(pinfold_cache_destroy(shared) == 0);
}

int main(void)
{
	works();
	aligned_to_lines();
	bad_input();
	too_many();
	constructors();
	CHECK(pinfold_slab_on_report(go_on, &reported) == 0);
	overwritten();
	wrong_frees(ALL_CHECKS);
	wrong_frees(PINFOLD_SLAB_HARDENED);
	written_after_free();
	leaks();
	threads(0);
	threads(PINFOLD_SLAB_HARDENED);
	threads(PINFOLD_SLAB_PROFILED);
	threads(ALL_CHECKS);
	forks();
	puts("ok");
	return 0;
}
