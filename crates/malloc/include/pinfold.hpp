// pinfold.hpp - Pinfold for C++17: caches of objects, and allocators for containers. Header-only, over pinfold.h.
//
//	pinfold::cache<T>          values of one type, each owned by a pointer that gives it back
//	pinfold::prefilled<T>      values of a cache that are certain: no want of memory halfway
//	pinfold::mempolicy         which nodes memory comes from, as a value
//	pinfold::reader            looks at values that others free deferred, until it goes out of scope
//	pinfold::allocator<T>      for any standard container: std::vector<int, pinfold::allocator<int>>
//	pinfold::memory_resource   for containers of std::pmr, over malloc's size classes
//	pinfold::cache_resource    for containers of std::pmr with nodes of one size, over a cache of its own
//
// Linking with libpinfold.so or libpinfold.a also replaces operator new and operator delete, in all their forms. When there is
// no memory they call the program's new handler (std::set_new_handler) until there is some, or no handler; then they throw
// std::bad_alloc, or return null for std::nothrow. In a program without a C++ runtime they end the process with a message.
//
// The only exceptions thrown here are std::bad_alloc and std::bad_array_new_length, which is one; those of constructors pass through.
// Without exceptions (-fno-exceptions) want of memory ends the program. Everything may be used from any thread at once but for what is
// moved, assigned or destroyed.
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

// What pinfold_malloc aligns to.
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

// A block of malloc's size classes; the alignment is a power of two.
inline void *allocate(std::size_t bytes, std::size_t align)
{
	void *block = align <= natural_align ? pinfold_malloc(bytes) : pinfold_aligned_alloc(align, bytes);

	if (!block)
		no_memory();
	return block;
}

inline void deallocate(void *block, std::size_t bytes, std::size_t align) noexcept
{
	if (align <= natural_align)
		pinfold_free_sized(block, bytes);
	else
		pinfold_free_aligned_sized(block, align, bytes);
}

} // namespace detail

// A memory policy. Copies hold the same one; none is ever changed, so that any thread may use one.
//
//	pinfold::mempolicy policy("interleave:0-3");
//	if (!policy)
//		std::cerr << policy.error() << '\n';
//	else if (!policy.apply(buffer, size))
//		...                                  errno
class mempolicy {
public:
	// The default policy.
	mempolicy() noexcept = default;
	// The policy of a text. When it is none, or there is no memory, the policy is false and error() says what to write instead.
	explicit mempolicy(const char *text) noexcept
		: handle_(pinfold_mempolicy_parse(text, error_, sizeof(error_))), valid_(handle_ != nullptr)
	{
	}
	// Takes a handle over, such as that of pinfold_mempolicy_get_thread(); null is false.
	explicit mempolicy(pinfold_mempolicy_t *handle) noexcept : handle_(handle), valid_(handle != nullptr) {}
	mempolicy(const mempolicy &other) noexcept : handle_(pinfold_mempolicy_get(other.handle_)), valid_(other.valid_)
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

	explicit operator bool() const noexcept { return valid_; }
	const char *error() const noexcept { return error_; }

	// The text that stands for it.
	std::string format() const
	{
		std::string text(pinfold_mempolicy_format(handle_, nullptr, 0), '\0');

		pinfold_mempolicy_format(handle_, &text[0], text.size() + 1);
		return text;
	}
	int mode() const noexcept { return pinfold_mempolicy_mode(handle_); }
	unsigned flags() const noexcept { return pinfold_mempolicy_flags(handle_); }

	// For the calling thread; for a range of addresses. False with errno; a policy that is false is EINVAL.
	bool set_thread() const noexcept { return usable() && pinfold_mempolicy_set_thread(handle_) == 0; }
	bool apply(const void *at, std::size_t len, unsigned moving = 0) const noexcept
	{
		return usable() && pinfold_mempolicy_apply(at, len, handle_, moving) == 0;
	}

