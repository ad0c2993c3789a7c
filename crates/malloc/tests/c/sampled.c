/*
 * A heap profile that samples each block (PINFOLD_HEAP=1), under threads, forks, small stacks, and
 * a signal handler that allocates. Run with the library preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>

#define BLOCKS 64

static volatile unsigned long handled;

static void handler(int signal)
{
	size_t size = 10 + handled % 5 * 700;
	char *block = malloc(size);

	(void)signal;
	CHECK(block);
	memset(block, 1, size);
	block = realloc(block, 2 * size);
	CHECK(block && block[size - 1] == 1);
	free(block);
	handled++;
}

/* Allocates a block in one of several ways. */
static char *allocate(unsigned *seed, size_t size)
{
	void *block;

	switch (rand_r(seed) % 4) {
	case 0:
		CHECK(posix_memalign(&block, (size_t)64 << rand_r(seed) % 8, size) == 0);
		break;
	case 1:
		block = calloc(1, size);
		CHECK(block);
		for (size_t at = 0; at < size; at += 61)
			CHECK(((char *)block)[at] == 0);
		break;
	default:
		block = malloc(size);
		CHECK(block);
	}
	return block;
}

static void work(unsigned seed, int rounds)
{
	char *blocks[BLOCKS] = { 0 };
	size_t sizes[BLOCKS] = { 0 };

	while (rounds--) {
		int nth = rand_r(&seed) % BLOCKS;
		size_t size = 1 + (size_t)rand_r(&seed) % ((size_t)1 << rand_r(&seed) % 20);

		for (size_t at = 0; blocks[nth] && at < sizes[nth]; at += 97)
			CHECK(blocks[nth][at] == (char)nth);
		if (!blocks[nth]) {
			blocks[nth] = allocate(&seed, size);
		} else if (rand_r(&seed) % 3 == 0) {
			blocks[nth] = realloc(blocks[nth], size);
			CHECK(blocks[nth]);
		} else {
			free(blocks[nth]);
			blocks[nth] = NULL;
			continue;
		}
		sizes[nth] = size;
		memset(blocks[nth], nth, size);
	}
	for (int nth = 0; nth < BLOCKS; nth++)
		free(blocks[nth]);
}

static void *thread(void *seed)
{
	work((unsigned)(size_t)seed, 10000);
	return NULL;
}

/* Runs on the smallest stack, without the signal's handler, which has no room there. */
static void *on_small_stack(void *unused)
{
	sigset_t all;

	(void)unused;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	for (size_t size = 100; size < 10000; size += 50)
		free(malloc(size));
	return NULL;
}

int main(void)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 200 }, { 0, 200 } };
	pthread_t threads[3], other;
	pthread_attr_t small;

	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
	for (size_t nth = 0; nth < 3; nth++)
		CHECK(pthread_create(&threads[nth], NULL, thread, (void *)(nth + 1)) == 0);
	CHECK(pthread_attr_init(&small) == 0);
	CHECK(pthread_attr_setstacksize(&small, PTHREAD_STACK_MIN) == 0);
	for (unsigned turn = 0; turn < 15; turn++) {
		int status;
		pid_t child = fork();

		if (child == 0) {
			work(turn, 500);
			CHECK(pthread_create(&other, NULL, thread, (void *)7) == 0);
			pthread_join(other, NULL);
			_exit(0);
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
		CHECK(pthread_create(&other, &small, on_small_stack, NULL) == 0);
		pthread_join(other, NULL);
	}
	for (int nth = 0; nth < 3; nth++)
		pthread_join(threads[nth], NULL);
	puts("ok");
	return 0;
}
