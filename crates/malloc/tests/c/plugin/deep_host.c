/*
 * A program loads a plugin with RTLD_DEEPBIND, as PHP and Samba do, and passes blocks to the plugin
 * and back. It gives the plugin's file name without a folder, so that the loader must search the
 * program's RUNPATH. Prints "ok".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void)
{
	void *library = dlopen("deep.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	char *(*take)(char *) = (char *(*)(char *))dlsym(library, "plugin_take");
	void (*drop)(char *) = (void (*)(char *))dlsym(library, "plugin_drop");
	char *(*line)(void) = (char *(*)(void))dlsym(library, "plugin_line");
	char *block = take(strdup("hello"));
	if (!block || strcmp(block, "hello world") != 0)
		return 2;
	drop(block);
	free(line());
	puts("ok");
	return 0;
}
