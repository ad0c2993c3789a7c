// pinfold.hpp in a C++ program. Prints "ok".
#include "pinfold.hpp"
#include "check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <list>
#include <malloc.h>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

static int alive;

struct session {
	std::string name;
	int port;

	session(std::string with, int at) : name(std::move(with)), port(at)
	{
		if (port < 0)
			throw std::runtime_error("no port");
		alive++;
	}
	session(const session &) = delete;
	~session() { alive--; }
};

struct alignas(256) wide {
	unsigned char bytes[300];
};

static bool at_multiple(const void *address, std::size_t align)
{
	return reinterpret_cast<std::uintptr_t>(address) % align == 0;
}

static void typed_caches()
{
	pinfold::cache<session> sessions("session");

	CHECK(std::string("session") == sessions.name());
	{
		std::vector<pinfold::cache<session>::pointer> many;

		for (int n = 0; n < 1000; n++)
			many.push_back(sessions.make(
				"a name beyond what a string keeps in itself " +
					std::to_string(n),
				n));
		CHECK(alive == 1000 && sessions.in_use() >= 1000);
		CHECK(many[999]->name == "a name beyond what a string keeps in itself 999" &&
		      many[999]->port == 999);
		CHECK(!sessions.destroy());
		session *raw = many.back().release();
		many.pop_back();
		CHECK(alive == 1000);
		sessions.adopt(raw).reset();
		CHECK(alive == 999);
	}
	CHECK(alive == 0);

	// A constructor that throws leaves no object in use.
	bool thrown = false;
	try {
		(void)sessions.make("x", -1);
	} catch (const std::runtime_error &) {
		thrown = true;
	}
	CHECK(thrown && alive == 0);
	CHECK(sessions.shrink() >= 0 && sessions.in_use() == 0 && sessions.validate() == 0);
	CHECK(sessions.statistics().slab_alloc > 0);

	void *memory = sessions.allocate();
	CHECK(memory);
	sessions.deallocate(memory);
	CHECK(sessions.try_make("y", 1));
	CHECK(alive == 0);

	// Pointers stay valid when their cache is moved.
	auto kept = sessions.make("z", 2);
	pinfold::cache<session> moved(std::move(sessions));
	CHECK(sessions.handle() == nullptr && moved.handle() != nullptr);
	sessions = std::move(moved);
	kept.reset();
	CHECK(alive == 0 && sessions.destroy() && sessions.handle() == nullptr);

	// Pointers may outlive their cache.
	pinfold::cache<session>::pointer last;
	{
		pinfold::cache<session> brief("brief");
		last = brief.make("last", 3);
	}
	CHECK(last->name == "last");
	last.reset();
	CHECK(alive == 0);
}

static void certain_values()
{
	pinfold::cache<session> sessions("certain");

	{
		pinfold::prefilled<session> some(sessions, 3);
		auto one = some.make("one", 1);
		bool thrown = false;

		CHECK(some.len() == 2 && one->name == "one");
		try {
			(void)some.make("x", -1);
		} catch (const std::runtime_error &) {
			thrown = true;
		}
		CHECK(thrown && some.len() == 1 && alive == 1);
		CHECK(some.refill(200) && !some.refill(SIZE_MAX));
		pinfold::prefilled<session> moved(std::move(some));
		while (moved.len() > 0)
			CHECK(moved.make("two", 2)->port == 2);
		thrown = false;
		try {
			(void)moved.make("three", 3);
		} catch (const std::bad_alloc &) {
			thrown = true;
		}
		CHECK(thrown && moved.refill(5));
	}
	CHECK(alive == 0 && sessions.destroy());
}

static void readers()
{
	static std::atomic<long *> current;
	pinfold::cache<long> numbers("read");
	std::atomic<bool> done(false);

	current = numbers.make(0).release();
	std::thread reading([&] {
		for (long last = 0; !done;) {
			pinfold::reader reader;
			const long *seen = current.load(), number = *seen;

			CHECK(number >= last && *seen == number);
			last = number;
		}
	});
	for (long n = 1; n < 20000; n++)
		numbers.free_deferred(numbers.adopt(current.exchange(numbers.make(n).release())));
	done = true;
	reading.join();
	numbers.free_deferred(numbers.adopt(current.exchange(nullptr)));
	CHECK(numbers.destroy());
}

