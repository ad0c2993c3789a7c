/*
 * A program without a C++ runtime loads a plugin that has one. The plugin must catch what its
 * operators throw. Prints "ok".
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	int (*plugin)(size_t) = (int (*)(size_t))dlsym(library, "plugin");
	if (!plugin || !plugin(SIZE_MAX / 2 - 4096))
		return 1;
	puts("ok");
	return 0;
}
