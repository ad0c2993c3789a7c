/* Per-CPU arrays, pairs and rings in C: each operation, each errno, and threads that share them. */
#define _GNU_SOURCE
#include "check.h"
#include "pinfold.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define TURNS 20000
#define ELEMENTS 10

static struct pinfold_percpu_array array;
static struct pinfold_percpu_pair pair;
static struct pinfold_percpu_ring ring;

static atomic_ulong paired, appended, drained;

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static void add_up(int cpu, uint64_t value, void *context)
{
	CHECK(cpu >= -1 && cpu < 8192);
	*(uint64_t *)context += value;
}

/* Checks that every operation refuses element `at` with EINVAL. */
static void refused(struct pinfold_percpu_array *none, size_t at)
{
	uint64_t expected = 0, sum = 0;

#define REFUSES(call)                                                                      \
	do {                                                                               \
		errno = 0;                                                                 \
		call;                                                                      \
		CHECK(errno == EINVAL);                                                    \
	} while (0)
	REFUSES(CHECK(pinfold_percpu_array_read(none, at) == 0));
	REFUSES(pinfold_percpu_array_write(none, at, 1));
	REFUSES(pinfold_percpu_array_add(none, at, 1));
	REFUSES(CHECK(pinfold_percpu_array_add_return(none, at, 1) == 0));
	REFUSES(CHECK(pinfold_percpu_array_sub_return(none, at, 1) == 0));
	REFUSES(CHECK(pinfold_percpu_array_inc_return(none, at) == 0));
	REFUSES(CHECK(pinfold_percpu_array_dec_return(none, at) == 0));
	REFUSES(CHECK(pinfold_percpu_array_read_on(none, at, 0) == 0));
	REFUSES(CHECK(!pinfold_percpu_array_write_on(none, at, 0, 1)));
	REFUSES(pinfold_percpu_array_inc(none, at));
	REFUSES(pinfold_percpu_array_dec(none, at));
	REFUSES(pinfold_percpu_array_and(none, at, 1));
	REFUSES(pinfold_percpu_array_or(none, at, 1));
	REFUSES(CHECK(pinfold_percpu_array_xchg(none, at, 1) == 0));
	REFUSES(CHECK(pinfold_percpu_array_cmpxchg(none, at, 0, 1) == 0));
	REFUSES(CHECK(!pinfold_percpu_array_try_cmpxchg(none, at, &expected, 1)));
	REFUSES(CHECK(pinfold_percpu_array_sum(none, at) == 0));
	REFUSES(CHECK(pinfold_percpu_array_for_each_cpu(none, at, add_up, &sum) == -1));
	CHECK(sum == 0 && expected == 0);
}

static void arrays(void)
{
	uint64_t expected = 5, sum = 0;

	refused(&array, 0);
	errno = 0;
	CHECK(pinfold_percpu_array_init(&array, 0) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_percpu_array_init(&array, SIZE_MAX / 8) == -1 && errno == ENOMEM);
	errno = 0;
	CHECK(pinfold_percpu_array_init(&array, SIZE_MAX) == -1 && errno == ENOMEM);
	CHECK(pinfold_percpu_array_init(&array, ELEMENTS) == 0);
	refused(&array, ELEMENTS);
	for (size_t at = 0; at < ELEMENTS; at++)
		pinfold_percpu_array_add(&array, at, at + 1);
	for (size_t at = 0; at < ELEMENTS; at++)
		CHECK(pinfold_percpu_array_sum(&array, at) == at + 1);
	CHECK(pinfold_percpu_array_read(&array, 9) == 10);
	pinfold_percpu_array_write(&array, 9, 12);
	pinfold_percpu_array_and(&array, 9, 6);
	pinfold_percpu_array_or(&array, 9, 1);
	pinfold_percpu_array_add(&array, 9, 10);
	pinfold_percpu_array_inc(&array, 9);
	pinfold_percpu_array_inc(&array, 9);
	pinfold_percpu_array_dec(&array, 9);
	CHECK(pinfold_percpu_array_add_return(&array, 9, 5) == 21);
	CHECK(pinfold_percpu_array_xchg(&array, 9, 7) == 21);
	CHECK(pinfold_percpu_array_cmpxchg(&array, 9, 8, 9) == 7);
	CHECK(!pinfold_percpu_array_try_cmpxchg(&array, 9, &expected, 1) && expected == 7);
	CHECK(pinfold_percpu_array_try_cmpxchg(&array, 9, &expected, 11));
	CHECK(pinfold_percpu_array_sum(&array, 9) == 11);
	CHECK(pinfold_percpu_array_for_each_cpu(&array, 9, add_up, &sum) == 0 && sum == 11);
	CHECK(pinfold_percpu_array_sum(&array, 8) == 9);
	pinfold_percpu_array_write(&array, 0, 0);
}

static void count_pair(int cpu, uint64_t first, uint64_t second, void *context)
{
	CHECK(cpu >= 0 && cpu < 8192);
	CHECK(second == 3 * first);
	*(uint64_t *)context += first;
}

