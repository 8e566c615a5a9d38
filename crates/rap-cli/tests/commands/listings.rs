//! Output of the listing and `show` commands.

use rap_testkit::block_until;

use crate::support::{Running, Runtime, plain};

/// Starts a runtime with threads in different states.
fn busy_runtime() -> Runtime {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "say hi", "--id", "calm", "--title", "A calm one", "--wait"]);
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "slow"]);
    runtime.ok(&["threads", "new", "call choose", "--id", "pick"]);
    runtime.ok(&["threads", "new", "call authorize", "--id", "auth"]);
    runtime.ok(&["threads", "new", "call tick {\"after_ms\": 1000000}", "--id", "tick", "--wait"]);
    runtime.until_status("slow", "waiting");
    runtime.until_status("pick", "needs_you");
    runtime.until_status("auth", "needs_you");
    runtime
}

/// Returns the row of a table that begins with this word.
fn row<'a>(table: &'a str, first: &str) -> &'a str {
    table
        .lines()
        .find(|line| line.split_whitespace().next() == Some(first))
        .unwrap_or_else(|| panic!("{table}"))
}

#[test]
fn listings_show_what_agents_wait_for() {
    let runtime = busy_runtime();
    let threads = runtime.ok(&["threads", "ls"]);
    assert!(threads.starts_with("ID    STATUS     AGENT"), "{threads}");
    assert!(row(&threads, "calm").contains("A calm one"));
    assert!(row(&threads, "slow").contains("waiting") && row(&threads, "slow").contains("slow for"));
    assert!(row(&threads, "pick").contains("needs you"));
    assert!(row(&threads, "tick").ends_with("events of tick"));
    let calls = runtime.ok(&["calls", "ls"]);
    assert!(row(&calls, "slow").contains("call_1") && row(&calls, "slow").ends_with("none     acknowledged"));
    let subscriptions = runtime.ok(&["subs", "ls"]);
    assert!(row(&subscriptions, "tick").contains("call_1  tick"), "{subscriptions}");
    let inbox = runtime.ok(&["inbox", "ls"]);
    assert!(row(&inbox, "pick").ends_with("Which colour? 1) red, 2) green, 3) blue"), "{inbox}");
    assert!(row(&inbox, "auth").contains("sign in: http://127.0.0.1:"), "{inbox}");
    let tools = runtime.ok(&["tools", "ls"]);
    assert!(row(&tools, "echo").ends_with("Repeats a text."), "{tools}");
}

#[test]
fn listings_print_the_json_of_the_api() {
    let runtime = busy_runtime();
    let threads = runtime.json(&["threads", "ls", "--json"]);
    assert_eq!(threads["threads"].as_array().unwrap().len(), 5);
    assert_eq!(runtime.json(&["calls", "ls", "--json"])["calls"][0]["call_id"], "call_1");
    assert_eq!(runtime.json(&["subs", "ls", "--json"])["subscriptions"][0]["thread_id"], "tick");
    assert_eq!(runtime.json(&["inbox", "ls", "--json"])["items"].as_array().unwrap().len(), 2);
    assert_eq!(runtime.json(&["tools", "ls", "--json"])["servers"][0]["name"], "sink");
    assert_eq!(runtime.json(&["threads", "show", "calm", "--json"])["title"], "A calm one");
    let entries = runtime.ok(&["threads", "tail", "calm", "--json", "--once"]);
    let entries: Vec<serde_json::Value> =
        entries.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.len(), 2);
    assert_eq!((&entries[0]["kind"], &entries[1]["text"]), (&"user".into(), &"hi".into()));
}

#[test]
fn show_describes_what_a_thread_waits_for() {
    let runtime = busy_runtime();
    let show = |thread| runtime.ok(&["threads", "show", thread]);
    let slow = show("slow");
    assert!(slow.contains("waiting for 1 call\n  waiting for `slow` (call_1) for"), "{slow}");
    assert!(slow.ends_with("; no timeout\n"), "{slow}");
    let pick = show("pick");
    let answer = "Which colour? red, green, blue; answer with: rap inbox answer pick call_1 CHOICE";
    assert!(pick.contains("needs you:\n  `choose` asked ") && pick.contains(answer), "{pick}");
    assert!(show("auth").contains("to sign in: open http://127.0.0.1:"), "{}", show("auth"));
    assert!(show("tick").contains("subscribed to `tick` (call_1) for"), "{}", show("tick"));
    assert!(show("calm").contains("talk to it with: rap chat calm"), "{}", show("calm"));
    runtime.ok(&["threads", "close", "calm"]);
    assert!(show("calm").contains("closed just now") || show("calm").contains("closed 1 s ago"));
}

