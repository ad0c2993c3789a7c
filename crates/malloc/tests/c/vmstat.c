/* Counts by zone and item in C, and sets of event counters: threads, bounds, and every errno. */
#define _GNU_SOURCE
#include "check.h"
#include "pinfold.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define THREADS 4
#define TURNS 10000

enum { NR_FREE, NR_DIRTY, NR_MAPPED, NR_WRITES, NR_READS, NR_ITEMS };

static struct pinfold_vmstat *stat;
static struct pinfold_vmevents *events;

static void *work(void *argument)
{
	(void)argument;
	for (int turn = 0; turn < TURNS; turn++) {
		pinfold_vmstat_inc(stat, PINFOLD_ZONE_NORMAL(0), NR_FREE);
		pinfold_vmstat_add(stat, PINFOLD_ZONE_HUGE(0), NR_FREE, 3);
		pinfold_vmstat_dec(stat, PINFOLD_ZONE_NORMAL(0), NR_READS);
		pinfold_vmevents_inc(events, NR_READS);
		pinfold_vmevents_add(events, NR_FREE, 2);
	}
	return NULL;
}

static void counts(void)
{
	const int64_t all = (int64_t)THREADS * TURNS;
	pthread_t threads[THREADS];
	int64_t values[NR_ITEMS], read;
	uint64_t seen[NR_ITEMS], bound;

	for (int n = 0; n < THREADS; n++)
		CHECK(pthread_create(&threads[n], NULL, work, NULL) == 0);
	for (int n = 0; n < THREADS; n++)
		pthread_join(threads[n], NULL);
	read = pinfold_vmstat_read(stat, NR_FREE);
	bound = pinfold_vmstat_error_bound(stat, NR_FREE);
	CHECK((uint64_t)llabs(4 * all - read) <= bound);
	CHECK(pinfold_vmstat_sum(stat, NR_FREE) == 4 * all);
	CHECK(pinfold_vmstat_sum_zone(stat, PINFOLD_ZONE_NORMAL(0), NR_FREE) == all);
	CHECK(pinfold_vmstat_sum_zone(stat, PINFOLD_ZONE_HUGE(0), NR_FREE) == 3 * all);
	pinfold_vmstat_fold(stat);
	CHECK(pinfold_vmstat_read(stat, NR_READS) == -all);
	CHECK(pinfold_vmstat_read_zone(stat, PINFOLD_ZONE_HUGE(0), NR_FREE) == 3 * all);
	CHECK(pinfold_vmstat_read_zone(stat, PINFOLD_ZONE_HUGE(0), NR_READS) == 0);
	CHECK(pinfold_vmstat_snapshot(stat, values, NR_ITEMS) == 0);
	CHECK(values[NR_FREE] == 4 * all && values[NR_DIRTY] == 0 && values[NR_READS] == -all);
	CHECK(pinfold_vmevents_sum(events, NR_READS) == (uint64_t)all);
	CHECK(pinfold_vmevents_snapshot(events, seen, NR_ITEMS) == 0);
	CHECK(seen[NR_FREE] == 2 * (uint64_t)all && seen[NR_DIRTY] == 0);
	CHECK(seen[NR_READS] == (uint64_t)all && pinfold_vmevents_lost(events) == 0);
}

static void thresholds(void)
{
	CHECK(pinfold_vmstat_zones(stat) >= 2 && pinfold_vmstat_zones(stat) % 2 == 0);
	CHECK(pinfold_vmstat_threshold(stat, PINFOLD_ZONE_NORMAL(0)) == 10);
	CHECK(pinfold_vmstat_threshold(stat, PINFOLD_ZONE_NORMAL(4000)) == 0);
	CHECK(pinfold_vmstat_set_threshold(stat, 40) == 0);
	CHECK(pinfold_vmstat_threshold(stat, PINFOLD_ZONE_HUGE(0)) == 40);
	CHECK(pinfold_vmstat_set_threshold(stat, 5) == 0);
	CHECK(pinfold_vmstat_threshold(stat, PINFOLD_ZONE_HUGE(0)) == 5);
	CHECK(pinfold_vmstat_set_threshold(stat, 0) == 0);
	CHECK(pinfold_vmstat_threshold(stat, PINFOLD_ZONE_NORMAL(0)) > 0);
	errno = 0;
	CHECK(pinfold_vmstat_set_threshold(stat, UINT64_MAX) == -1 && errno == EINVAL);
}

