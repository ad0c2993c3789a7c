/*
 * pinfold_policy.h - Pinfold's C API of memory policies: which NUMA nodes memory comes from. Part of pinfold.h, which includes it.
 *
 * A policy is a mode, flags and nodes, as in the kernel; docs/mempolicy.md explains them. It is made of text or of numbers, and put to use
 * for a thread, for a range of addresses, for ranges of pages that several share, or for a cache. Whatever takes a policy copies it: to put
 * it afterwards is the caller's affair alone. Where the calls are forbidden (a kernel without NUMA, a container's filter) those that need
 * the kernel fail with ENOSYS or EPERM, and memory comes from where it came from before.
 *
 *	char wrong[200];
 *	pinfold_mempolicy_t *policy = pinfold_mempolicy_parse("interleave:0-3", wrong, sizeof(wrong));
 *	if (!policy || pinfold_mempolicy_apply(buffer, size, policy, 0) == -1)
 *		...
 *	pinfold_mempolicy_put(policy);
 */
#ifndef PINFOLD_POLICY_H
#define PINFOLD_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct pinfold_cache;

/* A policy, and a count of its holders. A thread may look at one that another holds too. NULL is the default policy wherever one is
 * taken. */
typedef struct pinfold_mempolicy pinfold_mempolicy_t;

/* What to do with the nodes; the numbers are the kernel's. */
enum pinfold_mempolicy_mode {
	PINFOLD_MPOL_DEFAULT = 0,             /* whatever the next policy says: the thread's behind a range's, the system's behind that */
	PINFOLD_MPOL_PREFERRED = 1,           /* this node, then by distance from it */
	PINFOLD_MPOL_BIND = 2,                /* these nodes, the nearest first, and no others */
	PINFOLD_MPOL_INTERLEAVE = 3,          /* one after the other, page by page */
	PINFOLD_MPOL_LOCAL = 4,               /* the node of the CPU that first touches a page */
	PINFOLD_MPOL_PREFERRED_MANY = 5,      /* these nodes, then the others */
	PINFOLD_MPOL_WEIGHTED_INTERLEAVE = 6  /* one after the other, as many pages on each as it weighs */
};

/* How the nodes follow those that the process may use. The first two exclude each other. */
#define PINFOLD_MPOL_STATIC_NODES   0x8000u /* they are meant by their numbers */
#define PINFOLD_MPOL_RELATIVE_NODES 0x4000u /* they are positions among those */
#define PINFOLD_MPOL_BALANCING      0x2000u /* pages may move to the node that uses them */

/* Reads `mode[=flag[|flag]][:nodes][@home]`, as tmpfs's mpol= has it. NULL with EINVAL or ENOMEM; then `error` has what is wrong and what to
 * write instead, in at most `error_size` bytes, the NUL among them; "" when nothing is. `error` may be NULL. */
pinfold_mempolicy_t *pinfold_mempolicy_parse(const char *text, char *error, size_t error_size);

/* A policy of numbers. Bit n of `mask` is node n; `bits` of them are looked at, no more and no fewer. NULL with EINVAL or ENOMEM. Here and
 * below more than 32768 bits are EINVAL. */
pinfold_mempolicy_t *pinfold_mempolicy_create(int mode, unsigned flags, const unsigned long *mask, size_t bits);

/* The policy as text that pinfold_mempolicy_parse reads. As snprintf: writes at most `size` bytes, the NUL among them, and returns the
 * length of all of it. `buffer` may be NULL when `size` is 0. */
size_t pinfold_mempolicy_format(const pinfold_mempolicy_t *policy, char *buffer, size_t size);

/* A copy that is the caller's alone. NULL with ENOMEM. */
pinfold_mempolicy_t *pinfold_mempolicy_dup(const pinfold_mempolicy_t *policy);

