/*
 * Helpers of the programs in this folder.
 *
 * Each program takes the name of one case. It exits with 0 if the case went well, with 77 if this
 * machine cannot run the case, else with another status or by a signal. EDGE_SECONDS says how long
 * a case works.
 */
#ifndef EDGE_H
#define EDGE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNUSED __attribute__((unused))

/* Prints one line without stdio, whose locks a test may hold. */
UNUSED static void say(const char *text)
{
	char line[300];
	int length = snprintf(line, sizeof line, "%s\n", text);
	if (write(1, line, (size_t)length) < 0)
		_exit(2);
}

#define FAIL(...)                                                                                  \
	do {                                                                                       \
		char text_[250];                                                                   \
		snprintf(text_, sizeof text_, __VA_ARGS__);                                        \
		say(text_);                                                                        \
		_exit(1);                                                                          \
	} while (0)

#define CHECK(x)                                                                                   \
	do {                                                                                       \
		if (!(x))                                                                          \
			FAIL("%s:%d: %s", __FILE_NAME__, __LINE__, #x);                            \
	} while (0)

#ifndef __FILE_NAME__
#define __FILE_NAME__ __FILE__
#endif

/* Ends the program because this machine cannot run the case. */
UNUSED static void skip(const char *why)
{
	say(why);
	_exit(77);
}

/* Returns seconds of a monotonic clock. */
UNUSED static double now(void)
{
	struct timespec time;
	CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

UNUSED static void sleep_for(double seconds)
{
	struct timespec time = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };
	while (nanosleep(&time, &time) == -1 && errno == EINTR)
		;
}

/* Returns how many seconds a case works. Reads the environment once. */
UNUSED static double working_time(void)
{
	static double seconds;
	if (seconds == 0) {
		const char *text = getenv("EDGE_SECONDS");
		seconds = text && atof(text) > 0 ? atof(text) : 4;
	}
	return seconds;
}

/* Allocates and frees blocks from 1 byte to 5 MB, most of them small, and checks their ends. */
UNUSED static void churn(unsigned seed, int rounds)
{
	enum { HELD = 64 };
	unsigned char *held[HELD] = { 0 };
	size_t sizes[HELD];
	for (int i = 0; i < rounds; i++) {
		seed = seed * 1664525 + 1013904223;
		unsigned at = seed >> 26, kind = seed >> 16 & 1023;
		size_t most = kind == 0 ? 5000000 : kind < 16 ? 400000 : kind < 128 ? 32000 : 2000;
		if (held[at]) {
			unsigned char mark = (unsigned char)(at + 1);
			CHECK(held[at][0] == mark && held[at][sizes[at] - 1] == mark);
			free(held[at]);
		}
		size_t size = sizes[at] = 1 + (seed >> 4) % most;
		held[at] = kind % 7 == 0 ? calloc(1, size) : malloc(size);
		CHECK(held[at]);
		if (kind % 11 == 0) {
			sizes[at] = size = size * 2;
			held[at] = realloc(held[at], size);
			CHECK(held[at]);
		}
		held[at][0] = held[at][size - 1] = (unsigned char)(at + 1);
	}
	for (int i = 0; i < HELD; i++)
		free(held[i]);
}

/* Calls churn for `seconds`. */
UNUSED static void churn_for(unsigned seed, double seconds)
{
	for (double end = now() + seconds; now() < end; seed++)
		churn(seed, 500);
}

/* Starts a thread; the case cannot go on without it. */
UNUSED static pthread_t start(void *(*work)(void *), void *argument)
{
	pthread_t thread;
	int error = pthread_create(&thread, NULL, work, argument);
	if (error)
		FAIL("pthread_create: %s", strerror(error));
	return thread;
}

/* Waits for a child that must end by itself with status 0. */
UNUSED static void await_child(pid_t child, double limit)
{
	int status;
	for (double end = now() + limit; waitpid(child, &status, WNOHANG) == 0;) {
		if (now() > end) {
			kill(child, SIGKILL);
			FAIL("STUCK: the child does not end");
		}
		sleep_for(0.002);
	}
	if (WIFSIGNALED(status))
		FAIL("the child ended by signal %d", WTERMSIG(status));
	if (WEXITSTATUS(status))
		_exit(WEXITSTATUS(status));
}

#endif
