// Buffers that grow: by a half each time as vectors do, by 64 KiB steps up to 1.9 MB as readers of
// files do, and by a few bytes as strings do. Several buffers grow in turn, so no buffer always has
// a free neighbour.
#include "load.h"

enum { BUFFERS = 8, ROUNDS = 60 };

static char *buffers[BUFFERS];
static size_t sizes[BUFFERS];
static uint64_t result;

static void grow(int which, size_t size) {
    char *fresh = (char *)realloc(buffers[which], size);
    if (!fresh) die("no memory");
    if (sizes[which] && fresh[sizes[which] - 1] != (char)sizes[which]) die("realloc lost a byte");
    for (size_t at = sizes[which]; at < size; at += 1024) fresh[at] = (char)at;
    fresh[size - 1] = (char)size;
    buffers[which] = fresh;
    sizes[which] = size;
    result += size;
}

static void release(void) {
    for (int i = 0; i < BUFFERS; i++) {
        free(buffers[i]);
        buffers[i] = NULL;
        sizes[i] = 0;
    }
}

int main(int argc, char **argv) {
    begin(argc, argv);
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t size = 64; size < 4 * MIB; size += size / 2)
            for (int i = 0; i < BUFFERS; i++) grow(i, size + (size_t)i);
        release();
        for (size_t size = 64 * KIB; size < 1900 * KIB; size += 64 * KIB)
            for (int i = 0; i < BUFFERS; i++) grow(i, size);
        release();
        for (size_t size = 10; size < 6000; size += 7)
            for (int i = 0; i < BUFFERS; i++) grow(i, size);
        release();
    }
    finish(result);
}
