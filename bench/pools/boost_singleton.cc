// boost::singleton_pool: one list of free objects under a mutex. boost::fast_pool_allocator takes
// single objects from it.
#include "pool.h"
#include <boost/pool/singleton_pool.hpp>

struct tag {};
using pool = boost::singleton_pool<tag, SIZE>;

const char *pool_start(size_t, size_t) { return nullptr; }
void pool_enter_thread(void) {}
void *pool_alloc(void) { return pool::malloc(); }
void pool_free(void *object) { pool::free(object); }
