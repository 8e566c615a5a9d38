//! Alerts to people.

use rap_agent::Input;

use super::Database;
use super::fixture::{ALERTS, Fixture, START, seconds};

pub(crate) async fn an_alert_is_stored_with_its_step_and_claimed_by_one_attempt(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for thread in ["a", "b"] {
        fixture.create(thread, None).await;
        fixture.send_input(thread, Input::Close).await.unwrap();
    }
    let claim = async |fixture: &Fixture, second: u64, until: u64| {
        let (now, until) = (START.plus(seconds(second)), START.plus(seconds(until)));
        let claimed = fixture.store.claim_alerts(ALERTS, now, until, 1).await.unwrap();
        let shown: Vec<_> =
            claimed.alerts.iter().map(|alert| (alert.thread.to_string(), alert.attempts)).collect();
        (shown, claimed.alerts.first().map(|alert| alert.number), claimed.next)
    };
    let (first, number, _) = claim(&fixture, 10, 30).await;
    assert_eq!(first, [("a".to_owned(), 1)]);
    assert_eq!(claim(&fixture, 10, 30).await.0, [("b".to_owned(), 1)]);
    let (none, _, next) = claim(&fixture, 10, 30).await;
    assert_eq!((none.len(), next), (0, Some(START.plus(seconds(30)))));
    // One is accepted, and the attempt to send the other is lost.
    fixture.store.settle_alert(number.unwrap(), None).await.unwrap();
    let (again, number, _) = claim(&fixture, 31, 50).await;
    assert_eq!(again, [("b".to_owned(), 2)]);
    fixture.store.settle_alert(number.unwrap(), Some(START.plus(seconds(40)))).await.unwrap();
    assert_eq!(claim(&fixture, 39, 60).await.0.len(), 0);
    assert_eq!(claim(&fixture, 40, 60).await.0, [("b".to_owned(), 3)]);
    fixture.store.expire_alerts(START.plus(seconds(1000))).await.unwrap();
    assert_eq!(claim(&fixture, 1000, 2000).await, (Vec::new(), None, None));
    assert_eq!(fixture.store.claim_alerts("other", START, START, 1).await.unwrap().alerts, []);
}
