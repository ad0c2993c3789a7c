//! Work that many clients ask for at once, and that is done once.
//!
//! Processes are read in a thread of their own, and no lock is held meanwhile. A client waits for
//! the thread with a deadline, so work that hangs in the kernel takes no client with it.

use crate::live::locked;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The most threads that hang.
const MOST: usize = 8;

/// The latest outcome of the work, and the thread that is at it.
pub struct Once<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    work: Box<dyn Fn() -> T + Send + Sync>,
    /// How long a thread works before another begins anew.
    hangs: Duration,
}

struct State<T> {
    /// An outcome, and when its work began.
    latest: Option<(Instant, Arc<T>)>,
    /// When the newest thread began, if it is still at work.
    working: Option<Instant>,
    threads: usize,
}

impl<T: Send + Sync + 'static> Once<T> {
    pub fn new(hangs: Duration, work: impl Fn() -> T + Send + Sync + 'static) -> Arc<Once<T>> {
        Arc::new(Once {
            state: Mutex::new(State {
                latest: None,
                working: None,
                threads: 0,
            }),
            changed: Condvar::new(),
            work: Box::new(work),
            hangs,
        })
    }

    /// Returns an outcome whose work began at `since` or later. Starts the work if no thread is at
    /// it. Returns `None` if there is no outcome within `patience`.
    pub fn get(self: &Arc<Self>, since: Instant, patience: Duration) -> Option<Arc<T>> {
        let end = Instant::now() + patience;
        let mut state = locked(&self.state);
        loop {
            if let Some((begin, outcome)) = &state.latest
                && *begin >= since
            {
                return Some(Arc::clone(outcome));
            }
            let is_working = state
                .working
                .is_some_and(|begin| begin.elapsed() < self.hangs);
            if !is_working && state.threads < MOST {
                self.start(&mut state);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // Without this limit, a client that waits would not see that a thread hangs.
            let pause = left.min(Duration::from_secs(1));
            let waited = self.changed.wait_timeout(state, pause);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn start(self: &Arc<Self>, state: &mut State<T>) {
        let (once, begin) = (Arc::clone(self), Instant::now());
        let work = move || {
            let outcome = Arc::new((once.work)());
            let mut state = locked(&once.state);
            state.threads -= 1;
            if state.working == Some(begin) {
                state.working = None;
            }
            if state.latest.as_ref().is_none_or(|latest| latest.0 < begin) {
                state.latest = Some((begin, outcome));
            }
            once.changed.notify_all();
        };
        // Without a thread, the next client tries again.
        if thread::Builder::new().spawn(work).is_ok() {
            state.working = Some(begin);
            state.threads += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn clients_share_work_and_get_no_older_outcome() {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let once = Once::new(PATIENCE, move || {
            thread::sleep(Duration::from_millis(20));
            counted.fetch_add(1, Relaxed)
        });
        let since = Instant::now();
        thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| assert!(once.get(since, PATIENCE).is_some()));
            }
        });
        assert_eq!(runs.load(Relaxed), 1);
        assert_eq!(once.get(Instant::now(), PATIENCE).as_deref(), Some(&1));
    }

    #[test]
    fn work_that_hangs_takes_no_client_with_it() {
        let first = AtomicUsize::new(0);
        let once = Once::new(Duration::from_millis(500), move || {
            if first.fetch_add(1, Relaxed) == 0 {
                thread::sleep(2 * PATIENCE);
            }
        });
        let begin = Instant::now();
        assert!(once.get(begin, Duration::from_millis(50)).is_none());
        assert!(once.get(begin, PATIENCE).is_some(), "another thread works");
        assert!(begin.elapsed() < PATIENCE);
    }
}
