//! `rap models check`, and `rap init --provider`.

use std::path::Path;
use std::process::Output;

use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::programs;
use serde_json::json;

async fn rap(directory: &Path, arguments: &'static [&'static str]) -> Output {
    let directory = directory.to_owned();
    let run = move || programs::rap(arguments).current_dir(directory).output().unwrap();
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the lines of the output, without the seconds.
fn lines(output: &Output) -> Vec<String> {
    let plain = |line: &str| match (line.find(" ("), line.find(" s): ")) {
        (Some(begin), Some(end)) => format!("{}{}", &line[..begin], &line[end + 3..]),
        _ => line.to_owned(),
    };
    text(&output.stdout).lines().map(plain).collect()
}

#[tokio::test]
async fn a_model_is_asked_for_a_word_a_call_and_an_image() {
    let (directory, model) = (tempfile::tempdir().unwrap(), ModelServer::start().await);
    let settings = format!("[model]\n{}\nwindow = 50000\ninput_price = 1\noutput_price = 1\n", model.lines());
    std::fs::write(directory.path().join("rap.toml"), settings).unwrap();
    model.says("ready");
    model.calls(&[("c", "add", json!({"a": 2, "b": 3}))]);
    model.says("red");
    let output = rap(directory.path(), &["models", "check"]).await;
    let expected = [
        format!("gpt (openai) at {}/v1", model.url),
        "  word       ok: ready".into(),
        "  tool call  ok: add(2, 3)".into(),
        "  image      ok: red".into(),
        "  window     50000 tokens".into(),
        "  cost       30 input and 9 output tokens, $0.000039".into(),
    ];
    assert_eq!((lines(&output).as_slice(), output.status.code()), (&expected[..], Some(0)), "{output:?}");
    let asked = [model.question().await, model.question().await, model.question().await];
    assert_eq!(asked[1]["tools"][0]["function"]["name"], "add");
    assert!(asked[2].to_string().contains("data:image/png;base64,"), "{}", asked[2]);
}

#[tokio::test]
async fn a_model_that_does_not_work_is_named_and_its_errors_are_shown() {
    let (directory, model) = (tempfile::tempdir().unwrap(), ModelServer::start().await);
    let settings = format!("[model]\n{}\nwindow = 50000\nimages = false\n", model.lines());
    std::fs::write(directory.path().join("rap.toml"), settings).unwrap();
    model.says("ready");
    model.says("I cannot call tools.");
    let output = rap(directory.path(), &["models", "check"]).await;
    let shown = lines(&output);
    assert_eq!(shown[1], "  word       ok: ready");
    assert_eq!(shown[2], "  tool call  FAILED: it did not call the tool; it answered: I cannot call tools.");
    assert_eq!(shown[3], "  image      not checked: model.images is false");
    let cost = "20 input and 6 output tokens, price unknown; set input_price and output_price";
    assert_eq!(shown[5], format!("  cost       {cost}"));
    let failed = (Some(1), "rap: checks failed: gpt (openai)\n");
    assert_eq!((output.status.code(), &*text(&output.stderr)), failed);

    // A model that gives no answer is not asked again.
    model.answer(Reply::Full(401, None, "{\"error\": \"wrong key sk-key\"}".into()));
    let output = rap(directory.path(), &["models", "check"]).await;
    let shown = lines(&output);
    assert_eq!(shown[1..], ["  word       FAILED: the model's server answered 401: wrong key [key]"]);
    assert_eq!((output.status.code(), &*text(&output.stderr)), failed);
    assert_eq!(model.questions(), 3);
}

/// A model that is configured to see images, as by default, has to accept one. The window is not presented as that of the
/// server if the server does not name it.
#[tokio::test]
async fn a_model_without_images_and_a_window_that_is_assumed_are_named() {
    let (directory, model) = (tempfile::tempdir().unwrap(), ModelServer::start().await);
    std::fs::write(directory.path().join("rap.toml"), format!("[model]\n{}\n", model.lines())).unwrap();
    for (list, window) in [
        ("{\"data\": [{\"id\": \"gpt\", \"max_model_len\": 9000}]}", "9000 tokens"),
        (
            "{\"data\": [{\"id\": \"gpt\"}]}",
            "128000 tokens, assumed: its server does not name it; set model.window if you know it",
        ),
    ] {
        model.says("ready");
        model.calls(&[("c", "add", json!({"a": 2, "b": 3}))]);
        model.answer(Reply::Full(400, None, "{\"error\": \"this model has no eyes\"}".into()));
        model.answer_next("/v1/models", Reply::Full(200, None, list.into()));
        let output = rap(directory.path(), &["models", "check"]).await;
        let shown = lines(&output);
        assert_eq!(shown[3], "  image      FAILED: the model's server answered 400: this model has no eyes");
        assert_eq!(
            shown[4],
            "             if the model cannot see images, set images = false in its section"
        );
        assert_eq!(shown[5], format!("  window     {window}"));
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
}

#[tokio::test]
async fn a_model_of_several_agents_is_asked_once() {
    let (directory, model) = (tempfile::tempdir().unwrap(), ModelServer::start().await);
    let agents = "[[agent]]\nname = \"a\"\n[[agent]]\nname = \"b\"\nmodel = \"other\"\n[[agent]]\nname = \"c\"\nmodel = \"gpt\"\n";
    let settings = format!("[model]\n{}\nwindow = 50000\nimages = false\n{agents}", model.lines());
    std::fs::write(directory.path().join("rap.toml"), settings).unwrap();
    for _ in 0..2 {
        model.says("ready");
        model.calls(&[("c", "add", json!({"a": 2, "b": 3}))]);
    }
    let output = rap(directory.path(), &["models", "check"]).await;
    assert_eq!((model.questions(), output.status.code()), (4, Some(0)), "{output:?}");
}

#[tokio::test]
async fn the_scripted_model_passes_and_init_writes_a_provider() {
    let directory = tempfile::tempdir().unwrap();
    let output = rap(directory.path(), &["models", "check"]).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(text(&output.stdout).starts_with("scripted at "), "{output:?}");
    let output = rap(directory.path(), &["init", "--provider", "anthropic"]).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let next = "wrote rap.toml; `rap serve` reads it; set ANTHROPIC_API_KEY, then try the model with `rap models check`\n";
    assert_eq!(text(&output.stdout), next);
    let written = std::fs::read_to_string(directory.path().join("rap.toml")).unwrap();
    assert!(written.contains("\nprovider = \"anthropic\"\n"), "{written}");
    let output = rap(directory.path(), &["init", "--force", "--provider", "acme"]).await;
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("possible values: anthropic, openai, openai-responses, scripted"),
        "{output:?}"
    );
}
