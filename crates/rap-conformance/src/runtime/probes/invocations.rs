//! Invocations: what is sent, how often, and what the model hears when it can not be sent.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Check, Phase, unseen};
use crate::runtime::model::{Question, Told};
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::stage::{Asked, Mark, Route};
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
    Check {
        probe: Probe {
            name: "call_id_form",
            requirements: &[],
            checks: "The `id` of a call has at most 40 letters, digits, `_`, `-`, whatever id the model gave.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(id_form(scene)),
    },
    Check {
        probe: Probe {
            name: "call_id_of_the_model",
            requirements: &[],
            checks: "The id that the model gave a call is its `call_id`.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(id_of_the_model(scene)),
    },
    Check {
        probe: Probe {
            name: "call_ids_across_threads",
            requirements: &[],
            checks: "Calls of different threads and sessions have different ids.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(ids_across_threads(scene)),
    },
];

/// The most characters that the `id` of a call has.
const ID_CHARACTERS: usize = 40;

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
        json!({"mark": scene.call_mark(mark), "text": "\u{e9}\u{1f980} \"quoted\"", "list": [1, null]});
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
    scene.acknowledge(mark, [Acknowledgement::Result(word.clone())]);
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
    scene.acknowledge(mark, statuses.iter().map(|status| Acknowledgement::Status(*status)));
    scene.open(mark).await?;
    let wanted = statuses.len() + 1;
    scene
        .until(&format!("attempt {wanted} of a call whose attempts were answered {statuses:?}"), || {
            Some(scene.invocations()).filter(|asked| asked.len() >= wanted)
        })
        .await
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
        scene.acknowledge(mark, (0..20).map(|_| Acknowledgement::Status(status)));
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
        let wanted = scene.call_mark(mark);
        let of: Vec<_> = invocations.iter().filter(|asked| asked.mark() == wanted).collect();
        if of.len() != 1 {
            let shown = of.iter().take(3).map(|asked| asked.exchange()).collect();
            return wrong(format!("a call that was answered {status} was sent {} times", of.len()), shown);
        }
    }
    Ok(())
}

async fn refused_told(scene: Scene) -> Seen {
    let mark = scene.calls(&[WORK]);
    scene.acknowledge(mark, (0..20).map(|_| Acknowledgement::Status(422)));
    scene.open(mark).await?;
    let call = scene.call().await?;
    let told = |results: Vec<String>| results.iter().any(|text| !text.trim().is_empty());
    scene
        .question("a question with a result of the call that was refused", |asked| {
            told(asked.results_of(call.mark()))
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
    calls.sort_by_key(|call| call.mark().to_owned());
    let words: Vec<String> = (0..3).map(|at| scene.word(&format!("part{at}"))).collect();
    for at in [2, 0, 1] {
        calls[at].returns(&words[at]).await?;
    }
    let all = |asked: &Question| words.iter().all(|word| asked.has(word));
    let question = scene.question("a question with the results of three calls", all).await?;
    for (call, word) in calls.iter().zip(&words) {
        // Behind the call itself, or behind a synthetic one for it.
        if question.call_with_result(word).is_none_or(|told| told.mark() != call.mark()) {
            let what = format!("the result of `{}` does not stand behind its call", call.id());
            return wrong(what, vec![question.exchange()]);
        }
    }
    Ok(())
}

/// A model gives its second call the id of its first.
async fn repeated_id(scene: Scene) -> Seen {
    let id = scene.model_id();
    let thread = scene.open(scene.call_as(&id, WORK)).await?;
    let one = scene.call().await?;
    let words = [scene.word("one"), scene.word("two")];
    one.returns(&words[0]).await?;
    scene.heard(&words[0]).await?;
    scene.say(&thread, scene.call_as(&id, WORK)).await?;
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

/// A call to which the model gave a long id with all kinds of characters, and that id.
async fn oddly_named(scene: &Scene) -> Result<(Call, String), Verdict> {
    let given = format!("functions.{WORK}:0/{}", scene.model_id());
    scene.open(scene.call_as(&given, WORK)).await?;
    Ok((scene.call().await?, given))
}

async fn id_form(scene: Scene) -> Seen {
    let (call, _) = oddly_named(&scene).await?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if call.id().len() <= ID_CHARACTERS && call.id().bytes().all(plain) {
        return Ok(());
    }
    let what = format!("`{}` is not an `id` of at most {ID_CHARACTERS} letters, digits, `_`, `-`", call.id());
    wrong(what, scene.story())
}

async fn id_of_the_model(scene: Scene) -> Seen {
    let (call, given) = oddly_named(&scene).await?;
    if call.asked.field("call_id") == given {
        return Ok(());
    }
    wrong(format!("`call_id` is not the id that the model gave: `{given}`"), scene.story())
}

/// The model gives the same id to calls of a thread, of its child, and of a thread of another session.
async fn ids_across_threads(scene: Scene) -> Seen {
    let given = scene.model_id();
    let (_, watch) = scene.subscribed_by(scene.call_as(&given, WATCH)).await?;
    watch.insists(&watch.event(&scene.text(scene.call_as(&given, WORK)))).await?;
    let inner = scene.call().await?;
    scene.open(scene.call_as(&given, WORK)).await?;
    let outer = scene.call().await?;
    for (one, two) in [(&watch, &inner), (&watch, &outer), (&inner, &outer)] {
        if one.id() == two.id() {
            let what = "two calls have the same `id`: a tool server that keys its work by it confuses them";
            return wrong(what, vec![one.asked.exchange(), two.asked.exchange()]);
        }
    }
    Ok(())
}