#[test]
fn show_describes_sleeps_and_children() {
    let runtime = Runtime::start();
    let spawn = "call spawn_thread {\"instructions\": \"call slow {\\\"seconds\\\": 1000}\"}";
    runtime.ok(&["threads", "new", spawn, "--id", "parent", "--wait"]);
    let children = runtime.json(&["threads", "ls", "--parent", "parent", "--json"]);
    let child = children["threads"][0]["id"].as_str().unwrap();
    runtime.until_status(child, "waiting");
    let shown = runtime.ok(&["threads", "show", "parent"]);
    let line = format!("  child {child} “call slow {{\"seconds\": 1000}}” is waiting: slow for ");
    assert!(shown.contains(&line), "{shown}");
    let listed = runtime.ok(&["threads", "ls"]);
    assert!(row(&listed, "parent").ends_with("1 child"), "{listed}");
    assert!(runtime.ok(&["threads", "show", child]).contains(", a child of parent\n"));
    let output = runtime.ok(&["threads", "tail", child, "--once"]);
    assert!(output.contains("parent  call slow {\"seconds\": 1000}\n"), "{output}");

    runtime.ok(&["threads", "new", "call sleep {\"seconds\": 7210}\ncall wait", "--id", "sleeper"]);
    runtime.until_status("sleeper", "waiting");
    let shown = runtime.ok(&["threads", "show", "sleeper"]);
    assert!(shown.contains("waiting for 2 calls\n  asleep for the last "), "{shown}");
    assert!(shown.contains(" (call_1); wakes in 2 h, or on any input\n  has waited "), "{shown}");
    let listed = runtime.ok(&["threads", "ls"]);
    assert!(row(&listed, "sleeper").ends_with("sleep (wakes in 2 h), any input"), "{listed}");
}

#[test]
fn timers_are_listed() {
    let runtime = Runtime::start();
    assert_eq!(runtime.ok(&["timers", "ls"]), "no timers\n");
    let schedule = "call schedule {\"cron\": \"0 0 1 1 *\", \"text\": \"happy new year\"}";
    runtime.ok(&["threads", "new", schedule, "--id", "yearly", "--wait"]);
    runtime.ok(&["threads", "new", "call sleep {\"seconds\": 7200}", "--id", "sleeper"]);
    runtime.until_status("sleeper", "waiting");
    let timers = runtime.ok(&["timers", "ls"]);
    let rows: Vec<Vec<&str>> = timers.lines().map(|line| line.split("  ").map(str::trim).collect()).collect();
    let rows: Vec<Vec<&str>> =
        rows.into_iter().map(|row| row.into_iter().filter(|cell| !cell.is_empty()).collect()).collect();
    assert_eq!(rows[0], ["WHEN", "AT", "KIND", "THREAD", "CALL", "TOOL"]);
    // The order is not checked: at the end of a year the schedule comes first.
    let sleeper = rows.iter().find(|row| row.contains(&"sleeper")).unwrap();
    assert_eq!((sleeper[0], &sleeper[2..]), ("in 2 h", &["sleep", "sleeper", "call_1", "sleep"][..]));
    assert!(sleeper[1].ends_with(" UTC") && sleeper[1].contains(':'), "{sleeper:?}");
    let yearly = rows.iter().find(|row| row.contains(&"yearly")).unwrap();
    assert_eq!(yearly[2..], ["schedule", "yearly", "call_1", "schedule"]);
    let json = runtime.json(&["timers", "ls", "--json"]);
    let json = json["timers"].as_array().unwrap();
    let of = |thread: &str| json.iter().find(|timer| timer["thread_id"] == thread).unwrap();
    assert_eq!((&of("sleeper")["kind"], &of("yearly")["kind"]), (&"sleep".into(), &"schedule".into()));
    assert_eq!(
        runtime.json(&["timers", "ls", "--json", "--limit", "1"])["timers"].as_array().unwrap().len(),
        1
    );
    // `threads show` has the same time.
    let at = of("yearly")["at"].as_str().unwrap();
    let shown = runtime.ok(&["threads", "show", "yearly"]);
    assert!(
        shown.contains("  schedule (call_1) active for ") && shown.contains(&format!(", at {at}\n")),
        "{shown}"
    );
    runtime.ok(&["subs", "cancel", "yearly", &runtime.call("yearly", 1)]);
    runtime.ok(&["threads", "interrupt", "sleeper"]);
    runtime.until_status("sleeper", "idle");
    assert_eq!(runtime.ok(&["timers", "ls"]), "no timers\n");
}

