// boost::lockfree::stack as a list of free objects. Objects come from operator new, and all of them
// fit into the list.
#include "pool.h"
#include <boost/lockfree/stack.hpp>
#include <new>

static boost::lockfree::stack<void *> *list;

const char *pool_start(size_t objects, size_t) {
    list = new boost::lockfree::stack<void *>(objects);
    return list->is_lock_free() ? nullptr : "boost's stack is not lock-free on this machine";
}

void pool_enter_thread(void) {}

void *pool_alloc(void) {
    void *object;
    return list->pop(object) ? object : ::operator new(SIZE, std::nothrow);
}

void pool_free(void *object) {
    if (!list->bounded_push(object)) ::operator delete(object);
}
