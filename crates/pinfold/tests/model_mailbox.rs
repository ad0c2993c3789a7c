//! A model of the mailbox, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test model_mailbox`.
//!
//! The mailbox is `segment/mailbox.rs` itself, with one slot. Two processes ask a third one, which
//! looks as often as there are requests. At some moment, the time of the first request passes: then
//! the second asker may take its slot, wherever the first asker has got to.
#![cfg(loom)]

#[path = "../src/segment/mailbox.rs"]
#[allow(dead_code, reason = "the model does not use all of the file")]
mod mailbox;

use loom::thread;
use mailbox::{Answer, Code, Consent, GET, Mailbox, Posted, Request, TRIM};
use primitive::NOW;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

mod primitive {
    pub use loom::sync::atomic::{AtomicU32, AtomicU64};

    pub const SLOTS: usize = 1;

    /// The clock, which no thread waits for. Not one of loom's, because it is no part of what is
    /// explored.
    pub static NOW: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

    pub fn now_ms() -> u64 {
        NOW.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// Held by a model, because all models use one clock.
static CLOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());

const ASKED: u32 = 7;
/// How long the first request is open, and how long the second one.
const SHORT: u64 = 100;
const LONG: u64 = 10_000;

fn argument_of(what: u32) -> u64 {
    u64::from(what) << 8
}

/// Looks for a request, checks that the argument is that of the request, and answers with it.
fn look(mailbox: &Mailbox) {
    if let Some(taken) = mailbox.take(ASKED) {
        assert_eq!(taken.argument, argument_of(taken.what()));
        mailbox.answer(taken, Answer::new(Code::Done, taken.argument));
    }
}

/// Takes a request, and asks for consent. Checks twice that consent is only seen after the asker of
/// this request has given it.
fn look_with_consent(mailbox: &Mailbox, consents: &[AtomicBool; 2]) {
    let Some(taken) = mailbox.take(ASKED) else {
        return;
    };
    mailbox.want_consent(taken);
    let is_given = (0..2).any(|_| mailbox.consent(taken) == Consent::Given);
    let has_given = consents[taken.argument as usize].load(Relaxed);
    assert!(has_given || !is_given);
    mailbox.answer(taken, Answer::new(Code::Done, u64::from(is_given)));
}

/// Posts a request with its number as the argument, and gives consent if it is wanted. Checks that
/// nothing was done without it. The time of the first request passes between the wish for consent
/// and the consent.
fn ask_with_consent(mailbox: &Mailbox, number: u64, request: Request, consents: &[AtomicBool; 2]) {
    let Some(posted) = (0..2).find_map(|_| mailbox.post(request, number)) else {
        return;
    };
    let consent = &consents[number as usize];
    if (0..2).any(|_| mailbox.wants_consent(posted)) {
        if number == 0 {
            NOW.store(1000 + SHORT, Relaxed);
        }
        consent.store(true, Relaxed);
        mailbox.give_consent(posted);
    }
    let answer = mailbox.answer_to(posted);
    assert!(answer.is_none_or(|answer| answer.value() == 0 || consent.load(Relaxed)));
    mailbox.withdraw(posted);
}

/// Checks that the asker gets no answer to another request than the one that it posted.
fn check(mailbox: &Mailbox, posted: Option<Posted>, what: u32) {
    let answer = posted.and_then(|posted| mailbox.answer_to(posted));
    assert!(answer.is_none_or(|answer| answer.value() == argument_of(what)));
}

#[test]
fn no_request_gets_another_ones_argument_or_answer() {
    let _clock = CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
    loom::model(|| {
        NOW.store(1000, Relaxed);
        let mailbox = loom::sync::Arc::new(Mailbox::zeroed());
        let stopped = {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                let request = Request::new(ASKED, TRIM, SHORT);
                mailbox.post(request, argument_of(TRIM))
            })
        };
        let later = {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                NOW.store(1000 + SHORT, Relaxed);
                mailbox.post(Request::new(ASKED, GET, LONG), argument_of(GET))
            })
        };
        look(&mailbox);
        let later = later.join().unwrap();
        look(&mailbox);
        let stopped = stopped.join().unwrap();
        look(&mailbox);
        check(&mailbox, stopped, TRIM);
        check(&mailbox, later, GET);
    });
}

#[test]
fn no_request_is_served_by_the_consent_to_another() {
    let _clock = CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let mut model = loom::model::Builder::new();
    // An asker that stops before its consent, one that stops behind its post, and a look between.
    model.preemption_bound = Some(3);
    model.check(|| {
        NOW.store(1000, Relaxed);
        let requests = [SHORT, LONG].map(|ms| Request::new(ASKED, TRIM, ms));
        let mailbox = loom::sync::Arc::new(Mailbox::zeroed());
        let consents = std::sync::Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let looks = {
            let (mailbox, consents) = (mailbox.clone(), consents.clone());
            thread::spawn(move || {
                look_with_consent(&mailbox, &consents);
                look_with_consent(&mailbox, &consents);
            })
        };
        let first = {
            let (mailbox, consents) = (mailbox.clone(), consents.clone());
            thread::spawn(move || ask_with_consent(&mailbox, 0, requests[0], &consents))
        };
        ask_with_consent(&mailbox, 1, requests[1], &consents);
        looks.join().unwrap();
        first.join().unwrap();
    });
}