#[test]
fn threads_are_filtered_and_paged() {
    let runtime = busy_runtime();
    let waiting = runtime.ok(&["threads", "ls", "--status", "waiting"]);
    assert_eq!(waiting.lines().count(), 2, "{waiting}");
    let needy = runtime.json(&["threads", "ls", "--status", "needs-you", "--json"]);
    assert_eq!(needy["threads"].as_array().unwrap().len(), 2);
    let two = runtime.run(&["threads", "ls", "--limit", "2"]);
    assert_eq!(
        (two.out.lines().count(), two.err.as_str()),
        (3, "there are more rows; use --all to list them\n")
    );
    assert_eq!(runtime.ok(&["threads", "ls", "--all"]).lines().count(), 6);
    assert!(runtime.ok(&["threads", "ls", "--parent", "calm"]).starts_with("no threads"));
    // Open threads come first, the newest first, and closed ones last.
    runtime.ok(&["threads", "close", "slow"]);
    let ids = |listed: &str| -> Vec<String> {
        listed.lines().skip(1).map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    let listed = ids(&runtime.ok(&["threads", "ls"]));
    assert_eq!(listed.last().unwrap(), "slow", "{listed:?}");
    let json = runtime.json(&["threads", "ls", "--json"]);
    let created: Vec<&str> = json["threads"].as_array().unwrap()[..4]
        .iter()
        .map(|thread| thread["created_at"].as_str().unwrap())
        .collect();
    assert!(created.is_sorted_by(|newer, older| newer >= older), "{created:?}");
    assert!(json["threads"][0]["usage"].is_object(), "{json}");
    for (listing, heading) in [("calls", "THREAD"), ("inbox", "THREAD")] {
        let one = runtime.run(&[listing, "ls", "--limit", "1"]);
        assert!(one.out.starts_with(heading), "{}", one.out);
        assert_eq!(
            (one.out.lines().count(), one.err.as_str()),
            (2, "there are more rows; use --all to list them\n")
        );
        let all = runtime.run(&[listing, "ls", "--all"]);
        assert!(all.out.lines().count() > 2 && all.err.is_empty(), "{}", all.out);
    }
}

#[test]
fn failed_deliveries_are_listed_and_shown_and_callbacks_are_not_redelivered() {
    let runtime = Runtime::start();
    for _ in 0..2 {
        runtime.post("/callback/made-up", "{}");
    }
    let deliveries = || runtime.json(&["deliveries", "ls", "--json"])["deliveries"].clone();
    block_until("the delivery log is written", || deliveries()[0]["attempts"] == 2);
    let listed = runtime.ok(&["deliveries", "ls"]);
    assert!(listed.starts_with("ID  KIND      OUTCOME  ATTEMPTS  LAST"), "{listed}");
    assert!(row(&listed, "1").contains("callback  refused  2"), "{listed}");
    let none = runtime.ok(&["deliveries", "ls", "--outcome", "given-up", "--thread", "t"]);
    assert_eq!(none, "no deliveries were refused, retried or given up\n");
    let shown = runtime.ok(&["deliveries", "show", "1"]);
    assert!(shown.starts_with("1: callback\n  refused; 2 attempts, first "), "{shown}");
    // One line for each attempt.
    assert_eq!(shown.matches(" UTC  answered 401: the callback URL was not issued by").count(), 2, "{shown}");
    assert_eq!(runtime.json(&["deliveries", "show", "1", "--json"])["topic"], "bad_token");
    let refused = runtime.fails(&["deliveries", "redeliver", "1"]);
    assert!(refused.starts_with("rap: only invocations can be delivered again"), "{refused}");
    let unknown = runtime.fails(&["deliveries", "show", "7"]);
    assert_eq!(unknown, "rap: no such delivery; old ones are removed after a while\n");
}

#[test]
fn a_runtime_on_sqlite_is_the_only_node() {
    let runtime = Runtime::start();
    let listing = runtime.json(&["nodes", "ls", "--json"]);
    let nodes = listing["nodes"].as_array().unwrap();
    assert_eq!(nodes.len(), 1);
    assert_eq!((&nodes[0]["asking"], &nodes[0]["invoking"]), (&0.into(), &0.into()));
    assert!(nodes[0]["url"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{listing}");
    assert!(nodes[0]["seen_at"].is_string() && nodes[0]["started_at"].is_string());
    let table = runtime.ok(&["nodes", "ls"]);
    assert!(table.starts_with("ID  URL") && table.lines().count() == 2, "{table}");
}

#[test]
fn an_empty_listing_says_so() {
    let runtime = Runtime::start();
    let table = [
        ("threads", "no threads; start one with: rap chat\n"),
        ("calls", "no open calls\n"),
        ("subs", "no subscriptions\n"),
        ("inbox", "no questions\n"),
        ("timers", "no timers\n"),
        ("deliveries", "no deliveries were refused, retried or given up\n"),
    ];
    for (listing, expected) in table {
        assert_eq!(runtime.ok(&[listing, "ls"]), expected);
    }
}

#[test]
fn a_table_fits_its_terminal() {
    let runtime = Runtime::start();
    let title = "a title that is much longer than any terminal of sixty columns could ever show";
    runtime.ok(&["threads", "new", "--id", "long", "--title", title]);
    let mut listing = Running::on_a_terminal(runtime.command(&["threads", "ls"]), 60);
    assert_eq!(listing.exit(), Some(0));
    assert!(listing.seen.contains("\x1b[1mID"), "headings are bold: {:?}", listing.seen);
    let text = plain(&listing.seen);
    assert!(text.contains("a title that") && text.contains('…'), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    assert!(runtime.ok(&["threads", "ls"]).contains(title), "a pipe gets the whole title");
}

#[test]
fn tail_follows_a_thread_until_it_is_closed() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "say one", "--id", "t", "--wait"]);
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    tail.expect("you     say one\nagent   one\n");
    runtime.ok(&["threads", "send", "t", "call echo {\"text\": \"two\"}"]);
    tail.expect("call    echo({\"text\":\"two\"}) (call_1)\n");
    tail.expect("result  echo: echo two\n");
    tail.expect("agent   echo: echo two\n");
    runtime.ok(&["threads", "close", "t"]);
    tail.expect("(closed)");
    assert_eq!(tail.exit(), Some(0));
}

#[test]
fn tail_continues_after_a_restart() {
    let mut runtime = Runtime::start();
    runtime.ok(&["threads", "new", "say one", "--id", "t", "--wait"]);
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    tail.expect("agent   one\n");
    runtime.kill();
    tail.expect("connection lost; reconnecting\n");
    runtime.start_again();
    runtime.ok(&["threads", "send", "t", "say two"]);
    tail.expect("agent   two\n");
    assert_eq!(plain(&tail.seen).matches("agent   one").count(), 1);
}

#[test]
fn closed_children_are_listed_only_on_request() {
    let runtime = Runtime::start();
    let spawn = "call spawn_thread {\"instructions\": \"call close_thread {}\"}";
    runtime.ok(&["threads", "new", spawn, "--id", "parent", "--wait"]);
    let children = runtime.json(&["threads", "ls", "--parent", "parent", "--json"]);
    let child = children["threads"][0]["id"].as_str().unwrap();
    runtime.until_status(child, "closed");
    assert!(!runtime.ok(&["threads", "ls"]).contains(child));
    assert!(runtime.ok(&["threads", "ls", "--all"]).contains(child));
}

#[test]
fn waiting_for_an_answer_has_a_time_limit() {
    let runtime = Runtime::start();
    let slow = "call slow {\"seconds\": 3600}";
    let error = runtime.fails(&["threads", "new", slow, "--id", "busy", "--wait", "--timeout", "1s"]);
    assert!(
        error.contains("the agent is not idle after 1 s") && error.contains("rap threads tail busy"),
        "{error}"
    );
    assert_eq!(runtime.run(&["threads", "send", "busy", "x", "--timeout", "1s"]).code, Some(2));
}

#[test]
fn tools_have_one_line_each_and_more_on_request() {
    let runtime = Runtime::start();
    let short = runtime.ok(&["tools", "ls"]);
    assert!(row(&short, "echo").contains("http://127.0.0.1:"), "{short}");
    assert!(!short.contains("\"type\""), "{short}");
    assert!(runtime.ok(&["tools", "ls", "--long"]).contains("\"type\":\"object\""));
}
