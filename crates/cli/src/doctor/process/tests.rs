//! Checks on made-up processes, in states that few machines can provoke.

use super::*;
use crate::live::segment;
use pinfold::internal::segment::EVENTS;
use pinfold::vmstat::Item;
use std::fs;

const MIB: u64 = 1 << 20;

fn files(folder: &Path) -> foreign::Process {
    foreign::Process::in_any_state(folder, 7).unwrap()
}

/// Returns a process on two nodes that holds nothing, without variables and without a limit.
fn process() -> Process {
    Process {
        files: files(tempfile::tempdir().unwrap().path()),
        snapshot: Snapshot::parse(&segment(0)).unwrap(),
        environment: Vec::new(),
        cgroup: None,
    }
}

/// Asserts that `verdict` is a problem, and that its advice contains `remedy`.
fn assert_problem(verdict: &Check, remedy: &str) {
    assert_eq!(
        verdict.state,
        State::Problem,
        "no problem: {}",
        verdict.found
    );
    assert!(verdict.follows.contains(remedy), "{}", verdict.follows);
}

/// Asserts that `verdict` is no problem, and that there is nothing to do.
fn assert_good(verdict: &Check) {
    assert_eq!(verdict.state, State::Ok, "a problem: {}", verdict.found);
    assert_eq!(verdict.follows, "nothing to do");
}

/// Returns the verdict on the limit of a cgroup that uses `used` of 1000 MiB, in which the kernel
/// ended `kills` processes.
fn limit(used: u64, kills: u64) -> Check {
    let cgroup = Cgroup {
        limit: 1000 * MIB,
        used,
        kills,
    };
    let process = Process {
        cgroup: Some(cgroup),
        ..process()
    };
    process.limit()
}

#[test]
fn file_pages_that_the_kernel_can_drop_are_free() {
    let v1 = "inactive_file 5\ntotal_inactive_file 70\n";
    for (stat, bytes) in [("anon 9\ninactive_file 4096\n", 4096), (v1, 70), ("", 0)] {
        assert_eq!(droppable(stat), bytes);
    }
}

#[test]
fn a_near_limit_and_ended_processes_are_problems() {
    assert_good(&process().limit());
    assert_good(&limit(900 * MIB, 0));
    let near = limit(900 * MIB + 1, 0);
    assert_problem(&near, "less than a tenth is left");
    assert!(near.found.contains("uses 900.0 MiB of 1000.0 MiB"));
    let killed = limit(10 * MIB, 2);
    assert_problem(&killed, "set PINFOLD_MEMORY_LIMIT");
    assert!(killed.found.contains("ended 2 of its processes"));
    // The lack of memory now is worse than what happened before.
    assert_problem(&limit(990 * MIB, 2), "less than a tenth is left");
}

#[test]
fn much_kept_memory_is_a_problem() {
    // The free memory is on both nodes.
    let kept = |dirty: u64, held: u64| {
        let mut process = process();
        process.snapshot.held = held;
        process.snapshot.nodes[0].dirty = dirty / 2;
        process.snapshot.nodes[1].dirty = dirty - dirty / 2;
        process.kept()
    };
    assert_good(&kept(0, 0));
    let much = kept(100 * MIB, 300 * MIB);
    assert_problem(&much, "set PINFOLD_MEMORY_LIMIT");
    assert!(much.found.starts_with("100.0 MiB"), "{}", much.found);
    assert!(much.found.contains("33 %"), "{}", much.found);
    // Just over both bounds, and then at most at one of them.
    assert_problem(&kept(64 * MIB + 1, 200 * MIB), "PINFOLD_SHEPHERD=on");
    assert_good(&kept(64 * MIB, 64 * MIB));
    assert_good(&kept(100 * MIB, 400 * MIB));
}

#[test]
fn many_objects_of_other_nodes_are_a_problem() {
    // Both nodes and two caches count.
    let nodes = |elsewhere: u64, refilled: u64| {
        let mut process = process();
        let caches = &mut process.snapshot.caches;
        let elsewhere_at = SlabEvent::AllocNodeMismatch.index();
        caches[0].nodes[0][elsewhere_at] = elsewhere / 2;
        caches[3].nodes[1][elsewhere_at] = elsewhere - elsewhere / 2;
        caches[0].nodes[1][SlabEvent::Refilled.index()] = refilled;
        process.nodes()
    };
    assert_good(&nodes(0, 0));
    let many = nodes(300_000, 1_000_000);
    assert_problem(&many, "`pinfold numastat PID` shows which");
    assert!(many.found.starts_with("2 "), "{}", many.found);
    assert!(many.found.contains("300000"), "{}", many.found);
    assert!(
        many.found.contains("30 % of 1000000 that left slabs"),
        "{}",
        many.found
    );
    // Just over both bounds, and then at most at one of them.
    assert_problem(&nodes(100_001, 2_000_000), "--policy");
    assert_good(&nodes(100_000, 200_000));
    assert_good(&nodes(200_000, 4_000_000));
}

/// Writes files with these names and texts below `folder`.
fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

