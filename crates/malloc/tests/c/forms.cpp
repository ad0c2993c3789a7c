// Allocates in each way that C and C++ offer, each in a function of its own. A heap profile must
// name these functions, and none of the allocator's. Prints "ok".
#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <malloc.h>
#include <new>

static void *volatile kept;

static const std::align_val_t line{64};

// The loop keeps the call from being a jump, so the function has a frame while it allocates.
#define BY(name, allocated) \
	__attribute__((noinline)) void by_##name() \
	{ \
		for (int i = 0; i < 20; i++) \
			kept = (allocated); \
	}

BY(malloc, malloc(1000))
BY(large_malloc, malloc(100000))
BY(calloc, calloc(10, 100))
BY(large_calloc, calloc(100, 1000))
BY(realloc, realloc(nullptr, 1000))
BY(grown, realloc(malloc(100), 1000))
BY(reallocarray, reallocarray(nullptr, 10, 100))
BY(memalign, memalign(64, 1000))
BY(aligned_alloc, aligned_alloc(64, 1024))
BY(posix_memalign, posix_memalign(const_cast<void **>(&kept), 64, 1000) == 0 ? kept : nullptr)
BY(valloc, valloc(1000))
BY(new, ::operator new(1000))
BY(large_new, ::operator new(100000))
BY(new_array, ::operator new[](1000))
BY(new_nothrow, ::operator new(1000, std::nothrow))
BY(new_array_nothrow, ::operator new[](1000, std::nothrow))
BY(new_aligned, ::operator new(1024, line))
BY(new_array_aligned, ::operator new[](1024, line))
BY(new_aligned_nothrow, ::operator new(1024, line, std::nothrow))
BY(new_array_aligned_nothrow, ::operator new[](1024, line, std::nothrow))

int main()
{
	for (auto form : {by_malloc, by_large_malloc, by_calloc, by_large_calloc, by_realloc, by_grown,
	         by_reallocarray, by_memalign, by_aligned_alloc, by_posix_memalign, by_valloc, by_new,
	         by_large_new, by_new_array, by_new_nothrow, by_new_array_nothrow, by_new_aligned,
	         by_new_array_aligned, by_new_aligned_nothrow, by_new_array_aligned_nothrow})
		form();
	std::puts("ok");
	return 0;
}
