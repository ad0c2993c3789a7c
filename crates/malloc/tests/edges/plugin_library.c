/* A plugin that allocates. It is linked with an allocator of its own, whose names stay hidden. */
#include "edge.h"

void plugin_work(unsigned seed)
{
	churn(seed, 20000);
}