#[test]
fn the_tightest_limit_above_a_process_counts() {
    let root = tempfile::tempdir().unwrap();
    let v1 = "sys/fs/cgroup/memory/x/memory";
    write(
        root.path(),
        &[
            ("proc/7/cgroup", "0::/a/b/c\n"),
            ("proc/8/cgroup", "8:memory:/x\n0::/a/b\n"),
            ("proc/9/cgroup", "0::/\n"),
            ("sys/fs/cgroup/a/memory.max", "5000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "900\n"),
            (
                "sys/fs/cgroup/a/b/memory.stat",
                "anon 7\ninactive_file 100\n",
            ),
            ("sys/fs/cgroup/a/b/memory.events", "oom 9\noom_kill 3\n"),
            ("sys/fs/cgroup/a/b/c/memory.max", "max\n"),
            (&format!("{v1}.limit_in_bytes"), "700\n"),
            (&format!("{v1}.usage_in_bytes"), "600\n"),
            (&format!("{v1}.oom_control"), "under_oom 0\noom_kill 2\n"),
        ],
    );
    let found = |pid: u32| {
        let cgroup = Cgroup::of(pid, root.path().as_os_str().as_bytes())?;
        Some((cgroup.limit, cgroup.used, cgroup.kills))
    };
    assert_eq!(found(7), Some((1000, 800, 3)));
    assert_eq!(found(8), Some((700, 600, 2)));
    assert_eq!((found(9), found(10)), (None, None));
}

#[test]
fn huge_pages_near_the_limit_are_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let huge = |huge: u64, used: u64| {
        let text = format!("Rss: 50000 kB\nAnonHugePages: {huge} kB\n");
        write(folder.path(), &[("smaps_rollup", &text)]);
        let cgroup = Cgroup {
            limit: 1000 * MIB,
            used,
            kills: 0,
        };
        let process = Process {
            files: files(folder.path()),
            cgroup: Some(cgroup),
            ..process()
        };
        process.huge_pages()
    };
    assert_problem(&huge(2048, 950 * MIB), "PINFOLD_THP=never");
    assert_good(&huge(0, 950 * MIB));
    let far = huge(2048, 100 * MIB);
    assert_good(&far);
    assert!(
        far.found.starts_with("2.0 MiB of 48.8 MiB"),
        "{}",
        far.found
    );
    assert!(process().huge_pages().follows.contains("as root"));
}

#[test]
fn huge_pages_that_hold_little_are_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let verdict = |huge: u64, used: u64, free: u64| {
        let text = format!("Rss: 5000000 kB\nAnonHugePages: {} kB\n", huge << 10);
        write(folder.path(), &[("smaps_rollup", &text)]);
        let mut process = Process {
            files: files(folder.path()),
            ..process()
        };
        process.snapshot.huge = 0;
        process.snapshot.nodes.truncate(1);
        process.snapshot.nodes[0].used = used * MIB;
        // One cache, with one slab of `free` objects of 1 MiB, all of them free.
        process.snapshot.caches.truncate(1);
        let cache = &mut process.snapshot.caches[0];
        (cache.size, cache.per_slab) = (MIB, free);
        cache.nodes.truncate(1);
        cache.nodes[0] = [0; EVENTS];
        cache.nodes[0][SlabEvent::SlabAlloc.index()] = 1;
        process.huge_pages()
    };
    assert_good(&verdict(400, 300, 0));
    assert_good(&verdict(400, 700, 500));
    assert_good(&verdict(60, 1, 0));
    let sparse = verdict(400, 600, 500);
    assert_problem(&sparse, "thp=never");
    assert!(
        sparse.found.ends_with("only 100.0 MiB are in use"),
        "{}",
        sparse.found
    );
}

#[test]
fn much_memory_in_sheaves_is_a_problem() {
    let cpus = pinfold_rseq::possible() as u64;
    // A cache whose sheaves have room for `room` objects of 1 MiB, of which `out` are out.
    let sheaves = |room: u64, out: u64, held: u64| {
        let mut process = process();
        let cache = &mut process.snapshot.caches[0];
        cache.size = MIB;
        cache.sheaf_capacity = room.div_ceil(2 * cpus);
        cache.nodes[0][SlabEvent::Refilled.index()] = out;
        process.snapshot.held = held;
        process.sheaves()
    };
    assert_problem(&sheaves(1000, 100, 150 * MIB), "PINFOLD_SHEPHERD=on");
    assert_good(&sheaves(1000, 64, 100 * MIB));
    assert_good(&sheaves(1000, 100, 200 * MIB));
    // What fits into the sheaves, not what is out.
    let full = sheaves(2 * cpus, 1000, 1000 * MIB);
    assert_good(&full);
    let expected = format!("at most {}.0 MiB of 1000.0 MiB", 2 * cpus);
    assert!(full.found.starts_with(&expected), "{}", full.found);
}

#[test]
fn many_mappings_and_a_near_limit_on_addresses_are_problems() {
    let folder = tempfile::tempdir().unwrap();
    let most = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most: usize = most.trim().parse().unwrap();
    let mappings = |count: usize, size: u64, limit: &str| {
        write(
            folder.path(),
            &[
                ("maps", &"-\n".repeat(count)),
                ("status", &format!("VmSize: {size} kB\n")),
                (
                    "limits",
                    &format!("Max address space  {limit}  unlimited  bytes\n"),
                ),
            ],
        );
        let process = Process {
            files: files(folder.path()),
            ..process()
        };
        process.mappings()
    };
    assert_good(&mappings(100, 4096, "unlimited"));
    assert_good(&mappings(100, 4096, "8388608"));
    assert_problem(&mappings(100, 7168, "8388608"), "ulimit -v");
    assert_problem(
        &mappings(most / 10 * 8 + 1, 4096, "unlimited"),
        "max_map_count",
    );
}
