//! The mailbox: the page through which other processes of the same user ask a process for
//! something, and read the process's answer.
//!
//! The asking process may die at any moment, the asked process may be slow or never look, and a
//! hostile writer may store anything in the page. A child that runs no fork handlers shares its
//! parent's mailbox. So each request has an end, each change of a slot is one compare-exchange of a
//! word that names the request's process, kind and end, and the asked process checks all that it
//! reads.
//!
//! A child of `fork` has a mailbox of its own in private memory. An asking process that may trace
//! the child works on a copy of this page, and writes back the words that it changed, one after the
//! other. It cannot compare and exchange, so two such processes may take one slot at once. The seal
//! and the request's end in the answer word keep each from the other's answer.
//!
//! # Slots
//!
//! A slot has four words. The *request* word holds the asked process, the kind of the request, the
//! state, and the time from which on the slot is free again:
//!
//! | state of the request word | who may change it | to |
//! |---|---|---|
//! | 0, or any word whose time has passed | an asking process | `WRITING` |
//! | `WRITING` | the asking process that wrote it, after it stored the other words | `POSTED` |
//! | `POSTED` | a thread of the asked process | `TAKEN` |
//! | `TAKEN` | the asking process, after it has read the answer or given up | 0 |
//! | `POSTED` | the asking process, if it gives up | 0 |
//! | `POSTED` whose time has passed | a thread of the asked process | 0 |
//!
//! The *argument* word and the *seal* word belong to the asking process from `WRITING` on. The seal
//! is the exclusive or of the argument and the `POSTED` word. The asked process reads both after
//! `TAKEN`, and does nothing unless they fit this request. There are two reasons why they may not:
//!
//! * The time of the request has passed, and the slot was given to another request.
//! * An asking process stopped in `WRITING` until its time had passed, for example by a signal.
//!   Then it went on, and stored its words into a slot that belongs to another request by now. This
//!   other request then gets no answer.
//!
//! The *answer* word belongs to both processes:
//!
//! | state of the answer word | who may change it | to |
//! |---|---|---|
//! | any word | the asking process, in `WRITING` | a copy of the `POSTED` word |
//! | a copy of the `POSTED` word | the asked process | an [`Answer`], or `WANTS_CONSENT` |
//! | `WANTS_CONSENT`, with the request's end | the asking process | `HAS_CONSENT`, with the same end |
//! | `WANTS_CONSENT`, `HAS_CONSENT` | the asked process | an [`Answer`] |
//!
//! A process that answers after the request's time finds another word in the answer word, and its
//! answer is dropped. So no process reads an answer to another process's request.
//!
//! # Consent
//!
//! For some requests, the asked process makes system calls that it does not make otherwise. A
//! seccomp filter may end the process at such a call, and a process cannot find out about its
//! filters without one more system call. The asking process can: it reads `/proc/PID/task`. But the
//! asked process may enter a filter between that moment and its look at the mailbox.
//!
//! So a thread that has taken such a request sets `WANTS_CONSENT`, and waits for a short time. It
//! enters no filter while it waits. The asking process then reads again which threads have filters,
//! and sets `HAS_CONSENT` only if none has. Another thread can put a filter on all threads
//! (`SECCOMP_FILTER_FLAG_TSYNC`). If it does so just after the asking process has read, the asked
//! process makes the calls inside the filter.
//!
//! # The bell
//!
//! After a request is posted, the asking process adds 1 to [`Mailbox::bell`] and wakes the threads
//! that sleep on this word: the shepherds of the process. A process that writes to private memory
//! cannot wake them, and they look at their next tick. A process without a shepherd looks at the
//! ticks of its slow paths.

use super::primitive::{AtomicU32, AtomicU64, SLOTS, now_ms};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The value of [`Mailbox::magic`].
pub const MAIL_MAGIC: u64 = u64::from_le_bytes(*b"PINMAIL\x03");
/// The value of [`Mailbox::version`]. Other versions are not asked.
pub const MAIL_VERSION: u32 = 3;

