/*
 * A tracer steps through a process that allocates and frees, as debuggers do. The steps that the
 * process needs do not grow with the time that they take. Run with the library preloaded. Prints
 * "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* Several times as many as the child needs. */
#define STEPS 1000000
#define ROUNDS 8
/* Longer than the pauses between two rounds of the allocator's background work. */
#define PAUSE_US 700000

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
	long steps[ROUNDS + 1] = { 0 };
	int status, round = -1;
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
		if (WSTOPSIG(status) == SIGSTOP && ++round % 2 == 1)
			usleep(PAUSE_US);
		if (round >= 0 && round <= ROUNDS)
			steps[round]++;
		CHECK(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
	}
	if (WIFSTOPPED(status))
		kill(child, SIGKILL);
	CHECK(!WIFSTOPPED(status));
	CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
#ifdef __x86_64__
	long least = STEPS, most = 0;

	/* The first rounds also prepare what later ones use. Nothing is known on other processors. */
	for (round = 2; WEXITSTATUS(status) == 0 && round < ROUNDS; round++) {
		least = steps[round] < least ? steps[round] : least;
		most = steps[round] > most ? steps[round] : most;
	}
	/* A round may fill a sheaf or begin a slab. Background work would come after every pause. */
	int many = 0;
	for (round = 2; WEXITSTATUS(status) == 0 && round < ROUNDS; round++)
		many += steps[round] > 2 * least;
	if (many > ROUNDS / 4)
		fprintf(stderr, "%d rounds of %d: %ld to %ld steps\n", many, ROUNDS, least, most);
	CHECK(many <= ROUNDS / 4);
#endif
	puts("ok");
	return 0;
}
