/*
 * Under RLIMIT_AS, allocates blocks of one size until memory runs out, frees all, and goes on with
 * another size. Each size must get a third of the limit. Prints "ok".
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static void *blocks[4000000];

static size_t fill(size_t size)
{
	size_t count = 0;
	errno = 0;
	while (count < sizeof blocks / sizeof *blocks && (blocks[count] = malloc(size)) != NULL)
		memset(blocks[count++], 1, size < 64 ? size : 64);
	if (errno != ENOMEM) {
		fprintf(stderr, "errno is %d after %zu blocks of %zu\n", errno, count, size);
		exit(1);
	}
	for (size_t i = 0; i < count; i++)
		free(blocks[i]);
	return count * size;
}

int main(void)
{
	struct rlimit limit;
	getrlimit(RLIMIT_AS, &limit);
	size_t sizes[] = { 4096, 200, 100000, 5000000, 30000, 1000000, 4096 };
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		size_t got = fill(sizes[i]);
		if (got < limit.rlim_cur / 3) {
			fprintf(stderr, "only %zu of %zu bytes in blocks of %zu\n", got,
				(size_t)limit.rlim_cur, sizes[i]);
			return 1;
		}
	}
	puts("ok");
	return 0;
}
