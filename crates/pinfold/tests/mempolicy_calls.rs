//! The system calls, on this machine's kernel. One node is enough. Without NUMA in the kernel, or
//! if a filter forbids the calls, the tests check the error message only.

mod policy_machine;

use pinfold::mempolicy::{
    self, Flags, Mempolicy, Mode, Move, PageNode, PolicyError, Syscall, available,
};
use pinfold::topology::{NodeId, NodeSet};
use policy_machine::{PAGE, Pages};
use std::ptr::{self, null};

/// Returns whether the calls can be made, and prints why if not.
fn can_make_the_calls() -> bool {
    match available() {
        Ok(()) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            assert!(error.is_forbidden());
            false
        }
    }
}

fn set_errno(errno: i32) {
    // SAFETY: `__errno_location` returns a valid pointer to this thread's own `errno`.
    unsafe { *libc::__errno_location() = errno };
}

fn errno() -> i32 {
    // SAFETY: `__errno_location` returns a valid pointer to this thread's own `errno`.
    unsafe { *libc::__errno_location() }
}

/// Calls `mbind` with raw arguments. Returns 0 or the errno.
fn raw_mbind(pages: &Pages, mode: i32, mask: *const u64, bits: usize, flags: u32) -> i32 {
    // SAFETY: the kernel only reads the mask, and answers `EFAULT` if it is not mapped. It keeps
    // the content of the range.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            pages.at(0),
            pages.size(),
            mode,
            mask,
            bits,
            flags,
        )
    };
    if answer == 0 { 0 } else { errno() }
}

/// The eleven cases of the Linux Test Project's test for `mbind`: the kernel's answer, and what
/// this library answers before it asks the kernel.
#[test]
fn mbind_errors() {
    if !can_make_the_calls() {
        return;
    }
    let node = mempolicy::mems_allowed().unwrap().iter().next().unwrap();
    let one: NodeSet = [node].into_iter().collect();
    let mut words = [0u64; 16];
    words[node / 64] = 1 << (node % 64);
    let none = NodeSet::EMPTY;
    let needs = |mode| Err(PolicyError::NeedsNodes(mode));
    let given = |mode, set: &NodeSet| Mempolicy::new(mode, Flags::NONE, set.clone());
    let takes_none = Err(PolicyError::TakesNoNodes(Mode::Default));
    // Mode, nodes, the kernel's answer, and the policy that is read back.
    let cases = [
        (Mode::Default, &none, 0, Ok(Mempolicy::default())),
        (Mode::Default, &one, libc::EINVAL, takes_none),
        (Mode::Bind, &none, libc::EINVAL, needs(Mode::Bind)),
        (Mode::Bind, &one, 0, given(Mode::Bind, &one)),
        // The only case that differs from the kernel: here, no nodes means all nodes.
        (
            Mode::Interleave,
            &none,
            libc::EINVAL,
            given(Mode::Interleave, &mempolicy::mems_allowed().unwrap()),
        ),
        (Mode::Interleave, &one, 0, given(Mode::Interleave, &one)),
        (Mode::Preferred, &none, 0, Ok(Mempolicy::local())),
        (Mode::Preferred, &one, 0, given(Mode::Preferred, &one)),
    ];
    for (mode, set, says, wanted) in cases {
        let pages = Pages::new(4);
        let mask = if set.is_empty() {
            null()
        } else {
            words.as_ptr()
        };
        let bits = if set.is_empty() { 0 } else { 1025 };
        assert_eq!(
            raw_mbind(&pages, mode as i32, mask, bits, 0),
            says,
            "{mode:?}"
        );
        let pages = Pages::new(4);
        let read = Mempolicy::new(mode, Flags::NONE, set.clone()).and_then(|policy| {
            mempolicy::apply(pages.at(0), pages.size(), &policy, Move::No, false)?;
            mempolicy::policy_at(pages.at(0))
        });
        assert_eq!(read, wanted, "{mode:?} {set}");
    }
    // The library cannot express unknown modes and flags, or a mask that is not mapped.
    let pages = Pages::new(4);
    assert_eq!(raw_mbind(&pages, -1, null(), 0, 0), libc::EINVAL);
    assert_eq!(raw_mbind(&pages, 0, null(), 0, u32::MAX), libc::EINVAL);
    assert_eq!(raw_mbind(&pages, 1, ptr::dangling(), 1025, 0), libc::EFAULT);
}

