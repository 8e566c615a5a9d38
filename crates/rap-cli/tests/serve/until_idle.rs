//! `rap serve --until-idle`: a runtime that stops when it has nothing to do, and is started by the next message.

use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use rap_testkit::peer::{Peer, Reply};
use rap_testkit::stream::Stream;
use rap_testkit::{Client, Process, Rap, Setup, Tools, until};
use rustix::io::{FdFlags, fcntl_setfd};

const HOOK_SECRET: &str = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

async fn until_ended(process: &mut Process) {
    until("the end of the process", async || !process.is_running()).await;
    assert!(process.wait().success(), "{}", process.log());
}

fn until_idle(mut command: Command, period: &str) -> Process {
    command.args(["--until-idle", period]);
    Process::start(command)
}

/// The protocol's "it starts when a message arrives, processes it, and exits".
#[tokio::test]
async fn a_callback_to_an_inherited_socket_starts_the_runtime_again() {
    let tools = Tools::start().await;
    // The test takes the place of the service manager: it keeps the socket and starts the runtime.
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    fcntl_setfd(&socket, FdFlags::empty()).unwrap();
    let (address, fd) = (socket.local_addr().unwrap().to_string(), socket.as_raw_fd());
    let launch = format!("export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\" 3<&{fd}");
    let setup = Setup::new().tools(&tools).launched_by(&["bash", "-c", &launch]);
    let rap = setup.prepare(tempfile::tempdir().unwrap());
    let mut process = until_idle(rap.serve_command_on(&address), "1s");
    let client = Client::new(&format!("http://{address}"), None);
    let thread = client.open("call work {}").await;
    let call = tools.invocation().await;
    until_ended(&mut process).await;

    let result = tokio::spawn(async move { call.returns("done").await });
    let mut process = until_idle(rap.serve_command_on(&address), "1s");
    result.await.unwrap();
    client.until_line(&thread, "assistant: work: done").await;
    until_ended(&mut process).await;
}

#[tokio::test]
async fn a_runtime_with_work_that_is_due_soon_or_a_connected_reader_is_not_idle() {
    let tools = Tools::start().await;
    let rap: Rap = Setup::new().tools(&tools).prepare(tempfile::tempdir().unwrap());
    let mut process = until_idle(rap.serve_command(), "2s");
    let thread = rap.open("call sleep {\"seconds\": 4}").await;
    let stream = Stream::of(&rap, &thread).await;
    rap.until_line(&thread, "assistant: sleep: the sleep is over").await;
    // The sleep took longer than the period, and so does this reader.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(process.ended(), None, "{}", process.log());
    drop(stream);
    until_ended(&mut process).await;
}

/// Nothing would start the process for an alert that waits for its next attempt.
#[tokio::test]
async fn a_runtime_with_an_alert_that_is_due_soon_is_not_idle() {
    let peer = Peer::start().await;
    // The pauses between the attempts are about one and two seconds.
    peer.answer_next("/hook", Reply::Status(503));
    peer.answer_next("/hook", Reply::Status(503));
    let notify =
        format!("[[notify]]\nurl = \"{}/hook\"\nsecret = \"env:HOOK_SECRET\"\non = [\"closed\"]", peer.url);
    let setup = Setup::new().section(&notify).variable("HOOK_SECRET", HOOK_SECRET);
    let rap: Rap = setup.prepare(tempfile::tempdir().unwrap());
    let mut process = until_idle(rap.serve_command(), "1s");
    let thread = rap.open("say hello").await;
    rap.until_line(&thread, "assistant: hello").await;
    rap.close(&thread).await;
    until_ended(&mut process).await;
    assert_eq!((peer.count("/hook"), rap.rows("alerts")), (3, 0));
}

#[test]
fn an_inherited_socket_with_another_address_is_refused() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    fcntl_setfd(&socket, FdFlags::empty()).unwrap();
    let launch = format!("export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\" 3<&{}", socket.as_raw_fd());
    let setup = Setup::new().launched_by(&["bash", "-c", &launch]);
    let log = Process::refused(setup.prepare(tempfile::tempdir().unwrap()).serve_command());
    assert!(log.contains("set both to the same address"), "{log}");
}
