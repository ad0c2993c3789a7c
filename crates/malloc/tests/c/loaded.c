/*
 * Loads the library by dlopen, where it gets no static TLS, and calls it by its prefixed names
 * beside the system's malloc. Prints "ok".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	void *(*allocate)(size_t) = (void *(*)(size_t))dlsym(library, "pinfold_malloc");
	void (*release)(void *) = (void (*)(void *))dlsym(library, "pinfold_free");
	for (int i = 0; i < 100000; i++) {
		char *p = allocate((size_t)i % 3000);
		memset(p, 1, (size_t)i % 3000);
		release(p);
	}
	puts("ok");
	return 0;
}
