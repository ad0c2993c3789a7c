/*
 * pinfold_percpu.h - Pinfold's C API of per-CPU data: words, arrays, pairs, lists and rings with a
 * copy for each CPU, and reference counts. Part of pinfold.h, which includes it.
 *
 * An operation works on the copy of the CPU on which the thread runs. With restartable sequences,
 * it takes no lock, executes no atomic instruction and makes no system call, except that the first
 * operation on a CPU allocates memory. A thread may move to another CPU between two operations. An
 * operation that the kernel interrupts starts again, and works on one copy only. "CPU" means the
 * index of a copy: the CPU's number, or the concurrency id that the kernel gives to the thread.
 * docs/rseq.md explains concurrency ids.
 *
 * A word, a pair or a list is zero at first: a static, or memory that the program has cleared. The
 * first operation allocates the copies. If there is no memory, all CPUs share one copy of a word or
 * a list. An array or a ring gets its size and its memory by a call.
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
uint64_t pinfold_percpu_sub_return(struct pinfold_percpu *word, uint64_t n);
uint64_t pinfold_percpu_inc_return(struct pinfold_percpu *word);
uint64_t pinfold_percpu_dec_return(struct pinfold_percpu *word);
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
 * copy that CPUs without memory share. If `each` is NULL, only sets errno to EINVAL.
 */
void pinfold_percpu_for_each_cpu(const struct pinfold_percpu *word,
				 void (*each)(int cpu, uint64_t value, void *context),
				 void *context);

/*
 * Another CPU's copy: the kernel's *per_cpu_ptr(x, cpu). Both set errno to ENXIO, and return 0 or
 * false, if `cpu` has no copy yet. errno is kept otherwise.
 *
 * An operation of that CPU comes before pinfold_percpu_write_on or after it: none is lost, and none
 * undoes the write. The write stops the operations there for some microseconds, and interrupts that
 * CPU, or each CPU that runs a thread of the process if copies belong to concurrency ids. It
 * returns false with ENOTSUP, EBUSY or EDEADLK as pinfold_ref_kill does. Not for signal handlers.
 */
uint64_t pinfold_percpu_read_on(const struct pinfold_percpu *word, int cpu);
bool pinfold_percpu_write_on(struct pinfold_percpu *word, int cpu, uint64_t value);

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
 * other CPUs. Items of other CPUs stay in the list then. Returns -1 with EINVAL, and takes nothing,
 * if `each` is NULL.
 */
int pinfold_percpu_list_take_all(struct pinfold_percpu_list *list,
				 void (*each)(struct pinfold_percpu_node *node, void *context),
				 void *context, size_t *count);

/* Frees the list's own memory. No other thread may use the list meanwhile. */
void pinfold_percpu_list_destroy(struct pinfold_percpu_list *list);

/*
 * An array of words with a copy for each CPU. The elements of a copy lie side by side, eight to a
 * cache line. An array that is zero has no elements.
 */
struct pinfold_percpu_array {
	uint64_t pinfold_private[2];
};

/*
 * Makes an array of `count` words, which are zero. `array` must not hold an array already. Returns
 * 0, or -1 with EINVAL if `count` is 0, or -1 with ENOMEM if there is no room. All per-CPU data of
 * a process shares 32 MiB for each CPU, or less under a limit on the address space.
 */
int pinfold_percpu_array_init(struct pinfold_percpu_array *array, size_t count);

/* Frees the copies. The array is 0 afterwards. No other thread may use it meanwhile. */
void pinfold_percpu_array_destroy(struct pinfold_percpu_array *array);

/*
 * The operations of a word, on the element number `at`. Each costs a call, a comparison and one
 * critical section. If the array has no element `at`, each sets errno to EINVAL, changes nothing,
 * and returns 0 or false. They do not fail otherwise, except those on another CPU's copy.
 */
