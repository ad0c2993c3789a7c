/*
 * Memory policies, shared policies, and pages and caches with policies in C, on one node or
 * several. Prints "ok".
 */
#define _GNU_SOURCE
#include "pinfold.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS 20000
#define NODES 1024
#define WORDS (NODES / (8 * sizeof(unsigned long)))

static pinfold_mempolicy_t *parsed(const char *text)
{
	char wrong[200] = "?";
	pinfold_mempolicy_t *policy = pinfold_mempolicy_parse(text, wrong, sizeof(wrong));

	if (!policy)
		printf("%s: %s\n", text, wrong);
	CHECK(policy && !*wrong);
	return policy;
}

static int reads(const pinfold_mempolicy_t *policy, const char *text)
{
	char found[200];

	return pinfold_mempolicy_format(policy, found, sizeof(found)) == strlen(text) &&
		!strcmp(found, text);
}

static size_t policies_in_use(void)
{
	size_t length = pinfold_slabinfo(NULL, NULL, 0) + 4096, active;
	char *text = malloc(length), *line;

	CHECK(text && pinfold_slabinfo(NULL, text, length) < length);
	line = strstr(text, "\nmempolicy ");
	CHECK(line && sscanf(line, " mempolicy %zu", &active) == 1);
	free(text);
	return active;
}

static void text(void)
{
	static const char *const wrong[] = { "", "bind", "bind:", "bind:0-x", "bind:1024", "fast:0",
					     "local:0", "prefer:0-1",
					     "bind=static|relative:0", "interleave:0@0",
						     "bind:\xff" };
	pinfold_mempolicy_t *policy = parsed("mpol=preferred-many=static|balancing:0-2,5@7");
	char error[64], small[8], *long_text;
	size_t n;

	CHECK(reads(policy, "prefer (many)=static|balancing:0-2,5@7"));
	CHECK(pinfold_mempolicy_format(policy, NULL, 0) == 38);
	CHECK(pinfold_mempolicy_format(policy, small, sizeof(small)) == 38 &&
	      !strcmp(small, "prefer "));
	CHECK(pinfold_mempolicy_mode(policy) == PINFOLD_MPOL_PREFERRED_MANY);
	CHECK(pinfold_mempolicy_flags(policy) == (PINFOLD_MPOL_STATIC_NODES |
						  PINFOLD_MPOL_BALANCING));
	pinfold_mempolicy_put(policy);
	for (n = 0; n < sizeof(wrong) / sizeof(*wrong); n++) {
		errno = 0;
		memset(error, 'x', sizeof(error));
		CHECK(!pinfold_mempolicy_parse(wrong[n], error, sizeof(error)) && errno == EINVAL);
		CHECK(memchr(error, 0, sizeof(error)) && strlen(error) > 10);
		errno = 0;
		CHECK(!pinfold_mempolicy_parse(wrong[n], NULL, 0) && errno == EINVAL);
		CHECK(!pinfold_mempolicy_parse(wrong[n], error, 1) && !*error);
	}
	CHECK(!pinfold_mempolicy_parse(NULL, error, sizeof(error)) && strstr(error, "no text"));
	CHECK(!pinfold_mempolicy_parse("bind:0-x", error, sizeof(error)) &&
	      strstr(error, "\"0-x\" at byte 5"));
	/* A text of a megabyte. */
	long_text = malloc(1 << 20);
	CHECK(long_text);
	memset(long_text, ',', 1 << 20);
	memcpy(long_text, "bind:0", 6);
	long_text[(1 << 20) - 1] = 0;
	errno = 0;
	CHECK(!pinfold_mempolicy_parse(long_text, error, sizeof(error)) && errno == EINVAL);
	CHECK(strlen(error) == sizeof(error) - 1);
	free(long_text);
	/* NULL is the default policy. */
	CHECK(reads(NULL, "default") && pinfold_mempolicy_mode(NULL) == PINFOLD_MPOL_DEFAULT &&
	      pinfold_mempolicy_flags(NULL) == 0);
	errno = 4711;
	pinfold_mempolicy_put(NULL);
	CHECK(!pinfold_mempolicy_get(NULL) && errno == 4711);
}

