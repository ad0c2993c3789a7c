//! The recorder as a service uses it: through the macros of the crate `metrics`, from several
//! threads.

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    with_local_recorder,
};
use pinfold_bridges::metrics::{BuildError, InstallError, PinfoldRecorder, Value};
use std::thread;
use std::time::Duration;

const THREADS: u64 = 8;
const ROUNDS: u64 = 20_000;

/// The only test that installs a recorder, because a process has one. Half of the threads keep
/// their handles.
#[test]
fn totals_are_exact_over_threads() {
    let recorder = PinfoldRecorder::new();
    recorder.install().unwrap();
    assert_eq!(PinfoldRecorder::new().install(), Err(InstallError));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let kept = counter!("requests", "route" => "/");
                for round in 0..ROUNDS {
                    match thread % 2 {
                        0 => kept.increment(1),
                        _ => counter!("requests", "route" => "/").increment(1),
                    }
                    counter!("by thread", "thread" => thread.to_string()).increment(round % 3);
                    gauge!("connections").increment(3.0);
                    gauge!("connections").decrement(2.0);
                    gauge!("load").increment(0.5);
                    gauge!("load").decrement(0.25);
                    histogram!("took").record(Duration::from_nanos(round + 1));
                }
            });
        }
    });
    let all = (THREADS * ROUNDS) as f64;
    let page = recorder.render();
    let has = |line: &str| assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
    has("# TYPE requests counter");
    has(&format!("requests{{route=\"/\"}} {all}"));
    let thirds: u64 = (0..ROUNDS).map(|round| round % 3).sum();
    for thread in 0..THREADS {
        has(&format!("by_thread{{thread=\"{thread}\"}} {thirds}"));
    }
    has(&format!("connections {all}"));
    has(&format!("load {}", all / 4.0));
    has("# TYPE took summary");
    has(&format!("took_count {all}"));
    let nanoseconds = THREADS * ROUNDS * (ROUNDS + 1) / 2;
    has(&format!("took_sum {}", nanoseconds as f64 / 1e9));
}

#[test]
fn absolute_raises_and_never_lowers() {
    let recorder = PinfoldRecorder::new();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let recorder = &recorder;
            scope.spawn(move || {
                with_local_recorder(recorder, || {
                    for value in 0..1_000 {
                        counter!("read").absolute(value * THREADS + thread);
                    }
                });
            });
        }
    });
    assert_eq!(
        value(&recorder, "read"),
        Value::Counter(THREADS * 1_000 - 1)
    );
    with_local_recorder(&recorder, || {
        counter!("read").absolute(3);
        counter!("read").increment(1);
    });
    assert_eq!(value(&recorder, "read"), Value::Counter(THREADS * 1_000));
}

#[test]
fn gauges_go_up_and_down_and_are_set() {
    let recorder = PinfoldRecorder::new();
    with_local_recorder(&recorder, || {
        gauge!("depth").set(0.1);
        gauge!("depth").increment(5);
        gauge!("depth").decrement(7);
        assert_eq!(value(&recorder, "depth"), Value::Gauge(0.1 - 2.0));
        gauge!("depth").set(-4.5);
        assert_eq!(value(&recorder, "depth"), Value::Gauge(-4.5));
        gauge!("depth").set(f64::NEG_INFINITY);
        assert!(recorder.render().contains("\ndepth -Inf\n"));
    });
}

#[test]
fn the_page_has_the_text_format_of_prometheus() {
    let recorder = PinfoldRecorder::builder()
        .label("service", "shop")
        .buckets_for("wait", [0.1, 0.5, 1.0])
        .quantiles([0.5, 1.0])
        .build()
        .unwrap();
    with_local_recorder(&recorder, || {
        describe_counter!("http.requests", "Requests,\nby \"path\" \\ route");
        describe_gauge!("rooms", "Rooms");
        describe_histogram!("size", Unit::Bytes, "Sizes");
        counter!("http.requests", "z" => "1", "path" => "C:\\x \"y\"\n").increment(2);
        gauge!("rooms", "service" => "own").set(1.5);
        for wait in [0.05, 0.1, 0.3, 7.0] {
            histogram!("wait").record(wait);
        }
        for _ in 0..3 {
            histogram!("size").record(20.0);
        }
    });
    let expected = r#"# HELP http_requests Requests,\nby "path" \\ route
# TYPE http_requests counter
http_requests{path="C:\\x \"y\"\n",service="shop",z="1"} 2

# HELP rooms Rooms
# TYPE rooms gauge
rooms{service="own"} 1.5

# HELP size Sizes
# TYPE size summary
size{service="shop",quantile="0.5"} 20
size{service="shop",quantile="1"} 20
size_sum{service="shop"} 60
size_count{service="shop"} 3

# TYPE wait histogram
wait_bucket{service="shop",le="0.1"} 2
wait_bucket{service="shop",le="0.5"} 3
wait_bucket{service="shop",le="1"} 3
wait_bucket{service="shop",le="+Inf"} 4
wait_sum{service="shop"} 7.45
wait_count{service="shop"} 4

"#;
    assert_eq!(recorder.render(), expected);
}

