/* Counters, events, histograms, the shepherd and isolated CPUs in C. Prints "ok". */
#define _GNU_SOURCE
#include "pinfold.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ADDS 100000
#define THREADS 4

static struct pinfold_counter in_static = PINFOLD_COUNTER_INIT(-7);
static struct pinfold_counter_tree tree = PINFOLD_COUNTER_TREE_INIT(-7);
static struct pinfold_event events = PINFOLD_EVENT_INIT;
static struct pinfold_event_pair both = PINFOLD_EVENT_PAIR_INIT;
static struct pinfold_counter *created;
static struct pinfold_counters *many;
static struct pinfold_histogram *sizes;

static void *add(void *argument)
{
	(void)argument;
	for (int n = 0; n < ADDS; n++) {
		pinfold_counter_inc(&in_static);
		pinfold_counter_tree_add(&tree, 2);
		pinfold_counter_tree_sub(&tree, 1);
		pinfold_counter_add(created, 3);
		pinfold_counter_sub(created, 1);
		pinfold_counter_dec(created);
		pinfold_counter_inc(pinfold_counters_at(many, (size_t)n % 100));
		pinfold_event_inc(&events);
		pinfold_event_add(&events, 2);
		pinfold_event_pair_add(&both, 1, 5);
		pinfold_histogram_record(sizes, (uint64_t)n % 1000);
	}
	return NULL;
}

static void counts(void)
{
	int64_t values[100] = {0};
	uint64_t first, second;
	pthread_t threads[THREADS];

	created = pinfold_counter_create(10, PINFOLD_BATCH_DEFAULT);
	many = pinfold_counters_create(values, 100, 32);
	sizes = pinfold_histogram_create();
	CHECK(created && many && sizes);
	for (int n = 0; n < THREADS; n++)
		CHECK(pthread_create(&threads[n], NULL, add, NULL) == 0);
	for (int n = 0; n < THREADS; n++)
		CHECK(pthread_join(threads[n], NULL) == 0);
	CHECK(pinfold_counter_sum(&in_static) == (int64_t)THREADS * ADDS - 7);
	CHECK(pinfold_counter_tree_sum(&tree) == (int64_t)THREADS * ADDS - 7);
	CHECK(pinfold_counter_sum(created) == (int64_t)THREADS * ADDS + 10);
	for (size_t n = 0; n < 100; n++)
		CHECK(pinfold_counter_sum(pinfold_counters_at(many, n)) == THREADS * ADDS / 100);
	CHECK(pinfold_event_sum(&events) == 3ULL * THREADS * ADDS);
	pinfold_event_pair_sum(&both, &first, &second);
	CHECK(first == 1ULL * THREADS * ADDS && second == 5 * first);
	CHECK(pinfold_histogram_count(sizes) == (uint64_t)THREADS * ADDS);
	CHECK(pinfold_histogram_sum(sizes) == (uint64_t)THREADS * ADDS / 1000 * 499500);
	CHECK(pinfold_histogram_quantile(sizes, 0.5) >= 499 &&
	      pinfold_histogram_quantile(sizes, 0.5) < 516);
}

static void tree_operations(void)
{
	int64_t value = pinfold_counter_tree_sum(&tree);
	int64_t off = pinfold_counter_tree_read(&tree) - value;
	int64_t far = 2 * (int64_t)pinfold_counter_tree_error_bound(&tree) + 1;
	struct pinfold_counter_tree *other = pinfold_counter_tree_create(value + 1, 64);

	CHECK(other && far > 1 && 2 * llabs(off) < far);
	CHECK(pinfold_counter_tree_compare(&tree, value) == 0);
	CHECK(pinfold_counter_tree_compare(&tree, value + 1) == -1);
	CHECK(pinfold_counter_tree_compare(&tree, value - 1) == 1);
	CHECK(pinfold_counter_tree_compare_with(&tree, other) == -1);
	CHECK(pinfold_counter_tree_compare_with(other, &tree) == 1);
	CHECK(pinfold_counter_tree_try_compare(&tree, value) == 0);
	CHECK(pinfold_counter_tree_try_compare(&tree, value + far) == -1);
	CHECK(pinfold_counter_tree_try_compare_with(other, &tree) == 0);
	CHECK(pinfold_counter_tree_swap(other, value - far) == value + 1);
	CHECK(pinfold_counter_tree_try_compare_with(&tree, other) == 1);
	pinfold_counter_tree_set(&tree, 3);
	CHECK(pinfold_counter_tree_sum(&tree) == 3);
	pinfold_counter_tree_destroy(other);
	pinfold_counter_tree_destroy(NULL);
	errno = 0;
	CHECK(!pinfold_counter_tree_create(0, 0) && errno == EINVAL);
}