static void masks(void)
{
	unsigned long mask[WORDS + 1] = { 0x25 };
	pinfold_mempolicy_t *policy = pinfold_mempolicy_create(
		PINFOLD_MPOL_BIND, PINFOLD_MPOL_RELATIVE_NODES, mask, 6), *other;

	CHECK(policy && reads(policy, "bind=relative:0,2,5"));
	/* Exactly the first five bits count: node 5 is not among them. */
	other = pinfold_mempolicy_create(PINFOLD_MPOL_BIND, 0, mask, 5);
	CHECK(reads(other, "bind:0,2"));
	pinfold_mempolicy_put(other);
	memset(mask, 0xff, sizeof(mask));
	CHECK(pinfold_mempolicy_nodes(policy, mask, 6) == 0 && mask[0] == 0x25 && mask[1] == ~0ul);
	errno = 0;
	CHECK(pinfold_mempolicy_nodes(policy, mask, 5) == -1 && errno == ERANGE && mask[0] == 0x5);
	CHECK(pinfold_mempolicy_nodes(policy, mask, NODES) == 0 && mask[0] == 0x25 && mask[1] == 0);
	CHECK(mask[WORDS - 1] == 0 && mask[WORDS] == ~0ul);
	CHECK(pinfold_mempolicy_nodes(NULL, mask, 1) == 0 && mask[0] == 0);
	pinfold_mempolicy_put(policy);
	policy = parsed("bind:1023");
	CHECK(pinfold_mempolicy_nodes(policy, mask, NODES) == 0 &&
	      mask[WORDS - 1] == 1ul << (8 * sizeof(long) - 1));
	CHECK(pinfold_mempolicy_nodes(policy, mask, NODES - 1) == -1 && mask[WORDS - 1] == 0);
	pinfold_mempolicy_put(policy);
	mask[0] = 1;
	errno = 0;
	CHECK(!pinfold_mempolicy_create(7, 0, mask, 1) && errno == EINVAL);
	errno = 0;
	CHECK(!pinfold_mempolicy_create(PINFOLD_MPOL_BIND, 0, mask, (size_t)-1) && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_mempolicy_nodes(NULL, mask, (size_t)-1) == -1 && errno == EINVAL);
	CHECK(!pinfold_mempolicy_create(-1, 0, mask, 1) &&
	      !pinfold_mempolicy_create(PINFOLD_MPOL_BIND, 1, mask, 1));
	CHECK(!pinfold_mempolicy_create(PINFOLD_MPOL_LOCAL, 0, mask, 1) &&
	      !pinfold_mempolicy_create(PINFOLD_MPOL_BIND, 0, NULL, 0));
	memset(mask, 0, sizeof(mask));
	mask[WORDS] = 1;
	CHECK(!pinfold_mempolicy_create(PINFOLD_MPOL_BIND, 0, mask, NODES + 1));
}

