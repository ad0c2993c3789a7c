// A C++ plugin for host.c, which loads it with RTLD_LOCAL. dlsym does not find the plugin's C++
// runtime then.
#include <cstdint>
#include <new>

extern "C" int plugin(std::size_t too_much);

int plugin(std::size_t too_much)
{
	if (::operator new(too_much, std::nothrow))
		return 0;
	try {
		::operator delete(::operator new(too_much));
	} catch (const std::bad_alloc &) {
		return 1;
	}
	return 0;
}
