//! Invocations: what is sent, how often, and what the model hears when it can not be sent.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Check, Phase};
use crate::runtime::model::{ModelCall, Question, Told};
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::stage::{Asked, Mark, Reply, Route};
use crate::runtime::tools::{AWAY, Acknowledgement, Call, MAIN, THIRD, WATCH, WORK};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "invocation_fields",
            requirements: &["TR-01", "TR-02"],
            checks: "An invocation is a POST of JSON to the toolset's endpoint, with all its fields.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(fields(scene)),
    },
    Check {
        probe: Probe {
            name: "invocation_version",
            requirements: &["LC-35"],
            checks: "An invocation names the version of the toolset that it rests on.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(version(scene)),
    },
    Check {
        probe: Probe {
            name: "invocation_authenticated",
            requirements: &["TR-19"],
            checks: "A bearer token goes out with everything that a tool server is sent.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(authentication(scene)),
    },
    Check {
        probe: Probe {
            name: "acknowledgement_body",
            requirements: &["TR-05"],
            checks: "The body of an acknowledgement means nothing.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(acknowledgement_body(scene)),
    },
    Check {
        probe: Probe {
            name: "retry_server_errors",
            requirements: &["TR-06"],
            checks: "A call that is answered 5xx is sent again.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(server_errors(scene)),
    },
    Check {
        probe: Probe {
            name: "retry_unreachable",
            requirements: &["TR-06"],
            checks: "A call whose server can not be reached is sent again.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(unreachable(scene)),
    },
    Check {
        probe: Probe {
            name: "retry_backoff",
            requirements: &["TR-06"],
            checks: "The pauses between attempts grow.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(backoff(scene)),
    },
    Check {
        probe: Probe {
            name: "retry_is_the_same",
            requirements: &["TR-06"],
            checks: "Every attempt of a call has the same id and the same callback URL.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(same_again(scene)),
    },
    Check {
        probe: Probe {
            name: "no_retry_after_4xx",
            requirements: &["TR-07"],
            checks: "A call that is answered 4xx is not sent again.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(refused_once(scene)),
    },
    Check {
        probe: Probe {
            name: "refusal_is_told",
            requirements: &["LC-15"],
            checks: "A call that is answered 4xx has an error for its result.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(refused_told(scene)),
    },
    Check {
        probe: Probe {
            name: "parallel_calls",
            requirements: &["LC-29"],
            checks: "Calls of one answer run at the same time, and each has its own result, in whatever order they return.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(parallel(scene)),
    },
    Check {
        probe: Probe {
            name: "repeated_call_id",
            requirements: &["TR-22"],
            checks: "A model that repeats an id does not confuse two calls.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(repeated_id(scene)),
    },
];

/// What an invocation lacks or has too much of.
fn defect(asked: &Asked, scene: &Scene, mark: Mark) -> Option<String> {
    if asked.method != "POST" {
        return Some(format!("it was sent by {}", asked.method));
    }
    let kind = asked.header("content-type").unwrap_or_default();
    if kind.split(';').next().unwrap_or_default().trim() != "application/json" {
        return Some(format!("its Content-Type is `{kind}`"));
    }
    for name in ["operation", "id", "group_id", "callback_url"] {
        if asked.field(name).is_empty() {
            return Some(format!("it has no `{name}`"));
        }
    }
    if asked.field("operation") != WORK {
        return Some("its `operation` is not the tool that the model called".into());
    }
    let expected =
        json!({"mark": scene.stage().written(mark), "text": "\u{e9}\u{1f980} \"quoted\"", "list": [1, null]});
    if asked.body["arguments"] != expected {
        return Some("its `arguments` are not those that the model gave".into());
    }
    match asked.body.get("thread_ancestors") {
        None | Some(Value::Null) => None,
        Some(Value::Array(ancestors)) if ancestors.is_empty() => None,
        Some(_) => Some("it names ancestors of a thread that has none".into()),
    }
}

async fn fields(scene: Scene) -> Seen {
    let more = json!({"text": "\u{e9}\u{1f980} \"quoted\"", "list": [1, null]});
    let mark = scene.calls_with(&[(WORK, more)]);
    scene.open(mark).await?;
    let call = scene.call().await?;
    match defect(&call.asked, &scene, mark) {
        None => Ok(()),
        Some(what) => wrong(format!("the invocation is not as it should be: {what}"), scene.story()),
    }
}

async fn version(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    match call.asked.body.get("toolset_version") {
        Some(version) if version == "main-1" => Ok(()),
        _ => wrong("an invocation does not name the version of the toolset that it rests on", scene.story()),
    }
}

async fn authentication(scene: Scene) -> Seen {
    let (thread, call) = scene.called(WORK).await?;
    let expected = format!("Bearer {}", scene.stage().token.expose());
    let shows = |asked: &Asked| asked.header("authorization") == Some(expected.as_str());
    let discovered = scene.stage().asked(|asked| asked.route == Route::Discovery(MAIN));
    if !shows(&call.asked) {
        if discovered.iter().any(|asked| shows(asked)) {
            return wrong("the token goes out with discovery and not with invocations", scene.story());
        }
        return Err(Verdict::not_observable(
            "the runtime shows no bearer token; configure {tool_token} for the tool servers",
        ));
    }
    scene.close(&thread).await?;
    let told = || scene.told(Route::Close, call.thread()).into_iter().find(|(at, _)| *at == MAIN);
    let (_, asked) = scene.until("the closing at a tool server", told).await?;
    if shows(&asked) {
        return Ok(());
    }
    wrong("the token goes out with invocations and not with notifications", vec![asked.exchange()])
}

async fn acknowledgement_body(scene: Scene) -> Seen {
    let mark = scene.calls(&[WORK]);
    let (word, real) = (scene.word("inbody"), scene.word("bycallback"));
    let body = json!({"type": "tool_result", "group_id": "x", "id": scene.call_id(mark, 0), "text": word});
    scene.acknowledge(mark, [Acknowledgement { reply: Reply::json(&body), gate: None }]);
    scene.open(mark).await?;
    let call = scene.call().await?;
    scene.settle().await;
    scene.never_heard(&word, "the body of an acknowledgement")?;
    call.returns(&real).await?;
    scene.heard(&real).await?;
    scene.never_heard(&word, "the body of an acknowledgement")
}

/// Has a call refused with these statuses first, and gives all attempts up to the first that is accepted.
async fn attempts(scene: &Scene, statuses: &[u16]) -> Result<Vec<Arc<Asked>>, Verdict> {
    let mark = scene.calls(&[WORK]);
    scene.acknowledge(mark, statuses.iter().map(|status| Acknowledgement::status(*status)));
    scene.open(mark).await?;
    let wanted = statuses.len() + 1;
    scene
        .until(&format!("attempt {wanted} of a call whose attempts were answered {statuses:?}"), || {
            Some(scene.invocations()).filter(|asked| asked.len() >= wanted)
        })
        .await
}

/// Whether there are further attempts is for another probe to say.
fn unseen(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Fail { what, .. } => Verdict::not_observable(what),
        other => other,
    }
}

async fn server_errors(scene: Scene) -> Seen {
    attempts(&scene, &[503, 500]).await?;
    let call = scene.call().await?;
    let word = scene.word("atlast");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

async fn backoff(scene: Scene) -> Seen {
    let attempts = attempts(&scene, &[503, 503, 503]).await.map_err(unseen)?;
    let pauses: Vec<Duration> = attempts.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    // Some jitter is good manners.
    if pauses[2] > pauses[0].mul_f64(1.2) {
        return Ok(());
    }
    wrong(format!("the pauses between attempts do not grow: {pauses:?}"), scene.story())
}

async fn same_again(scene: Scene) -> Seen {
    let attempts = attempts(&scene, &[503, 503]).await.map_err(unseen)?;
    for name in ["id", "group_id", "callback_url", "operation", "arguments"] {
        if attempts.iter().any(|asked| asked.body[name] != attempts[0].body[name]) {
            return wrong(
                format!("`{name}` changes from attempt to attempt of the same call"),
                scene.story(),
            );
        }
    }
    Ok(())
}

async fn unreachable(scene: Scene) -> Seen {
    scene.needs(THIRD)?;
    let mark = scene.calls(&[AWAY]);
    scene.open(mark).await?;
    scene.heard(&scene.stage().written(mark)).await?;
    // Nobody listens there, so that nobody can see the attempts that fail.
    scene.settle().await;
    let home = scene.bench.stage.come_home();
    home.map_err(|error| Verdict::not_observable(format!("the checker can not listen: {error}")))?;
    let call = scene.call().await?;
    let word = scene.word("thereagain");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

async fn refused_once(scene: Scene) -> Seen {
    let statuses = [400, 404, 409, 429];
    let marks = statuses.map(|status| {
        let mark = scene.calls(&[WORK]);
        scene.acknowledge(mark, (0..20).map(|_| Acknowledgement::status(status)));
        mark
    });
    for mark in marks {
        scene.open(mark).await?;
    }
    scene
        .until("the first attempts of four calls", || (scene.invocations().len() >= 4).then_some(()))
        .await?;
    scene.settle().await;
    let invocations = scene.invocations();
    for (mark, status) in marks.into_iter().zip(statuses) {
        let written = scene.stage().written(mark);
        let of: Vec<_> =
            invocations.iter().filter(|asked| asked.body["arguments"]["mark"] == *written).collect();
        if of.len() != 1 {
            let shown = of.iter().take(3).map(|asked| asked.exchange()).collect();
            return wrong(format!("a call that was answered {status} was sent {} times", of.len()), shown);
        }
    }
    Ok(())
}

async fn refused_told(scene: Scene) -> Seen {
    let mark = scene.calls(&[WORK]);
    scene.acknowledge(mark, (0..20).map(|_| Acknowledgement::status(422)));
    scene.open(mark).await?;
    let id = scene.call().await?.id().to_owned();
    let told = |results: Vec<String>| results.iter().any(|text| !text.trim().is_empty());
    scene
        .question("a question with a result of the call that was refused", |asked| {
            told(asked.results_of(&id))
        })
        .await?;
    Ok(())
}

async fn parallel(scene: Scene) -> Seen {
    scene.open(scene.calls(&[WORK, WATCH, WORK])).await?;
    let mut calls: Vec<Call> = Vec::new();
    for _ in 0..3 {
        calls.push(scene.call().await?);
    }
    calls.sort_by_key(|call| call.id().to_owned());
    let words: Vec<String> = (0..3).map(|at| scene.word(&format!("part{at}"))).collect();
    for at in [2, 0, 1] {
        calls[at].returns(&words[at]).await?;
    }
    let all = |asked: &Question| words.iter().all(|word| asked.has(word));
    let question = scene.question("a question with the results of three calls", all).await?;
    for (call, word) in calls.iter().zip(&words) {
        // Behind the call itself, or behind a synthetic one for it.
        let of = question.call_with_result(word);
        let kind = |told: &Told| told.arguments["kind"].as_str().unwrap_or_default().contains(call.id());
        if !of.is_some_and(|told| told.id == call.id() || kind(&told)) {
            let what = format!("the result of `{}` does not stand behind its call", call.id());
            return wrong(what, vec![question.exchange()]);
        }
    }
    Ok(())
}

/// A model gives its second call the id of its first.
async fn repeated_id(scene: Scene) -> Seen {
    let first = scene.calls(&[WORK]);
    let id = scene.call_id(first, 0);
    let thread = scene.open(first).await?;
    let one = scene.call().await?;
    let words = [scene.word("one"), scene.word("two")];
    one.returns(&words[0]).await?;
    scene.heard(&words[0]).await?;
    let second = scene.step(|mark, step| {
        let arguments = json!({"mark": mark});
        step.calls.push(ModelCall { id, name: WORK.into(), arguments });
    });
    scene.say(&thread, second).await?;
    let two = scene.call().await?;
    if one.id() == two.id() {
        return wrong(
            "two calls of one thread have the same `id`: their results can not be told apart",
            scene.story(),
        );
    }
    two.returns(&words[1]).await?;
    let question = scene.heard(&words[1]).await?;
    let results: Vec<Told> = question.calls().into_iter().filter(|call| call.name == WORK).collect();
    let each =
        results.len() == 2 && results.iter().zip(&words).all(|(call, word)| call.results == [word.clone()]);
    if each { Ok(()) } else { wrong("the results of the two calls are mixed up", vec![question.exchange()]) }
}
