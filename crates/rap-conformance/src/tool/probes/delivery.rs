//! Delivery of results: retried after temporary failures, never after a rejection.

use std::time::Duration;

use rap_protocol::CLOSE_THREAD_PATH;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::report::{Exchange, Probe, RedactedMessage, Verdict};
use crate::tool::inbox::{Delivery, Reply};
use crate::tool::target::{Call, Target, results};
use crate::tool::{Check, ProbeResult};

/// Number of attempts in quick succession after which the server is considered to have no backoff.
const ATTEMPTS: usize = 8;
/// Maximum number of bytes of a request that are read before the connection is closed.
const REQUEST_BYTES: usize = 64 * 1024;
/// Maximum wait for the rest of a request.
const REST_WITHIN: Duration = Duration::from_millis(200);

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "result_is_sent_again_after_503",
            requirements: &["TR-14"],
            checks: "A result that is answered 503 is sent again, unchanged.",
        },
        run: |target| Box::pin(again_after_503(target)),
    },
    Check {
        probe: Probe {
            name: "result_is_sent_again_after_a_lost_connection",
            requirements: &["TR-14"],
            checks: "A result whose connection is closed before an answer is sent again.",
        },
        run: |target| Box::pin(again_after_a_lost_connection(target)),
    },
    Check {
        probe: Probe {
            name: "attempts_are_paced",
            requirements: &["TR-14"],
            checks: "If every attempt is answered 503, the pauses between attempts grow to one second and more.",
        },
        run: |target| Box::pin(paced(target)),
    },
    Check {
        probe: Probe {
            name: "refused_result_is_not_sent_again",
            requirements: &["TR-15"],
            checks: "A result that is answered 404 is not sent again.",
        },
        run: |target| Box::pin(not_after_404(target)),
    },
    Check {
        probe: Probe {
            name: "invalid_result_is_not_sent_again",
            requirements: &["TR-15"],
            checks: "A result that is answered 400 is not sent again; one error result may follow instead.",
        },
        run: |target| Box::pin(not_after_400(target)),
    },
];

/// Sends the invocation and observes callbacks concurrently, because a server may acknowledge late. A late
/// acknowledgement is the failure of another probe.
async fn observe(
    target: &Target,
    call: &Call,
    observation: impl Future<Output = ProbeResult>,
) -> ProbeResult {
    let (_, found) = tokio::join!(target.invoke(call), observation);
    found
}

async fn again_after_503(target: &Target) -> ProbeResult {
    let call = target.operation_answering(&[Reply::Status(503)])?;
    let observation = async {
        let first = call.result(target.timeouts).await?;
        let second = |deliveries: &[Delivery]| results(deliveries).nth(1).cloned();
        match call.inbox.wait_for(target.timeouts.result, second).await {
            Some(second) if second.message == first.message => Ok(()),
            Some(_) => Err(call.fail("the second attempt has a different body")),
            None => Err(call.fail(no_retry(target))),
        }
    };
    observe(target, &call, observation).await
}

async fn paced(target: &Target) -> ProbeResult {
    let call = target.operation_answering(&[Reply::Status(503); 100])?;
    let observation = async {
        call.result(target.timeouts).await?;
        for attempt in 1..=ATTEMPTS {
            let another = |deliveries: &[Delivery]| results(deliveries).nth(attempt).map(|_| ());
            if call.inbox.wait_for(target.timeouts.quiet / 2, another).await.is_none() {
                return Ok(());
            }
        }
        let seconds = target.timeouts.quiet.as_secs_f64() / 2.0;
        Err(call
            .fail(format!("the result was sent more than {ATTEMPTS} times without a pause of {seconds} s")))
    };
    let found = observe(target, &call, observation).await;
    // Otherwise the server might retry for days.
    drop(target.notify(CLOSE_THREAD_PATH, &json!({"thread_id": call.thread})).await);
    found
}

async fn not_after_404(target: &Target) -> ProbeResult {
    let call = target.operation_answering(&[Reply::Status(404)])?;
    let observation = async {
        call.result(target.timeouts).await?;
        let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
        match call.inbox.wait_for(target.timeouts.quiet, second).await {
            None => Ok(()),
            Some(()) => Err(call.fail("the result was sent again after a 404")),
        }
    };
    observe(target, &call, observation).await
}

async fn not_after_400(target: &Target) -> ProbeResult {
    let call = target.operation_answering(&[Reply::Status(400)])?;
    let observation = async {
        let first = call.result(target.timeouts).await?;
        let repeated = |deliveries: &[Delivery]| {
            let same = results(deliveries).skip(1).any(|later| later.message == first.message);
            (same || results(deliveries).count() > 2).then_some(())
        };
        match call.inbox.wait_for(target.timeouts.quiet, repeated).await {
            None => Ok(()),
            Some(()) => Err(call.fail("the result was sent again after a 400")),
        }
    };
    observe(target, &call, observation).await
}

async fn again_after_a_lost_connection(target: &Target) -> ProbeResult {
    let mut address = target.address();
    address.set_port(0);
    let broken = |error: std::io::Error| {
        Verdict::not_observable(format!("the checker cannot listen on a second port: {error}"))
    };
    let listener = TcpListener::bind(address).await.map_err(broken)?;
    let address = listener.local_addr().map_err(broken)?;
    let mut call = target.operation()?;
    call.invocation["callback_url"] = json!(format!("http://{address}/callback"));
    observe(target, &call, close_first_connection(target, &call, &listener)).await
}

async fn close_first_connection(target: &Target, call: &Call, listener: &TcpListener) -> ProbeResult {
    let Ok(Ok((stream, _))) = timeout(target.timeouts.result, listener.accept()).await else {
        return Err(Verdict::not_observable(
            "the server did not connect to a second port: see the probe callback_url_is_opaque",
        ));
    };
    drop(read_request(stream).await);
    let Ok(Ok((stream, _))) = timeout(target.timeouts.result, listener.accept()).await else {
        return Err(not_retried(target, call));
    };
    let mut stream = read_request(stream).await;
    // The retry has been observation, so it does not matter whether this answer arrives.
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await.ok();
    Ok(())
}

fn not_retried(target: &Target, call: &Call) -> Verdict {
    let mut exchanges = call.exchanges();
    exchanges.push(Exchange::new(
        RedactedMessage::head("POST (callback)"),
        RedactedMessage::head("the connection was closed"),
    ));
    Verdict::fail(no_retry(target), exchanges)
}

fn no_retry(target: &Target) -> String {
    format!("the result was not sent again within {} s", target.timeouts.result.as_secs_f64())
}

/// Reads a request until no more bytes arrive.
async fn read_request(mut stream: TcpStream) -> TcpStream {
    let mut request = vec![0; REQUEST_BYTES];
    while let Ok(Ok(1..)) = timeout(REST_WITHIN, stream.read(&mut request)).await {}
    stream
}
