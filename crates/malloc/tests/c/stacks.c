/*
 * No call uses more than 4 KiB of stack: of malloc, of caches, of counters, also at the first use
 * in a process.
 *
 * The calls run on fibers, threads and signal stacks of 12 and 16 KiB, for longer than two of the
 * shepherd's ticks. Below each stack lies memory with a pattern, so that a call which uses too much
 * is measured and does not crash. Prints "ok".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include "pinfold.h"
#include "check.h"

#define MOST  4096
#define BELOW (256 << 10)
#define PAINT 0x5a
#define HELD  3000

/*
 * The functions under test. Without the library, those of malloc are the C library's, and the
 * others are NULL.
 */
static struct {
	void *(*malloc)(size_t);
	void (*free)(void *);
	void *(*calloc)(size_t, size_t);
	void *(*realloc)(void *, size_t);
	int (*posix_memalign)(void **, size_t, size_t);
	__typeof__(&pinfold_cache_create) cache_create;
	__typeof__(&pinfold_cache_alloc) cache_alloc;
	__typeof__(&pinfold_cache_free) cache_free;
	__typeof__(&pinfold_cache_alloc_bulk) cache_alloc_bulk;
	__typeof__(&pinfold_cache_free_bulk) cache_free_bulk;
	__typeof__(&pinfold_cache_alloc_node) cache_alloc_node;
	__typeof__(&pinfold_cache_free_deferred) cache_free_deferred;
	__typeof__(&pinfold_counter_create) counter_create;
	__typeof__(&pinfold_counter_add) counter_add;
	__typeof__(&pinfold_counter_sum) counter_sum;
	__typeof__(&pinfold_counter_read) counter_read;
	__typeof__(&pinfold_counter_swap) counter_swap;
	__typeof__(&pinfold_counter_limited_add) counter_limited_add;
	__typeof__(&pinfold_event_create) event_create;
	__typeof__(&pinfold_event_add) event_add;
	__typeof__(&pinfold_event_sum) event_sum;
} calls;

static struct pinfold_cache *cache;
static struct pinfold_counter *counter;
static struct pinfold_event *event;
static void *held[HELD];
static void *objects[500];
static double seconds;
/* The frame of the loop that calls the functions. */
static char *volatile frame;
static int failed;

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void use_cache(void)
{
	size_t got = calls.cache_alloc_bulk(cache, 500, objects);
	for (size_t i = 0; i < got / 2; i++)
		calls.cache_free(cache, objects[i]);
	calls.cache_free_bulk(cache, got - got / 2, objects + got / 2);
	for (int i = 0; i < 100; i++)
		objects[i] = i % 2 ? calls.cache_alloc(cache) : calls.cache_alloc_node(cache, i);
	for (int i = 0; i < 100; i++)
		calls.cache_free_deferred(cache, objects[i]);
}

static void count(void)
{
	for (int i = 0; i < 1000; i++) {
		calls.counter_add(counter, i % 7 ? 100 : -600);
		calls.event_add(event, 1);
	}
	calls.counter_limited_add(counter, INT64_MAX, 5);
	calls.counter_sum(counter);
	calls.counter_read(counter);
	calls.counter_swap(counter, 0);
	calls.event_sum(event);
}

/*
 * Holds many small blocks, then few, so that caches fill, idle and give memory back; and some large
 * blocks.
 */
static void work(void)
{
	volatile char here;
	frame = (char *)&here;
	double begin = now();
	unsigned seed = 1;
	for (int round = 0; round < 2 || now() - begin < seconds; round++) {
		for (int i = 0; i < 5000; i++) {
			seed = seed * 1664525 + 1013904223;
			void **place = &held[(seed >> 16) % (round % 64 < 32 ? HELD : 10)];
			size_t size = (seed >> 8) % 2000;
			switch (i % 1000) {
			case 0:
				size *= 100;
				break;
			case 1:
				size *= 2000;
				break;
			case 2:
				*place = calls.realloc(*place, size * 3 + 1);
				continue;
			case 3:
				calls.free(*place);
				*place = calls.calloc(3, size);
				continue;
			case 4:
				calls.free(*place);
				if (calls.posix_memalign(place, 4096, size) != 0)
					*place = NULL;
				continue;
			}
			calls.free(*place);
			*place = calls.malloc(size);
		}
		if (calls.cache_alloc) {
			if (!cache)
				cache = calls.cache_create("stacks", 200, 0, 0, NULL);
			if (!counter)
				counter = calls.counter_create(0, 0);
			if (!event)
				event = calls.event_create();
			if (cache && counter && event) {
				use_cache();
				count();
			}
		}
	}
	for (int i = 0; i < HELD; i++) {
		calls.free(held[i]);
		held[i] = NULL;
	}
}

