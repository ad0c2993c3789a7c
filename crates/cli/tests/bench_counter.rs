//! Small runs of `pinfold bench counter`. They check its output, and that the exact designs have
//! exact sums. They do not judge speed.

mod runs;

use runs::*;
use serde_json::Value;

#[test]
fn counter_measures_all_designs_in_all_combinations() {
    let rows = rows(COUNTER);
    let designs = [
        "spinlock-batch",
        "slowcount",
        "add-start",
        "add-start-percpu",
        "spinlock-rseq",
        "total-rseq",
        "overstep-rseq",
        "atomic",
        "pinfold-batch",
        "pinfold",
    ];
    assert_eq!(rows.len(), 4 * designs.len());
    for (cell, combination) in
        rows.chunks(designs.len())
            .zip([(true, true), (true, false), (false, true), (false, false)])
    {
        assert_eq!(subjects(cell), designs);
        for row in cell {
            assert_eq!(
                fields(row),
                [
                    "amount",
                    "batch",
                    "error_bound",
                    "hand_over",
                    "mmap",
                    "ns_per_op",
                    "processes",
                    "subject",
                    "sum_error_max",
                    "summing",
                    "sys_ns_per_op",
                    "threads",
                    "user_ns_per_op"
                ]
            );
            let (mmap, summing) = combination;
            assert_eq!(
                (&row["mmap"], &row["summing"]),
                (&mmap.into(), &summing.into())
            );
            assert_eq!(row["threads"], 3);
            assert_eq!(
                (&row["amount"], &row["processes"]),
                (&32768.into(), &false.into())
            );
            let has_batch = !["atomic", "pinfold"].contains(&row["subject"].as_str().unwrap());
            assert_eq!(row["batch"].as_u64() >= Some(32), has_batch, "{row}");
            let bound = match row["subject"].as_str().unwrap() {
                "atomic" => Some(0..=0),
                "pinfold-batch" => Some(0..=4 * 32 * 8192),
                "pinfold" => Some(1..=64 * 32768 * 8192),
                _ => None,
            };
            match bound {
                Some(bound) => assert!(bound.contains(&row["error_bound"].as_u64().unwrap())),
                None => assert_eq!(row["error_bound"], Value::Null, "{row}"),
            }
            assert!(row["ns_per_op"].as_f64() > Some(0.0), "{row}");
            // The kernel may round either of the two to 0 in a short run.
            let times = ["user_ns_per_op", "sys_ns_per_op"].map(|time| row[time].as_f64().unwrap());
            assert!(times.iter().sum::<f64>() > 0.0, "{row}");
            assert_eq!(row["sum_error_max"].is_u64(), summing, "{row}");
        }
    }
}

#[test]
fn exact_counters_have_exact_sums() {
    let line = format!("{COUNTER} --subject atomic,pinfold,pinfold-batch --summing yes --mmap no");
    for backend in ["off", "cpu", "cid"] {
        let (_, rows) = rows_of(bench(&line).env("PINFOLD_RSEQ", backend));
        assert_eq!(subjects(&rows), ["atomic", "pinfold-batch", "pinfold"]);
        for row in rows {
            assert_eq!(row["sum_error_max"], 0, "{backend}: {row}");
        }
    }
}

#[test]
fn amounts_and_a_batch_can_be_chosen() {
    let line = "counter --threads 3 --rounds 1 --seconds 0.2 --mmap no --summing no";
    let rows = rows(&format!("{line} --amount 5,9 --batch 100"));
    let amounts: Vec<_> = rows.iter().map(|row| row["amount"].as_u64()).collect();
    assert_eq!(amounts, [[Some(5); 10], [Some(9); 10]].concat());
    assert!(
        rows.iter()
            .all(|row| [100.into(), Value::Null].contains(&row["batch"]))
    );
}

#[test]
fn small_amounts_show_the_error_of_slowcount_and_none_of_pinfold() {
    let line = "counter --amount 8 --batch 16 --threads 4 --mmap no --summing yes \
                --subject slowcount,pinfold-batch --rounds 1 --seconds 0.5";
    // A sum is wrong if it meets an add between two of its steps. So some sums must be made.
    let tried = (0..20).find(|_| {
        let rows = rows(line);
        assert_eq!(rows[1]["sum_error_max"], 0, "{}", rows[1]);
        rows[0]["sum_error_max"].as_u64() > Some(0)
    });
    assert!(tried.is_some() || std::thread::available_parallelism().unwrap().get() == 1);
}

#[test]
fn exact_counters_have_exact_sums_while_cpus_hand_over() {
    let rows = rows(
        "counter --hand-over --amount 4 --threads 2 --rounds 1 --seconds 1 --summing yes \
         --subject atomic,pinfold-batch,pinfold",
    );
    assert_eq!(subjects(&rows), ["atomic", "pinfold-batch", "pinfold"]);
    for row in &rows {
        assert_eq!(row["hand_over"], true, "{row}");
        assert_eq!(row["mmap"], false, "{row}");
        assert_eq!(row["sum_error_max"], 0, "{row}");
    }
}

#[test]
fn a_hand_over_needs_pairs_and_maps_nothing() {
    refused(
        "counter --hand-over --threads 3",
        &["pairs", "even number instead of 3"],
    );
    refused(
        "counter --hand-over --mmap yes",
        &["maps no memory", "leave out --mmap yes"],
    );
}

#[test]
fn processes_can_share_a_counter() {
    let designs = [
        "spinlock-batch",
        "slowcount",
        "add-start",
        "add-start-percpu",
        "atomic",
        "pinfold-shared",
    ];
    for (option, processes) in [("--processes", 3), ("--processes 5", 5)] {
        let rows = rows(&format!("{COUNTER} {option}"));
        assert_eq!(rows.len(), 4 * designs.len());
        assert_eq!(subjects(&rows[..designs.len()]), designs);
        for row in rows {
            assert_eq!(
                (&row["threads"], &row["processes"]),
                (&processes.into(), &true.into())
            );
            if row["subject"] == "pinfold-shared" && row["summing"] == true {
                assert_eq!(row["sum_error_max"], 0, "{row}");
            }
        }
    }
    refused("counter --processes 0", &["--processes", "1 or more"]);
    refused(
        "counter --processes --subject pinfold",
        &["pinfold", "leave out --processes"],
    );
}
