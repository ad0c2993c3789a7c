//! Requests, answers, and what a mailbox with wrong words does.

use super::*;
use std::boxed::Box;
use std::thread;
use std::time::Duration;

/// Milliseconds until a request expires, in tests that wait for this: long enough for what the test
/// does before, even on an emulated machine.
const SHORT: u64 = 500;

fn let_expire() {
    thread::sleep(Duration::from_millis(SHORT + 20));
}

fn mailbox() -> Box<Mailbox> {
    let mailbox = Box::new(Mailbox::zeroed());
    mailbox.fill_in();
    mailbox
}

#[test]
fn a_request_is_taken_once_by_the_process_it_names_and_answered() {
    let mailbox = mailbox();
    assert!(mailbox.is_ready());
    let posted = mailbox.post(Request::new(7, TRIM, 60_000), 99).unwrap();
    assert!(mailbox.take(8).is_none());
    assert_eq!(mailbox.answer_to(posted), None);
    let taken = mailbox.take(7).unwrap();
    assert_eq!((taken.what(), taken.argument), (TRIM, 99));
    assert!(mailbox.take(7).is_none());
    assert_eq!(mailbox.answer_to(posted), None);
    let answer = Answer::new(Code::Done, 12345);
    mailbox.answer(taken, answer);
    assert_eq!(mailbox.answer_to(posted), Some(answer));
    // The slot is free again.
    assert!(mailbox.requests.iter().all(|word| word.load(Relaxed) == 0));
}

#[test]
fn a_request_that_needs_consent_is_answered_with_and_without_it() {
    let mailbox = mailbox();
    for gives in [true, false] {
        let posted = mailbox
            .post(Request::new(7, HEAP_START, 60_000), 0)
            .unwrap();
        mailbox.give_consent(posted);
        let taken = mailbox.take(7).unwrap();
        assert!(!mailbox.wants_consent(posted));
        mailbox.want_consent(taken);
        assert!(mailbox.wants_consent(posted));
        assert_eq!(mailbox.consent(taken), Consent::Awaited);
        assert_eq!(mailbox.answer_to(posted), None);
        if gives {
            mailbox.give_consent(posted);
            assert_eq!(mailbox.consent(taken), Consent::Given);
            assert_eq!(mailbox.answer_to(posted), None);
        }
        let answer = Answer::new(Code::Refused, 0);
        mailbox.answer(taken, answer);
        assert_eq!(mailbox.answer_to(posted), Some(answer));
    }
}

#[test]
fn a_process_waits_for_no_consent_of_an_asker_that_has_given_up() {
    let mailbox = mailbox();
    let posted = mailbox.post(Request::new(7, HEAP_START, SHORT), 0).unwrap();
    let taken = mailbox.take(7).unwrap();
    mailbox.want_consent(taken);
    mailbox.withdraw(posted);
    assert_eq!(mailbox.consent(taken), Consent::Gone);
    // A late consent does not reach the next request in the slot.
    let_expire();
    let second = mailbox
        .post(Request::new(7, HEAP_START, 60_000), 0)
        .unwrap();
    let taken = mailbox.take(7).unwrap();
    mailbox.want_consent(taken);
    mailbox.give_consent(posted);
    assert_eq!(mailbox.consent(taken), Consent::Awaited);
    mailbox.give_consent(second);
    assert_eq!(mailbox.consent(taken), Consent::Given);
}

#[test]
fn a_late_answer_does_not_reach_the_next_request_in_the_slot() {
    let mailbox = mailbox();
    let first = mailbox.post(Request::new(7, TRIM, SHORT), 1).unwrap();
    let late = mailbox.take(7).unwrap();
    let_expire();
    let second = mailbox.post(Request::new(8, TRIM, 60_000), 2).unwrap();
    assert_eq!(first.slot, second.slot);
    mailbox.answer(late, Answer::new(Code::Done, 111));
    let taken = mailbox.take(8).unwrap();
    assert_eq!(mailbox.answer_to(first), None);
    assert_eq!(mailbox.answer_to(second), None);
    mailbox.answer(taken, Answer::new(Code::Done, 222));
    assert_eq!(mailbox.answer_to(second).unwrap().value(), 222);
}

#[test]
fn words_of_an_asker_that_was_stopped_are_not_taken_for_another_request() {
    let mailbox = mailbox();
    let request = Request::new(7, SET, 60_000);
    for (argument, seal, is_taken) in [
        (1, 1 ^ request.word(), true),
        (2, 1 ^ request.word(), false),
        (1, 2 ^ request.word(), false),
        (1, 1 ^ Request::new(7, SET, SHORT).word(), false),
    ] {
        let posted = mailbox.post(request, 1).unwrap();
        mailbox.arguments[posted.slot].store(argument, Relaxed);
        mailbox.seals[posted.slot].store(seal, Relaxed);
        assert_eq!(mailbox.take(7).is_some(), is_taken);
        mailbox.withdraw(posted);
    }
}

#[test]
fn old_requests_are_not_served_and_give_their_slots_back() {
    let mailbox = mailbox();
    for _ in 0..SLOTS {
        mailbox.post(Request::new(7, TRIM, SHORT), 0).unwrap();
    }
    assert!(mailbox.post(Request::new(7, TRIM, SHORT), 0).is_none());
    let_expire();
    assert!(mailbox.take(7).is_none());
    assert!(mailbox.requests.iter().all(|word| word.load(Relaxed) == 0));
    let posted = mailbox.post(Request::new(7, TRIM, 60_000), 0).unwrap();
    assert!(!mailbox.withdraw(posted));
    assert!(mailbox.take(7).is_none());
}

#[test]
fn each_of_many_askers_gets_its_own_answer() {
    const ASKERS: u64 = 4;
    let mailbox = mailbox();
    let (mailbox, left) = (&*mailbox, &AtomicU64::new(ASKERS));
    thread::scope(|scope| {
        for pid in 0..ASKERS {
            scope.spawn(move || {
                for nth in 0..300 {
                    let argument = pid << 32 | nth;
                    let request = Request::new(1 + pid as u32 % 2, TRIM, 60_000);
                    let posted = mailbox.post(request, argument).unwrap();
                    let answer = loop {
                        match mailbox.answer_to(posted) {
                            Some(answer) => break answer,
                            None => thread::yield_now(),
                        }
                    };
                    assert_eq!(answer, Answer::new(Code::Done, argument + 1));
                }
                left.fetch_sub(1, Relaxed);
            });
        }
        for pid in [1, 2, 1] {
            scope.spawn(move || {
                while left.load(Relaxed) > 0 {
                    match mailbox.take(pid) {
                        Some(taken) => {
                            let answer = Answer::new(Code::Done, taken.argument + 1);
                            mailbox.answer(taken, answer);
                        }
                        None => thread::yield_now(),
                    }
                }
            });
        }
    });
}

#[test]
fn garbage_is_never_taken_for_longer_than_the_longest_time() {
    let mailbox = mailbox();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..20_000 {
        for word in &mailbox.requests {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            word.store(state, Relaxed);
        }
        while let Some(taken) = mailbox.take(Request::from_word(state).pid) {
            assert!(taken.request.is_open(now_ms()) || taken.request.is_open(now_ms() - 1000));
            mailbox.answer(taken, Answer::new(Code::Done, 0));
        }
    }
}
