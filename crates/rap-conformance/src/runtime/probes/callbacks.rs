//! Callbacks: taken once, from the right tool, for the right call, or refused.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Check, Phase};
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::tools::{self, Call, Posted, WORK, with};
use crate::runtime::user::User;
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "result",
            requirements: &["TR-10", "TR-13"],
            checks: "A result is answered 200 and reaches the model behind its call.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(result(scene)),
    },
    Check {
        probe: Probe {
            name: "duplicate_result",
            requirements: &["LC-30", "TR-25"],
            checks: "A result that comes again changes nothing.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(duplicate(scene)),
    },
    Check {
        probe: Probe {
            name: "forged_url",
            requirements: &["TR-20"],
            checks: "A callback URL with one character changed is refused.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(forged(scene)),
    },
    Check {
        probe: Probe {
            name: "unguessable_url",
            requirements: &["TR-20"],
            checks: "A callback URL can not be made up from what others know of a call.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(unguessable(scene)),
    },
    Check {
        probe: Probe {
            name: "mismatched_result",
            requirements: &["TR-22"],
            checks: "A result whose ids are not those of its URL is refused.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(astray_refused(scene)),
    },
    Check {
        probe: Probe {
            name: "mismatched_result_unheard",
            requirements: &["LC-29"],
            checks: "A result whose ids are not those of its URL reaches no conversation.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(astray_unheard(scene)),
    },
    Check {
        probe: Probe {
            name: "invalid_callback",
            requirements: &["TR-21", "LC-29"],
            checks: "A callback that does not fit the schema is answered 4xx.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(invalid(scene)),
    },
    Check {
        probe: Probe {
            name: "callback_not_json",
            requirements: &["TR-01"],
            checks: "A callback that is not sent as application/json is answered 4xx.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(not_json(scene)),
    },
    Check {
        probe: Probe {
            name: "hostile_callback",
            requirements: &["TR-21"],
            checks: "Bodies that are too large or too deep are refused, and the runtime lives.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(hostile(scene)),
    },
    Check {
        probe: Probe {
            name: "sign_in",
            requirements: &["TR-10"],
            checks: "A call that waits for a sign-in stays open and is not sent again.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(sign_in(scene)),
    },
    Check {
        probe: Probe {
            name: "user_choice",
            requirements: &["TR-10"],
            checks: "A person's choice reaches the tool that asked.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(choice(scene)),
    },
    Check {
        probe: Probe {
            name: "view_update",
            requirements: &["TR-10"],
            checks: "A view is accepted, wakes nobody and never reaches the model.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(view(scene)),
    },
    Check {
        probe: Probe {
            name: "view_after_result",
            requirements: &[],
            checks: "A view that comes right after its call's result is answered 200 and kept.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(view_after_result(scene)),
    },
];

/// How deep the nested body of a hostile tool is.
const DEEP: usize = 200_000;
/// How large the large body of a hostile tool is, in bytes.
const LARGE: usize = 16 * 1024 * 1024;

async fn result(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let word = scene.word("done");
    let content = json!([{"type": "text", "text": word}]);
    call.insists_on_200(&with(
        call.result("not this"),
        json!({"content": content, "a field of the future": 1}),
    ))
    .await?;
    let question = scene.heard(&word).await?;
    match question.results_of(call.mark()).as_slice() {
        [only] if only.contains(&word) => Ok(()),
        _ => wrong("the result does not stand behind its call, or not alone", vec![question.exchange()]),
    }
}

async fn duplicate(scene: Scene) -> Seen {
    let (thread, call) = scene.called(WORK).await?;
    let (word, other) = (scene.word("once"), scene.word("other"));
    call.returns(&word).await?;
    scene.heard(&word).await?;
    let before = scene.questions().len();
    for body in [call.result(&word), call.result(&other), call.result(&word)] {
        call.says(&body).await?;
    }
    scene.settle().await;
    if scene.questions().len() > before {
        return wrong("the model was asked again because of a duplicate result", scene.story());
    }
    let question = scene.looked_at(&thread).await?;
    scene.never_heard(&other, "a second result of a call")?;
    match question.count(&word) {
        1 => Ok(()),
        times => wrong(format!("a result that came twice stands {times} times in the prompt"), scene.story()),
    }
}

/// One character of the URL is another, at several places from its end.
fn forgeries(url: &str) -> Vec<String> {
    let start = url.find("://").map_or(0, |at| at + 3);
    let start = url[start..].find('/').map_or(url.len(), |at| start + at + 1);
    let places = (start..url.len()).filter(|at| url.as_bytes()[*at].is_ascii_alphanumeric());
    let places: Vec<usize> = places.collect();
    let tail = &places[places.len().saturating_sub(24)..];
    let changed = |at: &usize| {
        let other = if url.as_bytes()[*at] == b'A' { "B" } else { "A" };
        format!("{}{other}{}", &url[..*at], &url[at + 1..])
    };
    let mut urls: Vec<String> = tail.iter().step_by(4).map(changed).collect();
    urls.push(format!("{url}A"));
    urls
}

/// It has to be refused, and nothing of it may be heard.
fn refused(posted: &Posted, what: &str) -> Seen {
    if posted.is_refused() {
        return Ok(());
    }
    let status = posted.status.map_or_else(|| "not at all".to_owned(), |status| status.to_string());
    wrong(format!("{what} was answered {status} instead of 4xx"), vec![posted.exchange.clone()])
}

/// The call still has its say, and nothing else was heard.
async fn only_the_real_one(scene: &Scene, call: &Call, false_word: &str, what: &str) -> Seen {
    let real = scene.word("real");
    call.returns(&real).await?;
    scene.heard(&real).await?;
    scene.never_heard(false_word, what)
}

async fn forged(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let word = scene.word("forged");
    let body = Bytes::from(call.result(&word).to_string());
    for url in forgeries(call.url()) {
        let posted = tools::post(&scene.bench.http, &url, None, body.clone()).await?;
        scene.notes.add(posted.exchange.clone());
        scene.never_heard(&word, "what was posted to a forged URL")?;
        refused(&posted, "a result at a URL with one character changed")?;
    }
    only_the_real_one(&scene, &call, &word, "what was posted to a forged URL").await
}

/// The URL of a call says something that can not be made up from the call.
async fn unguessable(scene: Scene) -> Seen {
    let (_, one) = scene.called(WORK).await?;
    let (_, two) = scene.called(WORK).await?;
    let bare = |call: &Call| call.url().replace(call.id(), "").replace(call.thread(), "");
    if bare(&one) == bare(&two) {
        let exchanges = vec![one.asked.exchange(), two.asked.exchange()];
        return wrong("whoever knows a call's ids can make its callback URL: it holds no token", exchanges);
    }
    Ok(())
}

const ASTRAY: &str = "a result whose ids are not those of its callback URL";

/// Posts results of other calls to the URL of the one that comes back, with the word in them.
async fn astray(scene: &Scene) -> Result<(Call, String, Vec<Posted>), Verdict> {
    let (_, call) = scene.called(WORK).await?;
    let (_, other) = scene.called(WORK).await?;
    let word = scene.word("astray");
    let mut answers = Vec::new();
    let foreign = [
        (other.id(), call.thread()),
        (call.id(), other.thread()),
        (other.id(), other.thread()),
        ("no-call", "no-thread"),
    ];
    // Where ids are unique only within a thread, both calls may have the same.
    let foreign = foreign.into_iter().filter(|ids| *ids != (call.id(), call.thread()));
    for (id, thread) in foreign {
        let body = with(call.result(&word), json!({"id": id, "group_id": thread}));
        let posted = call.post(&body).await?;
        answers.push(posted);
    }
    Ok((call, word, answers))
}

async fn astray_refused(scene: Scene) -> Seen {
    let (_, _, answers) = astray(&scene).await?;
    answers.iter().try_for_each(|posted| refused(posted, ASTRAY))
}

async fn astray_unheard(scene: Scene) -> Seen {
    let (call, word, _) = astray(&scene).await?;
    scene.settle().await;
    scene.never_heard(&word, ASTRAY)?;
    only_the_real_one(&scene, &call, &word, ASTRAY).await
}

async fn invalid(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let word = scene.word("invalid");
    let good = call.result(&word);
    let without = |name: &str| {
        let mut body = good.clone();
        body.as_object_mut().map(|fields| fields.remove(name));
        body
    };
    let bodies = [
        json!([good]),
        json!(word),
        without("type"),
        with(good.clone(), json!({"type": "tool_results"})),
        without("group_id"),
        without("id"),
        without("text"),
        with(good.clone(), json!({"text": {"word": word}})),
        with(good.clone(), json!({"content": [{"type": "sound", "text": word}]})),
        with(good.clone(), json!({"subscription": "yes"})),
        with(call.message("user_choice"), json!({"prompt": word})),
    ];
    for body in bodies {
        let posted = call.post(&body).await?;
        refused(&posted, "a callback that is not valid")?;
    }
    for raw in [&b""[..], b"{", b"{\"type\": \"tool_result\"", b"\xff\xfe\x00"] {
        let posted = call.post_raw("application/json", Bytes::from_static(raw)).await?;
        refused(&posted, "a callback that is not JSON")?;
    }
    only_the_real_one(&scene, &call, &word, "a callback that is not valid").await
}

async fn not_json(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let word = scene.word("plain");
    let body = Bytes::from(call.result(&word).to_string());
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let posted = call.post_raw(kind, body.clone()).await?;
        refused(&posted, &format!("a callback with Content-Type: {kind}"))?;
    }
    only_the_real_one(&scene, &call, &word, "a callback that was not sent as JSON").await
}

async fn hostile(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let word = scene.word("hostile");
    let deep = "[".repeat(DEEP);
    let large = format!("{{\"type\":\"tool_result\",\"text\":\"{}", "x".repeat(LARGE));
    for (body, what) in [(deep, "a body of nested arrays"), (large, "a body of 16 MiB that never ends")] {
        let posted = call.post_raw("application/json", body.into()).await?;
        // Whoever has read enough may hang up.
        if posted.timed_out || posted.status.is_some_and(|status| !(400..500).contains(&status)) {
            return wrong(format!("{what} was not refused with 4xx"), vec![posted.exchange]);
        }
    }
    only_the_real_one(&scene, &call, &word, "a hostile body").await
}

async fn sign_in(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let (secret, word) = (scene.word("secret"), scene.word("signedin"));
    let url = format!("https://sign-in.example/{secret}");
    call.insists(&with(call.message("oauth"), json!({"auth_url": url}))).await?;
    let questions = scene.questions().len();
    scene.settle().await;
    if scene.invocations().len() > 1 {
        return wrong("a call that waits for a sign-in was sent again", scene.story());
    }
    if scene.questions().len() > questions {
        return wrong("a call that waits for a sign-in did not stay open", scene.story());
    }
    call.returns(&word).await?;
    scene.heard(&word).await?;
    scene.never_heard(&secret, "the URL to sign in")
}

async fn choice(scene: Scene) -> Seen {
    let api = scene.bench.user.api("answer a question")?.clone();
    let (thread, call) = scene.called(WORK).await?;
    let path = format!("/answers/{}", scene.number);
    let question = json!({
        "prompt": "Which?", "choices": ["red", "green", "blue"], "default": 0,
        "response_url": format!("{}{path}", scene.stage().url),
    });
    call.insists(&with(call.message("user_choice"), question)).await?;
    let answer = ["threads", &thread, "calls", call.id(), "choice"];
    let answered = api.post(&scene.bench.http, &answer, &json!({"selected": 2})).await?;
    scene.notes.add(answered.exchange.clone());
    answered.expect(202)?;
    let answers = || scene.stage().asked(|asked| asked.path == path).into_iter().next();
    let asked = scene.until("the person's answer at its response_url", answers).await?;
    if asked.body["id"] != call.id() || asked.body["selected"] != json!(2) {
        return wrong(
            "the person's answer is not {\"id\", \"selected\"} of the question",
            vec![asked.exchange()],
        );
    }
    let word = scene.word("chosen");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

/// A view that shows this note.
fn progress(call: &Call, note: &str) -> Value {
    let content = json!({"note": note});
    json!({"type": "view_update", "group_id": call.thread(), "view_type": "progress", "content": content})
}

async fn view(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let (shown, word) = (scene.word("shown"), scene.word("returned"));
    let questions = scene.questions().len();
    call.insists(&progress(&call, &shown)).await?;
    scene.settle().await;
    if scene.questions().len() > questions {
        return wrong("a view woke the model", scene.story());
    }
    call.returns(&word).await?;
    scene.heard(&word).await?;
    scene.never_heard(&shown, "a view")
}

/// As a tool does that changes a file: the result first, then the diff.
async fn view_after_result(scene: Scene) -> Seen {
    let (thread, call) = scene.called(WORK).await?;
    let shown = scene.word("shown");
    call.returns(&scene.word("returned")).await?;
    call.insists_on_200(&progress(&call, &shown)).await?;
    kept(&scene, &thread, &shown).await
}

/// The view with this note is there for people, where the client API shows views at all.
async fn kept(scene: &Scene, thread: &str, note: &str) -> Seen {
    let User::Api(api) = &scene.bench.user else { return Ok(()) };
    let shown = api.get(&scene.bench.http, &["threads", thread, "views"]).await?;
    let Some(views) = shown["views"].as_array() else { return Ok(()) };
    if views.iter().any(|view| view["content"]["note"] == note) {
        return Ok(());
    }
    wrong("a view was answered 200, and is not among the views of its thread", scene.story())
}