static void copies_and_changes(void)
{
	pinfold_mempolicy_t *policy = parsed("bind=relative:0-1"), *copy =
		pinfold_mempolicy_dup(policy), *bound;
	unsigned long allowed[1] = { 0xf0 }, mask[1];

	CHECK(copy && copy != policy);
	CHECK(pinfold_mempolicy_get(policy) == policy);
	errno = 0;
	CHECK(pinfold_mempolicy_set_home_node(policy, 1) == -1 && errno == EBUSY);
	CHECK(pinfold_mempolicy_set_home_node(copy, 1) == 0 && reads(copy, "bind=relative:0-1@1") &&
	      reads(policy, "bind=relative:0-1"));
	CHECK(pinfold_mempolicy_set_home_node(copy, -1) == 0 && reads(copy, "bind=relative:0-1"));
	errno = 0;
	CHECK(pinfold_mempolicy_set_home_node(copy, -2) == -1 && errno == EINVAL);
	CHECK(pinfold_mempolicy_set_home_node(copy, 1024) == -1 &&
	      pinfold_mempolicy_set_home_node(NULL, 0) == -1);
	/* A holder of the old policy does not see the new one's nodes. */
	bound = pinfold_mempolicy_rebind(policy, allowed, 8);
	CHECK(bound && pinfold_mempolicy_nodes(bound, mask, 64) == 0 && mask[0] == 0x30);
	CHECK(pinfold_mempolicy_nodes(policy, mask, 64) == 0 && mask[0] == 0x3 &&
	      reads(bound, "bind=relative:0-1"));
	errno = 0;
	CHECK(!pinfold_mempolicy_rebind(policy, allowed, 4) && errno == EINVAL);
	CHECK(!pinfold_mempolicy_rebind(policy, NULL, 0));
	pinfold_mempolicy_put(bound);
	pinfold_mempolicy_put(policy);
	bound = pinfold_mempolicy_effective(NULL, policy);
	CHECK(reads(bound, "bind=relative:0-1"));
	pinfold_mempolicy_put(bound);
	bound = pinfold_mempolicy_effective(copy, NULL);
	CHECK(reads(bound, "bind=relative:0-1"));
	pinfold_mempolicy_put(bound);
	bound = pinfold_mempolicy_effective(NULL, NULL);
	CHECK(reads(bound, "local"));
	pinfold_mempolicy_put(bound);
	pinfold_mempolicy_put(copy);
	errno = 4711;
	pinfold_mempolicy_put(policy);
	CHECK(errno == 4711);
}

/* A map's default serves the pages without a range, and the thread's policy those of no map. */
static void defaults(void)
{
	struct pinfold_shared_policy *map = pinfold_shared_policy_create();
	struct pinfold_pages *pool = pinfold_pages_create("defaults");
	pinfold_mempolicy_t *mount = parsed("prefer:0"), *range = parsed("bind:0"), *found;
	pinfold_mempolicy_t *nowhere = parsed("bind:1000");
	void *page;
	int mode;

	CHECK(map && pool);
	CHECK(pinfold_shared_policy_set_default(map, NULL) == 0);
	CHECK(pinfold_shared_policy_set_default(map, mount) == 0);
	CHECK(pinfold_shared_policy_set(map, 5, 7, range) == 0);
	CHECK((found = pinfold_shared_policy_lookup(map, 6)) && reads(found, "bind:0"));
	CHECK(pinfold_shared_policy_node(map, 6, &mode) == 0 && mode == PINFOLD_MPOL_BIND);
	CHECK(pinfold_shared_policy_node(map, 7, &mode) == 0 && mode == PINFOLD_MPOL_PREFERRED);
	CHECK(pinfold_shared_policy_node(map, 7, NULL) == 0);
	pinfold_mempolicy_put(found);
	CHECK((found = pinfold_shared_policy_lookup(map, UINT64_MAX)) && reads(found, "prefer:0"));
	pinfold_mempolicy_put(found);
	CHECK(pinfold_shared_policy_set(map, 0, 100, NULL) == 0);
	CHECK((found = pinfold_shared_policy_lookup(map, 6)) && reads(found, "prefer:0"));
	pinfold_mempolicy_put(found);
	CHECK(pinfold_shared_policy_set_default(map, NULL) == 0);
	errno = 0;
	CHECK(!pinfold_shared_policy_lookup(map, 6) && errno == ENOENT);
	errno = 0;
	CHECK(pinfold_shared_policy_node(map, 6, &mode) == -1 && errno == ENOENT);
	CHECK(pinfold_pages_set_default_policy(pool, mount) == 0);
	errno = 0;
	CHECK(pinfold_pages_set_default_policy(pool, nowhere) == -1 && errno == EINVAL);
	CHECK(pinfold_pages_set_default_policy(pool, NULL) == 0);
	pinfold_pages_set_following_threads(pool, 1);
	page = pinfold_pages_alloc(pool, 3);
	CHECK(page);
	pinfold_pages_free(pool, page);
	pinfold_pages_set_following_threads(pool, 0);
	pinfold_mempolicy_put(mount);
	pinfold_mempolicy_put(range);
	pinfold_mempolicy_put(nowhere);
	pinfold_shared_policy_destroy(map);
	CHECK(pinfold_pages_destroy(pool) == 0 || errno == ENOTSUP);
}

