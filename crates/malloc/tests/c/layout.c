/*
 * The structs that programs define, or get by value, keep the layout that docs/versions.md
 * promises: programs have it compiled in. Prints "ok".
 */
#include "pinfold.h"
#include "check.h"

#include <stdio.h>

_Static_assert(sizeof(struct pinfold_counter) == 152, "a counter takes 152 bytes");
_Static_assert(_Alignof(struct pinfold_counter) == 8, "a counter is aligned to 8");
_Static_assert(sizeof(struct pinfold_counter_tree) == 160, "a tree takes 160 bytes");
_Static_assert(_Alignof(struct pinfold_counter_tree) == 8, "a tree is aligned to 8");
_Static_assert(sizeof(struct pinfold_event) == 16, "an event counter takes 16 bytes");
_Static_assert(_Alignof(struct pinfold_event) == 8, "an event counter is aligned to 8");
_Static_assert(sizeof(struct pinfold_reader) == 16, "a reader takes 16 bytes");
_Static_assert(sizeof(struct pinfold_isolation_report) == 11 * 8, "a report has eleven fields");
_Static_assert(offsetof(struct pinfold_isolation_report, flushes) == 10 * 8, "in this order");
_Static_assert(sizeof(struct pinfold_mallinfo2) == 10 * sizeof(size_t), "glibc's ten fields");
_Static_assert(offsetof(struct pinfold_mallinfo2, keepcost) == 9 * sizeof(size_t),
	       "in glibc's order");
_Static_assert(sizeof(struct pinfold_mallinfo) == 10 * sizeof(int), "glibc's ten fields");
_Static_assert(offsetof(struct pinfold_mallinfo, keepcost) == 9 * sizeof(int), "in this order");
_Static_assert(sizeof(struct pinfold_slab_statistics) == 72, "statistics have nine fields");
_Static_assert(offsetof(struct pinfold_slab_statistics, stride) == 64, "in this order");
_Static_assert(offsetof(struct pinfold_slab_report, kind) == 40, "a report's fields stay");
_Static_assert(offsetof(struct pinfold_cache_info, flags) == 64, "a cache's fields stay");
_Static_assert(sizeof(struct pinfold_ref) == 24, "a reference count takes 24 bytes");

/* Programs have the initialisers compiled in too. */
static const struct pinfold_counter counter = PINFOLD_COUNTER_INIT(7);
static const struct pinfold_counter_tree tree = PINFOLD_COUNTER_TREE_INIT(7);
static const struct pinfold_ref ref = PINFOLD_REF_INIT(NULL);
static const struct pinfold_event event = PINFOLD_EVENT_INIT;

int main(void)
{
	CHECK(counter.pinfold_private[0] == 64 && counter.pinfold_private[10] == 7);
	CHECK(tree.pinfold_private[0] == 64 && tree.pinfold_private[1] == 32);
	CHECK(tree.pinfold_private[10] == 7 && tree.pinfold_private[19] == 0);
	CHECK(event.pinfold_private[0] == 0 && event.pinfold_private[1] == 0);
	CHECK(ref.pinfold_private[0] == 2 && ref.pinfold_private[1] >> 63 == 1);
	puts("ok");
	return 0;
}
