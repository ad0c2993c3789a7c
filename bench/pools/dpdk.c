// DPDK's mempool: a ring of free objects, and a cache of the largest size for each lcore. Every
// measuring thread registers itself as an lcore. All objects are made at the start.
#include "pool.h"
#include <pthread.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_lcore.h>
#include <rte_mempool.h>
#include <stdio.h>
#include <stdlib.h>

static struct rte_mempool *pool;
static char reason[200];

// Initialises DPDK, in a thread that ends afterwards, because DPDK pins the thread that does it.
static void *start(void *unused) {
    char *arguments[] = {"pinfold-bench",  "--no-huge",     "--no-shconf", "--no-pci",
                         "--no-telemetry", "--log-level=1", "-m",          "2048",
                         "-l",             "0",             NULL};
    // There are lcores if the pool of another size has initialised DPDK.
    if (rte_lcore_count() == 0 && rte_eal_init(10, arguments) < 0)
        snprintf(reason, sizeof reason, "rte_eal_init failed: %s", rte_strerror(rte_errno));
    return unused;
}

const char *pool_start(size_t objects, size_t threads) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, start, NULL)) return "cannot start a thread";
    pthread_join(thread, NULL);
    if (reason[0]) return reason;
    char name[RTE_MEMPOOL_NAMESIZE];
    snprintf(name, sizeof name, "objects-%d", SIZE);
    // Objects in a cache serve only its lcore. A cache holds at most one and a half times its size.
    unsigned count = (unsigned)(objects + threads * RTE_MEMPOOL_CACHE_MAX_SIZE * 3 / 2);
    pool = rte_mempool_create(name, count, SIZE, RTE_MEMPOOL_CACHE_MAX_SIZE, 0, NULL, NULL, NULL,
                              NULL, SOCKET_ID_ANY, 0);
    if (!pool)
        snprintf(reason, sizeof reason, "rte_mempool_create failed: %s", rte_strerror(rte_errno));
    return pool ? NULL : reason;
}

void pool_enter_thread(void) {
    if (rte_lcore_id() == LCORE_ID_ANY && rte_thread_register() < 0) {
        fprintf(stderr, "rte_thread_register failed: %s\n", rte_strerror(rte_errno));
        exit(2);
    }
}

void *pool_alloc(void) {
    void *object;
    return rte_mempool_get(pool, &object) == 0 ? object : NULL;
}

void pool_free(void *object) { rte_mempool_put(pool, object); }
