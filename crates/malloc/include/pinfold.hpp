// pinfold.hpp - Pinfold for C++17: object caches, and allocators for containers. Header-only, over
// pinfold.h.
//
//	pinfold::cache<T>          values of one type, each owned by a smart pointer
//	pinfold::prefilled<T>      memory for values, allocated before it is needed
//	pinfold::mempolicy         which nodes memory comes from, as a value
//	pinfold::reader            protects values that other threads free deferred
//	pinfold::allocator<T>      for containers: std::vector<int, pinfold::allocator<int>>
//	pinfold::memory_resource   for containers of std::pmr, over malloc's size classes
//	pinfold::cache_resource    for containers of std::pmr with nodes of one size
//
// Linking with libpinfold.so or libpinfold.a also replaces operator new and operator delete, in all
// their forms. When there is no memory, operator new calls the program's new handler
// (std::set_new_handler) until there is memory or no handler is set. Then it throws std::bad_alloc,
// or returns null for std::nothrow. In a program without a C++ runtime it ends the process with a
// message instead of throwing.
//
// This header throws std::bad_alloc and std::bad_array_new_length, which is derived from it. An
// exception of a value's constructor passes through. Without exceptions (-fno-exceptions), lack of
// memory ends the program.
//
// Several threads may use one object at once. While a thread moves, assigns or destroys an object,
// no other thread may use the object.
#ifndef PINFOLD_HPP
#define PINFOLD_HPP

#include "pinfold.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#if __has_include(<memory_resource>)
#include <memory_resource>
#endif

namespace pinfold {

namespace detail {

// The alignment of pinfold_malloc in bytes.
inline constexpr std::size_t natural_align = 16;

[[noreturn]] inline void no_memory()
{
#if defined(__cpp_exceptions)
	throw std::bad_alloc();
#else
	std::abort();
#endif
}

[[noreturn]] inline void too_long()
{
#if defined(__cpp_exceptions)
	throw std::bad_array_new_length();
#else
	std::abort();
#endif
}

// Allocates a block of `bytes` bytes at a multiple of `align`, a power of two. Throws if there is
// no memory.
inline void *allocate(std::size_t bytes, std::size_t align)
{
	void *block = align <= natural_align ? pinfold_malloc(bytes)
					     : pinfold_aligned_alloc(align, bytes);

	if (!block)
		no_memory();
	return block;
}

// Allocates like allocate(bytes, align), and stores in `bytes` how many bytes the block has.
inline void *allocate_at_least(std::size_t &bytes, std::size_t align)
{
	void *block = align <= natural_align
			      ? pinfold_alloc_at_least(bytes, &bytes)
			      : pinfold_aligned_alloc_at_least(align, bytes, &bytes);

	if (!block)
		no_memory();
	return block;
}

// Frees a block of allocate(bytes, align).
inline void deallocate(void *block, std::size_t bytes, std::size_t align) noexcept
{
	if (align <= natural_align)
		pinfold_free_sized(block, bytes);
	else
		pinfold_free_aligned_sized(block, align, bytes);
}

} // namespace detail

// A memory policy. Copies share one immutable policy: a copy costs one atomic add.
//
//	pinfold::mempolicy policy("interleave:0-3");
//	if (!policy)
//		std::cerr << policy.error() << '\n';
//	else if (!policy.apply(buffer, size))
//		...                     errno says why
class mempolicy {
public:
	// Holds the default policy.
	mempolicy() noexcept = default;
	// Makes a policy from text; see pinfold_mempolicy_parse. If the text is invalid or there is
	// no memory, the policy converts to false and error() says why.
	explicit mempolicy(const char *text) noexcept
		: handle_(pinfold_mempolicy_parse(text, error_, sizeof(error_))),
		  valid_(handle_ != nullptr)
	{
	}
	// Takes ownership of a handle, such as that of pinfold_mempolicy_get_thread(). With null
	// the policy converts to false.
	explicit mempolicy(pinfold_mempolicy_t *handle) noexcept
		: handle_(handle), valid_(handle != nullptr)
	{
	}
	mempolicy(const mempolicy &other) noexcept
		: handle_(pinfold_mempolicy_get(other.handle_)), valid_(other.valid_)
	{
		std::memcpy(error_, other.error_, sizeof(error_));
	}
	mempolicy &operator=(const mempolicy &other) noexcept
	{
		pinfold_mempolicy_t *old = handle_;

		handle_ = pinfold_mempolicy_get(other.handle_);
		valid_ = other.valid_;
		std::memmove(error_, other.error_, sizeof(error_));
		pinfold_mempolicy_put(old);
		return *this;
	}
	~mempolicy() { pinfold_mempolicy_put(handle_); }

