/*
 * A sandbox refuses clock_gettime with an error, on a machine on which the allocator reads clocks
 * by that system call.
 *
 * The allocator finds the vDSO by getauxval. The program defines a getauxval that finds none. On
 * some machines the C library's clock makes the system call too, so the program itself reads no
 * clock once the filter is there: a thread counts how long it slept. With the word "trap", the
 * filter names the call and ends the process, which shows that the allocator makes the call.
 */
#include "seccomp.h"
#include <elf.h>
#include <sys/wait.h>

unsigned long getauxval(unsigned long type)
{
	/* The kernel puts the vector behind the environment that the program began with. */
	static const Elf64_auxv_t *vector;
	extern char **environ;
	if (!vector) {
		char **end = environ;
		while (*end)
			end++;
		vector = (const Elf64_auxv_t *)(end + 1);
	}
	if (type == AT_SYSINFO_EHDR)
		return 0;
	for (const Elf64_auxv_t *entry = vector; entry->a_type != AT_NULL; entry++)
		if (entry->a_type == type)
			return entry->a_un.a_val;
	return 0;
}

/* Hundredths of a second, counted by a thread that sleeps. */
static _Atomic long ticks;

static void *count_ticks(void *unused)
{
	for (;; ticks++)
		sleep_for(0.01);
	return unused;
}

static void work_for(unsigned seed, double seconds)
{
	for (double end = ticks + seconds * 100; ticks < end; seed++)
		churn(seed, 500);
}

static int without_fork;

static void *work(void *seed)
{
	work_for((unsigned)(size_t)seed, working_time() / 2);
	return NULL;
}

/* glibc's malloc gets stuck in such a fork, so EDGE_CONTROL leaves the fork out. */
static void in_handler(int number)
{
	(void)number;
	if (without_fork)
		return;
	int status;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		_exit(0);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int count, char **words)
{
	static const int calls[] = { SYS_clock_gettime };
	int trap = count > 1 && !strcmp(words[1], "trap");
	tell_traps();
	without_fork = getenv("EDGE_CONTROL") != NULL;
	working_time();
	churn_for(1, 0.2);
	start(count_ticks, NULL);
	enter_filter(calls, 1, trap ? SECCOMP_RET_TRAP : SECCOMP_RET_ERRNO | EPERM,
		     SECCOMP_RET_ALLOW);
	pthread_t threads[3];
	for (size_t i = 0; i < 3; i++)
		threads[i] = start(work, (void *)i);
	work_for(2, working_time() / 4);
	/* A handler's fork waits for the locks of malloc only for a time. */
	CHECK(signal(SIGUSR1, in_handler) != SIG_ERR);
	for (int i = 0; i < 20; i++) {
		pthread_kill(threads[i % 3], SIGUSR1);
		churn(3, 200);
	}
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	/* What is idle falls due. */
	sleep_for(0.6);
	work_for(4, working_time() / 4);
	return 0;
}