static void too_many_caches()
{
	std::vector<pinfold::cache<int>> many;
	bool thrown = false;

	try {
		while (many.size() < 5000)
			many.emplace_back("one of many");
	} catch (const std::bad_alloc &) {
		thrown = true;
	}
	CHECK(thrown && many.size() > 3000);
}

static void over_aligned()
{
	pinfold::cache<wide> cache("wide");
	std::vector<pinfold::cache<wide>::pointer> many;
	std::vector<wide, pinfold::allocator<wide>> vector(5);
	std::pmr::vector<wide> resourced(pinfold::resource());
	pinfold::cache_resource nodes("wide nodes", sizeof(wide) + 256, 256);
	std::pmr::list<wide> list(&nodes);

	for (int n = 0; n < 200; n++) {
		many.push_back(cache.make());
		CHECK(at_multiple(many.back().get(), 256));
		resourced.emplace_back();
		CHECK(at_multiple(&resourced.back(), 256));
		list.emplace_back();
		CHECK(at_multiple(&list.back(), 256));
	}
	CHECK(at_multiple(vector.data(), 256));
	CHECK(nodes.in_use() >= 200);
	list.clear();
}

template <class Map>
static void fill(Map &map)
{
	for (int n = 0; n < 5000; n++)
		map[n * 7919 % 5000] = n;
	for (int n = 0; n < 5000; n += 2)
		map.erase(n);
	CHECK(map.size() == 2500);
	for (const auto &[key, value] : map)
		CHECK(key % 2 == 1 && value * 7919 % 5000 == key);
}

static void containers(std::pmr::memory_resource *resource)
{
	std::pmr::vector<std::pmr::string> strings(resource);
	std::pmr::map<int, int> map(resource);
	std::pmr::unordered_map<int, int> hashed(resource);
	std::pmr::list<std::array<char, 40>> list(resource);

	for (int n = 0; n < 5000; n++) {
		strings.emplace_back("a string of some length, the number of which is " +
				     std::to_string(n));
		list.emplace_back()[39] = static_cast<char>(n);
	}
	CHECK(strings[4999] == "a string of some length, the number of which is 4999");
	CHECK(strings[0].get_allocator().resource() == resource);
	fill(map);
	fill(hashed);
	int n = 0;
	for (const auto &bytes : list)
		CHECK(bytes[39] == static_cast<char>(n++));
	strings.front().resize(3u << 20, 'x');
	CHECK(strings.front().back() == 'x');
}

static void resources()
{
	pinfold::memory_resource another;

	CHECK(*pinfold::resource() == another &&
	      *pinfold::resource() != *std::pmr::new_delete_resource());
	containers(pinfold::resource());
	containers(&another);
	{
		pinfold::cache_resource nodes("nodes", 64);

		CHECK(nodes.upstream_resource() == pinfold::resource());
		CHECK(nodes != *pinfold::resource() && nodes == nodes);
		containers(&nodes);
		CHECK(nodes.statistics().slab_alloc > 0);
		CHECK(pinfold_cache_shrink(nodes.handle()) >= 0 && nodes.in_use() == 0);

		// Smaller blocks, larger ones and those with a larger alignment go upstream.
		void *inside = nodes.allocate(33, 16), *small = nodes.allocate(32, 8);
		void *large = nodes.allocate(65, 8), *aligned = nodes.allocate(64, 32);
		CHECK(at_multiple(aligned, 32));
		CHECK(pinfold_cache_shrink(nodes.handle()) >= 0 && nodes.in_use() == 1);
		nodes.deallocate(inside, 33, 16);
		nodes.deallocate(small, 32, 8);
		nodes.deallocate(large, 65, 8);
		nodes.deallocate(aligned, 64, 32);
	}
	pinfold::cache_resource checked("checked nodes", 64, 16,
					PINFOLD_SLAB_CONSISTENCY_CHECKS | PINFOLD_SLAB_RED_ZONE |
						PINFOLD_SLAB_POISON,
					std::pmr::new_delete_resource());
	containers(&checked);
	CHECK(checked.in_use() == 0 && pinfold_cache_validate(checked.handle(), nullptr,
							      nullptr) == 0);

	bool thrown = false;
	try {
		(void)pinfold::resource()->allocate(SIZE_MAX / 2, 8);
	} catch (const std::bad_alloc &) {
		thrown = true;
	}
	CHECK(thrown);

	std::pmr::memory_resource *before = std::pmr::set_default_resource(pinfold::resource());
	CHECK(std::pmr::vector<int>(100).get_allocator().resource() == pinfold::resource());
	std::pmr::set_default_resource(before);
}

