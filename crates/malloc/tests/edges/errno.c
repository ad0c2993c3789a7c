/*
 * free always leaves errno unchanged, and so does each call that succeeds.
 *
 * System calls that the allocator makes may fail. In one case here, a filter makes membarrier fail.
 */
#include "seccomp.h"
#include <malloc.h>

enum { HELD = 20000, MARK = 4711 };

static void *held[HELD];

static void kept(const char *call, size_t size)
{
	if (errno != MARK)
		FAIL("%s changed errno to %d (%s), size %zu", call, errno, strerror(errno), size);
}

static void *use(void *argument)
{
	unsigned seed = (unsigned)(size_t)argument;
	double end = now() + working_time();
	/* Uses sizes once. Later slow paths give back what the caches of these sizes hold. */
	for (size_t i = 0; i < HELD; i++)
		held[i] = malloc(1 + i % 30000);
	for (size_t i = 0; i < HELD; i++) {
		errno = MARK;
		free(held[i]);
		kept("free", 1 + i % 30000);
	}
	while (now() < end) {
		void *blocks[500];
		size_t sizes[500];
		errno = MARK;
		for (int i = 0; i < 500; i++) {
			seed = seed * 1664525 + 1013904223;
			unsigned kind = seed >> 22 & 255;
			size_t most = kind == 0 ? 6000000 : kind < 8 ? 300000 : 3000;
			size_t size = sizes[i] = 1 + (seed >> 6) % most;
			switch (kind & 7) {
			case 1:
				blocks[i] = calloc(2, size);
				kept("calloc", size);
				break;
			case 2:
				blocks[i] = aligned_alloc(64, (size + 63) / 64 * 64);
				kept("aligned_alloc", size);
				break;
			case 3:
				CHECK(posix_memalign(&blocks[i], 4096, size) == 0);
				kept("posix_memalign", size);
				break;
			default:
				blocks[i] = malloc(size);
				kept("malloc", size);
			}
			CHECK(blocks[i]);
			if (kind % 16 == 5) {
				blocks[i] = realloc(blocks[i], size * 3);
				kept("realloc", size);
				CHECK(blocks[i]);
			}
			CHECK(malloc_usable_size(blocks[i]) >= size);
			kept("malloc_usable_size", size);
		}
		for (int i = 0; i < 500; i++) {
			free(blocks[i]);
			kept("free", sizes[i]);
		}
	}
	return NULL;
}

static void *churner(void *argument)
{
	churn_for(1, 0.3);
	return argument;
}

int main(int count, char **words)
{
	const char *name = count > 1 ? words[1] : "";
	working_time();
	if (!strcmp(name, "refused")) {
		static const int calls[] = { SYS_membarrier };
		enter_filter(calls, 1, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW);
		use((void *)1);
	} else if (!strcmp(name, "threads")) {
		pthread_t thread = start(churner, NULL);
		pthread_join(thread, NULL);
		use((void *)2);
	} else if (!strcmp(name, "alone"))
		use((void *)3);
	else
		FAIL("no such case");
	return 0;
}
