//! The mailbox: the page through which other processes of the same user ask a process for
//! something, and read the process's answer.
//!
//! The asking process may die at any moment, the asked process may be slow or never look, and a
//! hostile writer may store anything in the page. Several processes may share one mailbox, because
//! a forked child keeps its parent's. So each request has an end, each change of a slot is one
//! compare-exchange of a word that names the request's process, kind and end, and the asked process
//! checks all that it reads.
//!
//! # Slots
//!
//! A slot has three words. The *request* word holds the asked process, the kind of the request, the
//! state, and the time from which on the slot is free again:
//!
//! | state of the request word | who may change it | to |
//! |---|---|---|
//! | 0, or any word whose time has passed | an asking process | `WRITING` |
//! | `WRITING` | the asking process that wrote it, after it stored the two other words | `POSTED` |
//! | `POSTED` | a thread of the asked process | `TAKEN` |
//! | `TAKEN` | the asking process, after it has read the answer; or the asked process, for a request without an answer | 0 |
//!
//! The *argument* word belongs to the asking process from `WRITING` on. The asked process reads it
//! after `TAKEN`, and then reads the request word again. If that word has changed, the slot was
//! given to another request meanwhile, and the asked process does nothing.
//!
//! The *answer* word holds a copy of the `POSTED` word until the asked process exchanges this copy
//! for an [`Answer`]. A process that answers after the request's time finds another word in its
//! place, and the answer is dropped. So no process reads an answer to another process's request.
//!
//! # The bell
//!
//! After a request is posted, the asking process adds 1 to [`Mailbox::bell`] and wakes the threads
//! that sleep on this word: the shepherds of all processes that share the mailbox. Each then looks
//! for requests of its own. A process without a shepherd looks at the ticks of its slow paths.

use super::files::now_ms;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// The value of [`Mailbox::magic`].
pub const MAIL_MAGIC: u64 = u64::from_le_bytes(*b"PINMAIL\x02");
/// The value of [`Mailbox::version`]. Other versions are not asked.
pub const MAIL_VERSION: u32 = 1;

/// Asks a child of a fork to make a segment of its own. Has no argument and no answer.
pub const MAKE: u32 = 1;
/// Asks for free memory to go back to the system. The argument is ignored. The answer's value is a
/// number of bytes.
pub const TRIM: u32 = 2;
/// Asks for the present value of the setting whose number is the argument.
pub const GET: u32 = 3;
/// Asks for a heap profile. The argument is the mean number of bytes from one sample to the next. A
/// child of a fork makes a file of its own for the profile.
pub const HEAP_START: u32 = 4;
/// Asks for the end of the heap profile. The argument is ignored.
pub const HEAP_STOP: u32 = 5;
/// Asks for a new value of a setting. The kind is this number plus the setting's. The argument is
/// the value, and so is the answer's.
pub const SET: u32 = 16;
/// The kinds from [`SET`] on that are settings.
pub const SETS: u32 = 16;

/// The number of requests that a mailbox holds at once.
pub const SLOTS: usize = 32;

/// The mailbox. The module's text says who may write which word.
///
/// # Examples
///
/// ```
/// assert_eq!(size_of::<pinfold::segment::Mailbox>(), 4096);
/// ```
#[repr(C, align(4096))]
pub struct Mailbox {
    /// [`MAIL_MAGIC`], stored last by the process that makes the mailbox.
    pub magic: AtomicU64,
    /// [`MAIL_VERSION`].
    pub version: AtomicU32,
    /// Changes with each request. Shepherds sleep on this word.
    pub bell: AtomicU32,
    requests: [AtomicU64; SLOTS],
    arguments: [AtomicU64; SLOTS],
    answers: [AtomicU64; SLOTS],
}

/// A request word: which process is asked for what, and until when.
///
/// # Examples
///
/// ```
/// use pinfold::segment::{MAKE, Request, now_ms};
///
/// let request = Request::new(77, MAKE, 1000);
/// assert_eq!(Request::from_word(request.word()), request);
/// assert!(request.is_open(now_ms()) && !request.is_open(now_ms() + 3000));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The process, as it sees itself. Linux numbers processes up to 2²².
    pub pid: u32,
    /// [`MAKE`], [`TRIM`], …
    pub what: u32,
    state: u32,
    /// The milliseconds of the system's clock, modulo 2³², from which on the request is ignored.
    until: u32,
}

const STATE_BITS: u32 = 2;
const PID_BITS: u32 = 22;
const WHAT_BITS: u32 = 8;
const TIME_AT: u32 = STATE_BITS + PID_BITS + WHAT_BITS;
/// No request is open for longer, in milliseconds.
const LONGEST: u32 = 60_000;

const WRITING: u32 = 1;
const POSTED: u32 = 2;
const TAKEN: u32 = 3;

impl Request {
    /// Makes a request that is open for `ms` milliseconds, at most a minute.
    pub fn new(pid: u32, what: u32, ms: u64) -> Request {
        let ms = ms.min(u64::from(LONGEST)) as u32;
        Request {
            pid: pid & ((1 << PID_BITS) - 1),
            what: what & ((1 << WHAT_BITS) - 1),
            state: POSTED,
            until: (now_ms() as u32).wrapping_add(ms),
        }
    }

