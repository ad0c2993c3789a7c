//! Measures what it costs a pool of pages to follow the calling thread's policy:
//! `cargo test --release -p pinfold --test pages_speed -- --ignored --nocapture`.

use pinfold::mempolicy::thread_changed;
use pinfold::pages::Pages;

const PAGES: u64 = 100_000;
const ROUNDS: usize = 15;

/// Returns the nanoseconds for each page that is allocated and freed.
fn round(pages: &Pages, zeroed: bool) -> f64 {
    let start = std::time::Instant::now();
    for place in 0..PAGES {
        let page = match zeroed {
            true => pages.alloc_zeroed(place),
            false => pages.alloc(place),
        };
        // SAFETY: the page came from `pages` and is not used afterwards.
        unsafe { pages.free(page.unwrap()) };
    }
    start.elapsed().as_nanos() as f64 / PAGES as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[test]
#[ignore = "a measurement, which checks nothing"]
fn speed() {
    let pages = Pages::new("speed").unwrap();
    // No change can be taken back, so these rounds come first.
    let unchanged = median((0..ROUNDS).map(|_| round(&pages, false)).collect());
    thread_changed();
    let mut times = [(); 3].map(|()| Vec::new());
    for turn in 0..3 * ROUNDS {
        let kind = turn % 3;
        pages.set_following_threads(kind > 0);
        times[kind].push(round(&pages, kind == 2));
    }
    let [noted, asked, zeroed] = times.map(median);
    println!("ns a page allocated and freed, before any thread's change: {unchanged:.1}");
    println!("after a change, by the thread's note: {noted:.1}");
    println!("the kernel is asked for each page: {asked:.1}, and the page is zeroed: {zeroed:.1}");
}
