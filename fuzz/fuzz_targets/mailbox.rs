//! A mailbox with any content, seen from both sides: the process that serves requests, and the
//! process that has posted one. The input's first byte says what the other side writes when.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinfold::internal::segment::{Answer, Code, Consent, Mailbox, Request, SLOTS, TRIM, now_ms};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

const WORDS: usize = size_of::<Mailbox>() / 8;
const OWN: u32 = 77;
/// The milliseconds in a request's word are above these bits. The fuzzer cannot guess the time.
const TIME_AT: u32 = 32;

fuzz_target!(|data: &[u8]| {
    let Some((&first, data)) = data.split_first() else {
        return;
    };
    let words: Vec<AtomicU64> = (0..WORDS + 512).map(|_| AtomicU64::new(0)).collect();
    // The mailbox is aligned to its size.
    let at = words.as_ptr().addr().next_multiple_of(size_of::<Mailbox>());
    let skipped = (at - words.as_ptr().addr()) / 8;
    let words = &words[skipped..skipped + WORDS];
    // SAFETY: the words are zeroes, as many as the mailbox has, aligned, and live longer.
    let mailbox: &Mailbox = unsafe { &*words.as_ptr().cast() };
    let now = now_ms() as u32;
    let write = |data: &[u8]| {
        let (chunks, _) = data.as_chunks::<10>();
        for chunk in chunks {
            let nth = usize::from(u16::from_le_bytes([chunk[0], chunk[1]])) % WORDS;
            let mut word = u64::from_le_bytes(chunk[2..].try_into().expect("eight bytes"));
            // A request that is open for a moment.
            if nth < 2 + SLOTS && chunk[1] & 0x80 != 0 {
                let soon = now.wrapping_add((word >> TIME_AT) as u32 % 2000);
                word = word & 0xffff_ffff | u64::from(soon) << TIME_AT;
            }
            words[nth].store(word, Relaxed);
        }
    };
    let (before, after) = data.split_at(data.len() / 2);
    write(before);
    let _ = mailbox.is_ready();

    let posted = mailbox.post(Request::new(OWN, TRIM, 1000), u64::from(first));
    write(after);
    if let Some(posted) = posted {
        if mailbox.wants_consent(posted) {
            mailbox.give_consent(posted);
        }
        if let Some(answer) = mailbox.answer_to(posted) {
            assert!(answer.value() <= Answer::MAX);
        }
        if first & 1 != 0 {
            let _ = mailbox.withdraw(posted);
        }
    }

    for _ in 0..SLOTS {
        let Some(taken) = mailbox.take(OWN) else {
            continue;
        };
        if first & 2 != 0 {
            mailbox.want_consent(taken);
            let consent = mailbox.consent(taken);
            // Only the other side gives its consent.
            assert_ne!(consent, Consent::Given);
        }
        mailbox.answer(taken, Answer::new(Code::Done, taken.argument));
    }
    assert!(mailbox.take(0).is_none());
});
