/* loops_called.c - the sections called as functions of another file. */
#include "subject.h"

#define SUBJECT sections_called
#define ADD(n) called_add(n)
#define ADD_RETURN(n) called_add_return(n)
#define STORE_IF_EQUAL(expected, value) called_store_if_equal(expected, value)
#define EXCHANGE_PAIR(old1, old2, new1, new2) called_exchange_pair(old1, old2, new1, new2)
#define PUSH(node) called_push(node)
#define POP() called_pop()
#define APPEND(record) called_append(record)
#define READ() sections_read()
#define RESET sections_reset
#include "loops.h"
