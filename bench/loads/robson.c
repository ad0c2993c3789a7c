// Robson's worst case for allocators that serve the first hole that is large enough. Each phase
// doubles the size, and frees all objects but those that stand at the end of a block of the new
// size. So no hole holds a new object if the allocator placed the objects one after the other.
// The load assumes these places and does not look at addresses, so every allocator gets the same
// calls.
#include "load.h"

enum { LIVE = 32 << 20, UNIT = 16, PHASES = 13, MOST = LIVE / UNIT };

static struct object {
    unsigned char *block;
    uint32_t at, units;  // the assumed place
} objects[MOST];

int main(int argc, char **argv) {
    begin(argc, argv);
    uint64_t result = 0;
    uint32_t end = 0, live = 0, count = 0;
    for (int phase = 0; phase < PHASES; phase++) {
        uint32_t units = 1u << phase, kept = 0;
        for (uint32_t i = 0; i < count; i++) {
            struct object object = objects[i];
            // Whether the object has the last unit of a block.
            if ((object.at + object.units) % units == 0) {
                objects[kept++] = object;
                continue;
            }
            result += object.block[0];
            free(object.block);
            live -= object.units;
        }
        count = kept;
        end = (end + units - 1) & ~(units - 1);
        for (; live + units <= MOST; live += units, end += units) {
            size_t size = (size_t)units * UNIT;
            unsigned char *block = (unsigned char *)get(size);
            memset(block, phase, size);
            objects[count++] = (struct object){block, end, units};
        }
    }
    finish(result + live);
}