static void *hold_and_put(void *argument)
{
	pinfold_mempolicy_t *policy = argument;

	for (int n = 0; n < ROUNDS; n++) {
		pinfold_mempolicy_t *mine = pinfold_mempolicy_get(policy), *copy =
			pinfold_mempolicy_dup(mine);

		CHECK(copy && pinfold_mempolicy_mode(mine) == PINFOLD_MPOL_INTERLEAVE);
		pinfold_mempolicy_put(mine);
		CHECK(pinfold_mempolicy_mode(copy) == PINFOLD_MPOL_INTERLEAVE);
		pinfold_mempolicy_put(copy);
	}
	pinfold_mempolicy_put(policy);
	return NULL;
}

static void counts(void)
{
	pinfold_mempolicy_t *policy = parsed("interleave:0-3");
	size_t before = policies_in_use();
	pthread_t threads[THREADS];

	for (int n = 0; n < THREADS; n++)
		CHECK(!pthread_create(&threads[n], NULL, hold_and_put,
				      pinfold_mempolicy_get(policy)));
	for (int n = 0; n < THREADS; n++)
		CHECK(!pthread_join(threads[n], NULL));
	CHECK(policies_in_use() == before);
	CHECK(reads(policy, "interleave:0-3"));
	pinfold_mempolicy_put(policy);
	CHECK(policies_in_use() == before - 1);
}

/*
 * Puts one policy to two uses, and then puts the policy itself. In Linux 2.6.26 to 3.6 that freed
 * the policy under the users of the shared range. Here each use has a copy.
 */
static struct pinfold_shared_policy *shared;

static void *look_up(void *argument)
{
	for (int n = 0; n < ROUNDS; n++) {
		pinfold_mempolicy_t *found = pinfold_shared_policy_lookup(shared, 100 + n % 900);

		CHECK(found && reads(found, "bind=static:0"));
		pinfold_mempolicy_put(found);
	}
	return argument;
}

static void one_policy_in_two_uses(void)
{
	size_t before = policies_in_use();
	pinfold_mempolicy_t *policy = parsed("bind=static:0"), *found;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *private = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			     -1, 0);
	pthread_t threads[THREADS];

	CHECK(private != MAP_FAILED);
	CHECK((shared = pinfold_shared_policy_create()));
	if (pinfold_mempolicy_available())
		CHECK(pinfold_mempolicy_apply(private, 4 * page, policy, 0) == 0);
	CHECK(pinfold_shared_policy_set(shared, 100, 1000, policy) == 0);
	pinfold_mempolicy_put(policy);
	CHECK(policies_in_use() == before);
	/* A policy in the freed object's place has other nodes, so that a stale use shows. */
	policy = parsed("interleave:0-7");
	for (int n = 0; n < THREADS; n++)
		CHECK(!pthread_create(&threads[n], NULL, look_up, NULL));
	/*
	 * Neither other ranges nor the end of the private use change the policy of the shared
	 * range.
	 */
	for (uint64_t n = 0; n < 1000; n++) {
		CHECK(pinfold_shared_policy_set(shared, 2000 + n, 2001 + n,
						n % 2 ? policy : NULL) == 0);
	}
	munmap(private, 4 * page);
	for (int n = 0; n < THREADS; n++)
		CHECK(!pthread_join(threads[n], NULL));
	pinfold_mempolicy_put(policy);
	CHECK(pinfold_shared_policy_set(shared, 400, 500, NULL) == 0);
	errno = 0;
	CHECK(!pinfold_shared_policy_lookup(shared, 450) && errno == ENOENT);
	CHECK((found = pinfold_shared_policy_lookup(shared, 399)));
	errno = 0;
	CHECK(pinfold_shared_policy_set(shared, 5, 5, found) == -1 && errno == EINVAL);
	pinfold_shared_policy_destroy(shared);
	pinfold_shared_policy_destroy(NULL);
	CHECK(reads(found, "bind=static:0"));
	pinfold_mempolicy_put(found);
	CHECK(policies_in_use() == before);
}

