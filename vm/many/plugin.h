// The part of qemu's plugin interface, version 1, that plugin.c uses.
#ifndef PLUGIN_H
#define PLUGIN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

typedef uint64_t Id;
typedef uint32_t MemInfo;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_hwaddr;

typedef struct {
    const char *target;
    struct {
        int least, current;
    } version;
    bool is_machine;
    struct {
        int cpus, most_cpus;
    } machine;
} Info;

enum { NO_REGISTERS = 0 };
enum { LOADS_AND_STORES = 3 };

typedef void (*OnCpu)(Id, unsigned cpu);
typedef void (*OnBlock)(Id, struct qemu_plugin_tb *);
typedef void (*OnRun)(unsigned cpu, void *data);
typedef void (*OnAccess)(unsigned cpu, MemInfo, uint64_t address, void *data);

void qemu_plugin_register_vcpu_idle_cb(Id, OnCpu);
void qemu_plugin_register_vcpu_tb_trans_cb(Id, OnBlock);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, OnRun, int flags, void *data);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, OnRun, int flags,
                                            void *data);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, OnAccess, int flags, int which,
                                      void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
bool qemu_plugin_mem_is_store(MemInfo);
struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(MemInfo, uint64_t address);
bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *);
uint64_t qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *);
#endif
