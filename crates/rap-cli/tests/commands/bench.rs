//! `rap bench` in its small size: all figures, and the plots.

use rap_testkit::programs;
use serde_json::Value;

use crate::support::{Output, output};

#[test]
fn a_quick_benchmark_prints_all_figures_and_writes_plots() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = programs::rap(&["bench", "--quick", "--json", "--plots", "plots"]);
    let Output { code, out, err } = output(command.current_dir(directory.path()));
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    let report: Value = serde_json::from_str(&out).unwrap();
    for limit in ["fdatasync", "bare_1", "bare", "router"] {
        assert!(report[limit]["per_second"].as_f64().unwrap() > 0.0, "{limit}: {report}");
    }
    let trips = report["round_trips"].as_array().unwrap();
    assert_eq!(trips.iter().map(|trips| trips["threads"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 8]);
    assert!(trips.iter().all(|trips| trips["percentiles_us"].as_array().unwrap().len() == 101));
    for part in ["history", "sleeping"] {
        assert!(report[part].as_array().unwrap().len() > 1, "{part}: {report}");
    }
    assert!(report["tool_server"]["results_per_second"].as_f64().unwrap() > 0.0);
    assert!(report["tool_server"]["result_delay"]["p50_us"].as_f64().unwrap() > 0.0);
    for plot in ["throughput", "latency", "memory", "history"] {
        let svg = std::fs::read_to_string(directory.path().join(format!("plots/{plot}.svg"))).unwrap();
        assert!(svg.starts_with("<svg ") && svg.contains("<polyline"), "{svg}");
    }
    // The databases of the measurement are gone.
    assert_eq!(directory.path().read_dir().unwrap().count(), 1);
}