uint64_t pinfold_percpu_array_read(const struct pinfold_percpu_array *array, size_t at);
void pinfold_percpu_array_write(struct pinfold_percpu_array *array, size_t at, uint64_t value);
void pinfold_percpu_array_add(struct pinfold_percpu_array *array, size_t at, uint64_t n);
uint64_t pinfold_percpu_array_add_return(struct pinfold_percpu_array *array, size_t at, uint64_t n);
uint64_t pinfold_percpu_array_sub_return(struct pinfold_percpu_array *array, size_t at, uint64_t n);
uint64_t pinfold_percpu_array_inc_return(struct pinfold_percpu_array *array, size_t at);
uint64_t pinfold_percpu_array_dec_return(struct pinfold_percpu_array *array, size_t at);
uint64_t pinfold_percpu_array_read_on(const struct pinfold_percpu_array *array, size_t at, int cpu);
bool pinfold_percpu_array_write_on(struct pinfold_percpu_array *array, size_t at, int cpu,
				   uint64_t value);
void pinfold_percpu_array_inc(struct pinfold_percpu_array *array, size_t at);
void pinfold_percpu_array_dec(struct pinfold_percpu_array *array, size_t at);
void pinfold_percpu_array_and(struct pinfold_percpu_array *array, size_t at, uint64_t mask);
void pinfold_percpu_array_or(struct pinfold_percpu_array *array, size_t at, uint64_t mask);
uint64_t pinfold_percpu_array_xchg(struct pinfold_percpu_array *array, size_t at, uint64_t value);
uint64_t pinfold_percpu_array_cmpxchg(struct pinfold_percpu_array *array, size_t at,
				      uint64_t expected, uint64_t value);
bool pinfold_percpu_array_try_cmpxchg(struct pinfold_percpu_array *array, size_t at,
				      uint64_t *expected, uint64_t value);
uint64_t pinfold_percpu_array_sum(const struct pinfold_percpu_array *array, size_t at);

/*
 * Calls `each` as pinfold_percpu_for_each_cpu does, with the element number `at`. Returns 0, or -1
 * with EINVAL if the array has no such element.
 */
int pinfold_percpu_array_for_each_cpu(const struct pinfold_percpu_array *array, size_t at,
				      void (*each)(int cpu, uint64_t value, void *context),
				      void *context);

/* Two words with a copy for each CPU, which one operation compares and replaces together. */
struct pinfold_percpu_pair {
	uint64_t pinfold_private[1];
};

/*
 * Stores this CPU's copy in `*first` and `*second`. The two words may be of two moments or of two
 * CPUs; pinfold_percpu_pair_cmpxchg compares both again. Returns 0, or -1 with ENOMEM if there is
 * no memory for the copy.
 */
int pinfold_percpu_pair_read(struct pinfold_percpu_pair *pair, uint64_t *first, uint64_t *second);

/*
 * Stores `first` and `second` in this CPU's copy if the copy equals the expected words. Returns
 * whether it stored them. Returns false if a word differs, if there is no memory for the copy, or
 * (without restartable sequences) while another thread changes the copy. So a signal handler must
 * not repeat the call without end.
 */
bool pinfold_percpu_pair_cmpxchg(struct pinfold_percpu_pair *pair, uint64_t first_expected,
				 uint64_t second_expected, uint64_t first, uint64_t second);

/*
 * Calls `each` with each CPU that has a copy, and with its words. Another CPU may change its copy
 * between the reads of the two words.
 */
void pinfold_percpu_pair_for_each_cpu(const struct pinfold_percpu_pair *pair,
				      void (*each)(int cpu, uint64_t first, uint64_t second,
						   void *context),
				      void *context);

/* Frees the copies. The pair is 0 afterwards. No other thread may use it meanwhile. */
void pinfold_percpu_pair_destroy(struct pinfold_percpu_pair *pair);

/*
 * A ring of records with a part for each CPU. Each CPU appends to its own ring, and any thread
 * reads all rings. No record is lost, torn or seen twice. A ring that is zero has no records.
 */
struct pinfold_percpu_ring {
	uint64_t pinfold_private[3];
};

/*
 * Makes rings of `slots` records of `words` words. Both are powers of two, and `words` is at most
 * 64. `ring` must not hold a ring already. Each CPU that appends takes 8 * words * slots bytes, and
 * 128 bytes more. Returns 0, or -1 with EINVAL if a number is wrong, or -1 with ENOMEM if there is
 * no room.
 */
int pinfold_percpu_ring_init(struct pinfold_percpu_ring *ring, size_t words, size_t slots);

/*
 * Appends a record of the ring's `words` words to this CPU's ring. Returns 0. If nothing was
 * appended, returns -1 with one of these:
 *
 *	ENOBUFS	the ring is full until a reader has read from it
 *	EAGAIN	the CPU has no memory for its ring yet, or (without restartable sequences) another
 *		thread is appending to it: try again, or drop the record
 *	EINVAL	pinfold_percpu_ring_init has not made the ring
 */
