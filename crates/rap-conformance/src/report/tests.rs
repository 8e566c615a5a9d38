use super::*;
use rap_protocol::Secret;
use serde_json::json;

const MUST: Probe = Probe { name: "one", requirements: &["TC-04", "TC-05"], checks: "One thing." };
const SHOULD: Probe = Probe { name: "two", requirements: &["TC-09"], checks: "Another thing." };
/// Covers a requirement that is listed as unobservable: it can fail it, but not pass it.
const PARTIAL: Probe = Probe { name: "three", requirements: &["TC-10"], checks: "Some of a thing." };

/// Covers no requirement.
const ADDITION: Probe = Probe { name: "four", requirements: &[], checks: "An open point." };

fn report(outcomes: &[(&'static Probe, Verdict)]) -> Report {
    const GAPS: &[Gap] = &[Gap::whole("TC-10", "it takes days"), Gap::part("TC-14", "its log")];
    let mut report = Report::new(Subject::Tool, "a server", Profile::Rap, GAPS);
    for (probe, verdict) in outcomes {
        report.add(Outcome { probe, verdict: verdict.clone(), took: Duration::from_millis(250) });
    }
    report
}

fn pass() -> Verdict {
    Verdict::Pass { seen: None }
}

fn failed() -> Verdict {
    let request = RedactedMessage::new("POST /close_thread", br#"{"thread_id": "t"}"#);
    Verdict::fail("it answered <500>", vec![Exchange::new(request, RedactedMessage::head("500"))])
}

fn result_of<'a>(report: &'a Report, id: &str) -> RequirementResult<'a> {
    report.requirement_results().find(|(requirement, _)| requirement.id == id).unwrap().1
}

#[test]
fn a_requirement_passes_only_if_a_probe_passed_and_none_failed() {
    let not_observable = || Verdict::not_observable("nothing was observed");
    assert_eq!(result_of(&report(&[(&MUST, pass())]), "TC-04"), RequirementResult::Pass);
    assert_eq!(
        result_of(&report(&[(&MUST, pass()), (&MUST, failed())]), "TC-04"),
        RequirementResult::Fail(Weight::Requirement)
    );
    let unobserved = report(&[(&MUST, not_observable())]);
    assert_eq!(
        result_of(&unobserved, "TC-04"),
        RequirementResult::NotObservable { why: "nothing was observed" }
    );
    assert_eq!(result_of(&unobserved, "TC-10"), RequirementResult::NotObservable { why: "it takes days" });
    assert_eq!(
        result_of(&unobserved, "TC-09"),
        RequirementResult::NotObservable { why: "no probe covers this requirement" }
    );
    let partial = report(&[(&PARTIAL, pass())]);
    assert_eq!(result_of(&partial, "TC-10"), RequirementResult::NotObservable { why: "it takes days" });
    assert_eq!(
        result_of(&report(&[(&PARTIAL, failed())]), "TC-10"),
        RequirementResult::Fail(Weight::Requirement)
    );
}

#[test]
fn a_requirement_is_claimed_only_for_what_was_seen() {
    const LOGGED: Probe = Probe { name: "five", requirements: &["TC-14"], checks: "It answers." };
    let logged = report(&[(&LOGGED, Verdict::seen("200 after 3 ms"))]);
    assert_eq!(result_of(&logged, "TC-14"), RequirementResult::Partial { unseen: "its log" });
    assert_eq!(
        logged.count(),
        Count { partial: 1, not_observable: logged.count().not_observable, ..Count::default() }
    );
    let row = |report: &Report, id: &str| {
        let rows = report.to_json(Strictness::Strict)["requirements"].as_array().unwrap().clone();
        rows.into_iter().find(|row| row["id"] == id).unwrap()
    };
    let shown = row(&logged, "TC-14");
    assert_eq!(
        (&shown["result"], &shown["seen"], &shown["unseen"]),
        (&json!("partial"), &json!(["200 after 3 ms"]), &json!("its log"))
    );
    let table = logged.to_table(Strictness::Strict, None);
    assert!(table.contains("seen: 200 after 3 ms") && table.contains("not seen: its log"), "{table}");
    // A probe that could not run leaves a part of its requirements unseen.
    let half = report(&[(&MUST, pass()), (&MUST, Verdict::not_observable("pass --slow-operation"))]);
    assert_eq!(result_of(&half, "TC-04"), RequirementResult::Partial { unseen: "pass --slow-operation" });
    assert_eq!(row(&half, "TC-04")["seen"], json!(["One thing."]));
}

#[test]
fn a_recommendation_within_a_must_counts_as_a_should() {
    let warned = report(&[(&MUST, Verdict::not_recommended("a body", Vec::new()))]);
    assert!(warned.is_good(Strictness::Lenient) && !warned.is_good(Strictness::Strict));
    assert_eq!((warned.count().failed_must, warned.count().failed_should), (0, 2));
    let both = report(&[(&MUST, Verdict::not_recommended("a body", Vec::new())), (&MUST, failed())]);
    assert_eq!(result_of(&both, "TC-04"), RequirementResult::Fail(Weight::Requirement));
}

#[test]
fn a_failed_should_counts_only_in_strict_mode() {
    let table = [(pass(), pass(), true, true), (pass(), failed(), true, false)];
    for (must, should, lenient, strict) in table.into_iter().chain([(failed(), pass(), false, false)]) {
        let report = report(&[(&MUST, must), (&SHOULD, should)]);
        assert_eq!(report.is_good(Strictness::Lenient), lenient);
        assert_eq!(report.is_good(Strictness::Strict), strict);
    }
}

#[test]
fn a_failed_addition_counts_as_a_should_and_is_not_in_the_profile_of_the_specification() {
    let report = report(&[(&MUST, pass()), (&ADDITION, failed())]);
    assert!(report.is_good(Strictness::Lenient) && !report.is_good(Strictness::Strict));
    let table = report.to_table(Strictness::Lenient, None);
    assert!(table.contains("warning") && table.contains("this project's interpretation"), "{table}");
    assert!(table.contains("1 additions fail"), "{table}");
    let json = report.to_json(Strictness::Strict);
    assert_eq!((&json["good"], &json["probes"][1]["result"]), (&json!(false), &json!("fail")));
    assert_eq!((&json["profile"], &json["count"]["failed_additions"]), (&json!("rap"), &json!(1)));
    assert!(report.to_junit(Strictness::Strict).contains("rap.tool.addition"));
    assert!(ADDITION.is_in(Profile::Rap) && !ADDITION.is_in(Profile::Spec) && MUST.is_in(Profile::Spec));
}

#[test]
fn table_json_and_junit_show_the_same_results() {
    let report = report(&[(&MUST, pass()), (&SHOULD, failed())]);
    let table = report.to_table(Strictness::Lenient, None);
    assert!(table.contains("2 requirements pass, 0 in part, 0 MUST and 1 SHOULD fail"), "{table}");
    assert!(table.contains("POST /close_thread {\"thread_id\":\"t\"}"), "{table}");
    assert!(table.contains("it takes days"), "{table}");
    let json = report.to_json(Strictness::Lenient);
    assert_eq!(json["count"]["failed_should"], 1);
    assert_eq!(json["good"], true);
    assert_eq!(json["probes"][1]["exchanges"][0]["answer"], json!({"head": "500"}));
    let warned = report.to_junit(Strictness::Lenient);
    assert!(warned.contains("failures=\"0\"") && warned.contains("it answered &lt;500&gt;"), "{warned}");
    let strict = report.to_junit(Strictness::Strict);
    assert!(
        strict.contains("failures=\"1\"") && strict.contains("<failure message=\"SHOULD TC-09"),
        "{strict}"
    );
}

#[test]
fn an_exchange_shows_no_callback_url_and_no_secret() {
    let body = json!({
        "callback_url": "http://127.0.0.1:7/callback/s3cret",
        "response_url": "s3cret",
        "endpoint": "http://h/invoke",
        "text": "see https://user:s3cret@id.example.com/s3cret?s3cret#s3cret.",
        "more": [{"auth_url": "http://h/s3cret"}],
    });
    let shown = RedactedMessage::new("POST http://h/s3cret", &serde_json::to_vec(&body).unwrap());
    let broken = RedactedMessage::new("200", b"{\"auth_url\": \"http://h/s3cret\", ");
    let exchange = Exchange::new(shown, broken).redact(&Secret::new("t0ken"));
    let all = format!("{exchange:?}");
    assert!(!all.contains("s3cret"), "{all}");
    assert!(all.contains("http://h/invoke") && all.contains("https://id.example.com/…"), "{all}");
    let echoed = Exchange::new(RedactedMessage::head("x"), RedactedMessage::new("401", b"you said t0ken"));
    assert_eq!(echoed.redact(&Secret::new("t0ken")).answer.body, "you said …");
}
