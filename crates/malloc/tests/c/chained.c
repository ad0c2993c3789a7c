/*
 * Programs with handlers of SIGSEGV of their own, while blocks are guarded: a later handler that
 * passes faults on to an earlier one, pages that the program itself protects, and signals that
 * another process sends. Run with the library preloaded and PINFOLD_GUARD=1. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096

static volatile sig_atomic_t first_handled, second_handled;
static char *first_page, *second_page;
static struct sigaction first_action;
static void (*first_function)(int);
static sigjmp_buf back;

/* Allocates for a while, so that blocks are guarded and the handlers are looked at. */
static void allocate(int milliseconds)
{
	struct timespec begin, now;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	do {
		for (int n = 0; n < 100; n++)
			free(memset(malloc(100), 1, 100));
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 <
		 milliseconds);
}

static int is_in(const char *page, const void *address)
{
	return (const char *)address >= page && (const char *)address < page + PAGE;
}

static char *closed_page(void)
{
	char *page = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(page != MAP_FAILED);
	return page;
}

static void open_first(int signal, siginfo_t *info, void *context)
{
	(void)signal;
	(void)context;
	if (!is_in(first_page, info->si_addr))
		_exit(9);
	first_handled++;
	CHECK(mprotect(first_page, PAGE, PROT_READ | PROT_WRITE) == 0);
}

static void open_second(int signal, siginfo_t *info, void *context)
{
	if (!is_in(second_page, info->si_addr)) {
		first_action.sa_sigaction(signal, info, context);
		return;
	}
	second_handled++;
	CHECK(mprotect(second_page, PAGE, PROT_READ | PROT_WRITE) == 0);
}

/* The second handler passes faults on to the action that it replaced. */
static void passed_on(void)
{
	struct sigaction action = { .sa_flags = SA_SIGINFO, .sa_sigaction = open_first };

	first_page = closed_page();
	second_page = closed_page();
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	allocate(300);
	action.sa_sigaction = open_second;
	CHECK(sigaction(SIGSEGV, &action, &first_action) == 0);
	for (int n = 0; n < 20; n++) {
		CHECK(mprotect(first_page, PAGE, PROT_NONE) == 0);
		first_page[1] = 1;
		CHECK(mprotect(second_page, PAGE, PROT_NONE) == 0);
		second_page[1] = 1;
		allocate(5);
	}
	CHECK(first_handled == 20 && second_handled == 20);
}

static void jump_back(int signal)
{
	(void)signal;
	first_handled++;
	siglongjmp(back, 1);
}

static void pass_number_on(int signal)
{
	first_function(signal);
}

/* The same with handlers that know the signal's number only. */
static void passed_on_by_number(void)
{
	volatile char *page = closed_page();

	CHECK(signal(SIGSEGV, jump_back) != SIG_ERR);
	allocate(300);
	first_function = signal(SIGSEGV, pass_number_on);
	for (int n = 0; n < 10; n++) {
		if (!sigsetjmp(back, 1))
			(void)*page;
		allocate(5);
	}
	CHECK(first_handled == 10);
}

static void open_page(int signal, siginfo_t *info, void *context)
{
	uintptr_t page = (uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1);

	(void)signal;
	(void)context;
	first_handled++;
	CHECK(mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE) == 0);
}

/* A program may protect its own blocks. A fault there is no fault of the program. */
static void protected_by_the_program(void)
{
	struct sigaction action = { .sa_flags = SA_SIGINFO, .sa_sigaction = open_page };
	char path[] = "/tmp/pinfold-chained.XXXXXX";
	int errors = mkstemp(path);
	struct stat said;

	CHECK(errors >= 0 && unlink(path) == 0 && dup2(errors, 2) == 2);
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	allocate(150);
	for (int n = 0; n < 500; n++) {
		char *block = aligned_alloc(PAGE, PAGE);
		sig_atomic_t before = first_handled;

		memset(block, 1, PAGE);
		CHECK(mprotect(block, PAGE, PROT_READ) == 0);
		*(volatile char *)(block + 5) = 2;
		CHECK(block[5] == 2 && first_handled == before + 1);
		free(block);
		allocate(1);
	}
	CHECK(fstat(errors, &said) == 0 && said.st_size == 0);
}

static void count_signal(int signal)
{
	(void)signal;
	first_handled++;
}

/* A read goes on after a signal that is ignored, or whose handler asks for it. */
static void read_goes_on(void (*handler)(int))
{
	struct sigaction action = { .sa_flags = SA_RESTART, .sa_handler = handler };
	pid_t reader = getpid(), sender;
	int ends[2];
	char byte;

	CHECK(sigaction(SIGSEGV, &action, NULL) == 0 && pipe(ends) == 0);
	allocate(300);
	sender = fork();
	CHECK(sender >= 0);
	if (sender == 0) {
		usleep(100000);
		kill(reader, SIGSEGV);
		usleep(100000);
		_exit(write(ends[1], "x", 1) != 1);
	}
	CHECK(read(ends[0], &byte, 1) == 1);
	CHECK(waitpid(sender, NULL, 0) == sender);
	CHECK(first_handled == (handler == SIG_IGN ? 0 : 1));
}

static atomic_int arrived, wrongly_masked;

/* The program's action blocks SIGUSR1 in its handler. */
static void open_with_mask(int signal, siginfo_t *info, void *context)
{
	sigset_t blocked;

	CHECK(pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0);
	if (!sigismember(&blocked, SIGUSR1))
		wrongly_masked++;
	open_page(signal, info, context);
}

static void *fault_together(void *unused)
{
	char *page = closed_page();

	for (int n = 0; n < 300; n++) {
		CHECK(mprotect(page, PAGE, PROT_NONE) == 0);
		allocate(2);
		arrived++;
		while (arrived < 2 * (n + 1))
			;
		page[1] = 1;
	}
	return unused;
}

/* Two threads fault at the same time. Both get the program's action as the program asked for it. */
static void two_at_once(void)
{
	struct sigaction action = { .sa_flags = SA_SIGINFO, .sa_sigaction = open_with_mask };
	pthread_t other;

	CHECK(sigaddset(&action.sa_mask, SIGUSR1) == 0);
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	allocate(150);
	CHECK(pthread_create(&other, NULL, fault_together, NULL) == 0);
	fault_together(NULL);
	CHECK(pthread_join(other, NULL) == 0);
	CHECK(wrongly_masked == 0);
}

/* Runs a part in a process of its own. */
static void run(int part)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		switch (part) {
		case 0: passed_on(); break;
		case 1: passed_on_by_number(); break;
		case 2: protected_by_the_program(); break;
		case 3: two_at_once(); break;
		case 4: read_goes_on(count_signal); break;
		default: read_goes_on(SIG_IGN);
		}
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	if (status != 0)
		printf("part %d ended with status %#x\n", part, (unsigned)status);
	CHECK(status == 0);
}

int main(void)
{
	for (int part = 0; part < 6; part++)
		run(part);
	puts("ok");
	return 0;
}
