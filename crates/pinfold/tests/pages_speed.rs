//! Measures what it costs a pool of pages to follow the calling thread's policy:
//! `cargo test -p pinfold --test pages_speed -- --ignored --nocapture`.

use pinfold::pages::Pages;

#[test]
#[ignore = "a measurement, which checks nothing"]
fn speed() {
    const ROUNDS: u64 = 200_000;
    let pages = Pages::new("speed").unwrap();
    let mut times = [(); 3].map(|()| Vec::new());
    for turn in 0..21 {
        let kind = turn % 3;
        pages.set_following_threads(kind > 0);
        let start = std::time::Instant::now();
        for place in 0..ROUNDS {
            let page = match kind {
                2 => pages.alloc_zeroed(place),
                _ => pages.alloc(place),
            };
            // SAFETY: the page came from `pages` and is not used afterwards.
            unsafe { pages.free(page.unwrap()) };
        }
        times[kind].push(start.elapsed().as_nanos() as f64 / ROUNDS as f64);
    }
    let [alone, following, zeroed] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!("ns a page allocated and freed: {alone:.1}");
    println!("… following the thread: {following:.1}, and zeroed too: {zeroed:.1}");
    println!("following / not following: {:.1}", following / alone);
}