	// For the functions of pinfold_policy.h; held as long as this is.
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
// A pointer is a std::unique_ptr: it destroys its value and gives the memory back to the cache. Pointers may outlive the cache: then
// the memory of it stays until the program ends.
template <class T>
class cache {
	static_assert(std::is_object_v<T> && !std::is_array_v<T>, "a cache is of objects, one at a time");
	static_assert(sizeof(T) <= 65536 && alignof(T) <= 65536, "objects of a cache are at most 64 KiB large and aligned");

public:
	using value_type = T;

	// Destroys a value and gives its memory back.
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

	// `flags` are PINFOLD_SLAB_RED_ZONE and so on. std::bad_alloc when there is no memory, or there are 4096 caches.
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

	// A value made of `arguments`. std::bad_alloc, and whatever the constructor throws.
	template <class... Arguments>
	[[nodiscard]] pointer make(Arguments &&...arguments)
	{
		pointer made = try_make(std::forward<Arguments>(arguments)...);

		if (!made)
			detail::no_memory();
		return made;
	}

	// As make, but null when there is no memory.
	template <class... Arguments>
	[[nodiscard]] pointer try_make(Arguments &&...arguments)
	{
		return make_in(handle_, pinfold_cache_alloc(handle_), std::forward<Arguments>(arguments)...);
	}

	// Takes the ownership of a value that a pointer of this cache has released.
	[[nodiscard]] pointer adopt(T *value) noexcept { return pointer(value, deleter(handle_)); }

	// Takes a value back that readers may still look at; it is out of sight of those who come. Its memory is free when they have left.
	void free_deferred(pointer value) noexcept
	{
		static_assert(std::is_trivially_destructible_v<T>, "nobody destroys a value that readers look at");
		pinfold_cache_free_deferred(handle_, value.release());
	}

	// Memory for a T without a value in it, null when there is none; and back.
	[[nodiscard]] void *allocate() noexcept { return pinfold_cache_alloc(handle_); }
	void deallocate(void *memory) noexcept { pinfold_cache_free(handle_, memory); }

	// As the functions of pinfold.h. A cache that has been moved from has none.
	std::ptrdiff_t shrink() noexcept { return pinfold_cache_shrink(handle_); }
	std::size_t validate() const noexcept { return pinfold_cache_validate(handle_, nullptr, nullptr); }
	std::size_t in_use() const noexcept { return pinfold_cache_in_use(handle_); }
	pinfold_slab_statistics statistics() const noexcept { return pinfold_cache_statistics(handle_); }
	const char *name() const noexcept { return pinfold_cache_name(handle_); }
	pinfold_cache *handle() const noexcept { return handle_; }

	// Ends the cache if all values have come back, and says whether it did; else it works as before.
	bool destroy() noexcept
	{
		if (pinfold_cache_destroy(handle_) != 0)
			return false;
		handle_ = nullptr;
		return true;
	}

private:
	friend prefilled<T>;

	// A value in `memory` of a cache, null for null.
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

// Memory for values, set apart before they are needed.
//
//	pinfold::prefilled<node> nodes(cache, 3);
//	auto left = nodes.make(1), right = nodes.make(2);         // these, and one more, do not fail for want of memory
//
// One thread's at a time. It ends, and gives back what is left, before its cache does.
template <class T>
class prefilled {
public:
	// std::bad_alloc when there is no memory for `n` values.
	prefilled(cache<T> &of, std::size_t n) : of_(of.handle()), sheaf_(pinfold_cache_prefill(of_, n))
	{
		if (!sheaf_)
			detail::no_memory();
	}
	prefilled(prefilled &&other) noexcept : of_(other.of_), sheaf_(std::exchange(other.sheaf_, nullptr)) {}
	prefilled &operator=(prefilled &&) = delete;
	~prefilled() { pinfold_sheaf_return(sheaf_); }

	// A value made of `arguments`; std::bad_alloc when len() is 0. What a constructor throws passes through, and len() is one less.
	template <class... Arguments>
	[[nodiscard]] typename cache<T>::pointer make(Arguments &&...arguments)
	{
		void *memory = pinfold_sheaf_alloc(sheaf_);

		if (!memory)
			detail::no_memory();
		return cache<T>::make_in(of_, memory, std::forward<Arguments>(arguments)...);
	}

