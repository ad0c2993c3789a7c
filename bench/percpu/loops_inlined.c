/* loops_inlined.c - the sections compiled into the loops, as librseq's header would be. */
#include "subject.h"

#define SUBJECT sections_inlined
#define ADD(n) add(n)
#define ADD_RETURN(n) add_return(n)
#define STORE_IF_EQUAL(expected, value) store_if_equal(expected, value)
#define EXCHANGE_PAIR(old1, old2, new1, new2) exchange_pair(old1, old2, new1, new2)
#define PUSH(node) push(node)
#define POP() pop()
#define APPEND(record) append(record)
#define READ() sections_read()
#define RESET sections_reset
#include "loops.h"
