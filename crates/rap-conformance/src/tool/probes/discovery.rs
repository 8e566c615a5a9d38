//! Discovery: the toolset of the server.

use rap_protocol::parse_toolset;
use serde_json::Value;

use crate::report::{Probe, Verdict};
use crate::tool::target::{ServerResponse, Target};
use crate::tool::{Check, ProbeResult};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "toolset_is_served",
            requirements: &["LC-01"],
            checks: "GET /.well-known/rap-toolset is answered 200 with a JSON object.",
        },
        run: |target| Box::pin(served(target)),
    },
    Check {
        probe: Probe {
            name: "toolset_is_valid",
            requirements: &["LC-01"],
            checks: "The toolset has a name, an endpoint and at least one tool. Each tool has a unique name, a \
                     description and a valid JSON Schema.",
        },
        run: |target| Box::pin(valid(target)),
    },
    Check {
        probe: Probe {
            name: "toolset_changes_with_its_version",
            requirements: &[],
            checks: "Two toolsets with the same version have the same tools.",
        },
        run: |target| Box::pin(stable(target)),
    },
];

async fn served(target: &Target) -> ProbeResult {
    let response = target.discover().await?;
    match response.status {
        200 if object(&response).is_some() => Ok(()),
        200 => Err(Verdict::fail("the toolset is not a JSON object", vec![response.exchange])),
        status => Err(Verdict::fail(
            format!("the toolset was answered {status} instead of 200"),
            vec![response.exchange],
        )),
    }
}

async fn valid(target: &Target) -> ProbeResult {
    let response = fetch(target).await?;
    match parse_toolset(&response.body) {
        Ok(_) => Ok(()),
        Err(invalid) => {
            Err(Verdict::fail(format!("the toolset is invalid: {invalid}"), vec![response.exchange]))
        }
    }
}

async fn stable(target: &Target) -> ProbeResult {
    let (one, two) = (fetch(target).await?, fetch(target).await?);
    let parts = |response: &ServerResponse| {
        object(response).map(|toolset| (toolset["version"].clone(), toolset["tools"].clone()))
    };
    let (Some((version, tools)), Some((again, tools_again))) = (parts(&one), parts(&two)) else {
        return Err(Verdict::not_observable(
            "the toolset is not a JSON object: see the probe toolset_is_served",
        ));
    };
    if version.is_null() || version != again {
        return Err(Verdict::not_observable("the toolset has no version, or the version has just changed"));
    }
    if tools == tools_again {
        return Ok(());
    }
    Err(Verdict::fail("the tools changed, but the version did not", vec![one.exchange, two.exchange]))
}

/// Fetches the toolset, which may be invalid.
async fn fetch(target: &Target) -> Result<ServerResponse, Verdict> {
    let not_observable =
        || Verdict::not_observable("the server has no toolset: see the probe toolset_is_served");
    let response = target.discover().await.map_err(|_| not_observable())?;
    if response.status == 200 && object(&response).is_some() { Ok(response) } else { Err(not_observable()) }
}

fn object(response: &ServerResponse) -> Option<Value> {
    serde_json::from_slice(&response.body).ok().filter(Value::is_object)
}