/// Asks for free memory to go back to the system. The argument is ignored. The answer's value is
/// how many bytes went back.
pub const TRIM: u32 = 2;
/// Asks for the present value of the setting whose number is the argument.
pub const GET: u32 = 3;
/// Asks for a heap profile. The argument is the mean number of bytes from one sample to the next. A
/// child of a fork makes a file of its own for the profile. Needs consent.
pub const HEAP_START: u32 = 4;
/// Asks for the end of the heap profile. The argument is ignored.
pub const HEAP_STOP: u32 = 5;
/// Asks which call stacks keep free memory in slabs. The process notes it in its heap profile. The
/// argument is ignored.
pub const HEAP_FRAGMENTS: u32 = 6;
/// Asks for a new value of a setting. The kind is this number plus the setting's. The argument is
/// the value, and so is the answer's.
pub const SET: u32 = 16;

/// The mailbox. The module's text says who may write which word.
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
    seals: [AtomicU64; SLOTS],
    answers: [AtomicU64; SLOTS],
}

/// A request word: which process is asked for what, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The asked process's PID, as the process itself sees it. Linux has PIDs up to 2²².
    pub pid: u32,
    /// [`TRIM`], [`GET`], …
    pub what: u32,
    state: u32,
    /// The milliseconds of the system's clock, modulo 2³², from which on the request is ignored.
    until: u32,
}

const STATE_BITS: u32 = 2;
const PID_BITS: u32 = 22;
const WHAT_BITS: u32 = 8;
const TIME_AT: u32 = STATE_BITS + PID_BITS + WHAT_BITS;
/// The longest time for which a request is open, in milliseconds.
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

    /// Returns the answer word for `WANTS_CONSENT` or `HAS_CONSENT`. It holds the request's end, so
    /// that a late exchange does not fit a request with another end in the same slot.
    fn consent(self, code: u64) -> u64 {
        code << CODE_AT | u64::from(self.until) << STATE_BITS
    }
}

/// A process's answer to a request: a code, and a value of 54 bits.
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
    /// The process does not accept this value.
    Value = 4,
    /// The process cannot do this now.
    Refused = 5,
    /// The process did not get the asking process's consent in time, and did nothing.
    NoConsent = 6,
}

/// What an asked process that wants the asking process's consent may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consent {
    /// Go on: the asking process has given its consent.
    Given,
    /// Wait.
    Awaited,
    /// Do nothing: the asking process has given up, or the request's time has passed.
    Gone,
}

