/*
 * A program enters a sandbox after its start, and goes on with malloc and free.
 *
 * The filters kill for every call but those that a program with threads needs for memory, time and
 * waiting; or kill or refuse a few calls only. The allocator must not need the others.
 */
#include "seccomp.h"

static const int needed[] = {
	SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_madvise, SYS_brk, SYS_futex,
	SYS_clock_gettime, SYS_nanosleep, SYS_clock_nanosleep, SYS_sched_yield, SYS_read,
	SYS_write, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_rt_sigprocmask, SYS_rt_sigaction,
	SYS_clone, SYS_clone3, SYS_rseq, SYS_set_robust_list, SYS_getrandom,
};

static volatile int inside;

static void *work(void *seed)
{
	churn_for((unsigned)(size_t)seed, 0.3);
	return NULL;
}

/* Works, sleeps until the filter is there, and works on. */
static void *work_across(void *seed)
{
	churn_for((unsigned)(size_t)seed, 0.3);
	while (!inside)
		sleep_for(0.01);
	sleep_for(1.2);
	churn_for((unsigned)(size_t)seed, 0.3);
	return NULL;
}

/* Frees blocks of many sizes, and sleeps until the end. */
static void *work_and_sleep(void *seed)
{
	static char *blocks[4][4000];
	size_t thread = (size_t)seed;
	for (size_t i = 0; i < 4000; i++) {
		size_t size = (size_t)16 << (i % 9);
		CHECK((blocks[thread][i] = malloc(size)));
		memset(blocks[thread][i], 1, size);
	}
	for (size_t i = 0; i < 4000; i++)
		free(blocks[thread][i]);
	while (!inside)
		sleep_for(0.01);
	sleep_for(3.5);
	return NULL;
}

static void with_threads(void)
{
	pthread_t threads[3];
	for (size_t i = 0; i < 3; i++)
		threads[i] = start(work, (void *)i);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
}

/* Works in the sandbox, with a pause in which what is left of the allocator's work falls due. */
static void work_on(int threads)
{
	double time = working_time();
	churn_for(1, time / 4);
	if (threads)
		with_threads();
	sleep_for(time > 2 ? 1.3 : time / 4);
	for (double end = now() + time / 2; now() < end;) {
		churn(2, 1000);
		char *large = malloc(30 << 20);
		CHECK(large);
		memset(large, 1, 30 << 20);
		large = realloc(large, 60 << 20);
		CHECK(large && large[0] == 1 && large[(30 << 20) - 1] == 1);
		free(large);
	}
}

#define LENGTH(array) (sizeof(array) / sizeof *(array))

static void allow_only_needed(void)
{
	enter_filter(needed, LENGTH(needed), SECCOMP_RET_ALLOW, SECCOMP_RET_TRAP);
	inside = 1;
}

static void forbid(const int *calls, size_t count, unsigned answer)
{
	enter_filter(calls, count, answer, SECCOMP_RET_ALLOW);
	inside = 1;
}

int main(int count, char **words)
{
	const char *name = count > 1 ? words[1] : "";
	tell_traps();
	working_time();
	if (!strcmp(name, "first")) {
		/* The program's first block comes after the filter. */
		allow_only_needed();
		work_on(0);
	} else if (!strcmp(name, "alone")) {
		churn_for(3, 0.3);
		allow_only_needed();
		work_on(0);
	} else if (!strcmp(name, "threads-after")) {
		churn_for(3, 0.3);
		allow_only_needed();
		work_on(1);
	} else if (!strcmp(name, "threads-before")) {
		with_threads();
		allow_only_needed();
		work_on(0);
	} else if (!strcmp(name, "threads-both")) {
		with_threads();
		allow_only_needed();
		work_on(1);
	} else if (!strcmp(name, "sleeper")) {
		pthread_t thread = start(work_across, NULL);
		churn_for(3, 0.3);
		allow_only_needed();
		work_on(1);
		pthread_join(thread, NULL);
	} else if (!strcmp(name, "openat")) {
		static const int calls[] = { SYS_openat };
		with_threads();
		forbid(calls, LENGTH(calls), SECCOMP_RET_TRAP);
		work_on(1);
	} else if (!strcmp(name, "membarrier")) {
		static const int calls[] = { SYS_membarrier };
		with_threads();
		forbid(calls, LENGTH(calls), SECCOMP_RET_TRAP);
		work_on(1);
	} else if (!strcmp(name, "idle")) {
		/* The threads leave free blocks, which may go back while they sleep. */
		static const int calls[] = { SYS_membarrier };
		pthread_t threads[4];
		for (size_t i = 0; i < 4; i++)
			threads[i] = start(work_and_sleep, (void *)i);
		sleep_for(1);
		forbid(calls, LENGTH(calls), SECCOMP_RET_TRAP);
		for (int i = 0; i < 4; i++)
			pthread_join(threads[i], NULL);
	} else if (!strcmp(name, "scheduling")) {
		static const int calls[] = { SYS_sched_setaffinity, SYS_sched_getaffinity,
					     SYS_prctl };
		churn_for(3, 0.3);
		forbid(calls, LENGTH(calls), SECCOMP_RET_TRAP);
		work_on(1);
	} else if (!strcmp(name, "refused")) {
		static const int calls[] = { SYS_membarrier, SYS_mbind };
		with_threads();
		forbid(calls, LENGTH(calls), SECCOMP_RET_ERRNO | EPERM);
		work_on(1);
	} else
		FAIL("no such case");
	return 0;
}