static void allocators()
{
	using strings = std::basic_string<char, std::char_traits<char>, pinfold::allocator<char>>;
	std::vector<strings, pinfold::allocator<strings>> vector;
	std::map<int, int, std::less<int>, pinfold::allocator<std::pair<const int, int>>> map;
	std::unordered_map<int, int, std::hash<int>, std::equal_to<int>,
		pinfold::allocator<std::pair<const int, int>>> hashed;

	for (int n = 0; n < 1000; n++)
		vector.emplace_back(100, static_cast<char>('a' + n % 26));
	CHECK(vector[27] == strings(100, 'b'));
	fill(map);
	fill(hashed);
	CHECK(pinfold::allocator<int>() == pinfold::allocator<long>() &&
	      !(pinfold::allocator<int>() != pinfold::allocator<int>()));

	pinfold::allocator<long> longs;
	pinfold::allocator<wide> wides;
	for (std::size_t count = 0; count < 300000; count = count * 2 + 1) {
		auto made = longs.allocate_at_least(count);
		CHECK(made.ptr && made.count >= count);
		CHECK(made.count == malloc_usable_size(made.ptr) / sizeof(long));
		std::fill(made.ptr, made.ptr + made.count, 7);
		longs.deallocate(made.ptr, made.count);
		auto aligned = wides.allocate_at_least(count % 100 + 1);
		CHECK(at_multiple(aligned.ptr, 256) && aligned.count > count % 100);
		wides.deallocate(aligned.ptr, count % 100 + 1);
	}

	volatile std::size_t count = SIZE_MAX / 4;
	int thrown = 0;
	try {
		(void)longs.allocate(count);
	} catch (const std::bad_array_new_length &) {
		thrown++;
	}
	try {
		(void)longs.allocate_at_least(count);
	} catch (const std::bad_array_new_length &) {
		thrown++;
	}
	CHECK(thrown == 2);

	auto shared = std::allocate_shared<int>(pinfold::allocator<int>(), 5);
	CHECK(*shared == 5);
}

static void threads()
{
	pinfold::cache<std::array<int, 10>> numbers("numbers");
	pinfold::cache_resource nodes("shared nodes", 48);
	std::vector<std::thread> workers;

	for (int me = 0; me < 4; me++)
		workers.emplace_back([&, me] {
			for (int round = 0; round < 50; round++) {
				std::vector<pinfold::cache<std::array<int, 10>>::pointer> many;
				std::pmr::map<int, int> map(&nodes);

				for (int n = 0; n < 200; n++) {
					many.push_back(numbers.make());
					many.back()->fill(me);
					map[n] = me;
				}
				for (const auto &one : many)
					CHECK((*one)[9] == me);
				for (const auto &[key, value] : map)
					CHECK(value == me && key < 200);
			}
		});
	for (auto &worker : workers)
		worker.join();
	CHECK(numbers.destroy());
}

int main()
{
	typed_caches();
	certain_values();
	readers();
	too_many_caches();
	over_aligned();
	resources();
	allocators();
	threads();
	std::puts("ok");
	return 0;
}
