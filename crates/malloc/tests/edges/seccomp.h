/* Seccomp filters for the programs of this folder. */
#ifndef EDGE_SECCOMP_H
#define EDGE_SECCOMP_H

#include "edge.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/*
 * Enters a filter for all threads: a call in `listed` gets `listed_answer`, another `other_answer`.
 */
UNUSED static void enter_filter(const int *listed, size_t count, unsigned listed_answer,
				unsigned other_answer)
{
	struct sock_filter code[80];
	unsigned short n = 0;
	CHECK(count < 70);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
						 offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < count; i++) {
		unsigned char ahead = (unsigned char)(count - i);
		code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
							 (unsigned)listed[i], ahead, 0);
	}
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, other_answer);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, listed_answer);
	struct sock_fprog program = { n, code };
	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program))
		skip("this machine allows no seccomp filter");
}

/* Names the call that a filter answered with a trap, and ends the process. */
static void on_trap(int number, siginfo_t *info, void *context)
{
	static const struct {
		int number;
		const char *name;
	} names[] = {
		{ SYS_openat, "openat" },
		{ SYS_clock_gettime, "clock_gettime" },
		{ SYS_membarrier, "membarrier" },
		{ SYS_prctl, "prctl" },
		{ SYS_sched_getaffinity, "sched_getaffinity" },
		{ SYS_sched_setaffinity, "sched_setaffinity" },
		{ SYS_mbind, "mbind" },
		{ SYS_getcpu, "getcpu" },
		{ SYS_gettid, "gettid" },
		{ SYS_sysinfo, "sysinfo" },
#ifdef SYS_access
		{ SYS_access, "access" },
#endif
	};
	(void)number;
	(void)context;
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i].number == info->si_syscall)
			FAIL("killed for %s", names[i].name);
	FAIL("killed for call %d", info->si_syscall);
}

/*
 * Has a trap tell which call it was. The trap kills a thread that blocks all signals, with SIGSYS,
 * as SECCOMP_RET_KILL_PROCESS would.
 */
UNUSED static void tell_traps(void)
{
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };
	CHECK(sigaction(SIGSYS, &action, NULL) == 0);
}

#endif
