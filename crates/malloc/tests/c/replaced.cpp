// A program replaces plain operator new and delete, as the standard allows. The other unaligned
// forms must call these.
//
// The program's blocks begin behind a header, so that a free by another delete fails. Also runs
// without the library. Prints "ok".
#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <new>

static long made, ended;
static bool refuse;

void *operator new(std::size_t size)
{
	char *block = refuse ? nullptr : static_cast<char *>(std::malloc(size + 48));
	if (!block)
		throw std::bad_alloc();
	made++;
	return block + 48;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsized-deallocation"
void operator delete(void *block) noexcept
{
	if (block) {
		ended++;
		std::free(static_cast<char *>(block) - 48);
	}
}
#pragma GCC diagnostic pop

// The form that also returns the size, which only the library has.
struct sized_block {
	void *p;
	std::size_t n;
};
extern "C" __attribute__((weak)) sized_block __size_returning_new(std::size_t);

template <class T> static T hide(T value)
{
	__asm__ volatile("" : "+r"(value));
	return value;
}

int main()
{
	for (int i = 0; i < 1000; i++) {
		const std::size_t size = static_cast<std::size_t>(i) * 37 % 5000;
		const long before = made;
		void *blocks[] = {
			hide(::operator new(size)), hide(::operator new(size)),
				hide(::operator new(size)),
			hide(::operator new[](size)), hide(::operator new[](size)),
				hide(::operator new[](size)),
			hide(::operator new(size, std::nothrow)),
				hide(::operator new[](size, std::nothrow)),
		};
		CHECK(made - before == 8);
		::operator delete(blocks[0]);
		::operator delete(blocks[1], size);
		::operator delete(blocks[2], std::nothrow);
		::operator delete[](blocks[3]);
		::operator delete[](blocks[4], size);
		::operator delete[](blocks[5], std::nothrow);
		::operator delete(blocks[6]);
		::operator delete[](blocks[7]);
		CHECK(made == ended);
		if (__size_returning_new) {
			sized_block block = __size_returning_new(size);
			CHECK(made == ended + 1 && block.n == size);
			::operator delete(block.p, block.n);
			CHECK(made == ended);
		}
		// The aligned forms do not call the plain ones.
		const std::align_val_t align{64};
		::operator delete(hide(::operator new(size, align)), size, align);
		::operator delete[](hide(::operator new[](size, align)), align);
		CHECK(made == ended);
	}
	refuse = true;
	CHECK(!hide(::operator new(8, std::nothrow)));
	CHECK(!hide(::operator new[](8, std::nothrow)));
	refuse = false;
	std::puts("ok");
	return 0;
}
