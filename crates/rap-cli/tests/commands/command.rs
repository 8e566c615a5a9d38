//! Output and exit codes of the real binary, without a runtime.

use std::path::Path;
use std::process::Output;

use rap_testkit::programs;

fn rap(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = programs::rap(arguments);
    command.current_dir(directory).envs(variables.iter().copied()).output().unwrap()
}

/// Exit code, stdout and stderr.
fn parts(output: &Output) -> (Option<i32>, &str, &str) {
    let text = |bytes| str::from_utf8(bytes).expect("text");
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn init_writes_the_commented_file() {
    let directory = tempfile::tempdir().unwrap();
    let output = rap(directory.path(), &["init"], &[]);
    assert_eq!(parts(&output), (Some(0), "wrote rap.toml; `rap serve` reads it\n", ""));
    let written = std::fs::read_to_string(directory.path().join("rap.toml")).unwrap();
    assert_eq!(written, rap_cli::init::text());
}

#[test]
fn init_overwrites_a_file_only_with_force() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rap.toml");
    std::fs::write(&path, "mine").unwrap();
    let output = rap(directory.path(), &["init"], &[]);
    assert_eq!(parts(&output), (Some(1), "", "rap: rap.toml exists; use --force to overwrite it\n"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    assert_eq!(rap(directory.path(), &["init", "--force"], &[]).status.code(), Some(0));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), rap_cli::init::text());
}

#[test]
fn mistakes_in_the_configuration_are_reported_line_by_line() {
    let directory = tempfile::tempdir().unwrap();
    let text = "[limits]\nhold_maxx = \"60s\"\n[model]\nprovider = \"openai\"\nname = \"m\"\napi_key = \"env:KEY\"\n";
    std::fs::write(directory.path().join("rap.toml"), text).unwrap();
    let output = rap(directory.path(), &["serve", "--store", "postgres://u:s3cr3t@h/db"], &[]);
    let expected = "rap: rap.toml:2: limits.hold_maxx: unknown key; did you mean hold_max?\n\
                    rap: rap.toml:6: model.api_key: the environment variable KEY is not set\n\
                    rap: --store: store.key: missing; a Postgres database needs store.key, the same on every node. \
                    Make one: openssl rand -hex 32\n";
    assert_eq!(parts(&output), (Some(1), "", expected));
}

#[test]
fn the_environment_and_flags_reach_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let variables = [("RAP_SERVER_LISTEN", "0.0.0.0:7420"), ("RAP_SERVER_PUBLIC_URL", "http://h")];
    let problem = "is reachable from other machines, but server.tokens is empty: set server.tokens, or listen on 127.0.0.1";
    let output = rap(directory.path(), &["serve"], &variables);
    let expected = format!("rap: RAP_SERVER_LISTEN: server.listen: 0.0.0.0:7420 {problem}\n");
    assert_eq!(parts(&output), (Some(1), "", expected.as_str()));
    let output = rap(directory.path(), &["serve", "--listen", "10.0.0.1:1"], &variables);
    let expected = format!("rap: --listen: server.listen: 10.0.0.1:1 {problem}\n");
    assert_eq!(parts(&output), (Some(1), "", expected.as_str()));
}

/// A new key would invalidate the callback URLs of all open calls.
#[test]
fn a_database_without_its_key_file_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("rap.db"), "").unwrap();
    let output = rap(directory.path(), &["serve", "--listen", "127.0.0.1:0"], &[]);
    let (code, _, stderr) = parts(&output);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("the key file rap.db.key of the database rap.db is missing"), "{stderr}");
    assert!(!directory.path().join("rap.db.key").exists());
}

#[test]
fn a_database_of_another_program_is_not_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("other.db");
    rusqlite::Connection::open(&path).unwrap().execute_batch("CREATE TABLE other (x)").unwrap();
    std::fs::write(directory.path().join("other.db.key"), "0".repeat(64)).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(directory.path().join("other.db.key"), mode).unwrap();
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--store", "sqlite:other.db"];
    let output = rap(directory.path(), &arguments, &[]);
    let (code, _, stderr) = parts(&output);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("a database of another program"), "{stderr}");
    let tables = "SELECT count(*) FROM sqlite_schema";
    let count: i64 =
        rusqlite::Connection::open(&path).unwrap().query_row(tables, [], |row| row.get(0)).unwrap();
    assert_eq!(count, 1);
}

#[test]
fn a_configuration_given_by_name_must_exist() {
    let directory = tempfile::tempdir().unwrap();
    let output = rap(directory.path(), &["serve", "--config", "other.toml"], &[]);
    let expected = "rap: cannot read other.toml: No such file or directory (os error 2)\n";
    assert_eq!(parts(&output), (Some(1), "", expected));
}

#[test]
fn wrong_usage_exits_with_2_and_help_with_0() {
    let directory = tempfile::tempdir().unwrap();
    for arguments in [&["sevre"][..], &["serve", "--listn", "x"], &["init", "--config"]] {
        let output = rap(directory.path(), arguments, &[]);
        let (code, out, err) = parts(&output);
        assert_eq!((code, out), (Some(2), ""), "{arguments:?}");
        assert!(err.starts_with("rap: unexpected argument") || err.starts_with("rap: unrecognized"), "{err}");
    }
    let output = rap(directory.path(), &[], &[]);
    let (code, out, err) = parts(&output);
    assert_eq!((code, out), (Some(2), ""));
    assert!(err.starts_with("Run durable agents") && err.contains("Usage: rap <COMMAND>"), "{err}");
    for arguments in [&["--help"][..], &["--version"], &["serve", "--help"]] {
        let output = rap(directory.path(), arguments, &[]);
        let (code, out, err) = parts(&output);
        assert_eq!((code, err), (Some(0), ""), "{arguments:?}");
        assert!(out.contains("rap") && !out.contains('\x1b'), "{out}");
    }
}
