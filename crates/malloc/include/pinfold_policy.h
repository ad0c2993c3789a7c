/*
 * pinfold_policy.h - Pinfold's C API of memory policies: which NUMA nodes memory comes from. Part
 * of pinfold.h, which includes it.
 *
 * A policy is a mode, flags and nodes, as in the kernel; docs/mempolicy.md explains them. A program
 * makes a policy from text or from numbers. It uses the policy for a thread, for a range of
 * addresses, for ranges of pages that several threads share, or for a cache. Each use copies the
 * policy. So the program may give up its own policy afterwards, by pinfold_mempolicy_put.
 *
 * A system may forbid the kernel's calls: its kernel has no NUMA, or a container filters the calls.
 * Then the functions that need the kernel fail with ENOSYS or EPERM, and memory comes from the same
 * nodes as before.
 *
 * Any thread may call these functions. A function that fails sets errno. "ENOMEM" means that the
 * system has no memory. A signal handler may call only the functions whose comment says so.
 *
 *	char wrong[200];
 *	pinfold_mempolicy_t *policy;
 *
 *	policy = pinfold_mempolicy_parse("interleave:0-3", wrong, sizeof(wrong));
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

/*
 * A policy with a count of its holders. Several threads may read a policy at once, as long as each
 * of them holds it. Where a function takes a policy, NULL is the default policy.
 */
typedef struct pinfold_mempolicy pinfold_mempolicy_t;

/* What a policy does with its nodes. The numbers are the kernel's. */
enum pinfold_mempolicy_mode {
	/* No policy. A range follows the thread's policy, and a thread the system's policy. */
	PINFOLD_MPOL_DEFAULT = 0,
	/* This node, then the others by distance from it. */
	PINFOLD_MPOL_PREFERRED = 1,
	/* These nodes, the nearest first, and no others. */
	PINFOLD_MPOL_BIND = 2,
	/* These nodes in turn, page by page. */
	PINFOLD_MPOL_INTERLEAVE = 3,
	/* The node of the CPU that first touches the page. */
	PINFOLD_MPOL_LOCAL = 4,
	/* These nodes, then the others. */
	PINFOLD_MPOL_PREFERRED_MANY = 5,
	/* These nodes in turn, as many pages on each as its weight says. */
	PINFOLD_MPOL_WEIGHTED_INTERLEAVE = 6
};

/* Flags of a policy. The first two exclude each other. */
#define PINFOLD_MPOL_STATIC_NODES   0x8000u /* the nodes are numbers, whatever nodes are allowed */
#define PINFOLD_MPOL_RELATIVE_NODES 0x4000u /* the nodes are positions among the allowed nodes */
#define PINFOLD_MPOL_BALANCING      0x2000u /* pages may move to the node that uses them */

/*
 * Makes a policy from the text `mode[=flag[|flag]][:nodes][@home]`, the format of the mpol= option
 * of tmpfs.
 *
 * Stores in `error` what is wrong with the text and what to write instead, or "" if the text is
 * valid. Writes at most `error_size` bytes, including the NUL. `error` may be NULL.
 *
 * Returns the policy, which the caller holds, or NULL with EINVAL or ENOMEM.
 */
pinfold_mempolicy_t *pinfold_mempolicy_parse(const char *text, char *error, size_t error_size);

/*
 * Makes a policy from numbers. Bit n of `mask` is node n. Reads exactly `bits` bits, at most 32768,
 * and the whole words that contain them. A bit above 1023 must be 0.
 *
 * Returns the policy, which the caller holds, or NULL with EINVAL or ENOMEM.
 */
pinfold_mempolicy_t *pinfold_mempolicy_create(int mode, unsigned flags, const unsigned long *mask,
					      size_t bits);

/*
 * Writes the policy as text that pinfold_mempolicy_parse reads. Writes at most `size` bytes,
 * including the NUL, like snprintf. `buffer` may be NULL if `size` is 0.
 *
 * Returns the length of the whole text without the NUL.
 */
size_t pinfold_mempolicy_format(const pinfold_mempolicy_t *policy, char *buffer, size_t size);

/* Copies a policy. Returns the copy, which the caller alone holds, or NULL with ENOMEM. */
pinfold_mempolicy_t *pinfold_mempolicy_dup(const pinfold_mempolicy_t *policy);