	// Returns whether there is a policy.
	explicit operator bool() const noexcept { return valid_; }
	// Returns what was wrong with the text and what to write instead, or "" if the text was
	// valid.
	const char *error() const noexcept { return error_; }

	// Returns the policy as text. Throws std::bad_alloc.
	std::string format() const
	{
		std::string text(pinfold_mempolicy_format(handle_, nullptr, 0), '\0');

		pinfold_mempolicy_format(handle_, &text[0], text.size() + 1);
		return text;
	}
	// Return the mode, PINFOLD_MPOL_DEFAULT and so on; the flags, PINFOLD_MPOL_STATIC_NODES and
	// so on.
	int mode() const noexcept { return pinfold_mempolicy_mode(handle_); }
	unsigned flags() const noexcept { return pinfold_mempolicy_flags(handle_); }

	// Set the policy of the calling thread, or of the `len` bytes from `at` on; see
	// pinfold_mempolicy_set_thread and pinfold_mempolicy_apply. Return false with errno; EINVAL
	// if the policy converts to false.
	bool set_thread() const noexcept
	{
		return usable() && pinfold_mempolicy_set_thread(handle_) == 0;
	}
	bool apply(const void *at, std::size_t len, unsigned moving = 0) const noexcept
	{
		return usable() && pinfold_mempolicy_apply(at, len, handle_, moving) == 0;
	}

	// Returns the handle for the functions of pinfold_policy.h. It is valid as long as this
	// object.
	pinfold_mempolicy_t *handle() const noexcept { return handle_; }

private:
	bool usable() const noexcept
	{
		if (!valid_)
			errno = EINVAL;
		return valid_;
	}

	char error_[256] = "";
	pinfold_mempolicy_t *handle_ = nullptr;
	bool valid_ = true;
};

template <class T>
class prefilled;

// A cache of values of type T.
//
//	pinfold::cache<session> sessions("session");
//	pinfold::cache<session>::pointer one = sessions.make("10.0.0.1", 443);
//
// A pointer is a std::unique_ptr. It destroys its value and gives the memory back to the cache. A
// pointer may outlive the cache. In that case, the cache's memory stays until the program ends.
//
// Allocating and freeing cost one critical section on the thread's CPU; see pinfold.h.
template <class T>
class cache {
	static_assert(std::is_object_v<T> && !std::is_array_v<T>,
		      "a cache is of objects, one at a time");
	static_assert(sizeof(T) <= 65536 && alignof(T) <= 65536,
		      "objects of a cache are at most 64 KiB large and aligned");

public:
	using value_type = T;

	// Destroys a value and gives its memory back to the cache.
	class deleter {
	public:
		deleter() noexcept = default;
		void operator()(T *value) const noexcept
		{
			value->~T();
			pinfold_cache_free(of_, value);
		}

	private:
		friend cache;
		explicit deleter(const pinfold_cache *of) noexcept : of_(of) {}
		const pinfold_cache *of_ = nullptr;
	};
	using pointer = std::unique_ptr<T, deleter>;

