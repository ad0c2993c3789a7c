//! Policies as values and as text: every form of the grammar, the errors, and where pages go.

use pinfold::internal::topology_below;
use pinfold::mempolicy::{
    Distances, Flags, Mempolicy, Mode, PolicyError, SYSTEM_DEFAULT, Weights, Wrong, effective,
    node_for, zonelist,
};
use pinfold::topology::{NodeId, NodeSet, Topology};
use proptest::prelude::*;
use std::fs;
use std::time::{Duration, Instant};

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

const FLAGS: [&str; 9] = [
    "",
    "=static",
    "=relative",
    "=balancing",
    "=static|balancing",
    "=relative|balancing",
    "=static|relative",
    "=",
    "=x",
];
const LISTS: [&str; 13] = [
    "",
    ":",
    ":0",
    ":0-0",
    ":0-1",
    ":0,2",
    ":0-6:1/3",
    ":all",
    ":x",
    ":1024",
    ":3-1",
    ":0-",
    ":0=static",
];

/// Returns what a text is printed as after it was parsed; `None` if it must be refused. This is the
/// table of docs/mempolicy.md.
fn expected(mode: Mode, flag: &str, list: &str) -> Option<String> {
    let placed = matches!(flag, "=static" | "=relative");
    let balancing = matches!(
        flag,
        "=balancing" | "=static|balancing" | "=relative|balancing"
    );
    let listed = match list {
        ":0" | ":0-0" => Some(":0"),
        ":0-1" => Some(":0-1"),
        ":0,2" => Some(":0,2"),
        ":0-6:1/3" => Some(":0,3,6"),
        ":all" => Some(":all"),
        _ => None,
    };
    let name = mode.name();
    match mode {
        Mode::Default | Mode::Local => {
            (flag.is_empty() && list.is_empty()).then(|| name.to_owned())
        }
        Mode::Preferred if list.is_empty() => flag.is_empty().then(|| "local".to_owned()),
        Mode::Preferred => {
            ((flag.is_empty() || placed) && list == ":0").then(|| format!("prefer{flag}:0"))
        }
        Mode::Bind if flag == "=" => listed.map(|list| format!("bind=balancing{list}")),
        Mode::Bind | Mode::PreferredMany => {
            let list = listed.filter(|_| flag.is_empty() || placed || balancing)?;
            Some(format!("{name}{flag}{list}"))
        }
        Mode::Interleave | Mode::WeightedInterleave => {
            let list = match list {
                "" | ":all" => "",
                _ => listed?,
            };
            (flag.is_empty() || placed).then(|| format!("{name}{flag}{list}"))
        }
    }
}

#[test]
fn every_mode_with_every_flag_and_every_kind_of_list() {
    let mut read = 0;
    for mode in Mode::ALL {
        for flag in FLAGS {
            for list in LISTS {
                let text = format!("{}{flag}{list}", mode.name());
                let policy = Mempolicy::parse(&text).ok();
                let printed = policy.as_ref().map(ToString::to_string);
                assert_eq!(printed, expected(mode, flag, list), "{text}");
                if let Some(policy) = policy {
                    read += 1;
                    assert_eq!(Mempolicy::parse(&policy.to_string()), Ok(policy), "{text}");
                }
            }
        }
    }
    assert_eq!(read, 126);
}

#[test]
fn more_names_than_the_kernels_are_parsed() {
    for (text, printed) in [
        ("mpol=bind:0", "bind:0"),
        ("  bind:0 \n", "bind:0"),
        ("preferred:3", "prefer:3"),
        ("preferred", "local"),
        ("preferred-many:0,2", "prefer (many):0,2"),
        ("prefer-many:0,2", "prefer (many):0,2"),
        ("preferred (many)=static:2", "prefer (many)=static:2"),
        (
            "weighted-interleave=relative",
            "weighted interleave=relative",
        ),
        ("bind=balancing|static:0-1", "bind=static|balancing:0-1"),
        ("bind:0-1023", "bind:all"),
        ("interleave:0-1023", "interleave"),
        ("bind:0, 2,,3", "bind:0,2-3"),
        ("bind:0-3@2", "bind:0-3@2"),
        ("prefer-many=static:all@0", "prefer (many)=static:all@0"),
    ] {
        let policy = Mempolicy::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(policy.to_string(), printed, "{text}");
        assert_eq!(printed.parse(), Ok(policy), "{text}");
    }
}