	// How many are certain; and has it `n`, or says that there is no memory for that.
	std::size_t len() const noexcept { return pinfold_sheaf_len(sheaf_); }
	[[nodiscard]] bool refill(std::size_t n) noexcept { return pinfold_sheaf_refill(sheaf_, n) == 0; }

private:
	const pinfold_cache *of_;
	pinfold_sheaf *sheaf_;
};

// A reader as long as it lives, in the thread that made it: what it has looked up stays as it is, if whoever takes that out of sight frees it
// by cache<T>::free_deferred or pinfold_cache_free_deferred.
class [[nodiscard]] reader {
public:
	reader() noexcept : entered_(pinfold_grace_enter()) {}
	reader(const reader &) = delete;
	reader &operator=(const reader &) = delete;
	~reader() { pinfold_grace_leave(entered_); }

private:
	pinfold_reader entered_;
};

// An allocator for containers, over malloc's size classes. All are equal. Faster than std::allocator only where that is not Pinfold's.
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

	[[nodiscard]] T *allocate(std::size_t count)
	{
		if (count > PTRDIFF_MAX / sizeof(T))
			detail::too_long();
		return static_cast<T *>(detail::allocate(count * sizeof(T), alignof(T)));
	}
	void deallocate(T *block, std::size_t count) noexcept { detail::deallocate(block, count * sizeof(T), alignof(T)); }

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

// A resource for containers of std::pmr, over malloc's size classes. All are equal. See resource().
class memory_resource final : public std::pmr::memory_resource {
	void *do_allocate(std::size_t bytes, std::size_t align) override { return detail::allocate(bytes, align); }
	void do_deallocate(void *block, std::size_t bytes, std::size_t align) override { detail::deallocate(block, bytes, align); }
	bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
	{
#if defined(__cpp_rtti)
		return dynamic_cast<const memory_resource *>(&other) != nullptr;
#else
		return this == &other;
#endif
	}
};

// The program's one memory_resource, for std::pmr::set_default_resource and others. It is never destroyed.
inline memory_resource *resource() noexcept
{
	alignas(memory_resource) static unsigned char memory[sizeof(memory_resource)];
	static memory_resource *const made = ::new (memory) memory_resource;

	return made;
}

// A resource with a cache of its own for blocks of one size, such as the nodes of a list, a map or a set.
//
//	pinfold::cache_resource nodes("routes", 64);
//	std::pmr::map<int, route> routes(&nodes);
//
// Blocks of up to `size` bytes and more than half of it come from the cache, others (a hash map's buckets, say) from `upstream`. The blocks
// must have been given back when the resource is destroyed; else their memory stays until the program ends.
class cache_resource final : public std::pmr::memory_resource {
public:
	// std::bad_alloc when there is no memory, there are 4096 caches, or an argument is none of pinfold_cache_create's.
	explicit cache_resource(const char *name, std::size_t size, std::size_t align = alignof(std::max_align_t), unsigned flags = 0,
				std::pmr::memory_resource *upstream = resource())
		: handle_(pinfold_cache_create(name, size, align, flags, nullptr)), size_(size), align_(align), upstream_(upstream)
	{
		if (!handle_)
			detail::no_memory();
	}
	cache_resource(const cache_resource &) = delete;
	cache_resource &operator=(const cache_resource &) = delete;
	~cache_resource() override { pinfold_cache_destroy(handle_); }

	std::pmr::memory_resource *upstream_resource() const noexcept { return upstream_; }
	std::size_t in_use() const noexcept { return pinfold_cache_in_use(handle_); }
	pinfold_slab_statistics statistics() const noexcept { return pinfold_cache_statistics(handle_); }
	pinfold_cache *handle() const noexcept { return handle_; }

private:
	// The same for a block's allocation and its deallocation.
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
	bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override { return this == &other; }

	pinfold_cache *handle_;
	std::size_t size_, align_;
	std::pmr::memory_resource *upstream_;
};

#endif // __cpp_lib_memory_resource

} // namespace pinfold

#endif // PINFOLD_HPP
