//! Policies on a machine with several nodes: the kernel's behaviour, against this library's
//! description of it. Needs root.

mod policy_machine;

use pinfold::mempolicy::{
    self, Distances, Flags, Mempolicy, Mode, Move, PageNode, PolicyError, Weights, node_for,
};
use pinfold::topology::{NodeId, NodeSet, Topology};
use policy_machine::{Pages, TmpfsMount, run_on, set};
use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

/// Returns the nodes with memory. With fewer than two, prints that the test is skipped and returns
/// `None`.
fn nodes() -> Option<Vec<usize>> {
    let nodes: Vec<_> = Topology::system().unwrap().with_memory.iter().collect();
    if nodes.len() < 2 {
        eprintln!("skipped: one node");
        return None;
    }
    Some(nodes)
}

fn knows_weights() -> bool {
    fs::exists("/sys/kernel/mm/mempolicy/weighted_interleave").unwrap()
}

/// Returns whether the kernel's parser of `mpol=` supports everything in the policy.
fn for_tmpfs(policy: &Mempolicy, text: &str) -> bool {
    let with_memory = Topology::system().unwrap().with_memory;
    let weighted = policy.mode() == Mode::WeightedInterleave;
    !policy.flags().contains(Flags::BALANCING)
        && policy.home().is_none()
        && policy.user_nodes().without(&with_memory).is_empty()
        && !text.contains("all")
        && (!weighted || knows_weights())
}

