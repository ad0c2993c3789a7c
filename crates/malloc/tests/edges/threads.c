/*
 * Threads end, and no thread of the allocator shows.
 *
 * A process ends with its last thread. The kernel lets only a process with one thread enter a user
 * namespace. An allocator with a hidden thread breaks both.
 */
#include "edge.h"
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>

static void *work(void *seed)
{
	churn_for((unsigned)(size_t)seed, 0.3);
	return NULL;
}

static void threads_come_and_go(void)
{
	pthread_t threads[3];
	for (size_t i = 0; i < 3; i++)
		threads[i] = start(work, (void *)i);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
}

/* The main thread ends first, and the last worker's end is the process's. */
static void main_ends_first(int detached)
{
	for (size_t i = 0; i < 3; i++) {
		pthread_t thread = start(work, (void *)i);
		if (detached)
			pthread_detach(thread);
	}
	churn(1, 1000);
	pthread_exit(NULL);
}

/* A thread forks, and returns in the child, where no other thread is left. */
static void *fork_and_return(void *argument)
{
	for (int i = 0; i < 3; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			if (i > 0)
				threads_come_and_go();
			return NULL;
		}
		await_child(child, 8);
	}
	return argument;
}

static void *wait_shortly(void *argument)
{
	sleep_for(0.005);
	return argument;
}

/* Becomes `user`, who may have three threads, and makes two besides the main one. */
static void make_as_many_as_allowed(uid_t user)
{
	struct rlimit three = { 3, 3 };
	pthread_t threads[2];
	CHECK(setresuid(user, user, user) == 0);
	CHECK(setrlimit(RLIMIT_NPROC, &three) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, wait_shortly, NULL) == 0);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
}

/* A user who may have three threads gets three. */
static void limited(void)
{
	if (geteuid() != 0)
		skip("only root can become a user without other threads");
	for (uid_t user = 54321; user < 54321 + 300; user++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			make_as_many_as_allowed(user);
			_exit(0);
		}
		await_child(child, 8);
	}
}

static void *wait_for_ever(void *argument)
{
	for (;;)
		pause();
	return argument;
}

/* A child of which only workers are left ends by SIGTERM, and at once. */
static void terminated(void)
{
	for (int workers_end = 0; workers_end < 2; workers_end++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			pthread_t thread = start(work, NULL);
			pthread_join(thread, NULL);
			if (!workers_end)
				start(wait_for_ever, NULL);
			else
				start(work, NULL);
			pthread_exit(NULL);
		}
		sleep_for(1.5);
		int status = -1;
		kill(child, SIGTERM);
		double end = now() + 3;
		while (waitpid(child, &status, WNOHANG) == 0) {
			if (now() > end) {
				kill(child, SIGKILL);
				FAIL("STUCK: SIGTERM stays pending");
			}
			sleep_for(0.002);
		}
		if (workers_end)
			CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
		else
			CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	}
}

static int task_count(void)
{
	int count = 0;
	DIR *tasks = opendir("/proc/self/task");
	CHECK(tasks);
	for (struct dirent *task; (task = readdir(tasks));)
		count += task->d_name[0] != '.';
	closedir(tasks);
	return count;
}

/* The kernel wakes the joining thread shortly before the joined thread is gone. */
static void await_one_task(void)
{
	for (double end = now() + 2; task_count() != 1; sleep_for(0.005))
		if (now() > end)
			FAIL("%d threads are left after all were joined", task_count());
}

static void tasks(void)
{
	for (int i = 0; i < 3; i++) {
		threads_come_and_go();
		await_one_task();
	}
}

static void write_to(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);
	CHECK(file >= 0);
	CHECK(write(file, text, strlen(text)) == (ssize_t)strlen(text));
	close(file);
}

/* Maps the user and the group. A user without a mapping may not make another namespace. */
static void map_user(unsigned user, unsigned group)
{
	char text[64];
	snprintf(text, sizeof text, "%u %u 1", user, user);
	write_to("/proc/self/uid_map", text);
	write_to("/proc/self/setgroups", "deny");
	snprintf(text, sizeof text, "%u %u 1", group, group);
	write_to("/proc/self/gid_map", text);
}

/* Enters a new user namespace, a mount namespace within, and that one once more by setns. */
static void enter_namespaces(void)
{
	unsigned user = geteuid(), group = getegid();
	double end = now() + 2;
	while (unshare(CLONE_NEWUSER | CLONE_NEWNS) == -1) {
		if (errno == EPERM || errno == ENOSPC || errno == EUSERS || errno == ENOSYS)
			skip("user namespaces are forbidden here");
		/* A joined thread may not be gone yet. */
		if (now() > end)
			FAIL("unshare: %s", strerror(errno));
		sleep_for(0.005);
	}
	map_user(user, group);
	int own = open("/proc/self/ns/mnt", O_RDONLY);
	CHECK(own >= 0);
	CHECK(setns(own, CLONE_NEWNS) == 0);
	close(own);
}

/* Joins the user namespace of a child. */
static void join_namespace(void)
{
	int made[2], ended[2];
	char byte;
	CHECK(pipe(made) == 0 && pipe(ended) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(made[0]);
		close(ended[1]);
		int refused = unshare(CLONE_NEWUSER) != 0;
		CHECK(write(made[1], "", 1) == 1);
		CHECK(read(ended[0], &byte, 1) == 0);
		_exit(refused ? 77 : 0);
	}
	CHECK(read(made[0], &byte, 1) == 1);
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/ns/user", (int)child);
	int theirs = open(path, O_RDONLY);
	CHECK(theirs >= 0);
	int error = setns(theirs, CLONE_NEWUSER) == 0 ? 0 : errno;
	close(theirs);
	close(ended[1]);
	close(ended[0]);
	await_child(child, 5);
	if (error)
		FAIL("setns: %s", strerror(error));
}

/* A program may enter as many as 32 namespaces, one inside the other. */
static void namespaces(void)
{
	for (int i = 0; i < 5; i++) {
		threads_come_and_go();
		await_one_task();
		enter_namespaces();
	}
	threads_come_and_go();
	await_one_task();
	join_namespace();
}

static void namespaces_of_a_child(void)
{
	threads_come_and_go();
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		enter_namespaces();
		namespaces();
		_exit(0);
	}
	await_child(child, 20);
}

int main(int count, char **words)
{
	const char *name = count > 1 ? words[1] : "";
	if (!strcmp(name, "main-ends"))
		main_ends_first(0);
	else if (!strcmp(name, "main-ends-detached"))
		main_ends_first(1);
	else if (!strcmp(name, "last-in-child")) {
		pthread_t thread = start(fork_and_return, NULL);
		pthread_join(thread, NULL);
	} else if (!strcmp(name, "terminated"))
		terminated();
	else if (!strcmp(name, "limited"))
		limited();
	else if (!strcmp(name, "tasks"))
		tasks();
	else if (!strcmp(name, "namespaces"))
		namespaces();
	else if (!strcmp(name, "namespaces-in-child"))
		namespaces_of_a_child();
	else
		FAIL("no such case");
	return 0;
}
