//! Reads `[[notify]]` tables: destinations of alerts.

use rap_agent::Attention;
use rap_protocol::EndpointUrl;
use rap_runtime::AlertDestination;
use url::Url;

use super::document::{Setting, Table};
use super::read::{location_in, read_in};
use super::resolver::Resolver;
use super::section::Diagnostics;
use super::tool_server::signing_keys;
use super::{Location, Problem, value};

/// Maximum number of destinations.
const MAX_NOTIFY: usize = 16;
const URL_EXPECTED: &str = "an http or https URL without user and fragment, or env:NAME, or file:PATH";
const STATE_EXPECTED: &str = "\"needs_you\", \"failed\" or \"closed\"";

pub(super) fn read_notify(
    tables: Vec<(Location, Table)>,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Vec<AlertDestination> {
    let mut read: Vec<(Location, AlertDestination)> = Vec::new();
    for (number, (begin, table)) in tables.into_iter().enumerate() {
        let at = location_in(&table, "url", begin);
        let notify = read_in("notify", table, diagnostics, |section| {
            if number == MAX_NOTIFY {
                section.refuse("url", at.clone(), Problem::Expected("at most 16 tables [[notify]]"));
            }
            for (key, why) in [
                ("url", "every [[notify]] needs a URL to post to"),
                ("secret", "the messages are signed: make a key with echo whsec_$(openssl rand -base64 32)"),
            ] {
                if section.location_of(key).is_none() {
                    section.refuse(key, at.clone(), Problem::Missing(why));
                }
            }
            let url = section.read("url", |setting| url(setting, resolver));
            let keys = section.read("secret", |setting| signing_keys(setting, resolver));
            let on = section.read_list("on", "an array such as [\"needs_you\", \"failed\"]", state);
            let mut on = on.unwrap_or_else(|| Attention::ALL.to_vec());
            on.sort_unstable();
            on.dedup();
            let notify = AlertDestination { url: url?, keys: keys?, on };
            if let Some((other, _)) = read.iter().find(|(_, other)| other.url == notify.url) {
                section.refuse("url", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(notify)
        });
        read.extend(notify.map(|notify| (at, notify)));
    }
    read.into_iter().map(|(_, notify)| notify).collect()
}

/// Parses the URL of a destination. Errors do not contain it, because its path or query may be a secret.
fn url(setting: &Setting, resolver: &Resolver<'_>) -> Result<Url, Problem> {
    let text = resolver.secret(setting)?;
    let url = EndpointUrl::new(text.expose()).map_err(|_| Problem::Expected(URL_EXPECTED))?.to_url();
    let plain = url.username().is_empty() && url.password().is_none() && url.fragment().is_none();
    if plain { Ok(url) } else { Err(Problem::Expected(URL_EXPECTED)) }
}

fn state(setting: &Setting) -> Result<Attention, Problem> {
    let named = |text: &str| Attention::ALL.into_iter().find(|state| state.as_str() == text);
    value::parse_text(setting, STATE_EXPECTED, named)
}
