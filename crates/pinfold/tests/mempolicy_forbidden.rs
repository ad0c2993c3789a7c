//! Calls that are forbidden, by a filter or by missing rights. Both are per thread, so that each
//! test uses a thread of its own.

mod common;
mod policy_machine;

use common::forbid;
use pinfold::mempolicy::{self, Mempolicy, Move, PageNode, PolicyError, Syscall, available};
use pinfold::topology::{NodeId, NodeSet};
use policy_machine::Pages;

/// The policy calls.
const CALLS: [libc::c_long; 6] = [
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    libc::SYS_get_mempolicy,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_set_mempolicy_home_node,
];

/// Capabilities are per thread.
#[test]
fn missing_rights_are_reported() {
    if available().is_err() {
        return;
    }
    let thread = || {
        let pages = Pages::new(1);
        pages.touch();
        // The third version of the header, and no capability at all.
        let (header, none) = ([0x2008_0522u32, 0], [0u32; 6]);
        // SAFETY: the kernel reads a header of two words and three words for each of two sets,
        // which the arrays hold.
        let given_up = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
        assert_eq!(given_up, 0);
        let local = Mempolicy::local();
        let apply = |moving| mempolicy::apply(pages.at(0), pages.size(), &local, moving, false);
        assert_eq!(
            apply(Move::All),
            Err(PolicyError::NeedsRights(Syscall::Mbind))
        );
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
        assert_eq!(moved, Err(PolicyError::NeedsRights(Syscall::MovePages)));
    };
    std::thread::spawn(thread).join().unwrap();
}

/// A filter holds for the thread that sets it.
#[test]
fn a_filter_that_forbids_the_calls_is_reported() {
    for number in [libc::EPERM, libc::ENOSYS] {
        let thread = move || {
            let before = available().is_ok().then(mempolicy::thread);
            forbid(&CALLS, number);
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
            // Memory works as before.
            pages.touch();
            assert!(vec![7u8; 1 << 20].iter().all(|&byte| byte == 7));
            before
        };
        let before = std::thread::spawn(thread).join().unwrap();
        // The filter does not affect other threads.
        if let Some(policy) = before {
            assert_eq!(mempolicy::thread(), policy);
        }
    }
}