static void threads_and_ranges(void)
{
	pinfold_mempolicy_t *policy = parsed("bind:0"), *found;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *range = mmap(NULL, 100 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);
	const void *pages[100];
	int nodes[100], status[100];

	CHECK(range != MAP_FAILED);
	CHECK(pinfold_mempolicy_set_thread(policy) == 0);
	CHECK((found = pinfold_mempolicy_get_thread()) && reads(found, "bind:0"));
	pinfold_mempolicy_put(found);
	CHECK(pinfold_mempolicy_set_thread(NULL) == 0);
	pinfold_mempolicy_thread_changed();
	CHECK((found = pinfold_mempolicy_get_thread()) && reads(found, "default"));
	pinfold_mempolicy_put(found);
	CHECK(pinfold_mempolicy_apply(range, 100 * page, policy, PINFOLD_MPOL_STRICT |
				      PINFOLD_MPOL_MOVE) == 0);
	CHECK((found = pinfold_mempolicy_at(range + 7 * page)) && reads(found, "bind:0"));
	pinfold_mempolicy_put(found);
	memset(range, 1, 99 * page);
	CHECK(pinfold_node_of(range + page) == 0);
	for (int n = 0; n < 100; n++) {
		pages[n] = range + (size_t)n * page;
		nodes[n] = 0;
		status[n] = 4711;
	}
	CHECK(pinfold_pages_move(100, pages, NULL, status, 0) == 0 && status[0] == 0 &&
	      status[98] == 0 && status[99] < 0);
	status[98] = 4711;
	CHECK(pinfold_pages_move(99, pages, nodes, status, PINFOLD_MPOL_MOVE) == 0 &&
	      status[98] == 0);
	CHECK(pinfold_pages_move(0, NULL, NULL, NULL, 0) == 0);
	unsigned long allowed[16], none[16] = { 0 };

	CHECK(pinfold_mems_allowed(allowed, 1024) == 0 && memcmp(allowed, none, sizeof(none)) != 0);
	errno = 0;
	CHECK(pinfold_mems_allowed(allowed, 32769) == -1 && errno == EINVAL);
	CHECK(pinfold_pages_migrate(0, allowed, allowed, 1024) >= 0);
	errno = 0;
	CHECK(pinfold_pages_migrate(0, allowed, none, 1024) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_pages_migrate(0x7fffffff, allowed, allowed, 1024) == -1 && errno == ESRCH);
	errno = 0;
	CHECK(pinfold_pages_migrate(0, allowed, allowed, 32769) == -1 && errno == EINVAL);
	nodes[98] = 1023;
	errno = 0;
	CHECK(pinfold_pages_move(99, pages, nodes, status, 0) == -1 && errno == ENODEV);
	nodes[98] = -1;
	CHECK(pinfold_pages_move(99, pages, nodes, status, 0) == -1 && errno == ENODEV);
	errno = 0;
	CHECK(pinfold_pages_move(1, pages, nodes, status, PINFOLD_MPOL_STRICT) == -1 &&
	      errno == EINVAL);
	errno = 0;
	CHECK(pinfold_mempolicy_apply(range + 1, page, policy, 0) == -1 && errno == EINVAL);
	CHECK(pinfold_mempolicy_apply(range, page, policy, 8) == -1 && errno == EINVAL);
	CHECK(pinfold_mempolicy_apply(range, page, NULL, 0) == 0);
	munmap(range, 100 * page);
	errno = 0;
	CHECK(!pinfold_mempolicy_at(range) && errno == EFAULT);
	CHECK(pinfold_node_of(range) == -1 && errno == EFAULT);
	CHECK(pinfold_mempolicy_apply(range, page, policy, 0) == -1 && errno == EFAULT);
	pinfold_mempolicy_put(policy);
	policy = parsed("bind:0@0");
	errno = 0;
	CHECK(pinfold_mempolicy_set_thread(policy) == -1 && errno == EINVAL);
	pinfold_mempolicy_put(policy);
	policy = parsed("bind:1022");
	CHECK(pinfold_mempolicy_set_thread(policy) == -1 && errno == EINVAL);
	pinfold_mempolicy_put(policy);
}

