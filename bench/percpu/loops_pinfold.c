/* loops_pinfold.c - Pinfold's C API. */
#include "pinfold_percpu.h"
#include "subject.h"

static struct pinfold_percpu word;
static struct pinfold_percpu_pair pair;
static struct pinfold_percpu_list list;
static struct pinfold_percpu_ring ring;

static void forget(int cpu, const uint64_t *record, void *context)
{
	(void)cpu, (void)record, (void)context;
}

static void reset(void)
{
	uint64_t first, second;

	if (!ring.pinfold_private[0])
		pinfold_percpu_ring_init(&ring, RECORD_WORDS, RING_SLOTS);
	pinfold_percpu_write(&word, 0);
	if (pinfold_percpu_pair_read(&pair, &first, &second) == 0)
		pinfold_percpu_pair_cmpxchg(&pair, first, second, 0, 0);
	pinfold_percpu_ring_drain(&ring, forget, NULL);
}

static inline bool try_cmpxchg(uint64_t expected, uint64_t value)
{
	return pinfold_percpu_try_cmpxchg(&word, &expected, value);
}

#define SUBJECT pinfold_called
#define ADD(n) pinfold_percpu_add(&word, n)
#define ADD_RETURN(n) pinfold_percpu_add_return(&word, n)
#define STORE_IF_EQUAL(expected, value) try_cmpxchg(expected, value)
#define EXCHANGE_PAIR(old1, old2, new1, new2) \
	pinfold_percpu_pair_cmpxchg(&pair, old1, old2, new1, new2)
#define PUSH(node) pinfold_percpu_list_push(&list, (struct pinfold_percpu_node *)(node))
#define POP() pinfold_percpu_list_pop(&list)
#define APPEND(record) (pinfold_percpu_ring_push(&ring, record) == 0)
#define READ() pinfold_percpu_read(&word)
#define RESET reset
#include "loops.h"