#[test]
fn errors_name_the_piece_and_what_to_write() {
    for (text, position, said) in [
        (
            "fast:0",
            0,
            "\"fast\" at byte 0: no such mode; write one of default, prefer, bind, interleave, local, prefer-many, \
             weighted-interleave",
        ),
        (
            "mpol=",
            5,
            "\"\" at byte 5: no such mode; write one of default, prefer,",
        ),
        (
            "mpol=bind=statik:0",
            10,
            "\"statik\" at byte 10: no such flag; write static, relative or balancing, joined by |",
        ),
        ("bind=static|:0", 12, "\"\" at byte 12: no such flag"),
        (
            "bind:0-3,x,5",
            9,
            "\"x\" at byte 9: not a list of nodes; write numbers and ranges, like 0-3,8",
        ),
        ("bind:3-1", 5, "\"3-1\" at byte 5: the range runs backwards"),
        (
            "bind:0,+1",
            7,
            "\"+1\" at byte 7: numactl's + and ! have no meaning here",
        ),
        ("prefer:!0", 7, "\"!0\" at byte 7: numactl's + and !"),
        (
            "bind=0,2-3",
            5,
            "\"0,2-3\" at byte 5: nodes stand behind a colon; write bind:0,2-3",
        ),
        (
            "weighted interleave=all",
            20,
            "\"all\" at byte 20: nodes stand behind a colon; write weighted-interleave:all",
        ),
        ("local=0", 6, "\"0\" at byte 6: no such flag"),
        (
            "bind:0-3:2/0",
            5,
            "\"0-3:2/0\" at byte 5: not a list of nodes",
        ),
        (
            "bind:0,1024",
            7,
            "\"1024\" at byte 7: no node has this number; they are below 1024",
        ),
        (
            "bind:99999999999999999999999999",
            5,
            "\"999999999999999999999999\"… at byte 5: no node has this number; they are below 1024",
        ),
        (
            "prefer:0-1",
            7,
            "\"0-1\" at byte 7: prefer takes one node, a plain number; for several write prefer-many",
        ),
        (
            "bind:",
            5,
            "\"\" at byte 5: no nodes behind the colon; name some, like 0-3,8",
        ),
        (
            "local:0",
            6,
            "\"0\" at byte 6: this mode takes no nodes; leave the colon and the list out",
        ),
        (
            "bind",
            0,
            "\"bind\" at byte 0: bind needs nodes; name some, as in bind:0-1",
        ),
        (
            "prefer=static",
            0,
            "\"prefer=static\" at byte 0: static and relative say how nodes are counted, and prefer takes no nodes; leave the flag out",
        ),
        (
            "bind=static|relative:0",
            0,
            "\"bind=static|relative:0\" at byte 0: static and relative exclude each other; use one of them",
        ),
        (
            "interleave=balancing:0",
            0,
            "\"interleave=balancing:0\" at byte 0: balancing goes with bind and prefer (many), not with interleave; leave it out",
        ),
        (
            "interleave:0@0",
            0,
            "\"interleave:0@0\" at byte 0: a home node goes with bind and prefer (many), not with interleave; leave it out",
        ),
        ("bind:0@x", 7, "\"x\" at byte 7: a home node is one number"),
        (
            "bind:0@",
            7,
            "\"\" at byte 7: a home node is one number, as in",
        ),
        (
            "bind:0@0-1",
            7,
            "\"0-1\" at byte 7: a home node is one number",
        ),
        ("bind:ää\u{1b}", 5, "\"ää\\u{1b}\" at byte 5: not"),
    ] {
        let error = Mempolicy::parse(text).expect_err(text);
        assert!(error.to_string().starts_with(said), "{text:?}: {error}");
        assert_eq!(error.position(), position, "{text}");
        assert!(text[position..].starts_with(error.piece()), "{text}");
    }
    assert!(size_of::<pinfold::mempolicy::ParseError>() <= 64);
}

#[test]
fn an_error_suggests_the_mode_with_a_similar_name() {
    for (text, meant) in [
        ("BIND:0", "bind"),
        ("bnd:0", "bind"),
        ("membind:0", "bind"),
        ("weighted_interleave", "weighted-interleave"),
        ("Weighted Interleave:0", "weighted-interleave"),
        ("preferred_many:0", "prefer-many"),
        ("prefer(many):0", "prefer-many"),
        ("Preferred-Many:0", "prefer-many"),
        ("preferedmany:0", "prefer-many"),
        ("interleaved:0", "interleave"),
        ("localalloc", "local"),
    ] {
        let error = Mempolicy::parse(text).expect_err(text).to_string();
        let end = format!(": no such mode; did you mean {meant}?");
        assert!(error.ends_with(&end), "{error}");
        assert!(Mempolicy::parse(&format!("{meant}@")).is_err_and(|e| e.wrong() != Wrong::Mode));
    }
    for text in ["", "b:0", "()", "blind date", "näher:0"] {
        assert_eq!(Mempolicy::parse(text).unwrap_err().wrong(), Wrong::Mode);
    }
}

