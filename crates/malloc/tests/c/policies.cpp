// Memory policies in C++: pinfold::mempolicy. Prints "ok".
#include "pinfold.hpp"
#include "check.h"

#include <cstdio>
#include <type_traits>
#include <utility>
#include <vector>

static_assert(std::is_nothrow_copy_constructible_v<pinfold::mempolicy> &&
	      std::is_nothrow_copy_assignable_v<pinfold::mempolicy>);

int main()
{
	pinfold::mempolicy policy("preferred-many=relative:0,2"), wrong("bind:0-x"), none;

	CHECK(policy && policy.format() == "prefer (many)=relative:0,2" && !*policy.error());
	CHECK(policy.mode() == PINFOLD_MPOL_PREFERRED_MANY &&
	      policy.flags() == PINFOLD_MPOL_RELATIVE_NODES);
	CHECK(!wrong && std::string(wrong.error()).find("at byte 5") != std::string::npos);
	errno = 0;
	CHECK(!wrong.set_thread() && errno == EINVAL && !wrong.apply(&policy, 0));
	CHECK(none && none.format() == "default");
	{
		std::vector<pinfold::mempolicy> copies(100, policy);
		pinfold::mempolicy moved(std::move(copies[7]));

		copies.resize(300, moved);
		copies[1] = none;
		pinfold::mempolicy &self = copies[3];
		copies[3] = self;
		CHECK(copies[299].handle() == policy.handle() &&
		      copies[3].format() == policy.format() && copies[1].format() == "default");
		policy = wrong;
		CHECK(!policy && copies[2].format() == "prefer (many)=relative:0,2");
	}
	if (pinfold_mempolicy_available()) {
		CHECK(pinfold::mempolicy("bind:0").set_thread());
		CHECK(pinfold::mempolicy(pinfold_mempolicy_get_thread()).format() == "bind:0");
		CHECK(none.set_thread());
	}
	std::puts("ok");
}
