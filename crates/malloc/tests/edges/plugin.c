/*
 * Loads a library that allocates, uses it from threads, and unloads it while they run on.
 *
 * Usage: plugin LIBRARY. The library exports plugin_work, or pinfold_malloc and pinfold_free.
 * A restartable sequence must not stay noted in a thread after its code was unmapped: the kernel
 * reads the note at the thread's next preemption, and kills the process.
 */
#include "edge.h"
#include <dlfcn.h>

enum { THREADS = 3 };
static void (*work)(unsigned seed);
static void *(*allocate)(size_t size);
static void (*release)(void *block);
static pthread_barrier_t used, unloaded;
static volatile int over;

static void use(unsigned seed)
{
	void *blocks[100];
	if (work) {
		work(seed);
		return;
	}
	for (int round = 0; round < 500; round++) {
		for (size_t i = 0; i < 100; i++) {
			blocks[i] = allocate(1 + i * 37 % 3000 + (i == 50 ? 300000 : 0));
			CHECK(blocks[i]);
		}
		for (size_t i = 0; i < 100; i++)
			release(blocks[i]);
	}
}

/* Uses the library, and then only the processor, until the end. */
static void *use_and_go_on(void *seed)
{
	use((unsigned)(size_t)seed);
	pthread_barrier_wait(&used);
	pthread_barrier_wait(&unloaded);
	for (volatile unsigned long spins = 0; !over; spins++)
		if (spins % 1000000 == 0)
			sched_yield();
	return NULL;
}

static void *nothing(void *argument)
{
	return argument;
}

/* What finds hooks that were left behind: a fork, a thread's start and end, and the exit. */
static void fork_and_thread(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		exit(0);
	await_child(child, 5);
	pthread_join(start(nothing, NULL), NULL);
}

int main(int count, char **words)
{
	pthread_t threads[THREADS];
	CHECK(count == 2);
	for (int round = 0; round < 2; round++) {
		void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
		if (!library)
			FAIL("%s", dlerror());
		*(void **)&work = dlsym(library, "plugin_work");
		*(void **)&allocate = dlsym(library, "pinfold_malloc");
		*(void **)&release = dlsym(library, "pinfold_free");
		CHECK(work || (allocate && release));
		pthread_barrier_init(&used, NULL, THREADS + 1);
		pthread_barrier_init(&unloaded, NULL, THREADS + 1);
		over = 0;
		for (size_t i = 0; i < THREADS; i++)
			threads[i] = start(use_and_go_on, (void *)i);
		use(77);
		pthread_barrier_wait(&used);
		dlclose(library);
		pthread_barrier_wait(&unloaded);
		for (double end = now() + working_time() / 2; now() < end;) {
			fork_and_thread();
			sleep_for(0.01);
		}
		over = 1;
		for (int i = 0; i < THREADS; i++)
			pthread_join(threads[i], NULL);
	}
	return 0;
}
