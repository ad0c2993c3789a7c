//! On Pinfold's malloc, other processes see a recorder's counters if the program asks for it.

use metrics::{counter, with_local_recorder};
use pinfold::export::hide;
use pinfold_bridges::metrics::{AllocatorCollector, PinfoldRecorder};
use std::error::Error;

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

#[test]
fn counters_without_labels_are_shown_on_request() -> Result<(), Box<dyn Error>> {
    let count = || {
        counter!("jobs").increment(2);
        counter!("requests", "route" => "/").increment(1);
    };
    with_local_recorder(&PinfoldRecorder::new(), count);
    assert!(!hide("jobs"));

    let recorder = PinfoldRecorder::builder().show_counters(true).build()?;
    with_local_recorder(&recorder, count);
    assert!(recorder.render().contains("jobs 2\n"));
    drop(recorder);
    assert!(hide("jobs") && !hide("requests"));
    Ok(())
}

#[test]
#[cfg(feature = "prometheus-client")]
fn counters_of_prometheus_client_are_shown_on_request() {
    use pinfold::export::ShowError;
    use pinfold_bridges::prometheus_client::metrics::counter::Counter;

    let orders: Counter = Counter::default();
    assert_eq!(orders.show("orders"), Ok(()));
    assert_eq!(orders.show("orders"), Err(ShowError::Taken));
    drop(orders);
    assert!(hide("orders"));
}

/// The figures are those of the process's allocator, under the names of `pinfold serve`.
#[test]
fn the_allocator_is_collected() {
    let recorder = PinfoldRecorder::new();
    let block = vec![1u8; 3 << 20];
    with_local_recorder(&recorder, || {
        AllocatorCollector.describe();
        AllocatorCollector.collect();
    });
    let page = recorder.render();
    let value = |name: &str| {
        let line = page.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("no {name} in {page}"))
    };
    let allocated = value("pinfold_allocated_bytes ");
    assert!(allocated >= block.len() as f64 && value("pinfold_held_bytes ") >= allocated);
    assert!(value("pinfold_cache_refills_total{cache=\"kmalloc-00064\"") > 0.0);
    assert!(page.contains("# TYPE pinfold_returned_bytes_total counter\n"));
}
