/*
 * A program with a malloc of its own makes its first thread in a sandbox.
 *
 * A library that is loaded for its malloc is then first used when the thread is made. It must have
 * made all calls of its start when it was loaded.
 */
#include "seccomp.h"

/* The program's malloc: blocks of a static array, which nothing takes back. */
static _Alignas(64) char memory[8 << 20];
static size_t used;

void *aligned_alloc(size_t align, size_t size)
{
	size_t room = (size + 16 + align + 63) & ~(size_t)63;
	size_t at = __atomic_fetch_add(&used, room, __ATOMIC_RELAXED);
	if (at + room > sizeof memory)
		return NULL;
	char *block = memory + at + 16;
	block += -(size_t)block & (align - 1);
	((size_t *)block)[-1] = size;
	return block;
}

void *memalign(size_t align, size_t size)
{
	return aligned_alloc(align, size);
}

void *malloc(size_t size)
{
	return aligned_alloc(16, size);
}

void *calloc(size_t count, size_t size)
{
	return malloc(count * size);
}

void *realloc(void *block, size_t size)
{
	void *other = malloc(size);
	if (block && other) {
		size_t before = ((size_t *)block)[-1];
		memcpy(other, block, before < size ? before : size);
	}
	return other;
}

void free(void *block)
{
	(void)block;
}

static const int forbidden[] = {
	SYS_openat, SYS_membarrier, SYS_prctl, SYS_sched_getaffinity, SYS_sched_setaffinity,
	SYS_mbind, SYS_get_mempolicy, SYS_getcpu, SYS_sysinfo, SYS_prlimit64, SYS_newfstatat,
};

static void *work(void *seconds)
{
	sleep_for(*(double *)seconds);
	return NULL;
}

int main(void)
{
	double times[] = { 0.1, 1.5, working_time() / 2 };
	tell_traps();
	enter_filter(forbidden, sizeof forbidden / sizeof *forbidden, SECCOMP_RET_TRAP,
		     SECCOMP_RET_ALLOW);
	pthread_t threads[3];
	for (int i = 0; i < 3; i++)
		threads[i] = start(work, &times[i]);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