/// Returns whether the kernel accepts a text that is refused here, because the kernel's parser
/// ignores a part of it.
fn kernel_is_lax(mode: Mode, flag: &str, list: &str) -> bool {
    let flags_it_never_reads = mode == Mode::Default && !flag.is_empty() && list.is_empty();
    let flags_behind_nodes = flag.is_empty()
        && list.ends_with("=static")
        && mode != Mode::Default
        && mode != Mode::Local;
    let unknown = mode == Mode::WeightedInterleave && !knows_weights();
    (flags_it_never_reads || flags_behind_nodes) && !unknown
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_tmpfs_reads_and_prints_the_same_policies() {
    let Some(nodes) = nodes() else { return };
    let list: Vec<_> = nodes.iter().map(ToString::to_string).collect();
    let (a, b) = (&list[0], &list[list.len() - 1]);
    let lists = [
        String::new(),
        ":".to_owned(),
        format!(":{a}"),
        format!(":{a}-{a}"),
        format!(":{a},{b}"),
        format!(":{}", list.join(",")),
        format!(":{a}-{}:1/{}", nodes[1], nodes[1] - nodes[0]),
        ":all".to_owned(),
        ":x".to_owned(),
        ":1023".to_owned(),
        ":1024".to_owned(),
        format!(":{b}-{a}"),
        format!(":{a}-"),
        format!(":{a}=static"),
    ];
    let flags = [
        "",
        "=static",
        "=relative",
        "=balancing",
        "=static|balancing",
    ];
    let flags = flags.into_iter().chain(["=static|relative", "=", "=x"]);
    let mut counts = [0; 3];
    let _quiet = policy_machine::Quiet::new();
    for (flag, mode) in flags.flat_map(|flag| Mode::ALL.map(|mode| (flag, mode))) {
        for list in &lists {
            let text = format!("{}{flag}{list}", mode.name());
            let mounted = TmpfsMount::new(&text);
            let Ok(policy) = Mempolicy::parse(&text) else {
                counts[0] += 1;
                let lax = kernel_is_lax(mode, flag, list);
                assert_eq!(mounted.is_ok(), lax, "refused here: {text}");
                continue;
            };
            let can = for_tmpfs(&policy, &text);
            assert_eq!(mounted.is_ok(), can, "read here: {text}");
            let Ok(mounted) = mounted else {
                counts[1] += 1;
                continue;
            };
            counts[2] += 1;
            same_as_mounted(&policy, &mounted, &text);
            let printed = policy.to_string();
            let again = TmpfsMount::new(&printed).unwrap_or_else(|e| panic!("{printed}: {e}"));
            assert_eq!(again.policy(), mounted.policy(), "{text}");
        }
    }
    eprintln!(
        "{} refused by both or lax, {} beyond tmpfs, {} the same",
        counts[0], counts[1], counts[2]
    );
    assert!(counts[2] >= 40);
}

/// Asserts that `/proc/self/mounts` shows the policy, with "all" spelled out.
fn same_as_mounted(policy: &Mempolicy, mounted: &TmpfsMount, text: &str) {
    let shown = mounted.policy();
    let read = shown
        .as_deref()
        .map_or(Ok(Mempolicy::default()), Mempolicy::parse);
    let spelled = if policy.user_nodes().is_empty() && policy.nodes().is_empty() {
        let all = match policy.mode() {
            Mode::Interleave | Mode::WeightedInterleave => Topology::system().unwrap().with_memory,
            _ => NodeSet::EMPTY,
        };
        Mempolicy::new(policy.mode(), policy.flags(), all).unwrap()
    } else {
        policy.clone()
    };
    assert_eq!(read, Ok(spelled), "{text}: {shown:?}");
}

/// Returns policies of every mode and flag over some nodes.
fn policies(nodes: &[usize]) -> Vec<Mempolicy> {
    let (a, b) = (nodes[0], nodes[nodes.len() - 1]);
    let all: Vec<_> = nodes.iter().map(ToString::to_string).collect();
    let all = all.join(",");
    let mut texts = vec!["default".to_owned(), "local".to_owned()];
    for node in nodes {
        texts.push(format!("prefer:{node}"));
        texts.push(format!("bind:{node}"));
        texts.push(format!("prefer=static:{node}"));
    }
    for mode in ["bind", "prefer (many)", "interleave", "weighted interleave"] {
        for list in [format!("{a},{b}"), all.clone()] {
            texts.push(format!("{mode}:{list}"));
            texts.push(format!("{mode}=static:{list}"));
        }
        texts.push(format!("{mode}=relative:0-1"));
        texts.push(format!("{mode}=relative:1,{}", nodes.len()));
    }
    texts.extend(["interleave", "weighted interleave"].map(str::to_owned));
    for home in nodes {
        texts.push(format!("bind:{all}@{home}"));
        texts.push(format!("bind:{a},{b}@{home}"));
        texts.push(format!("prefer (many):{a},{b}@{home}"));
    }
    let known = |text: &String| knows_weights() || !text.starts_with("weighted");
    let policies = texts.iter().filter(|text| known(text));
    policies
        .map(|text| Mempolicy::parse(text).unwrap())
        .collect()
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn every_page_of_a_range_lies_on_the_predicted_node() {
    let Some(nodes) = nodes() else { return };
    let topology = Topology::system().unwrap();
    let distances = Distances::read(&topology);
    let weights = Weights::read(&topology);
    let allowed = mempolicy::mems_allowed().unwrap();
    // Older kernels count in 32 bits.
    let counted = match policy_machine::kernel() < (6, 7) {
        true => u64::from(u32::MAX),
        false => u64::MAX,
    };
    for local in topology.nodes.iter().map(NodeId) {
        if !run_on(&topology, local) {
            continue;
        }
        for policy in policies(&nodes) {
            let mut bound = policy.clone();
            bound.contextualize(&allowed).unwrap();
            let pages = Pages::new(24);
            mempolicy::apply(pages.at(0), pages.size(), &policy, Move::No, true)
                .unwrap_or_else(|error| panic!("{policy}: {error}"));
            pages.touch();
            let expected = |n| {
                let page = (pages.at(n).addr() as u64 / 4096) & counted;
                node_for(&bound, page, local, &weights, &distances)
            };
            let expected: Vec<_> = (0..24).map(expected).collect();
            assert_eq!(pages.nodes(), expected, "{policy} from node {}", local.0);
            assert_eq!(mempolicy::node_at(pages.at(3)), Ok(expected[3]));
        }
    }
}

/// The cases of numactl's regression test: each node, all of them, and in equal shares.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_threads_policy_places_its_memory() {
    let Some(nodes) = nodes() else { return };
    let topology = Topology::system().unwrap();
    let distances = Distances::read(&topology);
    let local = NodeId(nodes[1]);
    run_on(&topology, local);
    for policy in policies(&nodes)
        .into_iter()
        .filter(|policy| policy.home().is_none())
    {
        let pages = Pages::new(64);
        mempolicy::set_for_thread(&policy).unwrap();
        pages.touch();
        mempolicy::set_for_thread(&Mempolicy::default()).unwrap();
        let mut bound = policy.clone();
        bound.contextualize(&topology.with_memory).unwrap();
        let placed = pages.nodes();
        if matches!(policy.mode(), Mode::Interleave | Mode::WeightedInterleave) {
            // The thread's count also advances for the kernel's own pages, so that the turns cannot
            // be predicted.
            for node in bound.nodes().iter().map(NodeId) {
                let count = placed.iter().filter(|&&placed| placed == node).count();
                assert!(count >= 32 / bound.nodes().len(), "{policy}: {placed:?}");
            }
            assert!(placed.iter().all(|node| bound.nodes().contains(node.0)));
        } else {
            let node = node_for(&bound, 0, local, &Weights::default(), &distances);
            assert_eq!(placed, [node; 64], "{policy}");
        }
    }
}

/// Compares the fallback lists with those that the kernel prints at boot.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn nearest_first_is_the_kernels_order() {
    let Some(nodes) = nodes() else { return };
    let topology = Topology::system().unwrap();
    let distances = Distances::read(&topology);
    let mut options = fs::OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK);
    let mut log = options.open("/dev/kmsg").unwrap();
    let (mut record, mut found) = ([0; 8192], 0);
    while let Ok(length) = std::io::Read::read(&mut log, &mut record) {
        let text = String::from_utf8_lossy(&record[..length]);
        let Some((_, said)) = text.split_once("Fallback order for Node ") else {
            continue;
        };
        let (node, order) = said.lines().next().unwrap().split_once(':').unwrap();
        let node: usize = node.parse().unwrap();
        // The kernel also prints lists of nodes that could be plugged in later.
        if !topology.nodes.contains(node) {
            continue;
        }
        let order = order.split_whitespace().map(|node| node.parse().unwrap());
        // Older kernels list a node itself even if it has no memory.
        let order = order.filter(|node| topology.with_memory.contains(*node));
        let ours = distances.nearest_first(NodeId(node));
        let ours: Vec<_> = ours.map(|node| node.0).collect();
        assert_eq!(ours, order.collect::<Vec<_>>(), "node {node}");
        found += 1;
    }
    assert!(found >= nodes.len(), "{found}");
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn pages_move_as_asked() {
    let Some(nodes) = nodes() else { return };
    let (a, b) = (NodeId(nodes[0]), NodeId(nodes[1]));
    let bind = |node: NodeId| Mempolicy::bind(set(&[node.0])).unwrap();
    let pages = Pages::new(100);
    let apply = |node, moving, strict| {
        mempolicy::apply(pages.at(0), pages.size(), &bind(node), moving, strict)
    };
    apply(a, Move::No, true).unwrap();
    pages.touch();
    // Without moving, the pages stay. Only a strict call reports that, and then the old policy
    // stays.
    let refused = apply(b, Move::No, true).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::EIO));
    assert!(refused.to_string().contains("ask for a move"), "{refused}");
    apply(b, Move::No, false).unwrap();
    assert_eq!(pages.nodes(), [a; 100]);
    assert_eq!(mempolicy::policy_at(pages.at(9)), Ok(bind(b)));
    apply(b, Move::Own, true).unwrap();
    assert_eq!(pages.nodes(), [b; 100]);
    apply(a, Move::All, true).unwrap();
    assert_eq!(pages.nodes(), [a; 100]);
    assert!(pages.unharmed());

    // Each page has its own target, in turn.
    let target = |n: usize| NodeId(nodes[n % nodes.len()]);
    let targets: Vec<_> = (0..100).map(target).collect();
    let list: Vec<_> = (0..100).map(|n| pages.at(n)).collect();
    let mut now = vec![PageNode::UNKNOWN; 100];
    assert_eq!(
        mempolicy::move_pages(&list, &targets, &mut now, Move::Own),
        Ok(0)
    );
    assert_eq!(
        now.iter()
            .map(|now| now.node().unwrap())
            .collect::<Vec<_>>(),
        targets
    );
    assert_eq!(pages.nodes(), targets);
    // `Move::No` only asks.
    mempolicy::move_pages(&list, &[a; 100], &mut now, Move::No).unwrap();
    assert_eq!(pages.nodes(), targets);

    mempolicy::migrate(0, &set(&nodes), &set(&[b.0])).unwrap();
    assert_eq!(pages.nodes(), [b; 100]);
    assert!(pages.unharmed());
}

