/*
 * pinfold_percpu.h - Pinfold's C API of per-CPU data: words and lists with a copy for each CPU.
 * Part of pinfold.h, which includes it.
 *
 * An operation works on the copy of the CPU on which the thread runs. With restartable sequences,
 * it takes no lock, executes no atomic instruction and makes no system call, except that the first
 * operation on a CPU allocates memory. A thread may move to another CPU between two operations. An
 * operation that the kernel interrupts starts again, and works on one copy only. "CPU" means the
 * index of a copy: the CPU's number, or the concurrency id that the kernel gives to the thread.
 * docs/rseq.md explains concurrency ids.
 *
 * A variable is zero at first: a static, or memory that the program has cleared. The first
 * operation allocates the copies. If there is no memory, all CPUs share one copy.
 *
 * Signal handlers may use every operation on this CPU's copy. After fork the child goes on with
 * copies. The child of a vfork must not use these functions.
 *
 *	static struct pinfold_percpu bytes;
 *
 *	pinfold_percpu_add(&bytes, 1500);
 *	printf("%llu\n", (unsigned long long)pinfold_percpu_sum(&bytes));
 */
#ifndef PINFOLD_PERCPU_H
#define PINFOLD_PERCPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A word with a copy for each CPU. */
struct pinfold_percpu {
	uint64_t pinfold_private[2];
};

/*
 * The kernel's this_cpu operations. Each costs a call and one critical section. They never fail.
 *
 * pinfold_percpu_cmpxchg returns the value that was there. It equals `expected` if `value` was
 * stored. pinfold_percpu_try_cmpxchg returns whether `value` was stored. If false, it stores the
 * copy's value in `*expected`.
 */
uint64_t pinfold_percpu_read(const struct pinfold_percpu *word);
void pinfold_percpu_write(struct pinfold_percpu *word, uint64_t value);
void pinfold_percpu_add(struct pinfold_percpu *word, uint64_t n);
uint64_t pinfold_percpu_add_return(struct pinfold_percpu *word, uint64_t n);
void pinfold_percpu_inc(struct pinfold_percpu *word);
void pinfold_percpu_dec(struct pinfold_percpu *word);
void pinfold_percpu_and(struct pinfold_percpu *word, uint64_t mask);
void pinfold_percpu_or(struct pinfold_percpu *word, uint64_t mask);
uint64_t pinfold_percpu_xchg(struct pinfold_percpu *word, uint64_t value);
uint64_t pinfold_percpu_cmpxchg(struct pinfold_percpu *word, uint64_t expected, uint64_t value);
bool pinfold_percpu_try_cmpxchg(struct pinfold_percpu *word, uint64_t *expected, uint64_t value);

/* Returns the sum of all copies, modulo 2^64. Costs a cache miss for each copy that has changed. */
uint64_t pinfold_percpu_sum(const struct pinfold_percpu *word);

/*
 * Calls `each(cpu, value, context)` for each CPU that has a copy. Last, calls it with -1 and the
 * copy that CPUs without memory share.
 */
void pinfold_percpu_for_each_cpu(const struct pinfold_percpu *word,
				 void (*each)(int cpu, uint64_t value, void *context),
				 void *context);

/* Frees the copies. The variable is 0 afterwards. No other thread may use it meanwhile. */
void pinfold_percpu_destroy(struct pinfold_percpu *word);

/* An item of a list. The program makes it a part of its own struct. */
struct pinfold_percpu_node {
	struct pinfold_percpu_node *next;
};

/* A list with a part for each CPU. The last item pushed on a CPU is the first popped there. */
struct pinfold_percpu_list {
	uint64_t pinfold_private[2];
};

/*
 * Puts `node` in front of this CPU's items. Never fails. Until the node is taken off the list, it
 * belongs to the list: the program neither changes nor frees it.
 */
void pinfold_percpu_list_push(struct pinfold_percpu_list *list, struct pinfold_percpu_node *node);

/*
 * Takes the first of this CPU's items. Returns NULL if there is none. Does not look at other CPUs'
 * items.
 */
struct pinfold_percpu_node *pinfold_percpu_list_pop(struct pinfold_percpu_list *list);

/*
 * Takes the items of all CPUs, and calls `each` with each of them. Interrupts each CPU that runs a
 * thread of the process, once. Not for signal handlers. `each` may push into the list. Stores the
 * number of items in `count` unless `count` is NULL.
 *
 * Returns 0, or -1 with the kernel's errno if a sandbox or the kernel does not allow to interrupt
 * other CPUs. Items of other CPUs stay in the list then.
 */
int pinfold_percpu_list_take_all(struct pinfold_percpu_list *list,
				 void (*each)(struct pinfold_percpu_node *node, void *context),
				 void *context, size_t *count);

/* Frees the list's own memory. No other thread may use the list meanwhile. */
void pinfold_percpu_list_destroy(struct pinfold_percpu_list *list);

#ifdef __cplusplus
}
#endif

#endif
