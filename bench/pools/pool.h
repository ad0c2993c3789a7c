// What a pool in C or C++ offers to `pinfold-bench slab`. Each pool is a shared library for objects
// of `SIZE` bytes.
#ifndef POOL_H
#define POOL_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

// Makes the pool. `objects` of it are in use at most, by at most `threads` threads. Returns NULL,
// or the reason why there is no pool.
const char *pool_start(size_t objects, size_t threads);

// Prepares a thread for using the pool. A thread may call it repeatedly.
void pool_enter_thread(void);

// Returns NULL if there is no memory.
void *pool_alloc(void);

// Frees an object from any thread.
void pool_free(void *object);

#ifdef __cplusplus
}
#endif
#endif
