/*
 * Allocates and frees between two marks, "edge: begin" and "edge: end", for a tracer of system
 * calls.
 *
 * Threads and caches exist before the first mark, so that only malloc and free make calls.
 */
#include "edge.h"

enum { THREADS = 3 };
static volatile int stage;
static volatile int ready;

static void *work(void *seed)
{
	churn_for((unsigned)(size_t)seed, 0.3);
	__sync_fetch_and_add(&ready, 1);
	while (stage == 0)
		;
	for (unsigned i = 0; stage == 1; i++)
		churn((unsigned)(size_t)seed + i, 500);
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	double time = working_time();
	churn_for(9, 0.3);
	for (size_t i = 0; i < THREADS; i++)
		threads[i] = start(work, (void *)i);
	while (ready < THREADS)
		;
	say("edge: begin");
	stage = 1;
	churn_for(9, time);
	say("edge: end");
	/* The threads' ends, which make calls, come after the mark. */
	stage = 2;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