/* Adds a holder. Returns `policy`. Costs one atomic add. Safe in signal handlers. */
pinfold_mempolicy_t *pinfold_mempolicy_get(pinfold_mempolicy_t *policy);

/*
 * Removes a holder. Frees the policy if no holder is left. Does nothing if `policy` is NULL. Leaves
 * errno unchanged. Costs one atomic subtraction. Safe in signal handlers.
 */
void pinfold_mempolicy_put(pinfold_mempolicy_t *policy);

/* Return the mode, a number of enum pinfold_mempolicy_mode; the flags, PINFOLD_MPOL_* combined. */
int pinfold_mempolicy_mode(const pinfold_mempolicy_t *policy);
unsigned pinfold_mempolicy_flags(const pinfold_mempolicy_t *policy);

/*
 * Stores the nodes of the policy in `bits` bits of `mask`, at most 32768: the nodes that the
 * program named, or, after a rebind, the nodes that replace them. Writes whole words, with zeroes
 * behind the last bit. 1024 bits hold every node.
 *
 * Returns 0, or -1 with EINVAL (`bits`) or ERANGE. With ERANGE, the policy has nodes that do not
 * fit. The nodes that fit are stored.
 */
int pinfold_mempolicy_nodes(const pinfold_mempolicy_t *policy, unsigned long *mask, size_t bits);

/*
 * Sets the node from which the policy measures distances. -1 means the node of the CPU. No other
 * thread may use the policy during the call.
 *
 * Returns 0, or -1 with EINVAL (`policy` is NULL, its mode is neither bind nor prefer (many), or
 * `node` is not a node's number) or EBUSY (the policy has another holder: dup it first).
 */
int pinfold_mempolicy_set_home_node(pinfold_mempolicy_t *policy, int node);

/*
 * Computes the policy that results from `policy` if the nodes in `bits` bits of `mask` become the
 * allowed nodes. `policy` itself does not change.
 *
 * Returns a new policy, which the caller holds, or NULL with EINVAL (no nodes, a number above 1023,
 * or `bits` above 32768) or ENOMEM.
 */
pinfold_mempolicy_t *pinfold_mempolicy_rebind(const pinfold_mempolicy_t *policy,
					      const unsigned long *mask, size_t bits);

/*
 * Copies the policy that is in effect: `range`, or `task` if `range` is the default policy. If both
 * are the default policy, copies the system's policy, which is local.
 *
 * Returns the copy, which the caller holds, or NULL with ENOMEM.
 */
pinfold_mempolicy_t *pinfold_mempolicy_effective(const pinfold_mempolicy_t *range,
						 const pinfold_mempolicy_t *task);

/*
 * The kernel's policies. Functions that fail set errno to the kernel's error:
 *
 *   - EINVAL: none of the nodes may be used, the range is not aligned, or the kernel is too old.
 *   - EPERM: the call is forbidden, or it needs CAP_SYS_NICE.
 *   - ENOSYS: the kernel does not have the call, or a filter hides it.
 *
 * Each function makes one to four system calls, pinfold_pages_move one for every 64 pages.
 */

/* Returns whether policies can be set here, or false with errno. Changes nothing. */
bool pinfold_mempolicy_available(void);

/*
 * Sets the calling thread's policy, for pages that the thread is the first to touch from now on.
 * Threads and processes that the thread starts inherit the policy.
 *
 * Returns 0, or -1 with the policy unchanged. A policy with a home node is EINVAL.
 */
int pinfold_mempolicy_set_thread(const pinfold_mempolicy_t *policy);

/*
 * Tells Pinfold that the calling thread's policy may have changed, so that pools of pages ask the
 * kernel for it once. Call it after a system call that Pinfold does not see: one by syscall(), or
 * by a libnuma that is linked statically. Pinfold sees pinfold_mempolicy_set_thread, and in
 * programs that load libpinfold.so in front of libnuma also set_mempolicy.
 */
void pinfold_mempolicy_thread_changed(void);

/* Returns a copy of the calling thread's policy, which the caller holds, or NULL with errno. */
pinfold_mempolicy_t *pinfold_mempolicy_get_thread(void);