#[test]
fn quantiles_are_near_the_recorded_values() {
    let recorder = PinfoldRecorder::new();
    with_local_recorder(&recorder, || {
        (1..=1_000).for_each(|ms| histogram!("took").record(f64::from(ms) / 1e3));
    });
    let Value::Histogram(took) = value(&recorder, "took") else {
        panic!("not a histogram")
    };
    assert_eq!((took.count, took.sum), (1_000, 500.5));
    for (at, seconds) in took.quantiles {
        assert!((seconds - at).abs() <= 0.1, "quantile {at} is {seconds}");
    }
}

/// A histogram never shows a value outside of what was recorded.
#[test]
fn the_smallest_and_the_largest_value_are_exact() {
    let recorder = PinfoldRecorder::new();
    with_local_recorder(&recorder, || {
        histogram!("one").record(0.02);
        (1..=1_000).for_each(|nth| histogram!("many").record(f64::from(nth) * 0.000_917 - 0.1));
        histogram!("strange").record(f64::NAN);
    });
    let quantiles = |name| match value(&recorder, name) {
        Value::Histogram(seen) => seen.quantiles,
        other => panic!("{other:?}"),
    };
    assert!(quantiles("one").iter().all(|&(_, value)| value == 0.02));
    let many = quantiles("many");
    assert_eq!(many.first(), Some(&(0.0, 0.000_917 - 0.1)));
    assert_eq!(many.last(), Some(&(1.0, 1_000.0 * 0.000_917 - 0.1)));
    assert!(many.is_sorted_by(|one, other| one.1 <= other.1));
    assert_eq!(quantiles("strange").len(), 7);
}

/// An idle series is left out, comes back with its count, and its handle counts on.
#[test]
fn idle_series_are_left_out_until_they_are_used() {
    let recorder = PinfoldRecorder::builder().idle_after(Duration::ZERO);
    let recorder = recorder.build().expect("a recorder");
    let names = || -> Vec<String> {
        let samples = recorder.snapshot();
        samples.map(|sample| sample.name).collect()
    };
    with_local_recorder(&recorder, || {
        let jobs = counter!("jobs");
        let depth = gauge!("depth");
        jobs.increment(1);
        depth.set(4.0);
        histogram!("took").record(0.5);
        assert_eq!(names(), ["depth", "jobs", "took"]);
        assert!(names().is_empty());
        assert_eq!(recorder.render(), "");
        // A gauge that is set to the value that it has is in use.
        depth.set(4.0);
        jobs.increment(1);
        assert_eq!(names(), ["depth", "jobs"]);
        histogram!("took").record(0.5);
        jobs.increment(1);
        let page = recorder.render();
        assert!(
            page.contains("jobs 3\n") && page.contains("took_count 2\n"),
            "{page}"
        );
    });
    let stays = PinfoldRecorder::builder().idle_after(Duration::MAX);
    let stays = stays.build().expect("a recorder");
    with_local_recorder(&stays, || counter!("jobs").increment(1));
    for _ in 0..3 {
        assert_eq!(stays.snapshot().count(), 1);
    }
}

#[test]
fn keys_with_the_same_prometheus_name_share_a_series() {
    let recorder = PinfoldRecorder::new();
    with_local_recorder(&recorder, || {
        counter!("a.b", "x" => "1", "y" => "2").increment(1);
        counter!("a_b", "y" => "2", "x" => "1").increment(1);
        gauge!("a-b").set(7.0);
    });
    let page = recorder.render();
    assert!(page.contains("\na_b{x=\"1\",y=\"2\"} 2\n"), "{page}");
    assert!(page.starts_with("# gauge a_b is not shown: a counter has that name\n"));
    assert_eq!(page.matches("# TYPE").count(), 1);
}

#[test]
fn recommended_names_have_a_unit_and_a_suffix() {
    let recorder = PinfoldRecorder::builder()
        .recommended_naming(true)
        .build()
        .unwrap();
    with_local_recorder(&recorder, || {
        describe_counter!("sent", Unit::Bytes, "Sent");
        counter!("sent").increment(9);
    });
    assert_eq!(
        recorder.render(),
        "# HELP sent_bytes_total Sent\n# TYPE sent_bytes_total counter\nsent_bytes_total 9\n\n"
    );
}

#[test]
fn senseless_settings_are_refused() {
    let builder = PinfoldRecorder::builder;
    let error = |builder: pinfold_bridges::metrics::Builder| builder.build().unwrap_err();
    assert_eq!(
        error(builder().quantiles([0.5, 95.0])),
        BuildError::Quantile(95.0)
    );
    assert_eq!(error(builder().scale(0.0)), BuildError::Scale(0.0));
    let none = error(builder().buckets_for("took", [f64::NAN]));
    assert_eq!(
        none.to_string(),
        "buckets for took: give at least one finite upper bound"
    );
}

fn value(recorder: &PinfoldRecorder, name: &str) -> Value {
    let mut samples = recorder.snapshot().filter(|sample| sample.name == name);
    let found = samples.next().expect("a series of that name").value;
    assert!(samples.next().is_none(), "two series of that name");
    found
}
