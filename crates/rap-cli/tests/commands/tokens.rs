//! `rap token`.

use rap_testkit::Setup;

use crate::support::{Runtime, output};

#[test]
fn a_token_is_created_listed_used_and_revoked() {
    let runtime = Runtime::with(Setup::new().server("tokens = [\"operator-token-1\"]"));
    let operator =
        |arguments: &[&str]| output(runtime.command(arguments).env("RAP_TOKEN", "operator-token-1"));
    assert_eq!(operator(&["token", "ls"]).out, "no tokens\n");
    let created = operator(&["token", "create", "phone", "--user", "ann"]);
    assert_eq!(created.code, Some(0), "{created:?}");
    let token = created.out.trim_end();
    assert!(token.starts_with("rap_") && created.out == format!("{token}\n"), "stdout is the token alone");
    let expected = "created token 1 (phone) with the scope write for threads of user ann\n\
                    this is the only time that it is shown; revoke it with: rap token revoke 1\n";
    assert_eq!(created.err, expected);
    let listed = operator(&["token", "ls"]).out;
    let [head, row] =
        [0, 1].map(|line| listed.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>());
    assert_eq!(head, ["ID", "NAME", "SCOPE", "USER", "CREATED", "LAST", "USED"]);
    assert_eq!(row[..4], ["1", "phone", "write", "ann"]);
    assert!(listed.trim_end().ends_with("never"), "{listed}");
    let with_token = |arguments: &[&str]| output(runtime.command(arguments).env("RAP_TOKEN", token));
    assert_eq!(with_token(&["threads", "new", "--id", "own"]).code, Some(0));
    assert!(with_token(&["threads", "ls"]).out.contains("own"));
    let refused = with_token(&["token", "ls"]);
    let needed = "rap: this request needs a token with the scope admin; ask an administrator for one\n";
    assert_eq!((refused.code, refused.err.as_str()), (Some(1), needed));
    let json = operator(&["token", "create", "script", "--scope", "read", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((&json["id"], &json["open"]), (&"2".into(), &false.into()));
    let listed: serde_json::Value = serde_json::from_str(&operator(&["token", "ls", "--json"]).out).unwrap();
    assert_eq!(listed["tokens"][1]["name"], "script");
    assert_eq!(operator(&["token", "revoke", "1"]).out, "revoked token 1\n");
    let again = operator(&["token", "revoke", "1"]);
    assert_eq!(
        (again.code, again.err.as_str()),
        (Some(1), "rap: no token `1`; list tokens with: rap token ls\n")
    );
    assert_eq!(with_token(&["threads", "ls"]).code, Some(1));
}

#[test]
fn a_token_of_an_open_runtime_comes_with_a_note() {
    let runtime = Runtime::start();
    let created = output(&mut runtime.command(&["token", "create", "script"]));
    let note = "note: this machine can still use the API without a token, until server.tokens is set\n";
    assert!(created.err.ends_with(note), "{}", created.err);
}

#[test]
fn a_wrong_scope_is_a_usage_error() {
    let runtime = Runtime::start();
    let both = output(&mut runtime.command(&["token", "create", "x", "--scope", "admin", "--user", "ann"]));
    let why = "rap: an admin token sees all threads: leave --user out, or use --scope write or read\n";
    assert_eq!((both.code, both.err.as_str()), (Some(2), why));
    let unknown = output(&mut runtime.command(&["token", "create", "x", "--scope", "root"]));
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.err.contains("read, write, admin"), "{}", unknown.err);
}