/* What to do with pages that already lie on other nodes. The numbers are the kernel's. */
#define PINFOLD_MPOL_STRICT   1u /* fail with EIO if any page stays there */
#define PINFOLD_MPOL_MOVE     2u /* move the pages that no other process maps */
#define PINFOLD_MPOL_MOVE_ALL 4u /* move all pages; needs CAP_SYS_NICE */

/*
 * Sets the policy of the `len` bytes from `at` on. `at` must be the beginning of a page. `flags` is
 * 0 or PINFOLD_MPOL_STRICT to PINFOLD_MPOL_MOVE_ALL combined. The kernel leaves out nodes that
 * cannot be used here.
 *
 * Returns 0, or -1 with errno: EINVAL also if no node is left, EFAULT if part of the range is not
 * mapped, EIO for pages that stayed elsewhere (PINFOLD_MPOL_STRICT).
 */
int pinfold_mempolicy_apply(const void *at, size_t len, const pinfold_mempolicy_t *policy,
			    unsigned flags);

/*
 * Returns a copy of the policy of the mapping at `at`, which the caller holds. Returns the default
 * policy if the mapping has no policy. The copy has no home node, because the kernel does not tell
 * it. Returns NULL with EFAULT if nothing is mapped there.
 */
pinfold_mempolicy_t *pinfold_mempolicy_at(const void *at);

/*
 * Returns the number of the node on which the page at `at` lies, or -1 with errno: EFAULT if
 * nothing is mapped there. Makes the page if it does not exist yet.
 */
int pinfold_node_of(const void *at);

/*
 * Moves `count` pages, the n-th to node `nodes[n]`. Stores in `status[n]` on which node the page
 * lies now, or a negative errno. Any address in a page stands for the page. If `nodes` is NULL,
 * moves nothing and only stores where the pages lie. `flags` is PINFOLD_MPOL_MOVE or
 * PINFOLD_MPOL_MOVE_ALL. 0 means PINFOLD_MPOL_MOVE.
 *
 * Returns how many pages the kernel could not move, or -1: EINVAL (`flags`), ENODEV (no such node),
 * EACCES (the process may not use the node), EPERM (PINFOLD_MPOL_MOVE_ALL needs CAP_SYS_NICE).
 * After -1, some pages may have moved, and some of `status` may not have been written.
 */
ptrdiff_t pinfold_pages_move(size_t count, const void *const *pages, const int *nodes, int *status,
			     unsigned flags);

/*
 * Moves the pages of process `pid` on the n-th node of `from` to the n-th node of `to`: the
 * kernel's migrate_pages. `pid` 0 is this process. Each mask has `bits` bits. Takes time in
 * proportion to the process's memory.
 *
 * Returns how many pages the kernel could not move, or -1: EINVAL (`bits` is above 32768, a number
 * is above 1023, or none of the targets is allowed), ESRCH (no such process), EPERM (the process is
 * another user's or may not use the targets, without CAP_SYS_NICE).
 */
ptrdiff_t pinfold_pages_migrate(int pid, const unsigned long *from, const unsigned long *to,
				size_t bits);

/*
 * Stores the nodes that the calling thread may use, those of its cpuset, in `bits` bits of `mask`.
 * Writes whole words. Returns 0, or -1 as pinfold_mempolicy_nodes does.
 */
int pinfold_mems_allowed(unsigned long *mask, size_t bits);

/*
 * Where pages go under a policy: the distances between the machine's nodes, and their weights. An
 * order never changes by itself. Several threads may use one at once.
 */
struct pinfold_node_order;

/*
 * Reads the machine's distances, and the kernel's weights of weighted interleave. Reads a file for
 * each node and each pair of nodes. Returns the order, or NULL with EIO (the machine's nodes cannot
 * be read) or ENOMEM.
 */
struct pinfold_node_order *pinfold_node_order_create(void);

/* Ends an order. Does nothing if `order` is NULL. */
void pinfold_node_order_destroy(struct pinfold_node_order *order);

/*
 * Return or set a node's weight: how many pages in a row go to the node. set_weight changes this
 * order only, which no other thread may use during the call. `weight` is 1 to 255.
 *
 * Return the weight or 0, or -1 with EINVAL (`node` is not a node's number, or `weight`).
 */
