// Operator new and operator delete in all their forms, as the standard describes them. Also runs
// without the library. Prints "ok".
#include "check.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

// Keeps the compiler from removing a pair of calls.
template <class T> static T hide(T value)
{
	__asm__ volatile("" : "+r"(value));
	return value;
}

static const std::size_t too_much = SIZE_MAX / 2 - 4096;

static void use(void *block, std::size_t size, std::size_t align)
{
	CHECK(block && reinterpret_cast<std::uintptr_t>(block) % align == 0);
	std::memset(block, 0xab, size);
}

static void plain()
{
	for (std::size_t size = 0; size < 5000000; size = size * 3 / 2 + 1) {
		void *block = hide(::operator new(size));
		use(block, size, 16);
		::operator delete(block);
		block = hide(::operator new[](size));
		use(block, size, 16);
		::operator delete[](block);
		block = hide(::operator new(size));
		::operator delete(block, size);
		block = hide(::operator new[](size));
		::operator delete[](block, size);
		block = hide(::operator new(size, std::nothrow));
		use(block, size, 16);
		::operator delete(block, std::nothrow);
		block = hide(::operator new[](size, std::nothrow));
		use(block, size, 16);
		::operator delete[](block, std::nothrow);
	}
	void *one = hide(::operator new(0)), *other = hide(::operator new(0));
	CHECK(one != other);
	::operator delete(one, std::size_t(0));
	::operator delete(other);
	::operator delete(nullptr);
	::operator delete[](nullptr);
	::operator delete(nullptr, std::size_t(8));
}

static void aligned()
{
	for (std::size_t bytes = 1; bytes <= 4 << 20; bytes *= 2)
		for (std::size_t size = 0; size < 300000; size = size * 7 + 5) {
			const std::align_val_t align{bytes};
			void *block = hide(::operator new(size, align));
			use(block, size, bytes);
			::operator delete(block, align);
			block = hide(::operator new[](size, align));
			use(block, size, bytes);
			::operator delete[](block, align);
			block = hide(::operator new(size, align));
			::operator delete(block, size, align);
			block = hide(::operator new[](size, align));
			::operator delete[](block, size, align);
			block = hide(::operator new(size, align, std::nothrow));
			use(block, size, bytes);
			::operator delete(block, align, std::nothrow);
			block = hide(::operator new[](size, align, std::nothrow));
			use(block, size, bytes);
			::operator delete[](block, align, std::nothrow);
		}
	::operator delete(nullptr, std::align_val_t{64});
}

template <class F> static bool throws_bad_alloc(F f)
{
	try {
		f();
	} catch (const std::bad_alloc &) {
		return true;
	}
	return false;
}

static void refused()
{
	const std::align_val_t page{4096};
	CHECK(throws_bad_alloc([] { hide(::operator new(hide(too_much))); }));
	CHECK(throws_bad_alloc([] { hide(::operator new[](hide(too_much))); }));
	CHECK(throws_bad_alloc([&] { hide(::operator new(hide(too_much), page)); }));
	CHECK(throws_bad_alloc([&] { hide(::operator new[](hide(too_much), page)); }));
	CHECK(!hide(::operator new(hide(too_much), std::nothrow)));
	CHECK(!hide(::operator new[](hide(too_much), std::nothrow)));
	CHECK(!hide(::operator new(hide(too_much), page, std::nothrow)));
	CHECK(!hide(::operator new[](hide(too_much), page, std::nothrow)));
}

static int calls;
static const std::size_t block_size = 1 << 20;
static void *reserve[4000];
static int reserved;

// Frees some of the program's blocks at its third call.
static void gives_back()
{
	if (++calls == 3)
		for (int nth = 0; nth < 8; nth++)
			std::free(reserve[--reserved]);
	CHECK(calls <= 3);
}

static void gives_up()
{
	if (++calls % 5 == 0)
		std::set_new_handler(nullptr);
}

static void throws_another()
{
	calls++;
	throw std::runtime_error("no memory");
}

static void throws_bad_alloc_itself()
{
	calls++;
	throw std::bad_alloc();
}

template <class F> static void handlers(F alloc, bool nothrow)
{
	calls = 0;
	std::set_new_handler(gives_up);
	void *block = hide(&calls);
	CHECK(throws_bad_alloc([&] { block = alloc(hide(too_much)); }) == !nothrow);
	CHECK(calls == 5 && (!nothrow || !block));
	if (nothrow) {
		// The exception must not leave the nothrow form.
		std::set_new_handler(throws_bad_alloc_itself);
		CHECK(!alloc(hide(too_much)) && calls == 6);
	} else {
		std::set_new_handler(throws_another);
		try {
			alloc(hide(too_much));
			CHECK(false);
		} catch (const std::runtime_error &) {
		}
		CHECK(calls == 6);
	}
	std::set_new_handler(nullptr);
}