	// Creates a cache with `flags`, PINFOLD_SLAB_RED_ZONE and so on. Throws std::bad_alloc if
	// there is no memory, if 4096 caches exist, or if an argument is invalid.
	explicit cache(const char *name, unsigned flags = 0)
		: handle_(pinfold_cache_create(name, sizeof(T), alignof(T), flags, nullptr))
	{
		if (!handle_)
			detail::no_memory();
	}
	cache(cache &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
	cache &operator=(cache &&other) noexcept
	{
		if (this != &other) {
			destroy();
			handle_ = std::exchange(other.handle_, nullptr);
		}
		return *this;
	}
	~cache() { destroy(); }

	// Constructs a value from `arguments`. Throws std::bad_alloc, and what the constructor
	// throws.
	template <class... Arguments>
	[[nodiscard]] pointer make(Arguments &&...arguments)
	{
		pointer made = try_make(std::forward<Arguments>(arguments)...);

		if (!made)
			detail::no_memory();
		return made;
	}

	// Constructs a value like make, but returns null if there is no memory.
	template <class... Arguments>
	[[nodiscard]] pointer try_make(Arguments &&...arguments)
	{
		return make_in(handle_, pinfold_cache_alloc(handle_),
			       std::forward<Arguments>(arguments)...);
	}

	// Takes ownership of a value that a pointer of this cache has released.
	[[nodiscard]] pointer adopt(T *value) noexcept
	{
		return pointer(value, deleter(handle_));
	}

	// Frees a value that readers may still look at, when these readers have left. Readers that
	// enter later must not find the value.
	void free_deferred(pointer value) noexcept
	{
		static_assert(std::is_trivially_destructible_v<T>,
			      "nobody destroys a value that readers look at");
		pinfold_cache_free_deferred(handle_, value.release());
	}

	// Allocate memory for a T without a value in it, and free such memory. allocate returns
	// null if there is no memory.
	[[nodiscard]] void *allocate() noexcept { return pinfold_cache_alloc(handle_); }
	void deallocate(void *memory) noexcept { pinfold_cache_free(handle_, memory); }

	// Call the functions of pinfold.h that have these names. The cache must not have been moved
	// from.
	std::ptrdiff_t shrink() noexcept { return pinfold_cache_shrink(handle_); }
	std::size_t validate() const noexcept
	{
		return pinfold_cache_validate(handle_, nullptr, nullptr);
	}
	std::size_t in_use() const noexcept { return pinfold_cache_in_use(handle_); }
	pinfold_slab_statistics statistics() const noexcept
	{
		return pinfold_cache_statistics(handle_);
	}
	const char *name() const noexcept { return pinfold_cache_name(handle_); }
	pinfold_cache *handle() const noexcept { return handle_; }

	// Ends the cache if all values have come back. Returns whether the cache ended. If not, the
	// cache works as before. See pinfold_cache_destroy.
	bool destroy() noexcept
	{
		if (pinfold_cache_destroy(handle_) != 0)
			return false;
		handle_ = nullptr;
		return true;
	}

private:
	friend prefilled<T>;

	// Constructs a value in `memory` of cache `of`. Returns null if `memory` is null.
	template <class... Arguments>
	static pointer make_in(const pinfold_cache *of, void *memory, Arguments &&...arguments)
	{
		// Gives the memory back if the constructor throws.
		struct holder {
			const pinfold_cache *of;
			void *memory;
			~holder() { pinfold_cache_free(of, memory); }
		} holder{of, memory};

		if (!memory)
			return pointer(nullptr, deleter(of));
		T *value = ::new (memory) T(std::forward<Arguments>(arguments)...);
		holder.memory = nullptr;
		return pointer(value, deleter(of));
	}

	pinfold_cache *handle_;
};

// Memory for values, allocated before it is needed.
//
//	pinfold::prefilled<node> nodes(cache, 3);
//	auto left = nodes.make(1), right = nodes.make(2); // these and one more have memory
//
// One thread may use it at a time. Its destructor frees the memory that is left. Destroy it before
// its cache.
template <class T>
class prefilled {
public:
	// Allocates memory for `n` values. Throws std::bad_alloc.
	prefilled(cache<T> &of, std::size_t n)
		: of_(of.handle()), prefilled_(pinfold_cache_prefill(of_, n))
	{
		if (!prefilled_)
			detail::no_memory();
	}
	prefilled(prefilled &&other) noexcept
		: of_(other.of_), prefilled_(std::exchange(other.prefilled_, nullptr))
	{
	}
	prefilled &operator=(prefilled &&) = delete;
	~prefilled() { pinfold_prefilled_destroy(prefilled_); }