static void pools(void)
{
	struct pinfold_pages *pool = pinfold_pages_create("buffers");
	pinfold_mempolicy_t *policy = parsed("bind=static:0");
	char *pages[600];
	pinfold_mempolicy_t *nowhere = parsed("bind:1000");
	size_t size;

	CHECK(pool && (size = pinfold_pages_size(pool)) == (size_t)sysconf(_SC_PAGESIZE));
	CHECK(pinfold_pages_set_policy(pool, 0, 500, policy) == 0);
	pinfold_mempolicy_put(policy);
	for (int n = 0; n < 600; n++) {
		pages[n] = n % 2 ? pinfold_pages_alloc(pool, (uint64_t)n)
				 : pinfold_pages_alloc_zeroed(pool, (uint64_t)n);
		CHECK(pages[n] && (uintptr_t)pages[n] % size == 0);
		CHECK(n % 2 || (pages[n][0] == 0 && pages[n][size - 1] == 0));
		memset(pages[n], n, size);
	}
	for (int n = 0; n < 600; n++)
		CHECK(pages[n][0] == (char)n && pages[n][size - 1] == (char)n);
	if (pinfold_mempolicy_available())
		CHECK(pinfold_pages_node_of(pool, pages[7]) <= 0 && pinfold_node_of(pages[7]) == 0);
	for (int n = 0; n < 599; n++)
		pinfold_pages_free(pool, pages[n]);
	pinfold_pages_free(pool, NULL);
	errno = 0;
	CHECK(pinfold_pages_destroy(pool) == -1 && errno == EBUSY);
	/* The pool works as before. */
	CHECK((pages[0] = pinfold_pages_alloc(pool, 0)) && pages[599][1] == (char)599);
	pinfold_pages_free(pool, pages[0]);
	pinfold_pages_free(pool, pages[599]);
	errno = 0;
	CHECK(pinfold_pages_set_policy(pool, 7, 7, NULL) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_pages_set_policy(pool, 0, 9, nowhere) == -1 && errno == EINVAL);
	pinfold_mempolicy_put(nowhere);
	CHECK(pinfold_pages_set_policy(pool, 0, UINT64_MAX, NULL) == 0);
	CHECK(pinfold_pages_destroy(pool) == 0 || errno == ENOTSUP);
	CHECK(pinfold_pages_destroy(NULL) == 0);
	errno = 0;
	CHECK(!pinfold_pages_create(NULL) && errno == EINVAL && !pinfold_pages_create("\xff") &&
	      errno == EINVAL);
}

static void caches(void)
{
	pinfold_mempolicy_t *policy = parsed("interleave");
	struct pinfold_cache *cache = pinfold_cache_create_policy("bucket", 200, 0, 0, NULL,
								  policy);
	void *objects[1000];

	CHECK(cache);
	pinfold_mempolicy_put(policy);
	for (int n = 0; n < 1000; n++) {
		CHECK((objects[n] = pinfold_cache_alloc(cache)));
		memset(objects[n], n, 200);
	}
	for (int n = 0; n < 1000; n++) {
		CHECK(((unsigned char *)objects[n])[199] == (unsigned char)n);
		pinfold_cache_free(cache, objects[n]);
	}
	CHECK(pinfold_cache_destroy(cache) == 0);
	cache = pinfold_cache_create_policy("plain", 64, 0, 0, NULL, NULL);
	CHECK(cache && pinfold_cache_destroy(cache) == 0);
	errno = 0;
	CHECK(!pinfold_cache_create_policy("none", 0, 0, 0, NULL, NULL) && errno == EINVAL);
	errno = 0;
	policy = parsed("bind:1000");
	CHECK(!pinfold_cache_create_policy("nowhere", 64, 0, 0, NULL, policy) && errno == EINVAL);
	pinfold_mempolicy_put(policy);
}

