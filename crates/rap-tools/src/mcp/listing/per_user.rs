//! Lists of a server whose users have to sign in: each user may have another one.
//!
//! There is one toolset for all users, and its request names no user. So it contains only tools that all users have in
//! common, and no names of resources or prompts; those are listed by tools, which use the connection of their caller.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rmcp::model::Tool as McpTool;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Listing, TaskSupport};

/// Time for which the tools of a user count. A tool that not all of them have is not offered.
const COUNTS_FOR: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Maximum number of users whose tools count: those whose tools were read last.
const USERS: usize = 1_000;

/// What the users of a server have.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(in super::super) struct UserTools {
    users: BTreeMap<String, Read>,
    /// Some user had resources or templates.
    has_resources: bool,
    /// Some user had prompts.
    has_prompts: bool,
}

/// Tools of a user, as digests.
#[derive(Clone, Serialize, Deserialize)]
struct Read {
    /// Time in seconds since 1970.
    at: u64,
    tools: BTreeSet<String>,
}

impl UserTools {
    /// Notes what a user has. Returns what all users have in common.
    pub(in super::super) fn common(&mut self, user: &str, mut listing: Listing, now: u64) -> Listing {
        let tools =
            listing.tools.iter().map(|tool| digest(tool, listing.tasks.get(&*tool.name).copied())).collect();
        self.users.retain(|_, read| now.saturating_sub(read.at) < COUNTS_FOR.as_secs());
        self.users.insert(user.to_owned(), Read { at: now, tools });
        while self.users.len() > USERS {
            let Some(oldest) =
                self.users.iter().min_by_key(|(_, read)| read.at).map(|(user, _)| user.clone())
            else {
                break;
            };
            self.users.remove(&oldest);
        }
        let Listing { tools, tasks, .. } = &mut listing;
        tools.retain(|tool| {
            let digest = digest(tool, tasks.get(&*tool.name).copied());
            self.users.values().all(|read| read.tools.contains(&digest))
        });
        tasks.retain(|name, _| tools.iter().any(|tool| tool.name == name.as_str()));
        self.has_resources |= listing.resources.is_some();
        self.has_prompts |= listing.prompts.is_some();
        listing.resources = self.has_resources.then(Vec::new);
        listing.prompts = self.has_prompts.then(Vec::new);
        listing.without_names()
    }
}

impl Listing {
    /// Removes what may be about one user: the names of resources and prompts, and the instructions.
    pub(in super::super) fn without_names(mut self) -> Listing {
        self.is_per_user = true;
        self.resources = self.resources.map(|_| Vec::new());
        self.prompts = self.prompts.map(|_| Vec::new());
        self.instructions = None;
        self
    }
}

fn digest(tool: &McpTool, tasks: Option<TaskSupport>) -> String {
    let text = serde_json::to_vec(&(tool, tasks)).unwrap_or_default();
    Sha256::digest(text)[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn listing(tools: &[(&str, &str)]) -> Listing {
        let tool = |(name, about): &(&str, &str)| {
            let tool = json!({"name": name, "description": about, "inputSchema": {"type": "object"}});
            serde_json::from_value(tool).unwrap()
        };
        let named = |name: &str| Some(vec![format!("- note://{name}")]);
        let mut listing = Listing { tools: tools.iter().map(tool).collect(), ..Listing::default() };
        (listing.resources, listing.prompts) = (named("secret"), named("secret"));
        listing.instructions = Some("for ann".into());
        listing
    }

    fn names(listing: &Listing) -> Vec<&str> {
        listing.tools.iter().map(|tool| &*tool.name).collect()
    }

    #[test]
    fn only_tools_that_all_users_have_are_common_and_no_other_name_is_told() {
        let mut users = UserTools::default();
        let ann = listing(&[("echo", ""), ("ann", ""), ("search", "Searches the notes of Ann.")]);
        let bob = listing(&[("echo", ""), ("bob", ""), ("search", "Searches the notes of Bob.")]);
        let first = users.common("ann", ann.clone(), 0);
        assert_eq!(names(&first), ["echo", "ann", "search"]);
        let second = users.common("bob", bob, 1);
        assert_eq!(names(&second), ["echo"]);
        assert_eq!((&second.resources, &second.prompts), (&Some(Vec::new()), &Some(Vec::new())));
        assert_eq!(second.instructions, None);
        assert_eq!(users.common("ann", ann, 2), second);
    }

    #[test]
    fn a_new_tool_is_offered_when_all_users_of_late_have_it() {
        let mut users = UserTools::default();
        let (old, new) = (listing(&[("echo", "")]), listing(&[("echo", ""), ("new", "")]));
        let week = COUNTS_FOR.as_secs();
        users.common("ann", old.clone(), 0);
        users.common("bob", old, 1);
        assert_eq!(names(&users.common("ann", new.clone(), 2)), ["echo"]);
        assert_eq!(names(&users.common("ann", new.clone(), week)), ["echo"]);
        assert_eq!(names(&users.common("ann", new, week + 1)), ["echo", "new"]);
    }

    #[test]
    fn resources_stay_reachable_if_the_last_user_has_none() {
        let mut users = UserTools::default();
        users.common("ann", listing(&[]), 0);
        let mut bob = listing(&[]);
        bob.resources = None;
        assert_eq!(users.common("bob", bob, 1).resources, Some(Vec::new()));
    }
}