    /// Returns the request in one word, which is not 0.
    pub fn word(self) -> u64 {
        let pid = u64::from(self.pid) << STATE_BITS;
        let what = u64::from(self.what) << (STATE_BITS + PID_BITS);
        u64::from(self.state) | pid | what | u64::from(self.until) << TIME_AT
    }

    /// Returns the request in a word that may hold anything.
    pub fn from_word(word: u64) -> Request {
        Request {
            pid: (word >> STATE_BITS) as u32 & ((1 << PID_BITS) - 1),
            what: (word >> (STATE_BITS + PID_BITS)) as u32 & ((1 << WHAT_BITS) - 1),
            state: word as u32 & ((1 << STATE_BITS) - 1),
            until: (word >> TIME_AT) as u32,
        }
    }

    /// Returns whether the request is still to be served at `now`, in milliseconds.
    pub fn is_open(self, now: u64) -> bool {
        (1..=LONGEST).contains(&self.until.wrapping_sub(now as u32))
    }

    fn in_state(self, state: u32) -> u64 {
        Request { state, ..self }.word()
    }
}

/// What a process says to a request: a code, and a value of 56 bits.
///
/// # Examples
///
/// ```
/// use pinfold::segment::{Answer, Code};
///
/// let answer = Answer::new(Code::Done, 4096);
/// assert_eq!((answer.code(), answer.value()), (Some(Code::Done), 4096));
/// // A value that is too large becomes the largest.
/// assert_eq!(Answer::new(Code::Done, u64::MAX).value(), Answer::MAX);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer(u64);

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// The process did what it was asked for.
    Done = 1,
    /// The process did what it could without disturbing other CPUs.
    DoneHere = 2,
    /// The process does not know this kind of request, or this setting.
    Unknown = 3,
    /// The process does not take this value.
    Value = 4,
    /// The process cannot do this now.
    Refused = 5,
}

const CODE_AT: u32 = 56;
const VALUE: u64 = (1 << CODE_AT) - 1;

impl Answer {
    /// The largest value.
    pub const MAX: u64 = VALUE >> STATE_BITS;

    /// Makes an answer. A value above [`MAX`](Self::MAX) becomes `MAX`.
    pub fn new(code: Code, value: u64) -> Answer {
        // The low bits are 0, so no answer equals a request word.
        Answer((code as u64) << CODE_AT | value.min(Answer::MAX) << STATE_BITS)
    }

    /// Returns how the request ended, or `None` for a word that is no answer.
    pub fn code(self) -> Option<Code> {
        let code = (self.0 >> CODE_AT) as u8;
        let codes = [
            Code::Done,
            Code::DoneHere,
            Code::Unknown,
            Code::Value,
            Code::Refused,
        ];
        codes.into_iter().find(|&known| known as u8 == code)
    }

    /// Returns the value.
    pub fn value(self) -> u64 {
        (self.0 & VALUE) >> STATE_BITS
    }
}

/// A request that was posted: the asking process's hold on its slot.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    slot: usize,
    request: Request,
}

/// A request that was taken: the asked process's hold on its slot.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    slot: usize,
    request: Request,
    /// What the asking process gave with the request. Any value.
    pub argument: u64,
}

impl Taken {
    /// Returns what is asked for.
    pub fn what(&self) -> u32 {
        self.request.what
    }
}

impl Mailbox {
    /// Writes the head of a new mailbox, all of whose words are 0.
    pub fn fill_in(&self) {
        self.version.store(MAIL_VERSION, Relaxed);
        // Release pairs with the acquire in `is_ready`.
        self.magic.store(MAIL_MAGIC, Release);
    }

    /// Returns whether this is a mailbox of this version.
    pub fn is_ready(&self) -> bool {
        // Acquire pairs with the release in `fill_in`: the version is written.
        self.magic.load(Acquire) == MAIL_MAGIC && self.version.load(Relaxed) == MAIL_VERSION
    }

    /// Posts `request` with `argument`, and changes the bell. The caller then wakes those who sleep
    /// on the bell. Returns `None` if all slots are taken.
    pub fn post(&self, request: Request, argument: u64) -> Option<Posted> {
        let slot = (0..SLOTS).find(|&slot| self.claim(slot, request))?;
        // Release: a thread that sees one of these two words also sees `WRITING`. Pairs with the
        // acquire loads in `take` and `answer`.
        self.arguments[slot].store(argument, Release);
        self.answers[slot].store(request.in_state(POSTED), Release);
        let (writing, posted) = (request.in_state(WRITING), request.in_state(POSTED));
        // Release pairs with the acquire in `take`: the asked process sees the two words.
        let posted = self.requests[slot].compare_exchange(writing, posted, Release, Relaxed);
        // Release pairs with the acquire of the shepherd: it sees the request.
        self.bell.fetch_add(1, Release);
        posted.ok().map(|_| Posted { slot, request })
    }