	// Constructs a value from `arguments`. Throws std::bad_alloc if len() is 0. If the
	// constructor throws, passes the exception on, and len() is one less all the same.
	template <class... Arguments>
	[[nodiscard]] typename cache<T>::pointer make(Arguments &&...arguments)
	{
		void *memory = pinfold_prefilled_alloc(prefilled_);

		if (!memory)
			detail::no_memory();
		return cache<T>::make_in(of_, memory, std::forward<Arguments>(arguments)...);
	}

	// len returns for how many values there is memory. refill allocates until there is memory
	// for `n` values, and returns false if the system has no memory.
	std::size_t len() const noexcept { return pinfold_prefilled_len(prefilled_); }
	[[nodiscard]] bool refill(std::size_t n) noexcept
	{
		return pinfold_prefilled_refill(prefilled_, n) == 0;
	}

private:
	const pinfold_cache *of_;
	pinfold_prefilled *prefilled_;
};

// A reader for as long as the object lives. Values that the thread looks up meanwhile stay valid,
// if other threads free them by cache<T>::free_deferred or pinfold_cache_free_deferred. The thread
// that constructs a reader destroys it. Readers nest. See pinfold_grace_enter.
class [[nodiscard]] reader {
public:
	reader() noexcept : entered_(pinfold_grace_enter()) {}
	reader(const reader &) = delete;
	reader &operator=(const reader &) = delete;
	~reader() { pinfold_grace_leave(entered_); }

private:
	pinfold_reader entered_;
};

// An allocator for containers, over malloc's size classes. All allocators are equal. In a program
// whose operator new is Pinfold's, std::allocator is as fast.
template <class T>
class allocator {
public:
	using value_type = T;
	using is_always_equal = std::true_type;
	using propagate_on_container_move_assignment = std::true_type;

	allocator() noexcept = default;
	template <class U>
	allocator(const allocator<U> &) noexcept
	{
	}

	// Allocates memory for `count` values. Throws std::bad_alloc or std::bad_array_new_length.
	[[nodiscard]] T *allocate(std::size_t count)
	{
		if (count > PTRDIFF_MAX / sizeof(T))
			detail::too_long();
		return static_cast<T *>(detail::allocate(count * sizeof(T), alignof(T)));
	}
#if defined(__cpp_lib_allocate_at_least)
	using at_least = std::allocation_result<T *, std::size_t>;
#else
	struct at_least {
		T *ptr;
		std::size_t count;
	};
#endif
	// Allocates memory for `count` values or more, and says for how many (C++23). Throws like
	// allocate. deallocate takes any count from the one asked for to the one returned.
	[[nodiscard]] at_least allocate_at_least(std::size_t count)
	{
		if (count > PTRDIFF_MAX / sizeof(T))
			detail::too_long();
		std::size_t bytes = count * sizeof(T);
		T *block = static_cast<T *>(detail::allocate_at_least(bytes, alignof(T)));

		return {block, bytes / sizeof(T)};
	}
	// Frees memory of allocate(count).
	void deallocate(T *block, std::size_t count) noexcept
	{
		detail::deallocate(block, count * sizeof(T), alignof(T));
	}