#[test]
fn long_texts_are_refused_fast() {
    let long = |part: &str| part.repeat(1 << 20);
    for text in [
        long("bind:"),
        format!("bind:{}", long("0-1023,")),
        format!("bind={}:0", long("static|")),
        long("\u{fffd}"),
        long("\0"),
    ] {
        let start = Instant::now();
        let error = Mempolicy::parse(&text).unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(20));
        assert_eq!(error.wrong(), Wrong::TooLong);
        assert!(error.to_string().len() < 200);
        assert!(error.to_string().contains("at most 8192 bytes"), "{error}");
    }
    let evens: Vec<_> = (0..1024).step_by(2).map(|n| n.to_string()).collect();
    let policy = Mempolicy::parse(&format!("bind:{}", evens.join(","))).unwrap();
    assert_eq!(policy.nodes().len(), 512);
}

proptest! {
    #[test]
    fn a_printed_policy_parses_to_the_same_policy(
        mode in 0..7usize,
        flags in 0..8u8,
        list in proptest::collection::vec(0..1024usize, 0..40),
        home in proptest::option::of(0..1024usize),
    ) {
        let named = [Flags::STATIC, Flags::RELATIVE, Flags::BALANCING];
        let chosen = (0..3).filter(|n| flags >> n & 1 == 1).map(|n| named[n]);
        let flags = chosen.fold(Flags::NONE, |all, flag| all | flag);
        let list: NodeSet = list.into_iter().collect();
        if let Ok(mut policy) = Mempolicy::new(Mode::ALL[mode], flags, list) {
            let _ = policy.set_home_node(home.map(NodeId));
            prop_assert_eq!(Mempolicy::parse(&policy.to_string()), Ok(policy.clone()));
            let before = policy.clone();
            policy.rebind(&nodes("5-9"));
            prop_assert_eq!(policy.unbound(), before);
        }
    }

    #[test]
    fn no_text_panics(text in "(bind|prefer|mpol=|interleave|)[-=:|,@/0-9a-z \\PC]{0,40}") {
        match Mempolicy::parse(&text) {
            Ok(policy) => prop_assert_eq!(policy.to_string().parse(), Ok(policy)),
            Err(error) => prop_assert!(error.position() <= text.len() && !error.to_string().is_empty()),
        }
    }
}

#[test]
fn constructors_keep_the_kernels_rules() {
    let none = NodeSet::EMPTY;
    assert_eq!(
        Mempolicy::bind(none.clone()),
        Err(PolicyError::NeedsNodes(Mode::Bind))
    );
    assert_eq!(
        Mempolicy::preferred_many(none.clone()),
        Err(PolicyError::NeedsNodes(Mode::PreferredMany))
    );
    assert!(
        Mempolicy::interleave(none.clone())
            .unwrap()
            .nodes()
            .is_empty()
    );
    assert!(Mempolicy::weighted_interleave(none.clone()).is_ok());
    assert_eq!(
        Mempolicy::new(Mode::Preferred, Flags::NONE, none.clone()),
        Ok(Mempolicy::local())
    );
    assert_eq!(
        Mempolicy::new(Mode::Preferred, Flags::NONE, nodes("1-2")),
        Err(PolicyError::TakesOneNode)
    );
    assert_eq!(
        Mempolicy::new(Mode::Local, Flags::NONE, nodes("1")),
        Err(PolicyError::TakesNoNodes(Mode::Local))
    );
    assert_eq!(
        Mempolicy::preferred(NodeId(1024)),
        Err(PolicyError::NodeTooLarge(NodeId(1024)))
    );
    let mut local = Mempolicy::local();
    assert_eq!(
        local.set_home_node(Some(NodeId(0))),
        Err(PolicyError::TakesNoHome(Mode::Local))
    );
    assert_eq!(local.set_home_node(None), Ok(()));
}

