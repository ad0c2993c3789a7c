/* subject.h - what C hands to the benchmark. */
#ifndef SUBJECT_H
#define SUBJECT_H

#include "sections.h"

/* The most turns of a loop. */
#define NODES 1024

extern struct node nodes[NODES];

/* The loops of a subject, in the order of the benchmark's operations. */
struct subject {
	uint64_t (*loops[7])(uint32_t times);
	void (*reset)(void);
};

/* The operations of sections.h as functions of another file. */
void called_add(uint64_t n);
uint64_t called_add_return(uint64_t n);
bool called_store_if_equal(uint64_t expected, uint64_t value);
bool called_exchange_pair(uint64_t old1, uint64_t old2, uint64_t new1, uint64_t new2);
void called_push(struct node *node);
struct node *called_pop(void);
bool called_append(const uint64_t *record);

uint64_t sections_read(void);
void sections_reset(void);

#endif
