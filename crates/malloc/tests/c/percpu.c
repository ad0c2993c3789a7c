/* Per-CPU words and lists in C: each operation, and threads that share a list. */
#define _GNU_SOURCE
#include "check.h"
#include "pinfold.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define NODES 32
#define THREADS 4

static struct pinfold_percpu word, turns;
static struct pinfold_percpu_list list;

static struct item {
	struct pinfold_percpu_node node;
	atomic_bool taken;
} items[NODES];

static atomic_bool stop;

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static void operations(void)
{
	uint64_t expected = 5;

	pin(0);
	CHECK(pinfold_percpu_read(&word) == 0);
	pinfold_percpu_write(&word, 12);
	pinfold_percpu_and(&word, 6);
	pinfold_percpu_or(&word, 1);
	pinfold_percpu_add(&word, 10);
	pinfold_percpu_inc(&word);
	pinfold_percpu_dec(&word);
	CHECK(pinfold_percpu_add_return(&word, 5) == 20);
	CHECK(pinfold_percpu_xchg(&word, 7) == 20);
	CHECK(pinfold_percpu_cmpxchg(&word, 8, 9) == 7);
	CHECK(!pinfold_percpu_try_cmpxchg(&word, &expected, 1) && expected == 7);
	CHECK(pinfold_percpu_try_cmpxchg(&word, &expected, 11));
	CHECK(pinfold_percpu_inc_return(&word) == 12 && pinfold_percpu_dec_return(&word) == 11);
	CHECK(pinfold_percpu_sub_return(&word, 4) == 7 && pinfold_percpu_add_return(&word, 4) == 11);
	CHECK(pinfold_percpu_sum(&word) == 11);
}

static int with_value(struct pinfold_percpu *word, uint64_t value)
{
	for (int cpu = 0; cpu < 8192; cpu++)
		if (pinfold_percpu_read_on(word, cpu) == value)
			return cpu;
	return -1;
}

/* The copy of another CPU. With concurrency ids, its number need not be the CPU's. */
static void afar(void)
{
	int cpu = with_value(&word, 11);

	CHECK(cpu >= 0);
	CHECK(pinfold_percpu_write_on(&word, cpu, 30) && pinfold_percpu_read_on(&word, cpu) == 30);
	CHECK(pinfold_percpu_sum(&word) == 30);
	CHECK(pinfold_percpu_write_on(&word, cpu, 11));
	errno = 0;
	CHECK(pinfold_percpu_read_on(&word, -1) == 0 && errno == ENXIO);
	errno = 0;
	CHECK(!pinfold_percpu_write_on(&word, 8191, 1) && errno == ENXIO);
}

static void add_up(int cpu, uint64_t value, void *context)
{
	CHECK(cpu >= -1 && cpu < 8192);
	*(uint64_t *)context += value;
}

static void pass(struct item *item)
{
	CHECK(!atomic_exchange(&item->taken, true));
	atomic_store(&item->taken, false);
	pinfold_percpu_list_push(&list, &item->node);
}

static void keep(struct pinfold_percpu_node *node, void *context)
{
	node->next = *(struct pinfold_percpu_node **)context;
	*(struct pinfold_percpu_node **)context = node;
}

static void *work(void *number)
{
	for (int turn = 0; !atomic_load(&stop); turn++) {
		struct pinfold_percpu_node *node = NULL;

		if (turn % 64 == 0)
			pin((turn / 64 + (int)(intptr_t)number) % (int)sysconf(_SC_NPROCESSORS_ONLN));
		pinfold_percpu_inc(&turns);
		if (turn % 100 == 0) {
			pinfold_percpu_list_take_all(&list, keep, &node, NULL);
		} else {
			node = pinfold_percpu_list_pop(&list);
			if (node)
				node->next = NULL;
		}
		while (node) {
			struct pinfold_percpu_node *next = node->next;

			pass((struct item *)node);
			node = next;
		}
	}
	return NULL;
}

static void lists(void)
{
	pthread_t threads[THREADS];
	struct pinfold_percpu_node *rest = NULL;
	size_t count = 0;

	for (int n = 0; n < NODES; n++)
		pinfold_percpu_list_push(&list, &items[n].node);
	for (intptr_t n = 0; n < THREADS; n++)
		CHECK(pthread_create(&threads[n], NULL, work, (void *)n) == 0);
	usleep(500000);
	atomic_store(&stop, true);
	for (int n = 0; n < THREADS; n++)
		pthread_join(threads[n], NULL);
	CHECK(pinfold_percpu_list_take_all(&list, keep, &rest, &count) == 0);
	CHECK(count == NODES);
	CHECK(pinfold_percpu_list_pop(&list) == NULL);
}

static void add_one(struct pinfold_percpu_node *node, void *count)
{
	(void)node;
	++*(size_t *)count;
}

/* A callback that is NULL is an error, and takes no item. */
static void nulls(void)
{
	struct pinfold_percpu_array array;
	struct pinfold_percpu_ring ring;
	struct pinfold_percpu_pair pair = { 0 };
	struct pinfold_percpu_node item = { 0 };
	uint64_t record = 7;
	size_t count = 0;

	errno = 0;
	pinfold_percpu_for_each_cpu(&word, NULL, NULL);
	CHECK(errno == EINVAL);
	errno = 0;
	pinfold_percpu_pair_for_each_cpu(&pair, NULL, NULL);
	CHECK(errno == EINVAL);
	CHECK(pinfold_percpu_array_init(&array, 4) == 0);
	errno = 0;
	CHECK(pinfold_percpu_array_for_each_cpu(&array, 1, NULL, NULL) == -1 && errno == EINVAL);
	pinfold_percpu_array_destroy(&array);
	CHECK(pinfold_percpu_ring_init(&ring, 1, 8) == 0);
	CHECK(pinfold_percpu_ring_push(&ring, &record) == 0);
	errno = 0;
	CHECK(pinfold_percpu_ring_drain(&ring, NULL, NULL) == 0 && errno == EINVAL);
	pinfold_percpu_ring_destroy(&ring);
	pinfold_percpu_list_push(&list, &item);
	errno = 0;
	CHECK(pinfold_percpu_list_take_all(&list, NULL, NULL, &count) == -1 && errno == EINVAL);
	CHECK(count == 0);
	CHECK(pinfold_percpu_list_take_all(&list, add_one, &count, NULL) == 0 && count == 1);
}

int main(void)
{
	uint64_t sum = 0;

	operations();
	afar();
	lists();
	nulls();
	pinfold_percpu_for_each_cpu(&turns, add_up, &sum);
	CHECK(sum > 0 && sum == pinfold_percpu_sum(&turns));
	pinfold_percpu_destroy(&word);
	CHECK(pinfold_percpu_sum(&word) == 0);
	pinfold_percpu_destroy(&turns);
	pinfold_percpu_list_destroy(&list);
	puts("ok");
	return 0;
}