int pinfold_node_order_weight(const struct pinfold_node_order *order, int node);
int pinfold_node_order_set_weight(struct pinfold_node_order *order, int node, unsigned weight);

/*
 * Returns the node that page `page` goes to, for a thread on node `local`, or -1 with EINVAL
 * (`local` is not a node's number). Under an interleaving policy, `page` decides whose turn it is.
 * `policy` has nodes of the machine, as pinfold_mempolicy_rebind returns it. Only computes.
 */
int pinfold_mempolicy_node_for(const pinfold_mempolicy_t *policy, uint64_t page, int local,
			       const struct pinfold_node_order *order);

/*
 * Stores the first `count` of the nodes that the kernel tries for a page, in order, to `nodes`.
 * `from` is the node of the CPU that asks, or the node whose turn it is. `nodes` may be NULL if
 * `count` is 0. Only computes.
 *
 * Returns how many nodes there are, or -1 with EINVAL (`from` is not a node's number).
 */
ptrdiff_t pinfold_mempolicy_zonelist(const pinfold_mempolicy_t *policy, int from,
				     const struct pinfold_node_order *order, int *nodes,
				     size_t count);

/*
 * Policies for ranges of page numbers, shared by all threads: for shared memory, a file, or a pool.
 * A lookup takes no lock and writes to no shared memory.
 */
struct pinfold_shared_policy;

/* Creates a map without policies. Returns it, or NULL with ENOMEM. */
struct pinfold_shared_policy *pinfold_shared_policy_create(void);

/* Ends a map. Policies that were looked up stay valid. Does nothing if `shared` is NULL. */
void pinfold_shared_policy_destroy(struct pinfold_shared_policy *shared);

/*
 * Gives the pages from `start` to `end` - 1 a copy of `policy`. NULL and the default policy remove
 * the pages' policy. Cuts, splits or replaces the ranges that overlap. All pages change at once for
 * other threads.
 *
 * Returns 0, or -1 with nothing changed: EINVAL (`start` is not below `end`), ENOMEM, or EBUSY (the
 * caller is a signal handler that interrupted another set). Safe in signal handlers. Takes a lock.
 * Costs O(n) for n ranges.
 */
int pinfold_shared_policy_set(const struct pinfold_shared_policy *shared, uint64_t start,
			      uint64_t end, const pinfold_mempolicy_t *policy);

/*
 * Gives the pages whose range has no policy a copy of `policy`, as the "mpol=" of a mounted tmpfs
 * does. NULL and the default policy remove that policy. Ranges that are removed later take it too.
 *
 * Returns 0, or -1 with nothing changed: ENOMEM or EBUSY. Safe in signal handlers. Takes a lock.
 */
int pinfold_shared_policy_set_default(const struct pinfold_shared_policy *shared,
				      const pinfold_mempolicy_t *policy);

/*
 * Returns a copy of the policy of page `page`, or else of the map's default, which the caller
 * holds, or NULL with ENOENT (there is neither) or ENOMEM. Costs O(log n) for n
 * ranges, and an allocation. Safe in signal handlers.
 */
pinfold_mempolicy_t *pinfold_shared_policy_lookup(const struct pinfold_shared_policy *shared,
						  uint64_t page);

/*
 * Returns the node from which page `page` should come for the calling thread, by the policy that
 * pinfold_shared_policy_lookup finds, or -1 with ENOENT. Stores the mode that chose the node, a
 * number of enum pinfold_mempolicy_mode, to `mode`, unless that is NULL. Under the interleaving
 * modes, the page's number decides whose turn it is. Costs O(log n), and copies no policy. Safe in
 * signal handlers.
 */
int pinfold_shared_policy_node(const struct pinfold_shared_policy *shared, uint64_t page,
			       int *mode);

/*
 * Pages by policy, for programs that hand out pages themselves. The program asks for a page by its
 * place, a number that the program chooses. Ranges of places have policies. Each CPU has a list of
 * free pages for each node.
 *
 *	struct pinfold_pages *pool = pinfold_pages_create("buffers");
 *	pinfold_pages_set_policy(pool, 0, 1024, policy);
 *	void *page = pinfold_pages_alloc(pool, 7);
 *	...
 *	pinfold_pages_free(pool, page);
 *	pinfold_pages_destroy(pool);
 */
