/* called.c - memory for the sections, and the operations as functions. */
#define _GNU_SOURCE
#include "subject.h"
#include <stdlib.h>
#include <sys/mman.h>

/* glibc's registration of the rseq area. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));

ptrdiff_t sections_area, sections_index;
char *sections_base;
struct node nodes[NODES];

/*
 * Maps copies for `cpus` indexes, which are concurrency ids if `cid`, and CPU numbers otherwise.
 * Returns false if the C library has not registered the area or there is no memory.
 */
bool sections_init(size_t cpus, bool cid)
{
	void *base;

	_Static_assert(sizeof(struct copy) <= STRIDE, "a copy fits in its stride");
	if (!&__rseq_size || __rseq_size == 0)
		return false;
	sections_area = __rseq_offset;
	sections_index = sections_area + (cid ? 24 : 4);
	base = mmap(NULL, cpus * STRIDE, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	sections_base = base;
	return base != MAP_FAILED;
}

uint64_t sections_read(void)
{
	return copy_of(current_index())->word;
}

void sections_reset(void)
{
	struct copy *copy = copy_of(current_index());

	copy->word = copy->pair[0] = copy->pair[1] = 0;
	copy->tail = copy->head;
}

void called_add(uint64_t n)
{
	add(n);
}

uint64_t called_add_return(uint64_t n)
{
	return add_return(n);
}

bool called_store_if_equal(uint64_t expected, uint64_t value)
{
	return store_if_equal(expected, value);
}

bool called_exchange_pair(uint64_t old1, uint64_t old2, uint64_t new1, uint64_t new2)
{
	return exchange_pair(old1, old2, new1, new2);
}

void called_push(struct node *node)
{
	push(node);
}

struct node *called_pop(void)
{
	return pop();
}

bool called_append(const uint64_t *record)
{
	return append(record);
}
