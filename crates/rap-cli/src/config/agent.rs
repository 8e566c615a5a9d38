//! Agents: who there is to talk to. What one does not say about itself is as it is for all.

use rap_runtime::model::Kind;

use super::document::{Setting, Table, Value};
use super::limits::OF_ALL;
use super::model::read_model;
use super::outside::Outside;
use super::read::{place_in, read_in};
use super::section::{Notes, Section};
use super::{Agent, Limits, Model, Place, Problem, ToolGlob, value};

/// The longest name of an agent.
const NAME_BYTES: usize = 128;

/// What all agents have in common.
pub(super) struct Common<'a> {
    pub(super) model: &'a Model,
    pub(super) limits: &'a Limits,
    pub(super) outside: &'a Outside<'a>,
}

pub(super) fn read_agents(tables: Vec<(Place, Table)>, notes: &mut Notes, common: &Common<'_>) -> Vec<Agent> {
    let mut agents: Vec<(Place, Agent)> = Vec::new();
    for (begin, mut table) in tables {
        let at = place_in(&table, "name", begin);
        // Keys within these two are those of [model] and [limits].
        let (model, limits) = (table.remove("model"), table.remove("limits"));
        let agent = read_in("agent", table, notes, |section| {
            let agent = read_agent(section, &at)?;
            let twin = agents.iter().find(|(_, other)| other.name == agent.name);
            if let Some((other, _)) = twin {
                section.refuse("name", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(agent)
        });
        let model = model.and_then(|setting| read_own_model(setting, notes, common));
        let limits = limits.and_then(|setting| read_own_limits(setting, notes, common));
        agents.extend(agent.map(|agent| (at, Agent { model, limits, ..agent })));
    }
    if agents.is_empty() {
        return vec![Agent::default()];
    }
    agents.into_iter().map(|(_, agent)| agent).collect()
}

fn read_agent(section: &mut Section<'_>, at: &Place) -> Option<Agent> {
    if section.place_of("name").is_none() {
        section.refuse("name", at.clone(), Problem::Missing("every agent has a name"));
    }
    section.know(&["model", "limits"]);
    let name = section.read("name", agent_name);
    let system = section.read("system", |setting| value::text(setting).map(str::to_owned));
    let expected = "an array of strings such as [\"*\"]";
    let tools = section.read_list("tools", expected, tool_glob);
    let event_tools = section.read_list("event_tools", expected, tool_glob);
    let approve = section.read_list("approve", "an array of strings such as [\"delete_*\"]", tool_glob);
    let usual = Agent::default();
    Some(Agent {
        name: name?,
        system: system.unwrap_or(usual.system),
        tools: tools.unwrap_or(usual.tools),
        event_tools: event_tools.unwrap_or(usual.event_tools),
        approve: approve.unwrap_or(usual.approve),
        ..Agent::default()
    })
}

fn agent_name(setting: &Setting) -> Result<String, Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    value::shown(setting, "1 to 128 letters, digits, `_`, `-` and `.`", |text| {
        let fits = !text.is_empty() && text.len() <= NAME_BYTES && text.bytes().all(plain);
        fits.then(|| text.to_owned())
    })
}

fn tool_glob(setting: &Setting) -> Result<ToolGlob, Problem> {
    value::shown(setting, "the name of a tool, in which * stands for any letters", ToolGlob::new)
}

/// Another model of the same provider by its name, or a whole other one.
fn read_own_model(setting: Setting, notes: &mut Notes, common: &Common<'_>) -> Option<Model> {
    let Setting { value, place } = setting;
    match value {
        Value::Table(table) => {
            Some(read_within("agent.model", table, notes, |section| read_model(section, common.outside)))
        }
        value => {
            read_in("agent", Table::from([("model".into(), Setting { value, place })]), notes, |section| {
                section.read("model", |setting| named(setting, common.model))
            })
        }
    }
}

fn named(setting: &Setting, common: &Model) -> Result<Model, Problem> {
    let expected = "the name of a model, or a table with the keys of [model]";
    let name = value::shown(setting, expected, |text| (!text.trim().is_empty()).then(|| text.to_owned()))?;
    let mut model = common.clone();
    if model.provider.kind == Kind::Local {
        return Err(Problem::Expected("a table with the keys of [model], whose provider has no names"));
    }
    model.options.name = name;
    Ok(model)
}

fn read_own_limits(setting: Setting, notes: &mut Notes, common: &Common<'_>) -> Option<Limits> {
    let root = Table::from([("limits".to_owned(), setting)]);
    let table = read_within("agent", root, notes, |section| section.table("limits"));
    Some(read_within("agent.limits", table, notes, |section| {
        for key in OF_ALL {
            if let Some(place) = section.place_of(key) {
                section.refuse(key, place, Problem::OfAll);
            }
        }
        Limits::read(section, common.limits.clone())
    }))
}

/// Reads a table whose keys are known from elsewhere.
fn read_within<T>(
    name: &'static str,
    table: Table,
    notes: &mut Notes,
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> T {
    let mut own = Notes::default();
    let value = read_in(name, table, &mut own, read);
    notes.mistakes.extend(own.mistakes);
    value
}
