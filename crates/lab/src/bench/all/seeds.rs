//! The five documents that Pinfold's benchmarks come from: their questions and their own figures.

/// A document, and the benchmark that answers its question.
pub struct Seed {
    /// The benchmark's name on the command line.
    pub bench: &'static str,
    pub title: &'static str,
    /// Where the figures were published.
    pub source: &'static str,
    /// The machine that the document's figures come from.
    pub machine: &'static str,
    pub question: &'static str,
}

pub const SEEDS: [Seed; 5] = [
    Seed {
        bench: "vmstat",
        title: "Incrementing a counter of the CPU",
        source: "Christoph Lameter, \"Some interesting observations when trying to optimize vmstat \
                 handling\", 8 November 2007",
        machine: "two quad-core Intel Xeons, Linux 2.6.24-rc2",
        question: "What does it cost to protect a CPU's counter from an interruption, and which way \
                   is the cheapest?",
    },
    Seed {
        bench: "slab",
        title: "Allocating and freeing objects",
        source: "Joonsoo Kim and Jesper Dangaard Brouer, \"mm/slub: optimize alloc/free fastpath by \
                 removing preemption on/off\", 2015",
        machine: "not named; a kernel with CONFIG_PREEMPT, slab_test with one thread",
        question: "How many cycles do an allocation and a free take, if the fast path no longer \
                   disables preemption?",
    },
    Seed {
        bench: "jitter",
        title: "A loop that wants its CPU for itself",
        source: "Christoph Lameter, \"vmstat: On demand vmstat workers V3\", 2013",
        machine: "not named; an isolated CPU without a tick",
        question: "How long is the longest pause of a loop that only counts, if statistics are folded \
                   on its CPU, or from another CPU?",
    },
    Seed {
        bench: "counter",
        title: "A counter that many processes change",
        source: "Eric Dumazet and Shaohua Li, \"percpu_counter: scalability works\", May 2011",
        machine: "two Intel Xeons E5540 at 2.53 GHz, 16 hardware threads",
        question: "How long does a loop of mmap and munmap in 16 processes take, if every pass changes \
                   one shared counter by more than its batch?",
    },
    Seed {
        bench: "pft",
        title: "Page faults and memory policies",
        source: "Lee Schermerhorn, \"Mempolicy: More Reference Counting/Fallback Fixes\", April 2008",
        machine: "HP ProLiant 585, four dual-core AMD processors on 2 nodes, 32 GB, Linux \
                  2.6.25-rc8-mm1, a region of 4 GB",
        question: "How many pages a second can 1 to N threads fault in, with and without reference \
                   counts on memory policies?",
    },
];

/// The ways to increment of 2007, in cycles per call: inc_zone, dec_zone, count_vm_event.
pub const INCREMENTS: [(&str, [u32; 3]); 3] = [
    ("interrupts disabled and enabled", [60, 12, 6]),
    ("cmpxchg_local", [93, 96, 6]),
    ("local_inc", [14, 12, 6]),
];

/// slab_test of 2015 for one size, in cycles: alloc, free, and a pair of both.
pub struct Slab {
    pub size: u32,
    pub before: [u32; 3],
    pub after: [u32; 3],
}

const fn slab(size: u32, before: [u32; 3], after: [u32; 3]) -> Slab {
    Slab {
        size,
        before,
        after,
    }
}

pub const SLAB: [Slab; 12] = [
    slab(8, [49, 62, 68], [46, 61, 65]),
    slab(16, [48, 64, 68], [46, 63, 66]),
    slab(32, [53, 70, 69], [49, 69, 65]),
    slab(64, [64, 77, 68], [57, 76, 66]),
    slab(128, [74, 84, 68], [66, 83, 66]),
    slab(256, [84, 114, 68], [84, 110, 71]),
    slab(512, [83, 116, 74], [77, 114, 72]),
    slab(1024, [81, 120, 75], [80, 116, 71]),
    slab(2048, [104, 136, 74], [102, 131, 71]),
    slab(4096, [142, 165, 74], [135, 163, 71]),
    slab(8192, [238, 226, 75], [238, 218, 65]),
    slab(16384, [403, 264, 510], [399, 262, 511]),
];

/// The loop of 2011 with 16 processes and 10,000,000 passes in each, in seconds: real, user, sys.
pub const LOOPS: [(&str, [f64; 3]); 2] = [
    ("spinlock (before)", [134.509, 13.780, 2124.170]),
    ("slowcount (after)", [34.055, 17.910, 481.680]),
];

/// The passes of all processes of 2011.
pub const PASSES: f64 = 160e6;

/// A table of 2008. A line for each number of threads from 1 to 7 has the faults per CPU second and
/// per wall-clock second before the patches, and the same two after them.
pub struct Faults {
    pub memory: &'static str,
    pub policy: &'static str,
    pub title: &'static str,
    pub lines: [[u32; 4]; 7],
}

pub const FAULTS: [Faults; 4] = [
    Faults {
        memory: "anon",
        policy: "system",
        title: "anon+sys-default",
        lines: [
            [181_041, 181_000, 182_174, 182_131],
            [163_497, 323_742, 163_272, 323_820],
            [161_003, 475_130, 159_777, 469_809],
            [155_266, 603_399, 155_456, 606_295],
            [143_072, 655_859, 145_233, 670_912],
            [134_686, 757_457, 137_264, 778_470],
            [128_615, 865_516, 132_672, 896_737],
        ],
    },
    Faults {
        memory: "anon",
        policy: "range",
        title: "anon+vma-policy",
        lines: [
            [181_610, 181_567, 181_823, 181_781],
            [154_635, 305_537, 162_856, 323_839],
            [150_144, 440_599, 160_255, 472_724],
            [145_499, 562_344, 156_590, 609_765],
            [134_843, 625_401, 145_334, 669_095],
            [124_932, 704_900, 138_217, 781_865],
            [119_707, 806_536, 132_963, 900_196],
        ],
    },
    Faults {
        memory: "shmem",
        policy: "system",
        title: "shmem+sys-default",
        lines: [
            [150_218, 150_189, 152_371, 152_338],
            [121_958, 242_026, 128_962, 255_850],
            [116_335, 345_513, 122_205, 364_152],
            [105_485, 416_377, 112_212, 443_998],
            [93_032, 456_389, 100_356, 490_293],
            [78_882, 466_109, 87_685, 515_296],
            [60_979, 423_777, 70_195, 486_841],
        ],
    },
    Faults {
        memory: "shmem",
        policy: "range",
        title: "shmem+vma-policy",
        lines: [
            [146_970, 146_936, 150_319, 150_289],
            [116_237, 231_194, 120_756, 239_616],
            [109_052, 324_182, 113_717, 338_037],
            [98_291, 387_803, 104_346, 412_407],
            [88_979, 437_758, 94_189, 463_928],
            [75_370, 445_762, 79_997, 472_631],
            [60_021, 417_158, 63_099, 438_584],
        ],
    },
];