const CODE_AT: u32 = 56;
/// The codes of answer words that are not answers.
const WANTS_CONSENT: u64 = 0xfe;
const HAS_CONSENT: u64 = 0xff;
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
            Code::NoConsent,
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
    /// Where the request words end, in bytes.
    pub const REQUESTS_END: usize =
        core::mem::offset_of!(Mailbox, requests) + SLOTS * size_of::<AtomicU64>();

    /// Returns a mailbox whose words are all 0.
    #[cfg(test)]
    pub(crate) fn zeroed() -> Mailbox {
        let zeroes = || core::array::from_fn(|_| AtomicU64::new(0));
        Mailbox {
            magic: AtomicU64::new(0),
            version: AtomicU32::new(0),
            bell: AtomicU32::new(0),
            requests: zeroes(),
            arguments: zeroes(),
            seals: zeroes(),
            answers: zeroes(),
        }
    }

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

    /// Posts `request` with `argument`, and changes the bell. The caller then wakes the threads
    /// that sleep on the bell. Returns `None` if all slots are taken.
    pub fn post(&self, request: Request, argument: u64) -> Option<Posted> {
        let slot = (0..SLOTS).find(|&slot| self.claim(slot, request))?;
        let (writing, posted) = (request.in_state(WRITING), request.in_state(POSTED));
        self.arguments[slot].store(argument, Relaxed);
        self.seals[slot].store(argument ^ posted, Relaxed);
        self.answers[slot].store(posted, Relaxed);
        // Release pairs with the acquire in `take`: the asked process sees these words.
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
        // Acquire keeps the stores to the slot's other words after this exchange.
        let claimed = || self.requests[slot].compare_exchange(old, writing, Acquire, Relaxed);
        is_free && claimed().is_ok()
    }

    /// Takes the next request for process `pid` that is open. At most one thread takes a request.
    /// Frees the slots of requests for the process whose time has passed: their words would look
    /// open again when the clock's 32 bits have wrapped.
    pub fn take(&self, pid: u32) -> Option<Taken> {
        (0..SLOTS).find_map(|slot| {
            // Most calls find no request, so they only load each word.
            let word = self.requests[slot].load(Relaxed);
            let request = Request::from_word(word);
            if request.state != POSTED || request.pid != pid || pid == 0 {
                return None;
            }
            let is_open = request.is_open(now_ms());
            let taken = if is_open { request.in_state(TAKEN) } else { 0 };
            // Acquire pairs with the release in `post`: this thread sees the argument.
            self.requests[slot]
                .compare_exchange(word, taken, AcqRel, Relaxed)
                .ok()?;
            let argument = self.arguments[slot].load(Relaxed);
            let fits = self.seals[slot].load(Relaxed) == argument ^ word;
            (is_open && fits).then_some(Taken {
                slot,
                request,
                argument,
            })
        })
    }

    /// Asks for the consent to a request that [`take`](Self::take) returned.
    pub fn want_consent(&self, taken: Taken) {
        let (posted, wants) = (
            taken.request.in_state(POSTED),
            taken.request.consent(WANTS_CONSENT),
        );
        // Release pairs with the acquire in `wants_consent`.
        let _ = self.answers[taken.slot].compare_exchange(posted, wants, Release, Relaxed);
    }

    /// Returns whether the asking process has consented, has not answered yet, or has gone.
    pub fn consent(&self, taken: Taken) -> Consent {
        let request = taken.request;
        // Acquire pairs with the release in `give_consent`.
        let word = self.answers[taken.slot].load(Acquire);
        let is_open = self.requests[taken.slot].load(Relaxed) == request.in_state(TAKEN);
        if word == request.consent(HAS_CONSENT) {
            Consent::Given
        } else if is_open && word == request.consent(WANTS_CONSENT) {
            Consent::Awaited
        } else {
            Consent::Gone
        }
    }

    /// Answers a request that [`take`](Self::take) returned.
    pub fn answer(&self, taken: Taken, answer: Answer) {
        let request = taken.request;
        // The asking process may give its consent between two of these exchanges, so the words come
        // in the order in which they may follow each other.
        let words = [
            request.in_state(POSTED),
            request.consent(WANTS_CONSENT),
            request.consent(HAS_CONSENT),
        ];
        words.into_iter().any(|word| {
            // Release pairs with the acquire in `answer_to`: the asking process sees what was done.
            self.answers[taken.slot]
                .compare_exchange(word, answer.0, Release, Relaxed)
                .is_ok()
        });
    }

    /// Returns whether the asked process waits for the consent to a posted request.
    pub fn wants_consent(&self, posted: Posted) -> bool {
        // Acquire pairs with the release in `want_consent`: what the asking process reads about the
        // asked one from now on is of a time when the asked thread waits.
        self.answers[posted.slot].load(Acquire) == posted.request.consent(WANTS_CONSENT)
    }

    /// Gives the consent to a posted request.
    pub fn give_consent(&self, posted: Posted) {
        let request = posted.request;
        let (wants, has) = (request.consent(WANTS_CONSENT), request.consent(HAS_CONSENT));
        // Release pairs with the acquire in `consent`.
        let _ = self.answers[posted.slot].compare_exchange(wants, has, Release, Relaxed);
    }

    /// Returns the answer to a posted request. Returns `None` before it is answered. Frees the slot
    /// of an answered request.
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

    /// Returns whether a posted request waits for the asked process to take it.
    pub fn is_waiting(&self, posted: Posted) -> bool {
        self.requests[posted.slot].load(Relaxed) == posted.request.in_state(POSTED)
    }

    /// Gives up a request. If the asked process has not taken the request yet, it never will.
    /// Returns whether it had.
    pub fn withdraw(&self, posted: Posted) -> bool {
        let word = &self.requests[posted.slot];
        let from =
            |state| word.compare_exchange(posted.request.in_state(state), 0, AcqRel, Relaxed);
        from(POSTED).is_err() && from(TAKEN).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "mailbox/tests.rs"]
mod tests;