/// A policy of shared memory holds in every mapping of it.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn shared_memory_has_one_policy_in_all_mappings() {
    let Some(nodes) = nodes() else { return };
    let file = tempfile::tempfile().unwrap();
    file.set_len(16 * 4096).unwrap();
    let (one, other) = (Pages::shared(&file, 16), Pages::shared(&file, 16));
    let policy = Mempolicy::bind(set(&nodes[1..2])).unwrap();
    mempolicy::apply(one.at(4), 4 * 4096, &policy, Move::No, false).unwrap();
    other.touch();
    assert_eq!(mempolicy::policy_at(other.at(5)), Ok(policy));
    assert_eq!(mempolicy::policy_at(other.at(8)), Ok(Mempolicy::default()));
    assert_eq!(one.nodes_after_touch()[4..8], [NodeId(nodes[1]); 4]);

    // The turn depends on the page's number in the file plus the number of the file's inode.
    let file = tempfile::tempfile().unwrap();
    file.set_len(24 * 4096).unwrap();
    let (pages, inode) = (Pages::shared(&file, 24), file.metadata().unwrap().ino());
    let topology = Topology::system().unwrap();
    let distances = Distances::read(&topology);
    for policy in ["interleave", "interleave=relative:0-1"] {
        let mut policy = Mempolicy::parse(policy).unwrap();
        mempolicy::apply(pages.at(0), pages.size(), &policy, Move::No, false).unwrap();
        policy.contextualize(&topology.with_memory).unwrap();
        file.set_len(0).unwrap();
        file.set_len(24 * 4096).unwrap();
        pages.touch();
        let turn = |n| {
            node_for(
                &policy,
                n + inode,
                NodeId(nodes[0]),
                &Weights::default(),
                &distances,
            )
        };
        assert_eq!(
            pages.nodes(),
            (0..24).map(turn).collect::<Vec<_>>(),
            "{policy} {inode}"
        );
    }
}

