/* Reference counts per CPU in C: each function, and threads that share a count. */
#define _GNU_SOURCE
#include "check.h"
#include "pinfold.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS 200

static atomic_int released;

static void count_release(struct pinfold_ref *ref)
{
	CHECK(pinfold_ref_is_zero(ref) && pinfold_ref_is_dying(ref));
	atomic_fetch_add(&released, 1);
}

static struct pinfold_ref count = PINFOLD_REF_INIT(count_release);

static void functions(void)
{
	pinfold_ref_get(&count);
	CHECK(pinfold_ref_tryget(&count) && pinfold_ref_tryget_live(&count));
	pinfold_ref_put(&count);
	pinfold_ref_put(&count);
	CHECK(!pinfold_ref_is_dying(&count) && !pinfold_ref_is_zero(&count));
	CHECK(!pinfold_ref_resurrect(&count) && !pinfold_ref_reinit(&count));
	CHECK(pinfold_ref_kill(&count) == 0);
	errno = 0;
	CHECK(pinfold_ref_kill(&count) == -1 && errno == EALREADY);
	CHECK(!pinfold_ref_tryget_live(&count) && pinfold_ref_tryget(&count));
	pinfold_ref_put(&count);
	CHECK(pinfold_ref_resurrect(&count) && pinfold_ref_kill(&count) == 0);
	CHECK(atomic_load(&released) == 0);
	pinfold_ref_put(&count);
	CHECK(atomic_load(&released) == 1 && !pinfold_ref_tryget(&count));
	CHECK(pinfold_ref_reinit(&count) && pinfold_ref_tryget_live(&count));
	pinfold_ref_put(&count);
	CHECK(pinfold_ref_kill(&count) == 0 && atomic_load(&released) == 2);
	pinfold_ref_exit(&count);
	pinfold_ref_init(&count, NULL);
	CHECK(pinfold_ref_kill(&count) == 0 && atomic_load(&released) == 2);
	pinfold_ref_exit(&count);
}

/* An object that its last reference frees. */
struct object {
	struct pinfold_ref ref;
	atomic_bool alive;
};

static void free_object(struct pinfold_ref *ref)
{
	struct object *object = (struct object *)ref;

	CHECK(atomic_exchange(&object->alive, false));
	pinfold_ref_exit(ref);
	free(object);
	atomic_fetch_add(&released, 1);
}

static void *work(void *argument)
{
	struct object *object = argument;
	cpu_set_t set;

	for (int turn = 0; turn < 1000; turn++) {
		if (turn % 100 == 0) {
			CPU_ZERO(&set);
			CPU_SET(turn / 100 % (int)sysconf(_SC_NPROCESSORS_ONLN), &set);
			sched_setaffinity(0, sizeof(set), &set);
		}
		pinfold_ref_get(&object->ref);
		CHECK(atomic_load(&object->alive));
		pinfold_ref_put(&object->ref);
	}
	pinfold_ref_put(&object->ref);
	return NULL;
}

static void threads(void)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct object *object = malloc(sizeof(*object));
		pthread_t threads[THREADS];

		CHECK(object);
		pinfold_ref_init(&object->ref, free_object);
		atomic_init(&object->alive, true);
		atomic_store(&released, 0);
		for (int n = 0; n < THREADS; n++) {
			pinfold_ref_get(&object->ref);
			CHECK(pthread_create(&threads[n], NULL, work, object) == 0);
		}
		usleep(round);
		CHECK(pinfold_ref_kill(&object->ref) == 0);
		for (int n = 0; n < THREADS; n++)
			pthread_join(threads[n], NULL);
		CHECK(atomic_load(&released) == 1);
	}
}

int main(void)
{
	functions();
	threads();
	puts("ok");
	return 0;
}
