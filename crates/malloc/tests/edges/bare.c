/*
 * A program starts where neither /proc nor /sys nor /dev is mounted, as in a small chroot.
 *
 * The process covers the three folders by empty ones in a mount namespace of its own, and executes
 * itself, so that the allocator starts there.
 */
#include "edge.h"
#include <sched.h>
#include <sys/mount.h>

static void cover(const char *folder)
{
	if (mount("none", folder, "tmpfs", 0, NULL))
		skip("this machine allows no mounts");
}

static void *work(void *seed)
{
	churn_for((unsigned)(size_t)seed, working_time() / 2);
	return NULL;
}

int main(int count, char **words)
{
	if (count < 2) {
		char path[4096];
		ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
		CHECK(length > 0);
		path[length] = 0;
		int flags = geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER;
		if (unshare(flags) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
			skip("this machine allows no mount namespace");
		cover("/sys");
		cover("/dev");
		cover("/proc");
		execl(path, words[0], "covered", NULL);
		FAIL("cannot execute the program again");
	}
	CHECK(access("/proc/self", F_OK) && access("/sys/devices", F_OK));
	pthread_t threads[3];
	churn_for(1, working_time() / 4);
	for (size_t i = 0; i < 3; i++)
		threads[i] = start(work, (void *)i);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	if (fork() == 0) {
		churn(5, 5000);
		_exit(0);
	}
	int status;
	CHECK(wait(&status) > 0 && status == 0);
	return 0;
}