// Under a limit from the start: a handler that frees memory, and exceptions without memory.
static void limited()
{
	while (reserved < 4000 && (reserve[reserved] = std::malloc(block_size)))
		reserved++;
	CHECK(reserved > 100 && reserved < 4000);
	CHECK(throws_bad_alloc([] { hide(::operator new(block_size)); }));
	CHECK(throws_bad_alloc([] { hide(::operator new(block_size, std::align_val_t{64})); }));
	CHECK(!hide(::operator new[](block_size, std::nothrow)));
	calls = 0;
	std::set_new_handler(gives_back);
	void *block = hide(::operator new(block_size));
	use(block, block_size, 16);
	CHECK(calls == 3);
	std::set_new_handler(nullptr);
	::operator delete(block, block_size);
	while (reserved)
		std::free(reserve[--reserved]);
}

// The forms of tcmalloc and of LLVM, which also return the size. Only the library has them.
struct sized_block {
	void *p;
	std::size_t n;
};
extern "C" {
__attribute__((weak)) sized_block __size_returning_new(std::size_t);
__attribute__((weak)) sized_block __size_returning_new_hot_cold(std::size_t, unsigned char);
__attribute__((weak)) sized_block __size_returning_new_aligned(std::size_t, std::align_val_t);
__attribute__((weak)) sized_block
__size_returning_new_aligned_hot_cold(std::size_t, std::align_val_t, unsigned char);
__attribute__((weak)) sized_block
tcmalloc_size_returning_operator_new_nothrow(std::size_t) noexcept;
__attribute__((weak)) sized_block
tcmalloc_size_returning_operator_new_hot_cold_nothrow(std::size_t, unsigned char) noexcept;
__attribute__((weak)) sized_block
tcmalloc_size_returning_operator_new_aligned_nothrow(std::size_t, std::align_val_t) noexcept;
__attribute__((weak)) sized_block tcmalloc_size_returning_operator_new_aligned_hot_cold_nothrow(
	std::size_t, std::align_val_t, unsigned char) noexcept;
}

static void with_sizes()
{
	const std::align_val_t line{64};
	if (!__size_returning_new)
		return;
	for (std::size_t size = 0; size < 5000000; size = size * 3 / 2 + 1)
		for (int form = 0; form < 8; form++) {
			const bool aligned = form / 2 % 2;
			sized_block made =
				form == 0   ? __size_returning_new(size)
				: form == 1 ? __size_returning_new_hot_cold(size, 255)
				: form == 2 ? __size_returning_new_aligned(size, line)
				: form == 3 ? __size_returning_new_aligned_hot_cold(size, line, 0)
				: form == 4 ? tcmalloc_size_returning_operator_new_nothrow(size)
				: form == 5
					? tcmalloc_size_returning_operator_new_hot_cold_nothrow(size,
												1)
				: form == 6
					? tcmalloc_size_returning_operator_new_aligned_nothrow(size,
											       line)
					: tcmalloc_size_returning_operator_new_aligned_hot_cold_nothrow(
						  size, line, 2);
			// libpinfold.a does not know whether the program replaces `new`.
			const bool knows = std::getenv("LD_PRELOAD");
			CHECK(made.n == (knows ? malloc_usable_size(made.p) : size));
			use(made.p, made.n, aligned ? 64 : 16);
			if (aligned)
				::operator delete(made.p, made.n, line);
			else
				::operator delete(made.p, made.n);
		}
	CHECK(throws_bad_alloc([] { (void)__size_returning_new(hide(too_much)); }));
	CHECK(throws_bad_alloc([&] { (void)__size_returning_new_aligned(hide(too_much), line); }));
	sized_block none = tcmalloc_size_returning_operator_new_nothrow(hide(too_much));
	CHECK(!none.p && !none.n);
	none = tcmalloc_size_returning_operator_new_aligned_nothrow(hide(too_much), line);
	CHECK(!none.p && !none.n);
}

int main(int count, char **arguments)
{
	if (count == 1) {
		struct rlimit limit = {600 << 20, 600 << 20};
		char name[] = "limited", *again[] = {arguments[0], name, nullptr};
		CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
		execv(again[0], again);
		return 1;
	}
	plain();
	aligned();
	refused();
	with_sizes();
	const std::align_val_t line{64};
	handlers([](std::size_t n) { return hide(::operator new(n)); }, false);
	handlers([](std::size_t n) { return hide(::operator new[](n)); }, false);
	handlers([&](std::size_t n) { return hide(::operator new(n, line)); }, false);
	handlers([&](std::size_t n) { return hide(::operator new[](n, line)); }, false);
	handlers([](std::size_t n) { return hide(::operator new(n, std::nothrow)); }, true);
	handlers([](std::size_t n) { return hide(::operator new[](n, std::nothrow)); }, true);
	handlers([&](std::size_t n) { return hide(::operator new(n, line, std::nothrow)); }, true);
	handlers([&](std::size_t n) { return hide(::operator new[](n, line, std::nothrow)); },
		 true);
	limited();
	std::puts("ok");
	return 0;
}
