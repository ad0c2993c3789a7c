/*
 * A sampled allocation calls no function of the loader, and waits for none of its locks: neither
 * for a heap profile nor for guarded blocks. Run with the library preloaded. Prints "ok".
 *
 * The program defines functions of the loader, so that it sees the library's calls of them. It
 * leaves `dlsym` alone, whose answer depends on its caller.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int callback(struct dl_phdr_info *object, size_t size, void *argument);

/* Whether this thread is in a call of the allocator. */
static __thread volatile int allocates;
/* The calls of the loader's functions by such threads. */
static unsigned long calls;

static int go;

/* Returns the loader's function. Asks once, because to ask may allocate. */
static void *real(void **known, const char *name)
{
	const char *versions[] = { "GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17" };

	if (allocates)
		__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < 3 && !*known; i++)
		*known = dlvsym(RTLD_NEXT, name, versions[i]);
	CHECK(*known);
	return *known;
}

void *dlopen(const char *file, int flags)
{
	static void *known;

	return ((void *(*)(const char *, int))real(&known, "dlopen"))(file, flags);
}

int dladdr(const void *address, Dl_info *info)
{
	static void *known;

	return ((int (*)(const void *, Dl_info *))real(&known, "dladdr"))(address, info);
}

int dl_iterate_phdr(callback *each, void *argument)
{
	static void *known;

	return ((int (*)(callback *, void *))real(&known, "dl_iterate_phdr"))(each, argument);
}

static void *allocate(void *nothing)
{
	while (!__atomic_load_n(&go, __ATOMIC_SEQ_CST))
		usleep(1000);
	for (int i = 0; i < 200; i++) {
		void *aligned = NULL;
		char *block;

		allocates = 1;
		block = malloc((size_t)(16 + i * 50));
		CHECK(block);
		block = realloc(block, (size_t)(32 + i * 90));
		CHECK(block && posix_memalign(&aligned, 64, 100) == 0);
		free(block);
		free(aligned);
		block = calloc(3, 100000);
		CHECK(block);
		free(block);
		allocates = 0;
		/* No more than one block a millisecond is guarded. */
		if (i % 20 == 0)
			usleep(2000);
	}
	return nothing;
}

/* Runs while the loader's lock is held. A sample that took the lock would wait forever. */
static int wait_for_thread(struct dl_phdr_info *object, size_t size, void *thread)
{
	(void)object, (void)size;
	__atomic_store_n(&go, 1, __ATOMIC_SEQ_CST);
	CHECK(pthread_join(*(pthread_t *)thread, NULL) == 0);
	allocate(NULL);
	return 1;
}

static int nothing(struct dl_phdr_info *object, size_t size, void *argument)
{
	(void)object, (void)size, (void)argument;
	return 1;
}

/* Samples each block in a child. Its first sample is in a thread that must not wait. */
static void run(const char *name)
{
	int (*begin)(uint64_t) = (int (*)(uint64_t))dlsym(RTLD_DEFAULT, name);
	pid_t child = fork();
	pthread_t thread;
	int status;

	CHECK(begin && child >= 0);
	if (child == 0) {
		alarm(60);
		dl_iterate_phdr(nothing, NULL);
		CHECK(pthread_create(&thread, NULL, allocate, NULL) == 0);
		CHECK(begin(1) == 0);
		dl_iterate_phdr(wait_for_thread, &thread);
		if (calls)
			fprintf(stderr, "%s: %lu calls of the loader\n", name, calls);
		_exit(calls > 0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
	run("pinfold_heap_start");
	run("pinfold_guard_start");
	puts("ok");
	return 0;
}