static void operations(void)
{
	int64_t low, high, value = pinfold_counter_sum(created);
	int64_t off = pinfold_counter_read(created) - value;

	CHECK((uint64_t)llabs(off) <= pinfold_counter_error_bound(created));
	pinfold_counter_bounds(created, &low, &high);
	CHECK(low == value && high == value);
	CHECK(pinfold_counter_compare(created, value) == 0);
	CHECK(pinfold_counter_compare(created, value + 1) == -1);
	CHECK(pinfold_counter_compare(created, value - 1) == 1);
	CHECK(pinfold_counter_limited_add(created, value + 5, 5));
	CHECK(!pinfold_counter_limited_add(created, value + 5, 1));
	CHECK(pinfold_counter_swap(created, 1) == value + 5);
	CHECK(pinfold_counter_set_batch(created, PINFOLD_BATCH_LOCAL) == 0);
	CHECK(pinfold_counter_batch(created) == PINFOLD_BATCH_LOCAL);
	CHECK(pinfold_counter_set_batch(created, PINFOLD_BATCH_LOCAL + 1) == -1 &&
	      errno == EINVAL);
	pinfold_counter_set(created, 2);
	pinfold_counter_fold(created);
	CHECK(pinfold_counter_read(created) == 2);
	pinfold_counter_add_batch(created, -100000, 1);
	CHECK(pinfold_counter_sum(created) == 2 - 100000);
	CHECK(pinfold_counter_sum_positive(created) == 0);
	CHECK(pinfold_counter_read_positive(created) == 0);
	pinfold_counter_add_batch(created, 100000, UINT64_MAX);
	CHECK(pinfold_counter_sum_positive(created) == 2);
	CHECK(pinfold_counter_set_batch(created, 1000) == 0 &&
	      pinfold_counter_batch(created) == 1000);
}

static void shared(void)
{
	int64_t value = -1;
	int fd = memfd_create("counters", 0), status;
	struct pinfold_shared_counters *counters = pinfold_shared_counters_create(fd, 2);
	pid_t child;

	CHECK(counters);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct pinfold_shared_counters *own = pinfold_shared_counters_create(fd, 2);

		_exit(!own || pinfold_shared_counters_add(own, 1, 40) != 0);
	}
	CHECK(pinfold_shared_counters_add(counters, 1, 2) == 0);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(pinfold_shared_counters_sum(counters, 1, &value) == 0 && value == 42);
	CHECK(pinfold_shared_counters_read(counters, 0, &value) == 0 && value == 0);
	errno = 0;
	CHECK(pinfold_shared_counters_add(counters, 2, 1) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_shared_counters_create(fd, 3) == NULL && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_shared_counters_create(-1, 1) == NULL && errno == EBADF);
	pinfold_shared_counters_destroy(counters);
	pinfold_shared_counters_destroy(NULL);
	close(fd);
}

static void errors(void)
{
	errno = 0;
	CHECK(pinfold_counter_create(0, 0) == NULL && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_counter_create_max_drift(0, 0) == NULL && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_counter_set_batch(created, 0) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_counters_at(many, 100) == NULL && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_shepherd_create(5, 4) == NULL && errno == EINVAL);
	pinfold_counter_destroy(NULL);
	pinfold_counters_destroy(NULL);
}

static void shown(void)
{
	static struct pinfold_counter level = PINFOLD_COUNTER_INIT(0);
	struct pinfold_event *event = pinfold_event_create();

	CHECK(event);
	CHECK(pinfold_counter_show(&level, "level") == 0);
	errno = 0;
	CHECK(pinfold_event_show(event, "level") == -1 && errno == EEXIST);
	errno = 0;
	CHECK(pinfold_event_show(event, "two words") == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_event_show(event, NULL) == -1 && errno == EINVAL);
	CHECK(pinfold_hide("level") && !pinfold_hide("level"));
	CHECK(!pinfold_hide(NULL));
	CHECK(pinfold_event_show(event, "level") == 0);
	/* Destroying the counter frees its name. */
	pinfold_event_destroy(event);
	CHECK(pinfold_counter_show(&level, "level") == 0);
}