/* Returns a stack of `size` bytes, with BELOW bytes of the pattern below it. */
static char *paint(size_t size)
{
	char *memory = mmap(NULL, BELOW + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);
	CHECK(memory != MAP_FAILED);
	memset(memory, PAINT, BELOW + size);
	return memory + BELOW;
}

static void measure(const char *what, size_t size, char *stack)
{
	char *deepest = stack - BELOW;
	while (*deepest == PAINT)
		deepest++;
	size_t used = (size_t)(frame - deepest);
	printf("%s of %zu KiB: %zu bytes below the loop's frame\n", what, size >> 10, used);
	fflush(stdout);
	/* 256 bytes are for the frames of this file's own functions. */
	if (calls.cache_alloc && used > MOST + 256)
		failed = 1;
	munmap(stack - BELOW, BELOW + size);
}

static ucontext_t back, fiber;

static void on_fiber(const char *what, size_t size)
{
	char *stack = paint(size);
	getcontext(&fiber);
	fiber.uc_stack.ss_sp = stack;
	fiber.uc_stack.ss_size = size;
	fiber.uc_link = &back;
	makecontext(&fiber, work, 0);
	swapcontext(&back, &fiber);
	measure(what, size, stack);
}

static void handler(int signal)
{
	(void)signal;
	work();
}

static void on_signal_stack(size_t size)
{
	char *stack = paint(size);
	stack_t alternative = { .ss_sp = stack, .ss_size = size }, off = { .ss_flags = SS_DISABLE };
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_ONSTACK };
	CHECK(sigaltstack(&alternative, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
	raise(SIGUSR1);
	sigaltstack(&off, NULL);
	measure("signal stack", size, stack);
}

static void *thread(void *unused)
{
	work();
	return unused;
}

static void on_thread(size_t size)
{
	char *stack = paint(size);
	pthread_attr_t attributes;
	pthread_t id;
	pthread_attr_init(&attributes);
	CHECK(pthread_attr_setstack(&attributes, stack, size) == 0);
	CHECK(pthread_create(&id, &attributes, thread, NULL) == 0);
	pthread_join(id, NULL);
	pthread_attr_destroy(&attributes);
	measure("thread", size, stack);
}

#define FIND(name) (*(void **)&calls.name = dlsym(library, "pinfold_" #name))

/* Finds the library's functions. Returns 0 if the library is not loaded. */
static int find(void *library)
{
	FIND(cache_create), FIND(cache_alloc), FIND(cache_free), FIND(cache_alloc_bulk),
		FIND(cache_free_bulk);
	FIND(cache_alloc_node), FIND(cache_free_deferred);
	FIND(counter_create), FIND(counter_add), FIND(counter_sum), FIND(counter_read),
		FIND(counter_swap);
	FIND(counter_limited_add), FIND(event_create), FIND(event_add), FIND(event_sum);
	return calls.cache_alloc != NULL;
}

/*
 * Loads the library into a process that was started without it, and uses it first on a small stack.
 */
static int first_use(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(library && find(library));
	FIND(malloc), FIND(free), FIND(calloc), FIND(realloc), FIND(posix_memalign);
	now();
	on_fiber("first use on a fiber", 12 << 10);
	return failed;
}

int main(int argc, char **argv)
{
	if (argc > 1)
		return first_use(argv[1]);
	calls.malloc = malloc;
	calls.free = free;
	calls.calloc = calloc;
	calls.realloc = realloc;
	calls.posix_memalign = posix_memalign;
	int there = find(RTLD_DEFAULT);
	/* The shepherd ticks once a second. Without the library there is no tick to wait for. */
	seconds = there ? 2.5 : 0.1;
	/* The first call binds the symbol: the linker's stack must not count. */
	now();
	/* While the program has one thread, the slow paths tick. */
	on_fiber("fiber", 16 << 10);
	on_fiber("fiber", 12 << 10);
	on_signal_stack(16 << 10);
	on_signal_stack(12 << 10);
	Dl_info library;
	if (there && dladdr((void *)calls.cache_alloc, &library)) {
		pid_t child = fork();
		if (child == 0) {
			unsetenv("LD_PRELOAD");
			execl("/proc/self/exe", argv[0], library.dli_fname, NULL);
			_exit(127);
		}
		int status;
		if (waitpid(child, &status, 0) != child || status != 0)
			failed = 1;
	}
	on_thread(16 << 10);
	CHECK(!failed);
	puts("ok");
	return 0;
}
