/*
 * A thread that the system refuses, because its stack is too large, does not end the shepherd. Run
 * with the library preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void *wait_long(void *unused)
{
	sleep(60);
	return unused;
}

static int task_count(void)
{
	DIR *tasks = opendir("/proc/self/task");
	int count = 0;

	CHECK(tasks);
	for (struct dirent *task; (task = readdir(tasks));)
		count += task->d_name[0] != '.';
	closedir(tasks);
	return count;
}

/* The process has its own two threads and the shepherd. */
static void await_shepherd(void)
{
	for (time_t end = time(NULL) + 10; task_count() != 3; usleep(5000))
		CHECK(time(NULL) < end);
}

static void be_refused(void)
{
	pthread_attr_t attributes;
	pthread_t thread;

	CHECK(pthread_attr_init(&attributes) == 0);
	CHECK(pthread_attr_setstacksize(&attributes, (size_t)1 << 47) == 0);
	CHECK(pthread_create(&thread, &attributes, wait_long, NULL) == EAGAIN);
	CHECK(pthread_attr_destroy(&attributes) == 0);
}

static void part(void)
{
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, wait_long, NULL) == 0);
	await_shepherd();
	be_refused();
	await_shepherd();
}

int main(void)
{
	int status;
	pid_t child;

	part();
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		part();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	puts("ok");
	return 0;
}
