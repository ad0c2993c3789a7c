/*
 * A program maps pages where the allocator would map next.
 *
 * The program puts pages of its own behind each writable mapping that it finds, allocates more, and
 * repeats this. No page of the program's may change, and no block may overlap one.
 */
#include "edge.h"
#include <stdint.h>
#include <sys/mman.h>

enum { ROUNDS = 40, PAGES = 8192, BLOCKS = 200 };

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static unsigned char *pages[PAGES];
static size_t page_count;

/* Maps a page of the program's at `address`, unless something is mapped there. */
static void take(uintptr_t address)
{
	size_t size = (size_t)sysconf(_SC_PAGESIZE);
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
	if (page_count == PAGES)
		return;
	void *page = mmap((void *)address, size, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (page == MAP_FAILED)
		return;
	if (page != (void *)address) {
		munmap(page, size);
		return;
	}
	memset(page, 0xa5, size);
	pages[page_count++] = page;
}

static void take_behind_mappings(void)
{
	static uintptr_t ends[4096];
	size_t count = 0;
	char line[4096];
	FILE *maps = fopen("/proc/self/maps", "r");
	CHECK(maps);
	while (fgets(line, sizeof line, maps) && count < 4096) {
		unsigned long from, to;
		char access[5], path[2000] = "";
		CHECK(sscanf(line, "%lx-%lx %4s %*s %*s %*s %1999s", &from, &to, access, path) >= 3);
		if (access[1] == 'w' && !path[0])
			ends[count++] = to;
	}
	fclose(maps);
	for (size_t i = 0; i < count; i++) {
		take(ends[i]);
		/* Regions of the allocator begin at multiples of 64 MiB. */
		take((ends[i] & ~(uintptr_t)((64 << 20) - 1)) + (64 << 20));
	}
}

int main(void)
{
	static unsigned char *blocks[BLOCKS];
	static size_t sizes[BLOCKS];
	size_t size = (size_t)sysconf(_SC_PAGESIZE);
	for (unsigned round = 0; round < ROUNDS; round++) {
		take_behind_mappings();
		for (size_t i = 0; i < BLOCKS; i++) {
			free(blocks[i]);
			sizes[i] = i % 8 == 0 ? 3000000 : i % 2 ? 200 * (i + 1) : 70000;
			CHECK((blocks[i] = malloc(sizes[i])));
			memset(blocks[i], (int)i, sizes[i]);
		}
		churn(round, 2000);
		for (size_t i = 0; i < BLOCKS; i++)
			CHECK(blocks[i][0] == i && blocks[i][sizes[i] - 1] == i);
	}
	CHECK(page_count > 20);
	for (size_t i = 0; i < page_count; i++)
		for (size_t at = 0; at < size; at++)
			CHECK(pages[i][at] == 0xa5);
	return 0;
}
