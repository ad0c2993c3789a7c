// How a load tells the plugin vm/many/plugin.c what it does: instructions whose last four bytes are
// a magic displacement. Outside the emulator they do nothing.
#ifndef MANY_H
#define MANY_H

#define MANY_MAGIC 0x4d4e5900

enum many_mark {
    // Marks: instructions that do nothing.
    MANY_CLEAR = 1,    // forgets which CPU holds which line
    MANY_COUNT,        // counts from here on
    MANY_STOP,         // counts no longer
    MANY_REPORT,       // writes what was counted, and forgets it
    MANY_WAIT,         // this CPU waits, and holds no other CPU back
    MANY_WAIT_TO_WORK, // this CPU waits, and CPUs that already work must not run ahead of it
    // Values: loads of a byte. The address is the value.
    MANY_ALLOC,     // the address of a function that allocates
    MANY_FREE,      // the address of a function that frees
    MANY_FORGET,    // any address: forgets all functions
    MANY_ZERO,      // the address that stands for number 0
    MANY_NUMBER,    // the run's number, added to that address
    MANY_ALLOCATOR, // where the allocator's library begins
    MANY_LIBC,      // where the C library begins
    MANY_PROGRAM,   // where the program begins
    // A store: the program's first write to an object.
    MANY_TOUCH,
};

#define many_mark(code) __asm__ volatile("nopl %c0(%%rax)" ::"i"(MANY_MAGIC + (code)) : "memory")
#define many_value(code, address)                                                                  \
    __asm__ volatile("movb %c1(%0), %%al" ::"r"((const char *)(address) - MANY_MAGIC - (code)),    \
                     "i"(MANY_MAGIC + (code))                                                      \
                     : "rax", "memory")
#define many_touch(object)                                                                         \
    __asm__ volatile("movb %%al, %c1(%0)" ::"r"((char *)(object) - MANY_MAGIC - MANY_TOUCH),       \
                     "i"(MANY_MAGIC + MANY_TOUCH)                                                  \
                     : "memory")
#endif
