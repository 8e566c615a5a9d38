//! Models and agents: the expected configuration or error.

use super::*;

#[test]
fn a_model_of_anthropic_is_read() {
    let text = "[model]\nprovider = \"anthropic\"\nname = \"m\"\napi_key = \"k\"\n";
    let check = |more: &str, max_tokens, thinking| {
        let (name, api_key) = ("m".into(), Some(Secret::new("k")));
        let options = Options { name, api_key, max_tokens, thinking, ..Options::default() };
        let (provider, window) = (&anthropic::PROVIDER, Window::default());
        let expected = Model { provider, options, images: true, window };
        assert_eq!(Setup::new(&format!("{text}{more}")).config().model, expected);
    };
    check("", 16384, Thinking::Off);
    check("thinking = \"off\"\nmax_tokens = 5", 5, Thinking::Off);
    check("thinking = \"adaptive\"", 16384, Thinking::Adaptive);
    check("thinking = 1024\nmax_tokens = 1025", 1025, Thinking::Tokens(1024));
    let expected = "\"off\", \"adaptive\", or a number of tokens from 1024 to";
    for (value, max_tokens) in [("1023", 16384), ("2000", 2000), ("\"2000\"", 16384), ("true", 16384)] {
        let setup = Setup::new(&format!("{text}max_tokens = {max_tokens}\nthinking = {value}"));
        let (error, most) = (setup.error(), max_tokens - 1);
        let begin =
            format!("rap.toml:6: model.thinking: expected {expected} {most}, below max_tokens, found ");
        assert!(error.starts_with(&begin), "{error}");
    }
    let setup =
        Setup::new(text).variable("RAP_MODEL_THINKING", "2048").variable("RAP_MODEL_MAX_TOKENS", "4096");
    let options = setup.config().model.options;
    assert_eq!((options.max_tokens, options.thinking), (4096, Thinking::Tokens(2048)));
}

#[test]
fn agents_have_models_tools_and_limits_of_their_own() {
    let text = r#"
        [model]
        provider = "anthropic"
        name = "large"
        api_key = "k"
        [[agent]]
        name = "defaults"
        [[agent]]
        name = "small"
        model = "small"
        tools = ["read_*", "write"]
        event_tools = ["read_*"]
        [[agent]]
        name = "other"
        [agent.model]
        provider = "openai"
        name = "gpt"
        base_url = "http://127.0.0.1:1/v1"
        images = false
        [agent.limits]
        turns_per_wake = 3
        [limits]
        turns_per_wake = 9
        hold_max = "5s"
    "#;
    let config = Setup::new(text).config();
    let [defaults, small, other] = config.agents.as_slice() else { panic!("{:?}", config.agents) };
    assert_eq!(*defaults, Agent { name: "defaults".into(), ..Agent::default() });
    let own = small.model.as_ref().unwrap();
    assert_eq!(own.provider, &anthropic::PROVIDER);
    assert_eq!((own.options.name.as_str(), &own.options.api_key), ("small", &Some(Secret::new("k"))));
    assert_eq!(small.event_tools, [ToolGlob::new("read_*").unwrap()]);
    let own = other.model.as_ref().unwrap();
    assert_eq!((own.provider, own.options.name.as_str(), own.images), (&openai::PROVIDER, "gpt", false));
    let limits = other.limits.as_ref().unwrap();
    assert_eq!((limits.turns_per_wake, limits.hold_max), (3, Duration::from_secs(5)));
    let agent = "[[agent]]\nname = \"a\"";
    let table = [
        (
            "model = \"m\"",
            "agent.model: expected a table with the keys of [model], because the provider of [model] has no model names",
        ),
        (
            "model = 5",
            "agent.model: expected the name of a model, or a table with the keys of [model], found 5",
        ),
        (
            "model = {provider = \"openai\", api_key = \"k\"}",
            "agent.model.name: missing; name a model of the provider",
        ),
        ("model = {nam = \"m\"}", "agent.model.nam: unknown key; did you mean name?"),
        ("limits = 5", "agent.limits: expected a table, written [limits], found an integer"),
        (
            "limits = {body = 5000}",
            "agent.limits.body: this limit cannot be set for one agent; set it in [limits]",
        ),
        ("limits = {depth = 65}", "agent.limits.depth: expected a whole number from 0 to 64, found 65"),
        ("event_tool = []", "agent.event_tool: unknown key; did you mean event_tools?"),
    ];
    for (line, expected) in table {
        assert_eq!(Setup::new(&format!("{agent}\n{line}")).error(), format!("rap.toml:3: {expected}"));
    }
}

