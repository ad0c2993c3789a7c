//! Reads machines that are made up as trees of files.

use pinfold::internal::topology_below;
use pinfold::topology::{CpuSet, ListError, NodeId, Topology, TopologyError};
use proptest::prelude::*;
use std::fs;
use std::io::Write;
use tempfile::TempDir;

fn machine(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (file, text) in files {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

fn try_read(root: &TempDir) -> Result<Topology, TopologyError> {
    topology_below(root.path().as_os_str().as_encoded_bytes())
}

fn read(root: &TempDir) -> Topology {
    try_read(root).unwrap()
}

const CPU: &str = "sys/devices/system/cpu";
const NODE: &str = "sys/devices/system/node";

#[test]
fn sparse_and_memoryless_nodes() {
    let root = machine(&[
        (&format!("{CPU}/possible"), "0-15\n"),
        (&format!("{CPU}/online"), "0-11\n"),
        (&format!("{NODE}/online"), "0,2,8\n"),
        (&format!("{NODE}/has_memory"), "2,8\n"),
        (&format!("{NODE}/node0/cpulist"), "0-3\n"),
        (&format!("{NODE}/node2/cpulist"), "4-7\n"),
        (&format!("{NODE}/node8/cpulist"), "\n"),
        (&format!("{NODE}/node0/distance"), "10 21 32\n"),
    ]);
    let topology = read(&root);
    assert_eq!(topology.nodes.to_string(), "0,2,8");
    assert_eq!(topology.with_memory.to_string(), "2,8");
    assert_eq!(topology.possible.len(), 16);
    assert_eq!(topology.allowed.to_string(), "0-11");
    assert_eq!(topology.cpus_of(NodeId(2)).unwrap().to_string(), "4-7");
    assert!(topology.cpus_of(NodeId(8)).unwrap().is_empty());
    assert!(topology.cpus_of(NodeId(5)).unwrap().is_empty());
    assert_eq!(topology.distance(NodeId(0), NodeId(8)), 32);
    assert_eq!(topology.distance(NodeId(2), NodeId(8)), 20);
    assert_eq!(topology.distance(NodeId(2), NodeId(2)), 10);
}

/// The numbers of possible CPUs may have holes. A table by CPU number needs a place for each number
/// up to the last, and a CPU that is not possible belongs to no set.
#[test]
fn holes_in_the_numbers_of_cpus() {
    let root = machine(&[
        (&format!("{CPU}/possible"), "0,2-3\n"),
        (&format!("{CPU}/online"), "0,3\n"),
        (&format!("{CPU}/isolated"), "3\n"),
        (&format!("{NODE}/online"), "0,4\n"),
        (&format!("{NODE}/node0/cpulist"), "0\n"),
        (&format!("{NODE}/node4/cpulist"), "2-3\n"),
    ]);
    let topology = read(&root);
    assert_eq!(topology.possible.to_string(), "0,2-3");
    assert_eq!(topology.possible.len(), 3);
    assert_eq!(topology.online.to_string(), "0,3");
    assert_eq!(topology.allowed.to_string(), "0,3");
    assert_eq!(topology.housekeeping().to_string(), "0");
    assert_eq!(topology.cpus_of(NodeId(4)).unwrap().to_string(), "2-3");
}

#[test]
fn a_machine_without_numa_has_one_node() {
    let root = machine(&[(&format!("{CPU}/online"), "0-1\n")]);
    let topology = read(&root);
    assert_eq!(
        (topology.nodes.to_string(), topology.possible.len()),
        ("0".to_owned(), 2)
    );
    assert_eq!(topology.cpus_of(NodeId(0)).unwrap(), topology.possible);
}

#[test]
fn isolated_cpus_are_not_housekeeping() {
    let root = machine(&[
        (&format!("{CPU}/online"), "0-7"),
        (&format!("{CPU}/isolated"), "4-5\n"),
        (&format!("{CPU}/nohz_full"), "6-7\n"),
    ]);
    let topology = read(&root);
    assert_eq!(topology.housekeeping().to_string(), "0-3");
    let root = machine(&[
        (&format!("{CPU}/online"), "0-1"),
        (&format!("{CPU}/nohz_full"), " (null)\n"),
    ]);
    assert!(read(&root).nohz_full.is_empty());
    let root = machine(&[
        (&format!("{CPU}/online"), "0-1"),
        (&format!("{CPU}/isolated"), "0-1\n"),
    ]);
    assert_eq!(read(&root).housekeeping().len(), 2);
}

#[test]
fn cgroups_restrict_the_allowed_cpus() {
    let unified = machine(&[
        (&format!("{CPU}/online"), "0-7"),
        ("proc/self/cgroup", "0::/user/job\n"),
        ("sys/fs/cgroup/user/cpuset.cpus.effective", "2-3\n"),
    ]);
    assert_eq!(read(&unified).allowed.to_string(), "2-3");
    let old = machine(&[
        (&format!("{CPU}/online"), "0-7"),
        ("proc/self/cgroup", "5:cpu:/x\n4:cpuset:/job\n"),
        ("sys/fs/cgroup/cpuset/job/cpuset.effective_cpus", "7\n"),
    ]);
    assert_eq!(read(&old).allowed.to_string(), "7");
}

#[test]
fn nonsense_is_an_error_and_missing_files_have_defaults() {
    for text in [
        "x",
        "1-",
        "3-1",
        "0-9999999",
        "1,,2",
        "0-3:0/2",
        "0-3:3/2",
        "-",
    ] {
        let root = machine(&[(&format!("{CPU}/online"), text)]);
        let error = try_read(&root).unwrap_err();
        assert!(error.to_string().contains("cpu/online"), "{text}: {error}");
    }
    let root = machine(&[(&format!("{CPU}/online"), &"0,".repeat(100_000))]);
    assert_eq!(try_read(&root).unwrap_err().what, ListError::TooLarge);
    let nothing = topology_below(b"/no/such/folder").unwrap();
    assert!(!nothing.possible.is_empty() && nothing.nodes.len() == 1);
    assert!(topology_below(&[b'a'; 5000]).is_ok());
}

#[test]
fn empty_files_count_as_missing() {
    for text in ["", "\n"] {
        let root = machine(&[
            (&format!("{CPU}/possible"), text),
            (&format!("{CPU}/online"), text),
            (&format!("{NODE}/online"), text),
            (&format!("{NODE}/has_memory"), text),
        ]);
        let topology = read(&root);
        assert!(!topology.allowed.is_empty() && !topology.housekeeping().is_empty());
        assert_eq!(topology.allowed, topology.possible);
        assert_eq!(topology.with_memory.to_string(), "0");
    }
}

#[test]
fn a_list_in_several_reads_is_complete() {
    let root = machine(&[(&format!("{CPU}/possible"), "0-255\n")]);
    let path = root.path().join(CPU).join("online");
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.unwrap().success());
    let writer = std::thread::spawn(move || {
        let mut pipe = fs::File::options().write(true).open(path).unwrap();
        pipe.write_all(b"0-1").unwrap();
        // Gives the reader time to read the first piece.
        std::thread::sleep(std::time::Duration::from_millis(100));
        pipe.write_all(b"5,200\n")
    });
    let topology = read(&root);
    assert_eq!(topology.online.to_string(), "0-15,200");
    writer.join().unwrap().unwrap();
}

#[test]
fn a_node_without_a_cpu_list_has_no_cpus() {
    let root = machine(&[
        (&format!("{CPU}/online"), "0-7\n"),
        (&format!("{NODE}/online"), "0-1\n"),
        (&format!("{NODE}/node1/cpulist"), &"4,".repeat(50_000)),
    ]);
    let topology = read(&root);
    assert!(topology.cpus_of(NodeId(0)).unwrap().is_empty());
    let error = topology.cpus_of(NodeId(1)).unwrap_err();
    assert_eq!(error.what, ListError::TooLarge);
}

#[test]
fn a_cgroups_nonsense_is_an_error_and_its_empty_list_is_inherited() {
    let cpuset = "sys/fs/cgroup/job/cpuset.cpus.effective";
    for (text, found) in [("2-x\n", None), ("\n", Some("0-3")), ("1,3\n", Some("1,3"))] {
        let root = machine(&[
            (&format!("{CPU}/online"), "0-3\n"),
            ("proc/self/cgroup", "garbage\n::\n0::/job\n"),
            (cpuset, text),
        ]);
        match (try_read(&root), found) {
            (Ok(topology), Some(cpus)) => assert_eq!(topology.allowed.to_string(), cpus),
            (Err(error), None) => assert!(error.to_string().contains("cpuset"), "{error}"),
            (other, _) => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn this_machine_can_be_read() {
    let topology = Topology::system().unwrap();
    assert!(!topology.allowed.is_empty());
    assert_eq!(topology.allowed, topology.allowed.and(&topology.possible));
}

proptest! {
    #[test]
    fn lists_survive_printing_and_parsing(numbers in prop::collection::vec(0usize..8192, 0..200)) {
        let mut set = CpuSet::default();
        numbers.iter().for_each(|&n| set.insert(n));
        prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = String::from_utf8_lossy(&bytes).parse::<CpuSet>();
    }

    #[test]
    fn lists_of_list_characters_survive_printing_and_parsing(text in "[0-9,:/-]{0,30}") {
        if let Ok(set) = text.parse::<CpuSet>() {
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }
    }
}

#[test]
fn memory_of_a_node_is_read_from_its_meminfo() {
    let file = |node: usize| format!("sys/devices/system/node/node{node}/meminfo");
    let root = machine(&[
        (
            &file(0),
            "Node 0 MemTotal:       16000 kB\nNode 0 MemFree:  5 kB\n",
        ),
        (&file(1), "\nNode 1 MemTotal:       32000 kB\n"),
        (&file(2), "Node 2 MemFree:       32000 kB\n"),
    ]);
    let machine = read(&root);
    assert_eq!(machine.memory_of(NodeId(0)), 16_000 * 1024);
    assert_eq!(machine.memory_of(NodeId(1)), 32_000 * 1024);
    // Without a file, a node has its share of this machine's memory.
    assert!(machine.memory_of(NodeId(2)) > 1 << 24);
    assert!(machine.memory_of(NodeId(9)) > 1 << 24);
}

/// The library reads files while it holds locks. A thread that was cancelled there would never
/// release them.
#[test]
fn reading_files_cancels_no_thread() {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    static READ: AtomicBool = AtomicBool::new(false);

    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
    }
    extern "C" fn read_cancelled(_: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: `pthread_self` names the calling thread, which exists. It runs on until its next
        // cancellation point.
        unsafe { pthread_cancel(libc::pthread_self()) };
        let found = topology_below(b"/").is_ok();
        READ.store(found, Relaxed);
        std::ptr::null_mut()
    }
    // SAFETY: `thread` outlives the thread, which is joined below. The thread uses only the static.
    unsafe {
        let mut thread = std::mem::zeroed();
        let none = std::ptr::null_mut();
        let made = libc::pthread_create(&raw mut thread, std::ptr::null(), read_cancelled, none);
        assert_eq!(made, 0);
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
    }
    assert!(
        READ.load(Relaxed),
        "the thread was cancelled while it read files"
    );
}
