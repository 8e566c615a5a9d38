//! What a server says it offers.

use rap_protocol::parse_toolset;
use serde_json::Value;

use crate::report::{Probe, Verdict};
use crate::tool::target::{Said, Target};
use crate::tool::{Check, Found};

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
            checks: "The toolset has a name, an endpoint and at least one tool, each with a name of its \
                     own, a description and a JSON Schema that compiles.",
        },
        run: |target| Box::pin(valid(target)),
    },
    Check {
        probe: Probe {
            name: "toolset_changes_with_its_version",
            requirements: &["LC-01"],
            checks: "Two answers with the same version have the same tools.",
        },
        run: |target| Box::pin(stable(target)),
    },
];

async fn served(target: &Target) -> Found {
    let said = target.discover().await?;
    match said.status {
        200 if object(&said).is_some() => Ok(()),
        200 => Err(Verdict::fail("the answer is not a JSON object", vec![said.exchange])),
        status => Err(Verdict::fail(format!("it answered {status}"), vec![said.exchange])),
    }
}

async fn valid(target: &Target) -> Found {
    let said = some(target).await?;
    match parse_toolset(&said.body) {
        Ok(_) => Ok(()),
        Err(invalid) => Err(Verdict::fail(format!("the toolset is invalid: {invalid}"), vec![said.exchange])),
    }
}

async fn stable(target: &Target) -> Found {
    let (one, two) = (some(target).await?, some(target).await?);
    let parts =
        |said: &Said| object(said).map(|toolset| (toolset["version"].clone(), toolset["tools"].clone()));
    let (Some((version, tools)), Some((again, tools_again))) = (parts(&one), parts(&two)) else {
        return Err(Verdict::not_observable("the answer is no JSON object: see toolset_is_served"));
    };
    if version.is_null() || version != again {
        return Err(Verdict::not_observable("the toolset has no version, or it has just changed"));
    }
    if tools == tools_again {
        return Ok(());
    }
    Err(Verdict::fail("the tools changed and the version did not", vec![one.exchange, two.exchange]))
}

/// An answer with a toolset in it, valid or not.
async fn some(target: &Target) -> Result<Said, Verdict> {
    let hidden = || Verdict::not_observable("no toolset is served: see toolset_is_served");
    let said = target.discover().await.map_err(|_| hidden())?;
    if said.status == 200 && object(&said).is_some() { Ok(said) } else { Err(hidden()) }
}

fn object(said: &Said) -> Option<Value> {
    serde_json::from_slice(&said.body).ok().filter(Value::is_object)
}
