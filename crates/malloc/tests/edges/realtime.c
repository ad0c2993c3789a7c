/*
 * A thread of the allocator never gets a real-time policy, which it could inherit.
 *
 * Such a thread would run before the program's own threads of lower priority.
 */
#include "edge.h"
#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>

enum { THREADS = 3 };
static pid_t own[THREADS + 1];
static volatile int over;

static void *work(void *number)
{
	own[(size_t)number] = (pid_t)syscall(SYS_gettid);
	while (!over) {
		churn((unsigned)(size_t)number, 500);
		sleep_for(0.01);
	}
	return NULL;
}

static int is_own(pid_t task)
{
	for (int i = 0; i <= THREADS; i++)
		if (own[i] == task)
			return 1;
	return 0;
}

static void look(void)
{
	DIR *tasks = opendir("/proc/self/task");
	CHECK(tasks);
	for (struct dirent *entry; (entry = readdir(tasks));) {
		pid_t task = (pid_t)atoi(entry->d_name);
		if (task == 0 || is_own(task))
			continue;
		int policy = sched_getscheduler(task) & ~SCHED_RESET_ON_FORK;
		if (policy == SCHED_FIFO || policy == SCHED_RR || policy == 6)
			FAIL("thread %d, not the program's, has real-time policy %d", (int)task,
			     policy);
	}
	closedir(tasks);
}

int main(void)
{
	struct sched_param priority = { .sched_priority = 10 };
	own[THREADS] = (pid_t)syscall(SYS_gettid);
	if (sched_setscheduler(0, SCHED_FIFO, &priority) == -1)
		skip("real-time policies are forbidden here");
	pthread_t threads[THREADS];
	for (size_t i = 0; i < THREADS; i++)
		threads[i] = start(work, (void *)i);
	for (int i = 0; i < THREADS; i++)
		while (own[i] == 0)
			sleep_for(0.001);
	for (int i = 0; i < 20; i++) {
		sleep_for(working_time() / 20);
		look();
	}
	over = 1;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
