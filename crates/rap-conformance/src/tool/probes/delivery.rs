//! How a result is delivered: again where it failed for now, never where it was refused.

use std::time::Duration;

use rap_protocol::CLOSE_THREAD_PATH;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::report::{Exchange, Probe, Shown, Verdict};
use crate::tool::inbox::{Delivery, Reply};
use crate::tool::target::{Call, Target, results};
use crate::tool::{Check, Found};

/// More attempts than this without a longer pause are no backoff.
const ATTEMPTS: usize = 8;
/// How much of a request is read before its connection is cut.
const REQUEST_BYTES: usize = 64 * 1024;
/// How long the rest of a request may take to arrive.
const REST_WITHIN: Duration = Duration::from_millis(200);

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "result_is_sent_again_after_503",
            requirements: &["TR-14"],
            checks: "A result that was answered 503 is sent again, unchanged.",
        },
        run: |target| Box::pin(again_after_503(target)),
    },
    Check {
        probe: Probe {
            name: "result_is_sent_again_after_a_lost_connection",
            requirements: &["TR-14"],
            checks: "A result whose connection broke before an answer came is sent again.",
        },
        run: |target| Box::pin(again_after_a_lost_connection(target)),
    },
    Check {
        probe: Probe {
            name: "attempts_are_paced",
            requirements: &["TR-14"],
            checks: "While every attempt is answered 503, the pauses between them grow to a second and more.",
        },
        run: |target| Box::pin(paced(target)),
    },
    Check {
        probe: Probe {
            name: "refused_result_is_not_sent_again",
            requirements: &["TR-15"],
            checks: "A result that was answered 404 is not sent again.",
        },
        run: |target| Box::pin(not_after_404(target)),
    },
    Check {
        probe: Probe {
            name: "invalid_result_is_not_sent_again",
            requirements: &["TR-15"],
            checks: "A result that was answered 400 is not sent again; one error result may follow in its \
                     place.",
        },
        run: |target| Box::pin(not_after_400(target)),
    },
];

/// Invokes, and observes meanwhile: a server may well acknowledge late, and that is for another probe to
/// find.
async fn observe(target: &Target, call: &Call, seen: impl Future<Output = Found>) -> Found {
    let (_, found) = tokio::join!(target.invoke(call), seen);
    found
}

async fn again_after_503(target: &Target) -> Found {
    let call = target.operation_answering(&[Reply::Status(503)])?;
    let seen = async {
        let first = call.result(target.patience).await?;
        let second = |deliveries: &[Delivery]| results(deliveries).nth(1).cloned();
        match call.inbox.until(target.patience.result, second).await {
            Some(second) if second.message == first.message => Ok(()),
            Some(_) => Err(call.fail("the second attempt says something else")),
            None => Err(call.fail(not_again(target))),
        }
    };
    observe(target, &call, seen).await
}

async fn paced(target: &Target) -> Found {
    let call = target.operation_answering(&[Reply::Status(503); 100])?;
    let seen = async {
        call.result(target.patience).await?;
        for attempt in 1..=ATTEMPTS {
            let another = |deliveries: &[Delivery]| results(deliveries).nth(attempt).map(|_| ());
            if call.inbox.until(target.patience.quiet / 2, another).await.is_none() {
                return Ok(());
            }
        }
        let seconds = target.patience.quiet.as_secs_f64() / 2.0;
        Err(call.fail(format!("it was sent more than {ATTEMPTS} times without a pause of {seconds} s")))
    };
    let found = observe(target, &call, seen).await;
    // Otherwise it may go on for days.
    target.notify(CLOSE_THREAD_PATH, &json!({"thread_id": call.thread})).await?;
    found
}

async fn not_after_404(target: &Target) -> Found {
    let call = target.operation_answering(&[Reply::Status(404)])?;
    let seen = async {
        call.result(target.patience).await?;
        let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
        match call.inbox.until(target.patience.quiet, second).await {
            None => Ok(()),
            Some(()) => Err(call.fail("it was sent again after a 404")),
        }
    };
    observe(target, &call, seen).await
}

async fn not_after_400(target: &Target) -> Found {
    let call = target.operation_answering(&[Reply::Status(400)])?;
    let seen = async {
        let first = call.result(target.patience).await?;
        let repeated = |deliveries: &[Delivery]| {
            let same = results(deliveries).skip(1).any(|later| later.message == first.message);
            (same || results(deliveries).count() > 2).then_some(())
        };
        match call.inbox.until(target.patience.quiet, repeated).await {
            None => Ok(()),
            Some(()) => Err(call.fail("it was sent again after a 400")),
        }
    };
    observe(target, &call, seen).await
}

async fn again_after_a_lost_connection(target: &Target) -> Found {
    let mut address = target.address();
    address.set_port(0);
    let broken =
        |error: std::io::Error| Verdict::not_observable(format!("no second port to listen on: {error}"));
    let listener = TcpListener::bind(address).await.map_err(broken)?;
    let address = listener.local_addr().map_err(broken)?;
    let mut call = target.operation()?;
    call.invocation["callback_url"] = json!(format!("http://{address}/callback"));
    observe(target, &call, lose_one(target, &call, &listener)).await
}

async fn lose_one(target: &Target, call: &Call, listener: &TcpListener) -> Found {
    let Ok(Ok((stream, _))) = timeout(target.patience.result, listener.accept()).await else {
        return Err(Verdict::not_observable(
            "it did not connect to another port: see callback_url_is_opaque",
        ));
    };
    drop(read_some(stream).await);
    let Ok(Ok((stream, _))) = timeout(target.patience.result, listener.accept()).await else {
        return Err(lost(target, call));
    };
    let mut stream = read_some(stream).await;
    // Whether the server hears it does not matter to what we have seen.
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await.ok();
    Ok(())
}

fn lost(target: &Target, call: &Call) -> Verdict {
    let mut story = call.story();
    story.push(Exchange::new(Shown::head("POST (callback)"), Shown::head("the connection was closed")));
    Verdict::fail(not_again(target), story)
}

fn not_again(target: &Target) -> String {
    format!("it was not sent again within {} s", target.patience.result.as_secs_f64())
}

/// Reads what there is of a request.
async fn read_some(mut stream: TcpStream) -> TcpStream {
    let mut request = vec![0; REQUEST_BYTES];
    while let Ok(Ok(1..)) = timeout(REST_WITHIN, stream.read(&mut request)).await {}
    stream
}
