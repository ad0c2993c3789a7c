/*
 * loops.h - the timed loops, for the operations that the including file defines: ADD, ADD_RETURN,
 * STORE_IF_EQUAL, EXCHANGE_PAIR, PUSH, POP, APPEND, READ, RESET, and SUBJECT for the result. Each
 * loop begins with a word and a pair of 0 and with an empty ring, and returns how often an
 * operation gave an unexpected result.
 */
#include "subject.h"

#define barrier() __asm__ volatile("" ::: "memory")

static uint64_t loop_add(uint32_t times)
{
	for (uint32_t n = 0; n < times; n++) {
		ADD(1);
		barrier();
	}
	return READ() != times;
}

static uint64_t loop_add_return(uint32_t times)
{
	uint64_t wrong = 0;

	for (uint64_t n = 0; n < times; n++) {
		wrong += ADD_RETURN(1) != n + 1;
		barrier();
	}
	return wrong;
}

static uint64_t loop_store_if_equal(uint32_t times)
{
	uint64_t wrong = 0;

	for (uint64_t n = 0; n < times; n++) {
		wrong += !STORE_IF_EQUAL(n, n + 1);
		barrier();
	}
	return wrong;
}

static uint64_t loop_exchange_pair(uint32_t times)
{
	uint64_t wrong = 0;

	for (uint64_t n = 0; n < times; n++) {
		wrong += !EXCHANGE_PAIR(n, n, n + 1, n + 1);
		barrier();
	}
	return wrong;
}

static uint64_t loop_push(uint32_t times)
{
	for (uint32_t n = 0; n < times; n++) {
		PUSH(&nodes[n]);
		barrier();
	}
	return 0;
}

static uint64_t loop_pop(uint32_t times)
{
	uint64_t wrong = 0;

	for (uint32_t n = 0; n < times; n++) {
		wrong += POP() == NULL;
		barrier();
	}
	return wrong;
}

static uint64_t loop_append(uint32_t times)
{
	uint64_t wrong = 0;

	for (uint64_t n = 0; n < times; n++) {
		const uint64_t record[RECORD_WORDS] = { n, n + 1, n + 2, n + 3 };

		wrong += !APPEND(record);
		barrier();
	}
	return wrong;
}

const struct subject SUBJECT = {
	.loops = { loop_add, loop_add_return, loop_store_if_equal, loop_exchange_pair, loop_push,
		   loop_pop, loop_append },
	.reset = RESET,
};