/* Holds a policy once more, and returns it; holds it once less, and the last one frees it. Any thread. Put leaves errno alone. */
pinfold_mempolicy_t *pinfold_mempolicy_get(pinfold_mempolicy_t *policy);
void pinfold_mempolicy_put(pinfold_mempolicy_t *policy);

int pinfold_mempolicy_mode(const pinfold_mempolicy_t *policy);
unsigned pinfold_mempolicy_flags(const pinfold_mempolicy_t *policy);

/* Stores the nodes in the `bits` bits of `mask`: those that were named, or after a rebind, what they came to. `bits` is what it says, for
 * all numbers below 1024 it is 1024. Whole words are written, with zeroes behind the last bit. 0, or -1 with ERANGE when there are nodes
 * that do not fit; those that do are stored. */
int pinfold_mempolicy_nodes(const pinfold_mempolicy_t *policy, unsigned long *mask, size_t bits);

/* Has distances measured from `node`, -1 for the CPU's own. 0, or -1 with EINVAL (neither bind nor prefer (many), or no node's number), or
 * EBUSY: somebody else holds the policy too; dup it. */
int pinfold_mempolicy_set_home_node(pinfold_mempolicy_t *policy, int node);

/* What becomes of the policy when these nodes are the allowed ones: a new policy, as others may hold the old one. NULL with EINVAL (no
 * nodes, or a number beyond 1023) or ENOMEM. */
pinfold_mempolicy_t *pinfold_mempolicy_rebind(const pinfold_mempolicy_t *policy, const unsigned long *mask, size_t bits);

/* A copy of the policy that holds: the range's, else the task's, else the system's, which is local. NULL with ENOMEM. */
pinfold_mempolicy_t *pinfold_mempolicy_effective(const pinfold_mempolicy_t *range, const pinfold_mempolicy_t *task);

/*
 * The kernel's policies. Functions that fail set errno to the kernel's: EINVAL for nodes of which none may be used, unaligned ranges and
 * what this kernel is too old for; EPERM and ENOSYS where the call is forbidden, EPERM also for want of CAP_SYS_NICE.
 */

/* Whether policies can be set here; false with errno. Changes nothing. */
bool pinfold_mempolicy_available(void);

/* The calling thread's policy, for what it touches from now on; threads and processes that it starts inherit it. 0 or -1; a policy with a
 * home node is EINVAL. */
int pinfold_mempolicy_set_thread(const pinfold_mempolicy_t *policy);
/* A copy of it, or NULL. */
pinfold_mempolicy_t *pinfold_mempolicy_get_thread(void);

/* For pages that lie elsewhere already; the numbers are the kernel's. */
#define PINFOLD_MPOL_STRICT   1u /* fail with EIO if any stays there */
#define PINFOLD_MPOL_MOVE     2u /* move those that this process alone maps */
#define PINFOLD_MPOL_MOVE_ALL 4u /* move all; needs CAP_SYS_NICE */

/* The policy of `len` bytes from `at` on, which is at a page's beginning; NULL is the default. Nodes that cannot be used here are left out, as
 * by the kernel; with none left, -1 and EINVAL. 0 or -1. */
int pinfold_mempolicy_apply(const void *at, size_t len, const pinfold_mempolicy_t *policy, unsigned flags);
/* A copy of the policy of the mapping at an address; the default one when it has none. NULL with EFAULT where nothing is mapped. */
pinfold_mempolicy_t *pinfold_mempolicy_at(const void *at);

/* The node that the page at an address lies on; it is made if it was not there. -1 with errno. */
int pinfold_node_of(const void *at);

/* Moves each of `count` pages to its node and stores in `status` where it is now, or a negative errno; any address in a page stands for it.
 * `nodes` NULL: only says where they are. `flags` is PINFOLD_MPOL_MOVE, which 0 means too, or PINFOLD_MPOL_MOVE_ALL. Returns how many the
 * kernel gave up on, or -1: with ENODEV or EACCES for a node that is not there or not allowed; pages before it may have moved. */
