/*
 * Processes and threads: a constructor that starts a thread, forks of a program with threads, with
 * and without exec, handlers that allocate, and memory that is freed at exit. Run with the library
 * preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile int stop;
static pthread_t early;

static void churn(unsigned seed, int rounds)
{
	void *held[64] = { 0 };
	for (int i = 0; i < rounds; i++) {
		seed = seed * 1664525 + 1013904223;
		int at = seed >> 26;
		free(held[at]);
		size_t size = (seed >> 8) % ((seed >> 20) % 50 == 0 ? 300000 : 2000);
		held[at] = malloc(size);
		CHECK(held[at]);
		memset(held[at], at, size);
	}
	for (int i = 0; i < 64; i++)
		free(held[i]);
}

static void *churner(void *seed)
{
	for (unsigned i = 0; !stop; i++)
		churn((unsigned)(size_t)seed + i, 1000);
	return NULL;
}

/* Runs before main, perhaps before the program's first allocation. */
__attribute__((constructor)) static void start_early(void)
{
	CHECK(pthread_create(&early, NULL, churner, (void *)77) == 0);
}

static void *freed_at_exit;
static void at_exit(void)
{
	free(freed_at_exit);
	churn(5, 1000);
}

__attribute__((destructor)) static void destroy(void)
{
	churn(6, 1000);
}

static void forks(void)
{
	for (int i = 0; i < 100; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			alarm(20);
			churn((unsigned)i, 3000);
			if (i % 10 == 0) {
				/* The child makes a thread and forks too. */
				pthread_t thread;
				stop = 1;
				CHECK(pthread_create(&thread, NULL, churner, NULL) == 0);
				pthread_join(thread, NULL);
				pid_t grandchild = fork();
				if (grandchild == 0) {
					churn(9, 1000);
					_exit(0);
				}
				int status;
				CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
			}
			if (i % 10 == 5)
				execl("/bin/true", "true", (char *)NULL);
			_exit(0);
		}
		int status;
		CHECK(waitpid(child, &status, 0) == child);
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
}

static volatile long handled;
static void on_alarm(int signal)
{
	(void)signal;
	int before = errno;
	size_t size = (size_t)(handled * 977) % 100000;
	char *p = malloc(size + 1);
	CHECK(p);
	p[0] = p[size] = 1;
	free(p);
	handled++;
	errno = before;
}

int main(void)
{
	pthread_t threads[8];
	freed_at_exit = malloc(1000);
	atexit(at_exit);
	for (size_t i = 0; i < 8; i++)
		CHECK(pthread_create(&threads[i], NULL, churner, (void *)i) == 0);
	forks();
	struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	sigaction(SIGALRM, &action, NULL);
	struct itimerval timer = { { 0, 100 }, { 0, 100 } };
	setitimer(ITIMER_REAL, &timer, NULL);
	for (int i = 0; i < 20; i++)
		churn((unsigned)i, 20000);
	timer = (struct itimerval){ 0 };
	setitimer(ITIMER_REAL, &timer, NULL);
	CHECK(handled > 10);
	stop = 1;
	for (int i = 0; i < 8; i++)
		pthread_join(threads[i], NULL);
	pthread_join(early, NULL);
	puts("ok");
	return 0;
}
