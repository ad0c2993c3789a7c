/*
 * A tracer steps through a process that allocates and frees, as debuggers do. The process gets to
 * its end, although each step takes so long that background work is always due. Run with the
 * library preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* Several times as many as the child needs, unless background work is due again at each call. */
#define STEPS 2000000
#define ROUNDS 8
/* Longer than the pauses between two rounds of the allocator's background work. */
#define PAUSE_US 700000

static void use(void)
{
	for (size_t i = 0; i < 12; i++) {
		char *block = malloc(16 + i * 80);

		CHECK(block);
		block = realloc(block, 4000);
		CHECK(block);
		free(block);
		block = calloc(3, 100);
		CHECK(block && block[299] == 0);
		free(block);
	}
}

int main(void)
{
	int status, round = 0;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		/* Fills the sheaves, so that the fast paths serve the calls that are stepped through. */
		for (int i = 0; i < 300; i++)
			use();
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
			_exit(77);
		raise(SIGSTOP);
		for (int i = 0; i < ROUNDS; i++) {
			use();
			raise(SIGSTOP);
		}
		_exit(0);
	}
	for (long step = 0; step < STEPS; step++) {
		CHECK(waitpid(child, &status, 0) == child);
		if (!WIFSTOPPED(status))
			break;
		if (WSTOPSIG(status) == SIGSTOP && ++round % 2 == 0)
			usleep(PAUSE_US);
		CHECK(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
	}
	if (WIFSTOPPED(status))
		kill(child, SIGKILL);
	CHECK(!WIFSTOPPED(status));
	CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
	puts("ok");
	return 0;
}
