//! Where the calls are forbidden, by a filter or for want of rights. Both are a thread's own.

mod policy_machine;

use pinfold::mempolicy::{self, Call, Mempolicy, Move, PageNode, PolicyError, available};
use pinfold::topology::{NodeId, NodeSet};
use policy_machine::Pages;

/// Has the kernel answer `errno` to all calls of policies that this thread makes from now on.
fn forbid(errno: i32) {
    let statement = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let calls = [
        libc::SYS_mbind,
        libc::SYS_set_mempolicy,
        libc::SYS_get_mempolicy,
        libc::SYS_migrate_pages,
        libc::SYS_move_pages,
        libc::SYS_set_mempolicy_home_node,
    ];
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = vec![statement(load, 0, 0, 0)];
    for (n, call) in calls.iter().enumerate() {
        let to_refusal = (calls.len() - n) as u8;
        program.push(statement(equal, *call as u32, to_refusal, 0));
    }
    program.push(statement(answer, libc::SECCOMP_RET_ALLOW, 0, 0));
    program.push(statement(
        answer,
        libc::SECCOMP_RET_ERRNO | errno as u32,
        0,
        0,
    ));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the thread gives rights up, which concerns nobody else.
    let given_up = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(given_up, 0);
    // SAFETY: the filter is readable; the kernel copies it.
    let set = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const filter,
        )
    };
    assert_eq!(set, 0);
}

/// Rights are a thread's, too.
#[test]
fn what_needs_rights_is_told_of() {
    if available().is_err() {
        return;
    }
    let thread = || {
        let pages = Pages::new(1);
        pages.touch();
        // The third version of the header; no rights at all.
        let (header, none) = ([0x2008_0522u32, 0], [0u32; 6]);
        // SAFETY: both are readable.
        let given_up = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
        assert_eq!(given_up, 0);
        let local = Mempolicy::local();
        let apply = |moving| mempolicy::apply(pages.at(0), pages.size(), &local, moving, false);
        assert_eq!(apply(Move::All), Err(PolicyError::NeedsRights(Call::Mbind)));
        assert!(
            apply(Move::All)
                .unwrap_err()
                .to_string()
                .contains("CAP_SYS_NICE")
        );
        assert_eq!(apply(Move::Own), Ok(()));
        let node = mempolicy::node_at(pages.at(0)).unwrap();
        let mut now = [PageNode::UNKNOWN];
        let moved = mempolicy::move_pages(&[pages.at(0)], &[node], &mut now, Move::All);
        assert_eq!(moved, Err(PolicyError::NeedsRights(Call::MovePages)));
    };
    std::thread::spawn(thread).join().unwrap();
}

/// A filter holds for the thread that sets it.
#[test]
fn a_filter_that_forbids_the_calls_is_told_of() {
    for number in [libc::EPERM, libc::ENOSYS] {
        let thread = move || {
            let before = available().is_ok().then(mempolicy::thread);
            forbid(number);
            let refused = available().unwrap_err();
            assert!(refused.is_forbidden());
            let local = Mempolicy::local();
            let pages = Pages::new(1);
            for (error, call) in [
                (refused, "get_mempolicy: "),
                (
                    mempolicy::set_for_thread(&local).unwrap_err(),
                    "set_mempolicy: ",
                ),
                (
                    mempolicy::apply(pages.at(0), pages.size(), &local, Move::No, false)
                        .unwrap_err(),
                    "mbind: ",
                ),
            ] {
                let text = error.to_string();
                assert_eq!(error.errno(), Some(number));
                assert!(error.is_forbidden());
                assert!(text.starts_with(call), "{text}");
                assert!(text.contains("a filter (seccomp, a container's)"), "{text}");
                assert!(text.contains("default policy stays in effect"), "{text}");
            }
            let all = Mempolicy::interleave(NodeSet::EMPTY).unwrap();
            assert!(mempolicy::set_for_thread(&all).is_err());
            assert!(mempolicy::set_home_node(pages.at(0), pages.size(), NodeId(0)).is_err());
            assert!(mempolicy::nodes_of_pages(&[pages.at(0)], &mut [PageNode::UNKNOWN]).is_err());
            let moving = mempolicy::apply(pages.at(0), pages.size(), &local, Move::All, false);
            assert!(moving.unwrap_err().is_forbidden());
            let all = NodeSet::EMPTY;
            assert!(
                mempolicy::migrate(0, &all, &all)
                    .unwrap_err()
                    .is_forbidden()
            );
            // Memory is to be had as ever.
            pages.touch();
            assert!(vec![7u8; 1 << 20].iter().all(|&byte| byte == 7));
            before
        };
        let before = std::thread::spawn(thread).join().unwrap();
        // The other threads are none the wiser.
        if let Some(policy) = before {
            assert_eq!(mempolicy::thread(), policy);
        }
    }
}
