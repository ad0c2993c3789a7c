/* Heap profiles: starting, stopping and writing one, and which errors there are. */
#include "check.h"
#include <errno.h>
#include <pinfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
	char path[64];

	errno = 0;
	CHECK(pinfold_heap_write("/dev/null") == -1 && errno == ENODATA);
	errno = 0;
	CHECK(pinfold_heap_write_fd(1) == -1 && errno == ENODATA);
	errno = 0;
	CHECK(pinfold_heap_start(0) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(pinfold_heap_start(((uint64_t)1 << 40) + 1) == -1 && errno == EINVAL);
	CHECK(pinfold_guard_start(0) == -1 && errno == EINVAL);
	CHECK(pinfold_guard_start(1) == 0);
	CHECK(pinfold_heap_start(PINFOLD_HEAP_INTERVAL) == 0);
	/* Each block of more than 30 bytes is sampled from now on. */
	CHECK(pinfold_heap_start(1) == 0);

	for (size_t size = 40; size < 3 << 20; size = size * 3 / 2) {
		errno = 77;
		char *block = pinfold_malloc(size);
		CHECK(block && errno == 77 && pinfold_malloc_usable_size(block) >= size);
		memset(block, 1, size);
		block = pinfold_realloc(block, size + 1);
		CHECK(block && block[size - 1] == 1);
		block = pinfold_realloc(block, size / 2);
		CHECK(block && block[size / 2 - 1] == 1);
		pinfold_free(block);
		CHECK(errno == 77);
	}
	CHECK(pinfold_heap_stop() == 0);
	CHECK(pinfold_guard_stop() == 0);

	snprintf(path, sizeof path, "/tmp/pinfold-heap.%d", (int)getpid());
	CHECK(pinfold_heap_write(path) == 0);
	FILE *file = fopen(path, "rb");
	char magic[8] = { 0 };
	CHECK(file && fread(magic, 1, 7, file) == 7 && !strcmp(magic, "PINHEAP"));
	fclose(file);
	unlink(path);

	/* A file that is open already: the profile begins at its position. */
	file = tmpfile();
	CHECK(file && fputs("head", file) >= 0 && fflush(file) == 0);
	CHECK(pinfold_heap_write_fd(fileno(file)) == 0);
	memset(magic, 0, sizeof magic);
	CHECK(fseek(file, 4, SEEK_SET) == 0 && fread(magic, 1, 7, file) == 7);
	CHECK(!strcmp(magic, "PINHEAP"));
	fclose(file);
	/* A pipe, which has no position, and whose reader is slower than the writer. */
	FILE *reader = popen("test \"$(head -c 7)\" = PINHEAP && cat > /dev/null", "w");
	CHECK(reader && pinfold_heap_write_fd(fileno(reader)) == 0 && pclose(reader) == 0);
	errno = 0;
	CHECK(pinfold_heap_write_fd(-1) == -1 && errno == EBADF);
	errno = 0;
	CHECK(pinfold_heap_write("/nowhere/at/all") == -1 && errno == ENOENT);
	puts("ok");
	return 0;
}