/* A forked child goes on showing a counter, until it destroys the counter. */
static void shown_in_child(void)
{
	struct pinfold_counter *counter = pinfold_counter_create(0, 32);
	struct pinfold_event *event = pinfold_event_create();
	int status;
	pid_t child;

	CHECK(counter && event && pinfold_counter_show(counter, "inherited") == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		pinfold_counter_destroy(counter);
		_exit(pinfold_event_show(event, "inherited") == 0 ? 0 : 9);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	pinfold_counter_destroy(counter);
	pinfold_event_destroy(event);
}

static void shepherd(void)
{
	struct pinfold_counter *counter = pinfold_counter_create(0, 1000);
	struct pinfold_shepherd *shepherd =
		pinfold_shepherd_create(3600000, PINFOLD_SHEPHERD_FOLD_ISOLATED);
	char cpu[16];

	CHECK(counter && shepherd);
	CHECK(pinfold_shepherd_set_cpus(shepherd, "3-1") == -1 && errno == EINVAL);
	CHECK(pinfold_shepherd_set_cpus(shepherd, "") == -1 && errno == EINVAL);
	/* The highest number that a set can hold: there is no such CPU. */
	CHECK(pinfold_shepherd_set_cpus(shepherd, "8191") == 0);
	CHECK(pinfold_shepherd_start(shepherd) == -1 && errno == EINVAL);
	CHECK(pinfold_shepherd_set_cpus(shepherd, NULL) == 0);
	snprintf(cpu, sizeof cpu, "%d", sched_getcpu());
	CHECK(pinfold_shepherd_set_cpus(shepherd, cpu) == 0);
	CHECK(pinfold_shepherd_watch(counter) == 0);
	CHECK(pinfold_shepherd_watch_many(many) == 0);
	pinfold_counter_add(counter, 5);
	CHECK(pinfold_shepherd_tick(shepherd) >= 1);
	CHECK(pinfold_counter_read(counter) == 5);
	CHECK(pinfold_shepherd_start(shepherd) == 0 && pinfold_shepherd_start(shepherd) == 0);
	CHECK(pinfold_shepherd_set_interval(shepherd, 86400001) == -1 && errno == EINVAL);
	/* The thread may have ticked already: then it would sleep for an hour. */
	usleep(20000);
	CHECK(pinfold_shepherd_set_interval(shepherd, 5) == 0);
	pinfold_counter_add(counter, 1);
	for (int n = 0; pinfold_counter_read(counter) != 6; n++) {
		CHECK(n < 5000);
		usleep(1000);
	}
	pinfold_shepherd_stop(shepherd);
	pinfold_shepherd_unwatch(counter);
	pinfold_counter_add(counter, 1);
	CHECK(pinfold_counter_read(counter) == 6);
	pinfold_counter_destroy(counter);
	pinfold_shepherd_destroy(shepherd);
}

/* A CPU that a thread has isolated is left alone, and what the program does to it is reported. */
static void *apart(void *unused)
{
	struct pinfold_counter *counter = pinfold_counter_create(0, 1000);
	struct pinfold_isolation *isolation;
	struct pinfold_isolation_report report;
	cpu_set_t cpus;

	(void)unused;
	CHECK(sched_getaffinity(0, sizeof cpus, &cpus) == 0);
	if (CPU_COUNT(&cpus) > 1) {
		errno = 0;
		CHECK(!pinfold_isolate_enter() && errno == EINVAL);
	}
	CPU_ZERO(&cpus);
	CPU_SET(sched_getcpu(), &cpus);
	CHECK(sched_setaffinity(0, sizeof cpus, &cpus) == 0);
	CHECK(counter && pinfold_shepherd_watch(counter) == 0);
	pinfold_counter_add(counter, 5);
	isolation = pinfold_isolate_enter();
	CHECK(isolation && pinfold_counter_read(counter) == 5);
	errno = 0;
	CHECK(!pinfold_isolate_enter() && errno == EBUSY);
	usleep(1000);
	report = pinfold_isolate_report(isolation);
	CHECK(CPU_ISSET(report.cpu, &cpus) && report.switches > 0);
	CHECK(report.fences == 0 && report.drains == 0 && report.folds == 0);
	report = pinfold_isolate_leave(isolation);
	CHECK(CPU_ISSET(report.cpu, &cpus));
	CHECK(pinfold_isolate_leave(NULL).switches == 0);
	pinfold_counter_destroy(counter);
	return NULL;
}

int main(void)
{
	pthread_t thread;
	struct pinfold_event *event = pinfold_event_create();
	struct pinfold_event_pair *pair;
	uint64_t first, second;
	struct pinfold_counter *drifting = pinfold_counter_create_max_drift(5, 1 << 20);

	counts();
	tree_operations();
	operations();
	shared();
	errors();
	shown();
	shown_in_child();
	shepherd();
	CHECK(pthread_create(&thread, NULL, apart, NULL) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	for (int n = 0; n < 100000; n++)
		pinfold_counter_inc(drifting);
	CHECK(pinfold_counter_sum(drifting) == 100005);
	pinfold_event_inc(event);
	CHECK(pinfold_event_sum(event) == 1);
	pinfold_event_destroy(event);
	pair = pinfold_event_pair_create();
	CHECK(pair);
	pinfold_event_pair_add(pair, 3, UINT64_MAX);
	pinfold_event_pair_sum(pair, &first, &second);
	CHECK(first == 3 && second == UINT64_MAX);
	pinfold_event_pair_destroy(pair);
	pinfold_counter_destroy(drifting);
	pinfold_counter_destroy(created);
	pinfold_counters_destroy(many);
	pinfold_histogram_destroy(sizes);
	puts("ok");
	return 0;
}
