/*
 * A signal may arrive at any instruction of the allocator, and a profiler's handler walks the stack
 * from there. So this program steps through allocations, and walks the stack at every instruction.
 * A wrong entry in the unwinding tables leads the walk to an address where there is no code.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include "check.h"

#ifdef __x86_64__
#define TRAP 0x100
#define FRAMES 64
#define BLOCKS 100

static volatile long steps, wrong;
static volatile int stop;
static void *volatile bad[2];

static void on_step(int signal, siginfo_t *info, void *context)
{
	ucontext_t *at = context;
	void *frames[FRAMES];
	Dl_info module;

	(void)signal, (void)info;
	steps++;
	int depth = backtrace(frames, FRAMES);
	for (int i = 0; i < depth; i++)
		if (!dladdr(frames[i], &module)) {
			if (!wrong++) {
				bad[0] = frames[i];
				bad[1] = (void *)at->uc_mcontext.gregs[REG_RIP];
			}
		}
	if (stop)
		at->uc_mcontext.gregs[REG_EFL] &= ~TRAP;
}

static void step(void)
{
	__asm__ volatile("lea -128(%%rsp), %%rsp\n\tpushfq\n\torq %0, (%%rsp)\n\tpopfq\n\tlea 128(%%rsp), %%rsp"
			 : : "i"(TRAP) : "cc", "memory");
}

int main(void)
{
	struct sigaction action = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };
	void *held[BLOCKS], *frames[1];
	Dl_info module;

	/* The first walk loads the unwinder. */
	CHECK(backtrace(frames, 1) == 1 && dladdr(frames[0], &module));
	free(malloc(100));
	CHECK(sigaction(SIGTRAP, &action, NULL) == 0);
	step();
	for (int i = 0; i < BLOCKS; i++)
		held[i] = malloc(i % 10 == 9 ? 70000 : 200);
	for (int i = 0; i < BLOCKS; i++) {
		held[i] = realloc(held[i], 300);
		free(held[i]);
	}
	stop = 1;
	CHECK(steps > 10000);
	if (wrong)
		fprintf(stderr, "%ld wrong of %ld steps: %p from %p\n", wrong, steps, bad[0], bad[1]);
	CHECK(wrong == 0);
	puts("ok");
	return 0;
}
#else
int main(void)
{
	puts("ok");
	return 0;
}
#endif