#[test]
fn ranges_that_are_not_mapped_are_refused() {
    if !can_make_the_calls() {
        return;
    }
    let pages = Pages::new(4);
    let policy = Mempolicy::interleave(NodeSet::EMPTY).unwrap();
    let apply = |at, len| mempolicy::apply(at, len, &policy, Move::No, false);
    let refused = |call, errno| Err(PolicyError::Refused { call, errno });
    let unaligned = apply(pages.at(1).wrapping_add(8), PAGE);
    assert_eq!(unaligned, refused(Syscall::Mbind, libc::EINVAL));
    assert!(
        unaligned
            .unwrap_err()
            .to_string()
            .contains("does not begin at a page")
    );
    assert_eq!(
        apply(pages.at(2), usize::MAX / 2),
        refused(Syscall::Mbind, libc::EFAULT)
    );
    assert_eq!(apply(null(), PAGE), refused(Syscall::Mbind, libc::EFAULT));
    assert_eq!(apply(pages.at(0), 0), Ok(()));
    assert_eq!(
        mempolicy::node_at(null()),
        refused(Syscall::GetMempolicy, libc::EFAULT).map(|()| NodeId(0))
    );
    assert!(
        mempolicy::policy_at(null())
            .unwrap_err()
            .to_string()
            .contains("map it first")
    );
    // Without `mbind`, the page has the thread's policy, and the range has none.
    assert_eq!(mempolicy::policy_at(pages.at(3)), Ok(Mempolicy::default()));
}

#[test]
fn missing_nodes_are_refused() {
    if !can_make_the_calls() {
        return;
    }
    let allowed = mempolicy::mems_allowed().unwrap();
    let missing: NodeSet = (0..1024).filter(|&n| !allowed.contains(n)).collect();
    let pages = Pages::new(1);
    for last in [1, missing.len() - 1] {
        let far: NodeSet = missing.iter().skip(last).take(1).collect();
        let policy = Mempolicy::bind(far.clone()).unwrap();
        let none = Err(PolicyError::NoneAllowed(Mode::Bind));
        assert_eq!(mempolicy::set_for_thread(&policy), none);
        assert_eq!(
            mempolicy::apply(pages.at(0), pages.size(), &policy, Move::No, false),
            none
        );
        let home = NodeId(far.iter().next().unwrap());
        let error = mempolicy::set_home_node(pages.at(0), pages.size(), home).unwrap_err();
        assert!(
            error.is_forbidden() || error.errno() == Some(libc::EINVAL),
            "{error}"
        );
    }
    assert_eq!(mempolicy::thread(), Ok(Mempolicy::default()));
}

/// Sets every policy that a machine with these nodes can have, and reads it back.
#[test]
fn a_threads_policy_is_read_back() {
    if !can_make_the_calls() {
        return;
    }
    let node = mempolicy::mems_allowed().unwrap().iter().next().unwrap();
    for text in [
        "default",
        "local",
        "prefer:N",
        "prefer=static:N",
        "bind:N",
        "bind=static:N",
    ]
    .into_iter()
    .chain([
        "bind=relative:0",
        "interleave:N",
        "interleave=static:N",
        "prefer (many):N",
    ])
    .chain([
        "bind=balancing:N",
        "bind=static|balancing:N",
        "prefer (many)=balancing:N",
    ])
    .chain(["weighted interleave:N", "weighted interleave=relative:0"])
    {
        let policy = Mempolicy::parse(&text.replace('N', &node.to_string())).unwrap();
        match mempolicy::set_for_thread(&policy) {
            Ok(()) => assert_eq!(mempolicy::thread(), Ok(policy), "{text}"),
            // An older kernel, or one without what `balancing` needs, refuses.
            Err(error) => assert!(error.to_string().contains("needs Linux"), "{text}: {error}"),
        }
        assert!(vec![1u8; 100_000].iter().all(|&byte| byte == 1));
    }
    mempolicy::set_for_thread(&Mempolicy::interleave(NodeSet::EMPTY).unwrap()).unwrap();
    let all = mempolicy::mems_allowed().unwrap();
    assert_eq!(mempolicy::thread().unwrap().nodes(), &all);
    let bind_all = Mempolicy::parse("bind=relative:all").unwrap();
    mempolicy::set_for_thread(&bind_all).unwrap();
    let homely = Mempolicy::parse("bind:0@0").unwrap();
    assert_eq!(
        mempolicy::set_for_thread(&homely),
        Err(PolicyError::HomeOfThread)
    );
    mempolicy::set_for_thread(&Mempolicy::default()).unwrap();
    assert_eq!(mempolicy::thread(), Ok(Mempolicy::default()));
}

