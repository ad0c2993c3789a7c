/*
 * Successful calls leave errno unchanged, also in a sandbox that refuses membarrier and madvise.
 *
 * The first run sets the filter after its first allocation. It then starts this program again,
 * where the filter is there from the start. Also runs without the library. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define KEPT 4711
#define HELD 3000

static volatile int failures;

static void *hide(void *p)
{
	__asm__ volatile("" : "+r"(p));
	return p;
}

static void expect(const char *call, size_t size)
{
	if (errno != KEPT && failures++ < 5)
		fprintf(stderr, "%s of %zu bytes: errno is %d (%s)\n", call, size, errno,
			strerror(errno));
	errno = KEPT;
}

static long milliseconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void *calls(void *argument)
{
	unsigned seed = (unsigned)(size_t)argument;
	void **held = calloc(HELD, sizeof *held);
	long start = milliseconds();
	errno = KEPT;
	/*
	 * All sizes at first, then one small size for some seconds. Meanwhile the caches of the
	 * other sizes and old free runs go back to the system, by calls that fail here.
	 */
	for (int round = 0, few = 0; !few || milliseconds() - start < 3000; round++) {
		few = round > 10;
		for (int i = 0; i < HELD; i++) {
			size_t size = rand_r(&seed) % 3 ? rand_r(&seed) % 600
							: rand_r(&seed) % 40000;
			if (i % 100 == 0)
				size = rand_r(&seed) % 4000000;
			if (few)
				size = 64;
			free(hide(held[i]));
			expect("free", size);
			switch (rand_r(&seed) % 4) {
			case 0:
				held[i] = calloc(1, size);
				expect("calloc", size);
				break;
			case 1:
				held[i] = memalign(64, size);
				expect("memalign", size);
				break;
			case 2:
				held[i] = malloc(size);
				expect("malloc", size);
				break;
			default:
				held[i] = malloc(size / 2 + 1);
				expect("malloc", size / 2 + 1);
				held[i] = realloc(held[i], size + 1);
				expect("realloc", size + 1);
			}
		}
	}
	for (int i = 0; i < HELD; i++) {
		free(held[i]);
		expect("free", 0);
	}
	free(held);
	return NULL;
}

static void refuse(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_membarrier, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_madvise, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int main(int argc, char **argv)
{
	pthread_t threads[3];
	/* The first call starts the allocator, if the library is linked in. */
	errno = KEPT;
	free(hide(malloc(100)));
	expect("malloc", 100);
	if (argc == 1)
		refuse();
	/* One thread gives memory back itself. With several threads, the shepherd may do that. */
	if (argc == 1) {
		calls((void *)1);
	} else {
		for (size_t i = 0; i < 3; i++)
			pthread_create(&threads[i], NULL, calls, (void *)(i + 1));
		for (size_t i = 0; i < 3; i++)
			pthread_join(threads[i], NULL);
	}
	CHECK(failures == 0);
	if (argc == 1) {
		char again[] = "again", *arguments[] = { argv[0], again, NULL };
		execv(argv[0], arguments);
		return 1;
	}
	puts("ok");
	return 0;
}