int pinfold_percpu_ring_push(struct pinfold_percpu_ring *ring, const uint64_t *record);

/*
 * Reads the records of all CPUs, and calls `each` with the CPU and the record, which stays valid
 * during the call. Returns the number of records. The records of one CPU come in the order in which
 * they were appended. Interrupts no CPU. Several threads may drain at once, and each record goes to
 * one of them. `each` may append. Takes a lock for each record, but not while `each` runs. Not for
 * signal handlers. Returns 0 with EINVAL, and reads nothing, if `each` is NULL.
 */
size_t pinfold_percpu_ring_drain(struct pinfold_percpu_ring *ring,
				 void (*each)(int cpu, const uint64_t *record, void *context),
				 void *context);

/*
 * Frees the rings and the records in them. The ring is 0 afterwards. No other thread may use it
 * meanwhile.
 */
void pinfold_percpu_ring_destroy(struct pinfold_percpu_ring *ring);

/*
 * A reference count with a word for each CPU: the kernel's percpu_ref. While the count is live, a
 * get or a put is one critical section on this CPU's word. pinfold_ref_kill makes the count atomic.
 * `release` is called when no reference is left, exactly once, by the thread that put the last one.
 * It may end the count by pinfold_ref_exit, and free its memory. It may be NULL.
 *
 *	static struct pinfold_ref requests = PINFOLD_REF_INIT(closed);
 *
 *	if (pinfold_ref_tryget_live(&requests)) {	a request begins, and ends
 *		serve();
 *		pinfold_ref_put(&requests);
 *	}
 *	pinfold_ref_kill(&requests);			another thread shuts the service down
 */
struct pinfold_ref {
	uint64_t pinfold_private[2];
	void (*pinfold_release)(struct pinfold_ref *ref);
};

/* A count with its initial reference, for statics. pinfold_ref_init makes one in other memory. */
#define PINFOLD_REF_INIT(release) { { 2, UINT64_C(0x8000000000000001) }, release }
void pinfold_ref_init(struct pinfold_ref *ref, void (*release)(struct pinfold_ref *ref));

/* Frees the count's words. No other thread may use the count meanwhile. It can be made again. */
void pinfold_ref_exit(struct pinfold_ref *ref);

/*
 * Each costs a call and one critical section, or an atomic instruction after pinfold_ref_kill.
 * Signal handlers may call them.
 *
 * pinfold_ref_get needs that the caller has a reference already. pinfold_ref_tryget fails if no
 * reference is left, and pinfold_ref_tryget_live if the count was killed. pinfold_ref_put takes a
 * reference of the caller away.
 */
void pinfold_ref_get(struct pinfold_ref *ref);
bool pinfold_ref_tryget(struct pinfold_ref *ref);
bool pinfold_ref_tryget_live(struct pinfold_ref *ref);
void pinfold_ref_put(struct pinfold_ref *ref);

/*
 * Makes the count atomic, and takes the initial reference away. When it returns 0, no get or put on
 * a CPU's word is under way. Interrupts each CPU that runs a thread of the process, once. Not for
 * signal handlers. Otherwise returns -1 with one of these, and the count is as before:
 *
 *	EALREADY	the count was killed before
 *	ENOTSUP		the kernel or a sandbox does not allow to interrupt other CPUs any more
 *	EBUSY		another thread's operation or fork did not end within about a second
 *	EDEADLK		called in a signal handler that interrupted the library
 */
int pinfold_ref_kill(struct pinfold_ref *ref);

/*
 * Give a killed count a new initial reference, and make it live again. pinfold_ref_resurrect fails
 * if no reference is left, and pinfold_ref_reinit if there is one. Both fail if the count is live.
 * They interrupt no CPU. Not for signal handlers.
 */
bool pinfold_ref_resurrect(struct pinfold_ref *ref);
bool pinfold_ref_reinit(struct pinfold_ref *ref);

/* Whether the count was killed, and whether no reference is left. */
bool pinfold_ref_is_dying(const struct pinfold_ref *ref);
bool pinfold_ref_is_zero(const struct pinfold_ref *ref);

#ifdef __cplusplus
}
#endif

#endif
