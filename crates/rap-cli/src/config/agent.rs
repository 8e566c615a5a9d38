//! Reads `[[agent]]` tables. Settings that an agent does not have are taken from the common ones.

use rap_runtime::model::Kind;

use super::document::{Setting, Table, Value};
use super::limits;
use super::model::read_model;
use super::read::{location_in, read_in, read_within};
use super::resolver::Resolver;
use super::section::{Diagnostics, Section};
use super::{Agent, Limits, Location, Model, Problem, ToolGlob, value};

/// Maximum number of models of an agent.
const MAX_MODELS: usize = 8;
/// Maximum length of an agent's name, in bytes.
const NAME_BYTES: usize = 128;

/// Settings that all agents share.
pub(super) struct Common<'a> {
    pub(super) model: &'a Model,
    pub(super) limits: &'a Limits,
    pub(super) resolver: &'a Resolver<'a>,
}

pub(super) fn read_agents(
    tables: Vec<(Location, Table)>,
    diagnostics: &mut Diagnostics,
    common: &Common<'_>,
) -> Vec<Agent> {
    let mut agents: Vec<(Location, Agent)> = Vec::new();
    for (begin, mut table) in tables {
        let at = location_in(&table, "name", begin);
        // The keys of these two tables are those of [model] and [limits].
        let (model, limits) = (table.remove("model"), table.remove("limits"));
        let models = table.remove("models");
        let agent = read_in("agent", table, diagnostics, |section| {
            let agent = read_agent(section, &at)?;
            let duplicate = agents.iter().find(|(_, other)| other.name == agent.name);
            if let Some((other, _)) = duplicate {
                section.refuse("name", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(agent)
        });
        let models = read_models(model, models, diagnostics, common);
        let mut models = models.into_iter();
        let model = models.next();
        let fallbacks = models.collect();
        let limits = limits.and_then(|setting| read_own_limits(setting, diagnostics, common));
        agents.extend(agent.map(|agent| (at, Agent { model, fallbacks, limits, ..agent })));
    }
    if agents.is_empty() {
        return vec![Agent::default()];
    }
    agents.into_iter().map(|(_, agent)| agent).collect()
}

fn read_agent(section: &mut Section<'_>, at: &Location) -> Option<Agent> {
    if section.location_of("name").is_none() {
        section.refuse("name", at.clone(), Problem::Missing("every agent needs a name"));
    }
    section.mark_known(&["model", "models", "limits"]);
    let name = section.read("name", agent_name);
    let system = section.read("system", |setting| value::text(setting).map(str::to_owned));
    let expected = "an array of strings such as [\"*\"]";
    let tools = section.read_list("tools", expected, tool_glob);
    let event_tools = section.read_list("event_tools", expected, tool_glob);
    let approve = section.read_list("approve", "an array of strings such as [\"delete_*\"]", tool_glob);
    let fallback_after = section.read("fallback_after", value::duration(value::Zero::Allowed));
    let defaults = Agent::default();
    Some(Agent {
        name: name?,
        system: system.unwrap_or(defaults.system),
        tools: tools.unwrap_or(defaults.tools),
        event_tools: event_tools.unwrap_or(defaults.event_tools),
        approve: approve.unwrap_or(defaults.approve),
        fallback_after: fallback_after.unwrap_or(defaults.fallback_after),
        ..Agent::default()
    })
}

fn agent_name(setting: &Setting) -> Result<String, Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    value::parse_text(setting, "1 to 128 letters, digits, `_`, `-` and `.`", |text| {
        let fits = !text.is_empty() && text.len() <= NAME_BYTES && text.bytes().all(plain);
        fits.then(|| text.to_owned())
    })
}

fn tool_glob(setting: &Setting) -> Result<ToolGlob, Problem> {
    value::parse_text(setting, "a tool name, in which * matches any characters", ToolGlob::new)
}

/// Reads `agent.model` and `agent.models`. The first model is asked before the others.
fn read_models(
    model: Option<Setting>,
    models: Option<Setting>,
    diagnostics: &mut Diagnostics,
    common: &Common<'_>,
) -> Vec<Model> {
    let mut all: Vec<(Keys, Setting)> = model.into_iter().map(|setting| (ONE, setting)).collect();
    match models {
        Some(Setting { value: Value::List(items), .. }) if items.len() <= MAX_MODELS => {
            all.extend(items.into_iter().map(|setting| (LIST, setting)));
        }
        Some(Setting { location, .. }) => read_within("agent", Table::new(), diagnostics, |section| {
            let expected = "an array of at most 8 names of models or tables with the keys of [model]";
            section.refuse("models", location, Problem::Expected(expected));
        }),
        None => {}
    }
    all.into_iter().filter_map(|(keys, setting)| read_own_model(keys, setting, diagnostics, common)).collect()
}

/// Names of a setting in mistakes: in its section, and as a section of its own.
type Keys = (&'static str, &'static str);
const ONE: Keys = ("model", "agent.model");
const LIST: Keys = ("models", "agent.models");

/// Reads one model: the name of another model of the common provider, or a table like [model].
fn read_own_model(
    (key, section): Keys,
    setting: Setting,
    diagnostics: &mut Diagnostics,
    common: &Common<'_>,
) -> Option<Model> {
    let Setting { value, location } = setting;
    match value {
        Value::Table(table) => {
            Some(read_within(section, table, diagnostics, |section| read_model(section, common.resolver)))
        }
        value => read_in(
            "agent",
            Table::from([(key.into(), Setting { value, location })]),
            diagnostics,
            |section| section.read(key, |setting| model_by_name(setting, common.model)),
        ),
    }
}

fn model_by_name(setting: &Setting, common: &Model) -> Result<Model, Problem> {
    let expected = "the name of a model, or a table with the keys of [model]";
    let name =
        value::parse_text(setting, expected, |text| (!text.trim().is_empty()).then(|| text.to_owned()))?;
    let mut model = common.clone();
    if model.provider.kind == Kind::Local {
        return Err(Problem::Expected(
            "a table with the keys of [model], because the provider of [model] has no model names",
        ));
    }
    if model.options.name != name {
        // The configured prices and window are those of the other model.
        model.options.prices = None;
        model.window.tokens = None;
    }
    model.options.name = name;
    Ok(model)
}

fn read_own_limits(
    setting: Setting,
    diagnostics: &mut Diagnostics,
    common: &Common<'_>,
) -> Option<rap_agent::Limits> {
    let root = Table::from([("limits".to_owned(), setting)]);
    let table = read_within("agent", root, diagnostics, |section| section.table("limits"));
    Some(read_within("agent.limits", table, diagnostics, |section| {
        for key in Limits::TABLE.iter().map(|limit| limit.key) {
            section.read(key, |_| Err::<(), _>(Problem::RuntimeOnly));
        }
        let mut own = common.limits.thread.clone();
        limits::read(rap_agent::Limits::TABLE, &mut own, section);
        own
    }))
}