	template <class U>
	friend bool operator==(const allocator &, const allocator<U> &) noexcept
	{
		return true;
	}
	template <class U>
	friend bool operator!=(const allocator &, const allocator<U> &) noexcept
	{
		return false;
	}
};

#if defined(__cpp_lib_memory_resource)

// A memory resource for containers of std::pmr, over malloc's size classes. All objects of this
// class are equal. resource() returns one.
class memory_resource final : public std::pmr::memory_resource {
	void *do_allocate(std::size_t bytes, std::size_t align) override
	{
		return detail::allocate(bytes, align);
	}
	void do_deallocate(void *block, std::size_t bytes, std::size_t align) override
	{
		detail::deallocate(block, bytes, align);
	}
	bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
	{
#if defined(__cpp_rtti)
		return dynamic_cast<const memory_resource *>(&other) != nullptr;
#else
		return this == &other;
#endif
	}
};

// Returns one memory_resource for the whole program, for std::pmr::set_default_resource and others.
// It is never destroyed.
inline memory_resource *resource() noexcept
{
	alignas(memory_resource) static unsigned char memory[sizeof(memory_resource)];
	static memory_resource *const made = ::new (memory) memory_resource;

	return made;
}

// A memory resource with a cache for blocks of one size, such as the nodes of a list, a map or a
// set.
//
//	pinfold::cache_resource nodes("routes", 64);
//	std::pmr::map<int, route> routes(&nodes);
//
// Blocks of more than half of `size` bytes and at most `size` come from the cache. Other blocks,
// such as a hash map's buckets, come from `upstream`. Free all blocks before the resource is
// destroyed. Otherwise the cache's memory stays until the program ends.
class cache_resource final : public std::pmr::memory_resource {
public:
	// Creates the cache. Throws std::bad_alloc if there is no memory, if 4096 caches exist, or
	// if an argument is invalid for pinfold_cache_create.
	explicit cache_resource(const char *name, std::size_t size,
				std::size_t align = alignof(std::max_align_t), unsigned flags = 0,
				std::pmr::memory_resource *upstream = resource())
		: handle_(pinfold_cache_create(name, size, align, flags, nullptr)), size_(size),
		  align_(align), upstream_(upstream)
	{
		if (!handle_)
			detail::no_memory();
	}
	cache_resource(const cache_resource &) = delete;
	cache_resource &operator=(const cache_resource &) = delete;
	~cache_resource() override { pinfold_cache_destroy(handle_); }

	// Returns the resource from which the other blocks come.
	std::pmr::memory_resource *upstream_resource() const noexcept { return upstream_; }
	// Call the functions of pinfold.h that have these names.
	std::size_t in_use() const noexcept { return pinfold_cache_in_use(handle_); }
	pinfold_slab_statistics statistics() const noexcept
	{
		return pinfold_cache_statistics(handle_);
	}
	// Returns the cache for the functions of pinfold.h.
	pinfold_cache *handle() const noexcept { return handle_; }

private:
	// Returns whether the cache serves blocks of this size and alignment. The same arguments
	// always give the same answer, so a block is freed where it came from.
	bool serves(std::size_t bytes, std::size_t align) const noexcept
	{
		return bytes <= size_ && bytes > size_ / 2 && align <= align_;
	}

	void *do_allocate(std::size_t bytes, std::size_t align) override
	{
		if (!serves(bytes, align))
			return upstream_->allocate(bytes, align);
		void *object = pinfold_cache_alloc(handle_);
		if (!object)
			detail::no_memory();
		return object;
	}
	void do_deallocate(void *block, std::size_t bytes, std::size_t align) override
	{
		if (serves(bytes, align))
			pinfold_cache_free(handle_, block);
		else
			upstream_->deallocate(block, bytes, align);
	}
	bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
	{
		return this == &other;
	}

	pinfold_cache *handle_;
	std::size_t size_, align_;
	std::pmr::memory_resource *upstream_;
};

#endif // __cpp_lib_memory_resource

} // namespace pinfold

#endif // PINFOLD_HPP
