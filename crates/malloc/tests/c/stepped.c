/*
 * A tracer steps through a process that allocates and frees, as debuggers do. Run with the library
 * preloaded. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

/* Several times as many as the child needs. */
#define STEPS 1000000

static void use(void)
{
	for (size_t i = 0; i < 3; i++) {
		char *block = malloc(16 + i * 300);

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
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		/* Fills the sheaves, so that the fast paths serve the calls that are stepped through. */
		for (int i = 0; i < 300; i++)
			use();
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
			_exit(77);
		raise(SIGSTOP);
		use();
		_exit(0);
	}
	for (long step = 0; step < STEPS; step++) {
		CHECK(waitpid(child, &status, 0) == child);
		if (!WIFSTOPPED(status))
			break;
		CHECK(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
	}
	if (WIFSTOPPED(status))
		kill(child, SIGKILL);
	CHECK(!WIFSTOPPED(status));
	CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
	puts("ok");
	return 0;
}
