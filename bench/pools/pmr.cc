// std::pmr::synchronized_pool_resource of libstdc++, which has a pool for each thread.
#include "pool.h"
#include <memory_resource>
#include <new>

static std::pmr::synchronized_pool_resource *pool;

const char *pool_start(size_t, size_t) {
    std::pmr::pool_options options;
    options.largest_required_pool_block = SIZE;
    pool = new std::pmr::synchronized_pool_resource(options);
    return nullptr;
}

void pool_enter_thread(void) {}

void *pool_alloc(void) {
    try {
        return pool->allocate(SIZE);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void pool_free(void *object) { pool->deallocate(object, SIZE); }