/// The kernel's policies when a cpuset changes, against this library's, bound to the same nodes.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn policies_follow_a_cpuset_as_the_kernels_do() {
    let Some(nodes) = nodes() else { return };
    let group = policy_machine::Group::new("policies");
    let all = set(&nodes);
    group.allow(&all);
    group.enter();
    assert_eq!(mempolicy::mems_allowed(), Ok(all.clone()));
    let homeless = policies(&nodes)
        .into_iter()
        .filter(|policy| policy.home().is_none());
    for policy in homeless {
        let pages = Pages::new(1);
        group.allow(&all);
        mempolicy::apply(pages.at(0), pages.size(), &policy, Move::No, false).unwrap();
        mempolicy::set_for_thread(&policy).unwrap();
        let mut ours = policy.clone();
        ours.contextualize(&all).unwrap();
        let last = nodes.len() - 1;
        let steps = [
            &nodes[..],
            &nodes[last..],
            &nodes[..1],
            &nodes[1..],
            &[nodes[0], nodes[last]],
            &nodes[..2],
            &nodes[..],
        ];
        for allowed in steps.map(set) {
            group.allow(&allowed);
            ours.rebind(&allowed);
            if ours.user_nodes().is_empty() && !ours.nodes().is_empty() {
                // The kernel does not know "all": it got the nodes that were allowed at that time.
                break;
            }
            let shown = pages.policy_in_numa_maps();
            let kernels = Mempolicy::parse(&shown).unwrap();
            assert_eq!(kernels.mode(), ours.mode(), "{policy}: {shown}");
            assert_eq!(kernels.flags(), ours.flags(), "{policy}: {shown}");
            assert_eq!(
                kernels.nodes(),
                ours.nodes(),
                "{policy} in {allowed}: {shown}"
            );
            // For a thread's policy with flags, the kernel returns the user nodes.
            let thread = mempolicy::thread().unwrap();
            if policy.flags().is_empty() {
                assert_eq!(thread.nodes(), ours.nodes(), "{policy} in {allowed}");
            }
        }
        mempolicy::set_for_thread(&Mempolicy::default()).unwrap();
    }
    // A policy of forbidden nodes is refused.
    group.allow(&set(&nodes[..1]));
    let far = Mempolicy::bind(set(&nodes[1..])).unwrap();
    assert_eq!(
        mempolicy::set_for_thread(&far),
        Err(PolicyError::NoneAllowed(Mode::Bind))
    );
    group.allow(&all);
}
