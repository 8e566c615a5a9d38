//! A journal in memory.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Caller, Runtime};
use rap_tool::TestRuntime;
use rap_tool::prelude::*;
use serde_json::json;
use tokio::sync::oneshot;

#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

async fn say(args: Say, _: Call) -> Result<String> {
    Ok(args.text)
}

/// Everything that works with a journal on disk works, as long as the process runs.
#[tokio::test]
async fn a_server_can_run_without_a_disk() {
    let (closed, mut closings) = tokio::sync::mpsc::unbounded_channel();
    let tools =
        ToolServer::new("function").journal_in_memory().tool("say", say).on_close_thread(move |thread| {
            closed.send(thread.id().to_string()).ok();
            async { Ok(()) }
        });
    let bound = tools.bind("127.0.0.1:0").await.unwrap();
    let caller = Caller::new(&format!("http://{}", bound.local_addr()));
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(bound.run_until(async move { drop(stopped.await) }));
    let mut runtime = Runtime::start().await;
    let call = runtime.invocation("say", "t", "c", json!({"text": "hello"}));
    runtime.answer_next(&[503]);
    caller.accepted(&call).await;
    assert_eq!(runtime.accepted().await.text(), "hello");
    caller.until_settled("t", "c").await;
    // A repeat is recognised.
    caller.accepted(&call).await;
    caller.close("t").await;
    assert_eq!(closings.recv().await.unwrap(), "t");
    assert!(runtime.pending().is_empty());
    assert!(!std::path::Path::new("rap-data").exists(), "something was written to disk");
    drop(stop);
    serving.await.unwrap();
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_without_a_disk_says_at_its_start_what_is_lost() -> Result<()> {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let follow = |_: Say, subscribe: Subscribe| async move {
        let subscription = subscribe.confirm("").await?;
        subscription.cancelled().await;
        Ok(())
    };
    let tools =
        ToolServer::new("function").journal_in_memory().tool("say", say).subscription("follow", follow);
    let mut runtime = TestRuntime::start(tools).await?;
    let text = String::from_utf8(log.0.lock().unwrap().clone())?;
    assert!(
        text.contains("WARN") && text.contains("the journal is in memory: when this process ends"),
        "{text}"
    );
    let subscription = runtime.call("follow", json!({"text": ""})).await.result.id;
    assert!(runtime.is_alive(&subscription).await);
    runtime.restart().await?;
    // As the log says at the start: the subscription is gone, and a repeated call runs again.
    assert!(!runtime.is_alive(&subscription).await);
    for _ in 0..2 {
        assert_eq!(runtime.invoke_with_id("t", "c", "say", json!({"text": "hello"})).await, 200);
        runtime.next().await;
        runtime.restart().await?;
    }
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(runtime.pending().is_empty());
    Ok(())
}