ptrdiff_t pinfold_pages_move(size_t count, const void *const *pages, const int *nodes, int *status, unsigned flags);

/*
 * Policies for ranges of pages, for all who share them: shared memory, a file, a pool. A lookup takes no lock and writes to nothing that is
 * shared. All functions may be called from any thread; a handler that has interrupted a set cannot set: EBUSY.
 */
struct pinfold_shared_policy;

/* Without any policies. NULL with ENOMEM. */
struct pinfold_shared_policy *pinfold_shared_policy_create(void);
/* Ends it; what was looked up stays. NULL is none. */
void pinfold_shared_policy_destroy(struct pinfold_shared_policy *shared);

/* Gives the pages from `start` to before `end` a copy of `policy`; NULL takes theirs away. What it overlaps is cut, split or replaced. 0, or
 * -1 with EINVAL for a range without pages, ENOMEM, or EBUSY: then nothing has changed. */
int pinfold_shared_policy_set(const struct pinfold_shared_policy *shared, uint64_t start, uint64_t end, const pinfold_mempolicy_t *policy);

/* A copy of the page's policy, to be put. NULL with ENOENT when it has none, or ENOMEM. */
pinfold_mempolicy_t *pinfold_shared_policy_lookup(const struct pinfold_shared_policy *shared, uint64_t page);

/*
 * Pages by policy, for programs that hand out pages themselves. A page is asked for by its place, a number of the program's, for which ranges
 * have policies. Each CPU has lists of pages, one for each node: to allocate or free costs one critical section.
 *
 *	struct pinfold_pages *pool = pinfold_pages_create("buffers");
 *	pinfold_pages_set_policy(pool, 0, 1024, policy);
 *	void *page = pinfold_pages_alloc(pool, 7);
 *	...
 *	pinfold_pages_free(pool, page);
 *	pinfold_pages_destroy(pool);
 */
struct pinfold_pages;

/* NULL with EINVAL (name), ENOSPC (4096 caches, of which it takes one for each node), or ENOMEM. */
struct pinfold_pages *pinfold_pages_create(const char *name);

/* Ends it and gives its memory back; NULL is none. 0, or -1 and it is as it was: with EBUSY when pages have not come back, with ENOTSUP
 * where the kernel has no fence. Interrupts the CPUs that run threads of this process. */
int pinfold_pages_destroy(struct pinfold_pages *pages);

/* As pinfold_shared_policy_set, for places; -1 with EINVAL also for a policy none of whose nodes can be used here. Pages that are out stay
 * where they are. */
int pinfold_pages_set_policy(const struct pinfold_pages *pages, uint64_t start, uint64_t end, const pinfold_mempolicy_t *policy);

/* Bytes in a page. */
size_t pinfold_pages_size(const struct pinfold_pages *pages);

/* A page for a place; zeroed reads as zeroes. NULL with ENOMEM when no node that the policy lets give memory has any. */
void *pinfold_pages_alloc(const struct pinfold_pages *pages, uint64_t place);
void *pinfold_pages_alloc_zeroed(const struct pinfold_pages *pages, uint64_t place);

/* Takes a page back; NULL is none. */
void pinfold_pages_free(const struct pinfold_pages *pages, void *page);

/* The node that a page was asked of; pinfold_node_of asks the kernel where it is. -1 with ENOENT when the kernel placed it. */
int pinfold_pages_node_of(const struct pinfold_pages *pages, void *page);

/* As pinfold_cache_create, with slabs from where `policy` says, and objects that go back there wherever they are freed. NULL with EINVAL
 * also when none of the policy's nodes can be used here. */
struct pinfold_cache *pinfold_cache_create_policy(const char *name, size_t size, size_t align, unsigned flags, void (*ctor)(void *),
						  const pinfold_mempolicy_t *policy);

#ifdef __cplusplus
}
#endif

#endif /* PINFOLD_POLICY_H */