#[test]
fn pages_are_located_and_moved() {
    if !can_make_the_calls() {
        return;
    }
    let pages = Pages::new(3);
    pages.touch_page(0);
    let list = [pages.at(0), pages.at(1), null()];
    let mut nodes = [PageNode::UNKNOWN; 3];
    let Ok(()) = mempolicy::nodes_of_pages(&list, &mut nodes) else {
        return;
    };
    let node = mempolicy::node_at(pages.at(0)).unwrap();
    assert_eq!(nodes[0].node(), Some(node));
    assert_eq!(nodes[0].error(), None);
    // Older kernels have one error number for both.
    let absent = [Some(libc::ENOENT), Some(libc::EFAULT)];
    assert!(nodes[1].node().is_none() && absent.contains(&nodes[1].error()));
    assert_eq!(nodes[2].error(), Some(libc::EFAULT));
    assert_eq!(PageNode::UNKNOWN.error(), None);
    assert_eq!(
        mempolicy::nodes_of_pages(&list, &mut nodes[..2]),
        Err(PolicyError::LengthsDiffer)
    );
    // More pages than one call moves.
    let many = Pages::new(150);
    many.touch();
    let list: Vec<_> = (0..150).map(|n| many.at(n)).collect();
    let mut nodes = vec![PageNode::UNKNOWN; 150];
    let moved = mempolicy::move_pages(&list, &[node; 150], &mut nodes, Move::Own);
    assert_eq!(moved, Ok(0));
    assert!(nodes.iter().all(|to| to.node() == Some(node)));
    let gone = mempolicy::move_pages(&list[..1], &[NodeId(1023)], &mut nodes[..1], Move::Own);
    assert_eq!(
        gone,
        Err(PolicyError::Refused {
            call: Syscall::MovePages,
            errno: libc::ENODEV
        })
    );
    let all: NodeSet = mempolicy::mems_allowed().unwrap();
    assert_eq!(mempolicy::migrate(0, &all, &all), Ok(0));
    assert_eq!(
        mempolicy::migrate(i32::MAX, &all, &all),
        Err(PolicyError::Refused {
            call: Syscall::MigratePages,
            errno: libc::ESRCH
        })
    );
}

#[test]
fn a_home_node_needs_a_bind_policy() {
    if !can_make_the_calls() {
        return;
    }
    let pages = Pages::new(2);
    let node = NodeId(mempolicy::mems_allowed().unwrap().iter().next().unwrap());
    let set = || mempolicy::set_home_node(pages.at(0), pages.size(), node);
    let refused = |errno| {
        Err(PolicyError::Refused {
            call: Syscall::SetHomeNode,
            errno,
        })
    };
    if set() == refused(libc::ENOSYS) {
        return;
    }
    assert_eq!(set(), refused(libc::ENOENT));
    let apply =
        |policy: &Mempolicy| mempolicy::apply(pages.at(0), pages.size(), policy, Move::No, true);
    apply(&Mempolicy::preferred(node).unwrap()).unwrap();
    assert_eq!(set(), refused(libc::EOPNOTSUPP));
    let mut bind = Mempolicy::bind([node.0].into_iter().collect()).unwrap();
    bind.set_home_node(Some(node)).unwrap();
    apply(&bind).unwrap();
    assert_eq!(
        mempolicy::policy_at(pages.at(0)).unwrap().nodes(),
        bind.nodes()
    );
}

#[test]
fn calls_keep_errno() {
    set_errno(77);
    let _ = available();
    let _ = mempolicy::node_at(null());
    let _ = mempolicy::apply(null(), PAGE, &Mempolicy::local(), Move::All, true);
    let _ = mempolicy::migrate(i32::MAX, &NodeSet::EMPTY, &NodeSet::EMPTY);
    assert_eq!(errno(), 77);
}
