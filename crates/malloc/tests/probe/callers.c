/* Calls each function of the malloc family from functions that keep frame pointers. */
#include <stddef.h>

struct family {
  void *(*malloc)(size_t);
  void *(*calloc)(size_t, size_t);
  void *(*realloc)(void *, size_t);
  void *(*reallocarray)(void *, size_t, size_t);
  int (*posix_memalign)(void **, size_t, size_t);
  void *(*aligned_alloc)(size_t, size_t);
  void *(*memalign)(size_t, size_t);
  void *(*valloc)(size_t);
  void (*free)(void *);
  void (*free_sized)(void *, size_t);
};

/* Returns a block of `size` bytes by way number `way`, or null if there is no such way. */
__attribute__((noinline)) void *inner(const struct family *f, int way, size_t size) {
  void *volatile block = NULL;
  void *got = NULL;
  switch (way) {
  case 0: block = f->malloc(size); break;
  case 1: block = f->calloc(1, size); break;
  case 2: block = f->posix_memalign(&got, 64, size) ? NULL : got; break;
  case 3: block = f->posix_memalign(&got, 8, size) ? NULL : got; break;
  case 4: block = f->aligned_alloc(64, size); break;
  case 5: block = f->memalign(128, size); break;
  case 6: block = f->valloc(size); break;
  case 7: block = f->realloc(NULL, size); break;
  case 8: block = f->realloc(f->malloc(size / 3), size); break;
  case 9: block = f->reallocarray(f->malloc(size / 3), size, 1); break;
  case 10: block = f->realloc(f->malloc(4 * size), size); break;
  }
  return block;
}

__attribute__((noinline)) void *outer(const struct family *f, int way, size_t size) {
  void *volatile block = inner(f, way, size);
  return block;
}

__attribute__((noinline)) int inner_free(const struct family *f, void *block, size_t size) {
  if (size)
    f->free_sized(block, size);
  else
    f->free(block);
  return 1;
}

__attribute__((noinline)) int outer_free(const struct family *f, void *block, size_t size) {
  return inner_free(f, block, size) + 1;
}