    /// Sets a free slot to `WRITING`. Returns false if the slot is not free.
    fn claim(&self, slot: usize, request: Request) -> bool {
        let old = self.requests[slot].load(Relaxed);
        let is_free = old == 0 || !Request::from_word(old).is_open(now_ms());
        let writing = request.in_state(WRITING);
        // Acquire keeps the stores to the slot's other words behind this exchange.
        let claimed = || self.requests[slot].compare_exchange(old, writing, AcqRel, Relaxed);
        is_free && claimed().is_ok()
    }

    /// Takes the next request for process `pid` that is open. At most one thread takes a request.
    pub fn take(&self, pid: u32) -> Option<Taken> {
        (0..SLOTS).find_map(|slot| {
            // Most looks find no request. They only load each word.
            let word = self.requests[slot].load(Relaxed);
            let request = Request::from_word(word);
            if request.state != POSTED
                || request.pid != pid
                || pid == 0
                || !request.is_open(now_ms())
            {
                return None;
            }
            let taken = request.in_state(TAKEN);
            // Acquire pairs with the release in `post`: this thread sees the argument.
            self.requests[slot]
                .compare_exchange(word, taken, AcqRel, Relaxed)
                .ok()?;
            // Acquire pairs with the release in `post`. If this is the argument of a later
            // request, the load below sees that the slot has changed.
            let argument = self.arguments[slot].load(Acquire);
            let is_mine = self.requests[slot].load(Relaxed) == taken;
            is_mine.then_some(Taken {
                slot,
                request,
                argument,
            })
        })
    }

    /// Answers a request that [`take`](Self::take) returned. Without an answer, frees the slot.
    pub fn answer(&self, taken: Taken, answer: Option<Answer>) {
        let (slot, request) = (taken.slot, taken.request);
        // Release pairs with the acquire in `answer_to`: the asking process sees what was done.
        let _ = match answer {
            Some(Answer(answer)) => self.answers[slot].compare_exchange(
                request.in_state(POSTED),
                answer,
                Release,
                Relaxed,
            ),
            None => {
                self.requests[slot].compare_exchange(request.in_state(TAKEN), 0, Release, Relaxed)
            }
        };
    }

    /// Returns the answer to a posted request, or `None` if there is none yet. Frees the slot of an
    /// answered request.
    pub fn answer_to(&self, posted: Posted) -> Option<Answer> {
        // Acquire pairs with the release in `answer`.
        let word = self.answers[posted.slot].load(Acquire);
        let is_mine = self.requests[posted.slot].load(Relaxed) == posted.request.in_state(TAKEN);
        let answer = Answer(word);
        if word == posted.request.in_state(POSTED) || !is_mine || answer.code().is_none() {
            return None;
        }
        self.withdraw(posted);
        Some(answer)
    }

    /// Gives up a request. If the asked process has not taken it, it never will. Returns whether it
    /// was taken.
    pub fn withdraw(&self, posted: Posted) -> bool {
        let word = &self.requests[posted.slot];
        let from =
            |state| word.compare_exchange(posted.request.in_state(state), 0, AcqRel, Relaxed);
        from(POSTED).is_err() && from(TAKEN).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::thread;

    fn mailbox() -> Box<Mailbox> {
        // SAFETY: a mailbox consists of integers, so zeroes are valid.
        let mailbox: Box<Mailbox> = unsafe { Box::new_zeroed().assume_init() };
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
        mailbox.answer(taken, Some(answer));
        assert_eq!(mailbox.answer_to(posted), Some(answer));
        // The slot is free again.
        assert!(mailbox.requests.iter().all(|word| word.load(Relaxed) == 0));
    }

    #[test]
    fn a_late_answer_does_not_reach_the_next_request_in_the_slot() {
        let mailbox = mailbox();
        let first = mailbox.post(Request::new(7, TRIM, 20), 1).unwrap();
        let late = mailbox.take(7).unwrap();
        thread::sleep(core::time::Duration::from_millis(40));
        let second = mailbox.post(Request::new(8, TRIM, 60_000), 2).unwrap();
        assert_eq!(first.slot, second.slot);
        mailbox.answer(late, Some(Answer::new(Code::Done, 111)));
        let taken = mailbox.take(8).unwrap();
        assert_eq!(mailbox.answer_to(first), None);
        assert_eq!(mailbox.answer_to(second), None);
        mailbox.answer(taken, Some(Answer::new(Code::Done, 222)));
        assert_eq!(mailbox.answer_to(second).unwrap().value(), 222);
    }

    #[test]
    fn old_requests_are_not_served_and_give_their_slots_back() {
        let mailbox = mailbox();
        for _ in 0..SLOTS {
            mailbox.post(Request::new(7, TRIM, 20), 0).unwrap();
        }
        assert!(mailbox.post(Request::new(7, TRIM, 20), 0).is_none());
        thread::sleep(core::time::Duration::from_millis(40));
        assert!(mailbox.take(7).is_none());
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
                                mailbox.answer(taken, Some(answer));
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
                mailbox.answer(taken, None);
            }
        }
    }
}