static void pairs(void)
{
	uint64_t first = 9, second = 9, sum = 0;

	CHECK(pinfold_percpu_pair_read(&pair, &first, &second) == 0);
	CHECK(first == 0 && second == 0);
	CHECK(pinfold_percpu_pair_cmpxchg(&pair, 0, 0, 2, 6));
	CHECK(!pinfold_percpu_pair_cmpxchg(&pair, 2, 2, 7, 7));
	CHECK(!pinfold_percpu_pair_cmpxchg(&pair, 6, 6, 7, 7));
	CHECK(pinfold_percpu_pair_read(&pair, &first, &second) == 0);
	CHECK(first == 2 && second == 6);
	pinfold_percpu_pair_for_each_cpu(&pair, count_pair, &sum);
	CHECK(sum == 2);
	pinfold_percpu_pair_destroy(&pair);
	sum = 0;
	pinfold_percpu_pair_for_each_cpu(&pair, count_pair, &sum);
	CHECK(sum == 0);
}

static void in_order(int cpu, const uint64_t *record, void *context)
{
	CHECK(cpu >= 0 && cpu < 8192);
	CHECK(record[0] == (*(uint64_t *)context)++);
	CHECK(record[1] == ~record[0]);
}

static void rings(void)
{
	const uint64_t stray[2] = { 100, 100 };
	uint64_t next = 0;

	errno = 0;
	CHECK(pinfold_percpu_ring_push(&ring, stray) == -1 && errno == EINVAL);
	CHECK(pinfold_percpu_ring_drain(&ring, in_order, &next) == 0);
	const size_t wrong[][2] = { { 0, 8 }, { 2, 0 }, { 3, 8 }, { 2, 9 }, { 128, 8 } };
	for (size_t n = 0; n < sizeof(wrong) / sizeof(*wrong); n++) {
		errno = 0;
		CHECK(pinfold_percpu_ring_init(&ring, wrong[n][0], wrong[n][1]) == -1);
		CHECK(errno == EINVAL);
	}
	for (int bits = 22; bits < 64; bits++) {
		errno = 0;
		CHECK(pinfold_percpu_ring_init(&ring, 2, (size_t)1 << bits) == -1);
		CHECK(errno == ENOMEM);
	}
	CHECK(pinfold_percpu_ring_init(&ring, 2, 4) == 0);
	for (uint64_t n = 0; n < 4; n++)
		CHECK(pinfold_percpu_ring_push(&ring, (uint64_t[]){ n, ~n }) == 0);
	errno = 0;
	CHECK(pinfold_percpu_ring_push(&ring, stray) == -1 && errno == ENOBUFS);
	CHECK(pinfold_percpu_ring_drain(&ring, in_order, &next) == 4 && next == 4);
	CHECK(pinfold_percpu_ring_drain(&ring, in_order, &next) == 0);
	CHECK(pinfold_percpu_ring_push(&ring, (uint64_t[]){ 4, ~(uint64_t)4 }) == 0);
	CHECK(pinfold_percpu_ring_drain(&ring, in_order, &next) == 1);
	pinfold_percpu_ring_destroy(&ring);
	errno = 0;
	CHECK(pinfold_percpu_ring_push(&ring, stray) == -1 && errno == EINVAL);
	CHECK(pinfold_percpu_ring_init(&ring, 4, 64) == 0);
}

static void whole(int cpu, const uint64_t *record, void *context)
{
	(void)context;
	CHECK(cpu >= 0 && cpu < 8192);
	CHECK(record[1] == ~record[0] && record[2] == record[0] && record[3] < THREADS);
	atomic_fetch_add(&drained, 1);
}

static void *work(void *number)
{
	for (int turn = 0; turn < TURNS; turn++) {
		const uint64_t n = (uint64_t)turn;
		const uint64_t record[4] = { n, ~n, n, (uint64_t)(intptr_t)number };
		uint64_t first, second;

		if (turn % 64 == 0)
			pin((turn / 64 + (int)(intptr_t)number) % (int)sysconf(_SC_NPROCESSORS_ONLN));
		pinfold_percpu_array_inc(&array, 0);
		CHECK(pinfold_percpu_pair_read(&pair, &first, &second) == 0);
		if (pinfold_percpu_pair_cmpxchg(&pair, first, second, first + 1, second + 3))
			atomic_fetch_add(&paired, 1);
		if (pinfold_percpu_ring_push(&ring, record) == 0)
			atomic_fetch_add(&appended, 1);
		else
			CHECK(errno == ENOBUFS || errno == EAGAIN);
		if (turn % 32 == 0)
			pinfold_percpu_ring_drain(&ring, whole, NULL);
	}
	return NULL;
}

static void together(void)
{
	pthread_t threads[THREADS];
	uint64_t sum = 0;

	for (intptr_t n = 0; n < THREADS; n++)
		CHECK(pthread_create(&threads[n], NULL, work, (void *)n) == 0);
	for (int n = 0; n < THREADS; n++)
		pthread_join(threads[n], NULL);
	pinfold_percpu_ring_drain(&ring, whole, NULL);
	CHECK(appended > TURNS && drained == appended);
	pinfold_percpu_pair_for_each_cpu(&pair, count_pair, &sum);
	CHECK(paired > 0 && sum == paired);
	CHECK(pinfold_percpu_array_sum(&array, 0) == (uint64_t)THREADS * TURNS);
	CHECK(pinfold_percpu_array_sum(&array, 1) == 2);
}

int main(void)
{
	pin(0);
	arrays();
	pairs();
	rings();
	together();
	pinfold_percpu_array_destroy(&array);
	refused(&array, 0);
	pinfold_percpu_pair_destroy(&pair);
	pinfold_percpu_ring_destroy(&ring);
	puts("ok");
	return 0;
}
