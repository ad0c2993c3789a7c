/*
 * Walks of the stack for a heap profile: without a descriptor left to load the unwinder, with
 * signal handlers that use much stack or leave by a jump, and with a limit on the size of files.
 * Run with the library preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static int (*heap_start)(uint64_t interval);
static int (*heap_write)(const char *path);
static char path[64];
static volatile sig_atomic_t handled;
static volatile sig_atomic_t jumps;
static sigjmp_buf before;

/* Returns how many samples were dropped: a word of the profile's head. */
static uint64_t dropped(void)
{
	uint64_t head[4];
	int file;

	CHECK(heap_write(path) == 0);
	file = open(path, O_RDONLY);
	CHECK(file >= 0 && read(file, head, sizeof head) == sizeof head);
	close(file);
	return head[3];
}

/* The first walk loads the unwinder's library, which takes a descriptor. */
static void start_without_descriptors(void)
{
	struct rlimit limit, low;

	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	low = limit;
	low.rlim_cur = 3;
	CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
	CHECK(heap_start(1) == -1);
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	CHECK(heap_start(1) == 0);
}

/* Each signal sets the timer for the next one. A timer that goes on by itself would fill the stack
 * with handlers on a machine where a handler takes longer than the timer's interval. */
static void set_timer(void)
{
	struct itimerval soon = { { 0, 0 }, { 0, 311 } };

	CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
}

static void use_stack(int signal)
{
	char much[400 << 10];

	(void)signal;
	memset(much, handled, sizeof much);
	__asm__ volatile("" : : "r"(much) : "memory");
	if (jumps) {
		handled++;
		siglongjmp(before, 1);
	}
	handled++;
	set_timer();
}

/* Allocates until the handler was called so often. Each block is sampled. */
static void allocate_until(int times)
{
	struct itimerval never = { { 0, 0 }, { 0, 0 } };

	handled = 0;
	sigsetjmp(before, 1);
	set_timer();
	while (handled < times) {
		char *block = malloc(64);

		CHECK(block);
		/* A block that a jump leaves behind is a small loss. */
		free(block);
	}
	CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

/*
 * Whether small calls of malloc take locks: on atomics, and in hardened caches. A jump out of such
 * a call leaves a lock taken, and later samples find no memory.
 */
static int takes_locks(void)
{
	const char *rseq = getenv("PINFOLD_RSEQ"), *hardened = getenv("PINFOLD_HARDENED");

	return (rseq && strcmp(rseq, "off") == 0) || (hardened && strcmp(hardened, "1") == 0);
}

/* Jumps out of handlers in a child process. Returns whether no sample was dropped. */
static int all_are_sampled_after_jumps(void)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		jumps = 1;
		allocate_until(1000);
		_exit(dropped() != 0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
	return WEXITSTATUS(status) == 0;
}

static void write_beyond_the_limit(void)
{
	struct rlimit limit, low;
	struct stat before, after;

	/* A write that fails leaves the file of the last one. */
	CHECK(heap_write(path) == 0 && stat(path, &before) == 0);
	CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
	low = limit;
	low.rlim_cur = 1000;
	CHECK(setrlimit(RLIMIT_FSIZE, &low) == 0);
	errno = 0;
	CHECK(heap_write(path) == -1 && errno == EFBIG);
	CHECK(stat(path, &after) == 0 && after.st_ino == before.st_ino);
	CHECK(after.st_size == before.st_size && after.st_size > 0);
	CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
	CHECK(heap_write(path) == 0);
}

int main(void)
{
	int tries;

	heap_start = (int (*)(uint64_t))dlsym(RTLD_DEFAULT, "pinfold_heap_start");
	heap_write = (int (*)(const char *))dlsym(RTLD_DEFAULT, "pinfold_heap_write");
	CHECK(heap_start && heap_write);
	snprintf(path, sizeof path, "/tmp/pinfold-walks.%d", (int)getpid());
	CHECK(signal(SIGALRM, use_stack) != SIG_ERR);

	start_without_descriptors();
	allocate_until(3000);
	CHECK(dropped() == 0);
	/* By chance, a jump leaves a slow path with a lock taken. Then another child tries. */
	for (tries = 0; !all_are_sampled_after_jumps() && !takes_locks(); tries++)
		CHECK(tries < 20);
	write_beyond_the_limit();
	unlink(path);
	puts("ok");
	return 0;
}
