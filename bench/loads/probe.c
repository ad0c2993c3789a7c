// Prints the file that malloc comes from.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    Dl_info info;
    void *block = malloc(100);
    void *found = dlsym(RTLD_DEFAULT, "malloc");
    if (!block || !found || !dladdr(found, &info)) return 1;
    free(block);
    puts(info.dli_fname);
    return 0;
}