struct pinfold_pages;

/*
 * Creates a pool of pages without policies. `name` is text in UTF-8, for slabinfo. Takes a cache
 * for each node.
 *
 * Returns the pool, or NULL with EINVAL (`name`), ENOSPC (3,674 caches exist) or ENOMEM.
 */
struct pinfold_pages *pinfold_pages_create(const char *name);

/*
 * Ends a pool, and gives its memory back. Does nothing if `pages` is NULL. No other thread may use
 * the pool during the call.
 *
 * Returns 0, or -1 with the pool unchanged: EBUSY if pages have not come back, ENOTSUP if the
 * kernel cannot fence. Interrupts the CPUs that run threads of this process, once for each node.
 */
int pinfold_pages_destroy(struct pinfold_pages *pages);

/*
 * Gives the places from `start` to `end` - 1 a copy of `policy`. NULL and the default policy remove
 * the places' policy. Pages that were allocated before stay where they are.
 *
 * Returns 0, or -1 with nothing changed: EINVAL (`start` is not below `end`, or none of the
 * policy's nodes can be used here), ENOMEM, or EBUSY (the caller is a signal handler that
 * interrupted another set). Takes a lock. Costs O(n) for n ranges.
 */
int pinfold_pages_set_policy(const struct pinfold_pages *pages, uint64_t start, uint64_t end,
			     const pinfold_mempolicy_t *policy);

/*
 * Gives the places whose range has no policy a copy of `policy`. NULL and the default policy remove
 * that policy. Returns 0, or -1 with nothing changed: EINVAL (none of the policy's nodes can be
 * used here), ENOMEM or EBUSY. Takes a lock.
 */
int pinfold_pages_set_default_policy(const struct pinfold_pages *pages,
				     const pinfold_mempolicy_t *policy);

/*
 * Sets whether each allocation of a place without a policy asks the kernel for the policy that the
 * calling thread has at that moment. 0 at the start: then the pool follows the thread's policy as
 * far as Pinfold sees its changes (pinfold_mempolicy_thread_changed). While this is on, each such
 * allocation makes a system call, which costs more than zeroing the page.
 */
void pinfold_pages_set_following_threads(const struct pinfold_pages *pages, int following);

/* Returns the size of a page in bytes. */
size_t pinfold_pages_size(const struct pinfold_pages *pages);

/*
 * Allocate a page for place `place`. alloc_zeroed also fills the page with zeroes.
 *
 * Return the page, or NULL with ENOMEM if no node that the policy allows has memory. Cost one
 * critical section, and a lookup of the policy if any place has one. If the CPU's list is empty,
 * they also take the node's lock. Safe in signal handlers, but a call that interrupted another call
 * may fail.
 */
void *pinfold_pages_alloc(const struct pinfold_pages *pages, uint64_t place);
void *pinfold_pages_alloc_zeroed(const struct pinfold_pages *pages, uint64_t place);

/*
 * Frees `page`, which came from this pool. Does nothing if `page` is NULL. Never fails. Costs one
 * critical section. Safe in signal handlers.
 */
void pinfold_pages_free(const struct pinfold_pages *pages, void *page);

/*
 * Returns the node from which the pool asked for `page`, or -1 with EINVAL (`page` is NULL) or
 * ENOENT (the kernel chose the node). Makes no system call. The kernel may have placed the page
 * elsewhere: pinfold_node_of asks the kernel.
 */
int pinfold_pages_node_of(const struct pinfold_pages *pages, void *page);

/*
 * Creates a cache like pinfold_cache_create (pinfold.h). The cache's slabs lie on the nodes that
 * `policy` selects, and freed objects return to these nodes, whichever CPU the program frees them
 * on.
 *
 * Returns the cache, or NULL with errno: that of pinfold_cache_create, and EINVAL if none of the
 * policy's nodes can be used here.
 */
struct pinfold_cache *pinfold_cache_create_policy(const char *name, size_t size, size_t align,
						  unsigned flags, void (*ctor)(void *),
						  const pinfold_mempolicy_t *policy);

#ifdef __cplusplus
}
#endif

#endif /* PINFOLD_POLICY_H */