#[test]
fn window_and_summarise_at_are_read() {
    let check = |lines: &str, tokens, summarise_at| {
        assert_eq!(Setup::new(lines).config().model.window, Window { tokens, summarise_at }, "{lines}");
    };
    check("", None, 75);
    check("[model]\nwindow = 32768\nsummarise_at = \"50%\"", Some(32_768), 50);
    let variable = Setup::new("[model]\nwindow = 1000").variable("RAP_MODEL_WINDOW", "2000");
    assert_eq!(variable.config().model.window.tokens, Some(2000));
    let own = Setup::new("[model]\nwindow = 1000\n[[agent]]\nname = \"a\"\n[agent.model]\nwindow = 9000");
    let own = own.config().agents[0].model.clone().unwrap();
    assert_eq!(own.window.tokens, Some(9000));
}

#[test]
fn another_model_of_the_provider_has_its_own_prices() {
    let prices = |name: &str| {
        let text = format!(
            "[model]\nprovider = \"openai\"\nname = \"m\"\nbase_url = \"http://h/v1\"\ninput_price = 7\n\
             [[agent]]\nname = \"a\"\nmodel = \"{name}\"\n"
        );
        let agent = Setup::new(&text).config().agents.remove(0);
        agent.model.unwrap().options.prices.map(|prices| prices.input)
    };
    assert_eq!((prices("m"), prices("other")), (Some(7_000_000), None));
}

#[test]
fn another_model_of_the_provider_has_its_own_window() {
    let text = "[model]\nprovider = \"openai\"\nname = \"m\"\nbase_url = \"http://h/v1\"\nwindow = 200000\n\
                summarise_at = \"50%\"\n[[agent]]\nname = \"a\"\nmodels = [\"m\", \"other\"]\n";
    let agent = Setup::new(text).config().agents.remove(0);
    let windows: Vec<_> = agent.model.iter().chain(&agent.fallbacks).map(|model| model.window).collect();
    let own = Window { tokens: Some(200_000), summarise_at: 50 };
    assert_eq!(windows, [own, Window { tokens: None, ..own }]);
}

#[test]
fn a_price_of_written_input_follows_the_price_of_input() {
    let text = "[model]\nprovider = \"anthropic\"\nname = \"claude-sonnet-4-5\"\nbase_url = \"http://h\"\ninput_price = 6\n";
    let prices = Setup::new(text).config().model.options.prices.unwrap();
    assert_eq!((prices.input, prices.written, prices.output), (6_000_000, 7_500_000, 15_000_000));
}

#[test]
fn an_agent_has_a_list_of_models() {
    let model =
        "[model]\nprovider = \"openai\"\nname = \"m\"\nbase_url = \"http://h/v1\"\n[[agent]]\nname = \"a\"\n";
    let names = |more: &str| {
        let agent = Setup::new(&format!("{model}{more}")).config().agents.remove(0);
        let models = agent.model.iter().chain(&agent.fallbacks);
        let names = models.map(|model| format!("{} {}", model.provider.name, model.options.name));
        (names.collect::<Vec<_>>(), agent.fallback_after.as_secs())
    };
    assert_eq!(names(""), (vec![], 30));
    assert_eq!(names("models = [\"x\"]\nfallback_after = \"2m\""), (vec!["openai x".to_owned()], 120));
    let table = "{ provider = \"anthropic\", name = \"y\", base_url = \"http://h\" }";
    let all = ["openai w", "openai x", "anthropic y"].map(String::from).to_vec();
    assert_eq!(names(&format!("model = \"w\"\nmodels = [\"x\", {table}]")), (all, 30));
    let error = Setup::new(&format!("{model}models = \"x\"")).error();
    assert!(error.contains("agent.models: expected an array of at most 8 names"), "{error}");
    // A mistake in the list is named by the key of the list.
    let mistakes = [
        ("5", "agent.models: expected the name of a model, or a table with the keys of [model], found 5"),
        (
            "{ provider = \"openai\", base_url = \"http://h\" }",
            "agent.models.name: missing; name a model of the provider",
        ),
    ];
    for (item, expected) in mistakes {
        let error = Setup::new(&format!("{model}models = [{item}]")).error();
        assert_eq!(error, format!("rap.toml:7: {expected}"));
    }
}

/// The default provider would ignore the other settings, and answer instead of the model that they name.
#[test]
fn a_model_on_a_server_needs_a_provider() {
    let expected = "missing; name the provider of the model, such as \"openai\" or \"anthropic\"";
    let error = Setup::new("[model]\nname = \"gpt-5\"\napi_key = \"k\"").error();
    assert_eq!(error, format!("rap.toml:2: model.provider: {expected}"));
    let error = Setup::new("[[agent]]\nname = \"a\"\nmodels = [{ name = \"gpt-5\" }]").error();
    assert_eq!(error, format!("rap.toml:3: agent.models.provider: {expected}"));
    // Other software may set such a variable.
    Setup::new("").variable("RAP_MODEL_NAME", "gpt-5").config();
}