static void children(void)
{
	pinfold_mempolicy_t *policy = parsed("bind:0"), *copy;
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		CHECK((copy = pinfold_mempolicy_dup(policy)) && reads(copy, "bind:0"));
		pinfold_mempolicy_put(copy);
		pinfold_mempolicy_put(policy);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(reads(policy, "bind:0"));
	pinfold_mempolicy_put(policy);
}

/* Where pages go: the nodes with memory by distance, and those of a policy only. */
static void order_of_nodes(void)
{
	struct pinfold_node_order *order = pinfold_node_order_create();
	pinfold_mempolicy_t *policy;
	int nodes[1024], first[1] = { -2 };
	ptrdiff_t count;

	CHECK(order);
	count = pinfold_mempolicy_zonelist(NULL, 0, order, nodes, 1024);
	CHECK(count >= 1 && count <= 1024);
	CHECK(pinfold_mempolicy_zonelist(NULL, 0, order, NULL, 0) == count);
	CHECK(pinfold_mempolicy_zonelist(NULL, 0, order, first, 1) == count &&
	      first[0] == nodes[0]);
	CHECK(pinfold_mempolicy_node_for(NULL, 7, 0, order) == nodes[0]);
	policy = pinfold_mempolicy_create(PINFOLD_MPOL_BIND, 0,
					  (unsigned long[16]){ [0] = 1ul << nodes[0] }, 64);
	CHECK(policy && pinfold_mempolicy_node_for(policy, 7, 0, order) == nodes[0]);
	CHECK(pinfold_mempolicy_zonelist(policy, 0, order, first, 1) == 1);
	pinfold_mempolicy_put(policy);
	if (count > 1) {
		char text[64];

		/* Of four pages in a row, three go to the second node. */
		snprintf(text, sizeof(text), "weighted interleave:%d,%d", nodes[0], nodes[1]);
		policy = parsed(text);
		CHECK(pinfold_node_order_set_weight(order, nodes[0], 1) == 0);
		CHECK(pinfold_node_order_set_weight(order, nodes[1], 3) == 0);
		int second = 0;

		for (uint64_t page = 0; page < 4; page++)
			second += pinfold_mempolicy_node_for(policy, page, 0, order) == nodes[1];
		CHECK(second == 3);
		pinfold_mempolicy_put(policy);
	}
	CHECK(pinfold_node_order_weight(order, 1023) == 1);
	CHECK(pinfold_node_order_set_weight(order, 1023, 255) == 0);
	CHECK(pinfold_node_order_weight(order, 1023) == 255);
	errno = 0;
	CHECK(pinfold_node_order_weight(order, 1024) == -1 && errno == EINVAL);
	for (unsigned weight = 0; weight <= 256; weight += 256) {
		errno = 0;
		CHECK(pinfold_node_order_set_weight(order, 0, weight) == -1 && errno == EINVAL);
	}
	errno = 0;
	CHECK(pinfold_mempolicy_node_for(NULL, 0, -1, order) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_mempolicy_zonelist(NULL, 1024, order, nodes, 1024) == -1 && errno == EINVAL);
	pinfold_node_order_destroy(order);
	pinfold_node_order_destroy(NULL);
}

int main(void)
{
	text();
	order_of_nodes();
	masks();
	copies_and_changes();
	counts();
	one_policy_in_two_uses();
	defaults();
	if (pinfold_mempolicy_available())
		threads_and_ranges();
	else
		printf("skipped: policies cannot be set here: errno %d\n", errno);
	pools();
	caches();
	children();
	printf("ok\n");
	return 0;
}