static void refused(void)
{
	int64_t values[NR_ITEMS + 1];
	uint64_t seen[NR_ITEMS + 1];

#define REFUSES(call)                                                                      \
	do {                                                                               \
		errno = 0;                                                                 \
		call;                                                                      \
		CHECK(errno == EINVAL);                                                    \
	} while (0)
	REFUSES(CHECK(pinfold_vmstat_create(0, 0) == NULL));
	REFUSES(CHECK(pinfold_vmstat_create(257, 0) == NULL));
	REFUSES(CHECK(pinfold_vmstat_create(1, UINT64_MAX) == NULL));
	REFUSES(CHECK(pinfold_vmevents_create(0) == NULL));
	REFUSES(CHECK(pinfold_vmevents_create(SIZE_MAX) == NULL));
	REFUSES(pinfold_vmstat_inc(stat, 0, NR_ITEMS));
	REFUSES(pinfold_vmstat_add(stat, 0, SIZE_MAX, 1));
	REFUSES(CHECK(pinfold_vmstat_read(stat, NR_ITEMS) == 0));
	REFUSES(CHECK(pinfold_vmstat_read_zone(stat, 0, NR_ITEMS) == 0));
	REFUSES(CHECK(pinfold_vmstat_sum(stat, NR_ITEMS) == 0));
	REFUSES(CHECK(pinfold_vmstat_sum_zone(stat, 0, NR_ITEMS) == 0));
	REFUSES(CHECK(pinfold_vmstat_error_bound(stat, NR_ITEMS) == 0));
	REFUSES(CHECK(pinfold_vmstat_snapshot(stat, values, NR_ITEMS + 1) == -1));
	REFUSES(pinfold_vmevents_inc(events, NR_ITEMS));
	REFUSES(pinfold_vmevents_add(events, NR_ITEMS, 1));
	REFUSES(CHECK(pinfold_vmevents_sum(events, NR_ITEMS) == 0));
	REFUSES(CHECK(pinfold_vmevents_snapshot(events, seen, NR_ITEMS + 1) == -1));
	CHECK(pinfold_vmstat_lost(stat) == 0);
	pinfold_vmstat_inc(stat, PINFOLD_ZONE_NORMAL(4000), NR_FREE);
	pinfold_vmstat_inc(stat, -1, NR_FREE);
	CHECK(pinfold_vmstat_lost(stat) == 2);
	CHECK(pinfold_vmstat_sum_zone(stat, -1, NR_FREE) == 0);
}

int main(void)
{
	stat = pinfold_vmstat_create(NR_ITEMS, 10);
	events = pinfold_vmevents_create(NR_ITEMS);
	CHECK(stat && events);
	counts();
	refused();
	thresholds();
	pinfold_vmstat_destroy(stat);
	pinfold_vmevents_destroy(events);
	pinfold_vmstat_destroy(NULL);
	pinfold_vmevents_destroy(NULL);
	/* The largest number of items, again and again: their memory comes back. */
	for (int turn = 0; turn < 20; turn++) {
		stat = pinfold_vmstat_create(256, 0);
		events = pinfold_vmevents_create(256);
		CHECK(stat && events);
		pinfold_vmstat_inc(stat, 0, 255);
		pinfold_vmevents_inc(events, 255);
		CHECK(pinfold_vmstat_sum(stat, 255) == 1 && pinfold_vmevents_sum(events, 255) == 1);
		pinfold_vmstat_destroy(stat);
		pinfold_vmevents_destroy(events);
	}
	puts("ok");
	return 0;
}