#[test]
fn weights_are_read_and_default_to_one() {
    let root = tempfile::tempdir().unwrap();
    let folder = root
        .path()
        .join("sys/kernel/mm/mempolicy/weighted_interleave");
    fs::create_dir_all(&folder).unwrap();
    let online = root.path().join("sys/devices/system/node/online");
    fs::create_dir_all(online.parent().unwrap()).unwrap();
    fs::write(online, "0-3,700").unwrap();
    for (node, text) in [(0, "3\n"), (1, "0\n"), (2, "256\n"), (700, "255\n")] {
        fs::write(folder.join(format!("node{node}")), text).unwrap();
    }
    let machine = topology_below(root.path().as_os_str().as_encoded_bytes()).unwrap();
    let weights = Weights::read(&machine);
    let of = |node| weights.weight(NodeId(node));
    assert_eq!(
        [of(0), of(1), of(2), of(3), of(700), of(9999)],
        [3, 1, 1, 1, 255, 1]
    );
}

/// The distances of four nodes in a ring.
fn ring() -> Distances {
    let all = nodes("0-3");
    Distances::new(&all, &all, &all, |from, to| {
        [10, 20, 30, 20][(4 + to.0 - from.0) % 4]
    })
}

fn order(policy: &str, from: usize) -> Vec<usize> {
    let policy = Mempolicy::parse(policy).unwrap();
    zonelist(&policy, NodeId(from), &ring())
        .map(|node| node.0)
        .collect()
}

#[test]
fn fallback_is_by_distance_among_the_nodes_that_a_policy_permits() {
    // Nodes 1 and 3 are equally near to 0 and to 2.
    assert_eq!(order("local", 0), [0, 1, 3, 2]);
    assert_eq!(order("default", 1), [1, 2, 0, 3]);
    assert_eq!(order("prefer:2", 0), order("local", 2));
    assert_eq!(order("bind:0,2", 0), [0, 2]);
    assert_eq!(order("bind:0,2@2", 0), [2, 0]);
    assert_eq!(order("prefer (many):2-3", 0), [3, 2, 0, 1]);
    assert_eq!(order("bind:9", 0), Vec::<usize>::new());
}

#[test]
fn interleaving_uses_nodes_in_turn() {
    let mut weights = Weights::default();
    weights.set(NodeId(1), 3);
    let turns = |text: &str| -> Vec<usize> {
        let policy = Mempolicy::parse(text).unwrap();
        let place = |page| node_for(&policy, page, NodeId(2), &weights, &ring());
        (0..6).map(|page| place(page).0).collect()
    };
    assert_eq!(turns("interleave:0-1,3"), [0, 1, 3, 0, 1, 3]);
    assert_eq!(turns("weighted interleave:0-1"), [0, 1, 1, 1, 0, 1]);
    assert_eq!(turns("bind:0-1"), [1; 6]);
    assert_eq!(turns("prefer:0"), [0; 6]);
    assert_eq!(turns("local"), [2; 6]);
    assert_eq!(turns("interleave"), [2; 6], "not bound yet");
    let policy = Mempolicy::parse("interleave:0-2").unwrap();
    let far = node_for(&policy, u64::MAX, NodeId(0), &weights, &ring());
    assert_eq!(far, NodeId((u64::MAX % 3) as usize));
}

#[test]
fn nodes_without_memory_are_passed_over() {
    let with_memory = nodes("0,2");
    let distances = Distances::new(&nodes("0-2"), &with_memory, &nodes("0-1"), |from, to| {
        10 + 10 * from.0.abs_diff(to.0) as u32
    });
    let policy = Mempolicy::parse("prefer:1").unwrap();
    let order: Vec<_> = zonelist(&policy, NodeId(0), &distances).collect();
    // Nodes 0 and 2 are equally near to node 1. Node 2 comes first: its number is higher, and it
    // has no CPUs.
    assert_eq!(order, [NodeId(2), NodeId(0)]);
    let here = Topology::system().unwrap();
    let distances = Distances::read(&here);
    assert_eq!(
        distances.nearest_first(NodeId(0)).count(),
        here.with_memory.len()
    );
}

#[test]
fn the_effective_policy_is_the_first_that_is_not_default() {
    let (default, local) = (Mempolicy::default(), Mempolicy::local());
    let bind = Mempolicy::bind(nodes("1")).unwrap();
    assert_eq!(effective(None, None), &SYSTEM_DEFAULT);
    assert_eq!(effective(Some(&bind), Some(&local)), &bind);
    assert_eq!(effective(Some(&default), Some(&bind)), &bind);
    assert_eq!(effective(Some(&local), Some(&bind)), &local);
    assert_eq!(effective(Some(&default), Some(&default)), &SYSTEM_DEFAULT);
}
