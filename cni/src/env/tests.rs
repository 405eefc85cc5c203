use std::collections::HashMap;

use super::*;
use crate::error::Code;

fn parse(vars: &[(&str, &str)]) -> Result<Invocation, Error> {
    let vars: HashMap<_, _> = vars.iter().copied().collect();
    Invocation::parse(|name| vars.get(name).map(OsString::from))
}

fn full(verb: &str) -> Vec<(&str, &str)> {
    vec![
        (COMMAND, verb),
        (CONTAINER_ID, "c1"),
        (NETNS, "/run/netns/n1"),
        (IFNAME, "eth0"),
        (PATH, "/opt/cni/bin:/usr/lib/cni"),
    ]
}

fn without<'a>(vars: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    vars.iter()
        .copied()
        .filter(|(key, _)| *key != name)
        .collect()
}

fn with<'a>(vars: &[(&'a str, &'a str)], name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut vars = without(vars, name);
    vars.push((name, value));
    vars
}

#[test]
fn each_verb_needs_what_the_table_says() {
    let required: [(&str, &[&str]); 6] = [
        ("ADD", &[CONTAINER_ID, NETNS, IFNAME, PATH]),
        ("DEL", &[CONTAINER_ID, IFNAME, PATH]),
        ("CHECK", &[CONTAINER_ID, NETNS, IFNAME, PATH]),
        ("GC", &[PATH]),
        ("STATUS", &[PATH]),
        ("VERSION", &[]),
    ];
    for (verb, needs) in required {
        for name in [CONTAINER_ID, NETNS, IFNAME, PATH, ARGS] {
            let outcome = parse(&without(&full(verb), name));
            if needs.contains(&name) {
                let error = outcome.expect_err("a required variable is missing");
                assert_eq!(error.code, Code::InvalidEnvironment);
                assert_eq!(
                    error.msg,
                    format!("required env variables [{name}] missing")
                );
            } else {
                outcome.expect("an optional variable is missing");
            }
        }
    }
}

#[test]
fn all_that_is_missing_is_said_at_once_and_empty_is_missing() {
    let error = parse(&[(COMMAND, "ADD"), (CONTAINER_ID, "c1"), (IFNAME, "")])
        .expect_err("three are missing");
    assert_eq!(
        error.msg,
        "required env variables [CNI_NETNS,CNI_IFNAME,CNI_PATH] missing"
    );
}

#[test]
fn a_wrong_value_wins_over_a_missing_one() {
    let error = parse(&[(COMMAND, "ADD"), (CONTAINER_ID, "some%$%id")]).expect_err("bad id");
    assert_eq!(error.msg, "invalid characters in containerID");
    assert!(error.details.starts_with("some%$%id: "), "{error}");
}

#[test]
fn interface_names_follow_the_kernel() {
    let cases = [
        ("1234567890123456", "interface name is too long"),
        (".", "interface name is . or .."),
        ("..", "interface name is . or .."),
        (
            "et h0",
            "interface name contains / or : or whitespace characters",
        ),
        (
            "et\u{2003}h0",
            "interface name contains / or : or whitespace characters",
        ),
        (
            "a/b",
            "interface name contains / or : or whitespace characters",
        ),
        (
            "a:b",
            "interface name contains / or : or whitespace characters",
        ),
        ("net%d", "interface name contains %"),
        ("%", "interface name contains %"),
    ];
    for (name, msg) in cases {
        let error = parse(&with(&full("DEL"), IFNAME, name)).expect_err(name);
        assert_eq!(
            (error.code, error.msg.as_str()),
            (Code::InvalidEnvironment, msg)
        );
        assert!(
            error.details.contains(&format!("CNI_IFNAME is {name:?}")),
            "{error}"
        );
        parse(&with(&full("STATUS"), IFNAME, name)).expect("not looked at");
    }
    parse(&with(&full("ADD"), IFNAME, "123456789012345")).expect("15 bytes fit");
}

#[test]
fn the_attachment_is_handed_over_as_given() {
    let vars = with(
        &with(&full("ADD"), ARGS, "IP=10.0.0.1"),
        NETNS_OVERRIDE,
        "TRUE",
    );
    let attachment = Attachment {
        container_id: "c1".into(),
        ifname: "eth0".into(),
        netns: Some("/run/netns/n1".into()),
        args: "IP=10.0.0.1".into(),
        path: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
    };
    assert_eq!(
        parse(&vars),
        Ok(Invocation::Call(Call::Attachment(
            AttachmentVerb::Add,
            attachment,
            NetnsOverride::Accept
        )))
    );
}

#[test]
fn no_command_and_unknown_commands_are_not_errors_yet() {
    assert_eq!(parse(&[]), Ok(Invocation::Nobody));
    assert_eq!(parse(&[(COMMAND, "")]), Ok(Invocation::Nobody));
    assert_eq!(
        parse(&[(COMMAND, "NOPE")]),
        Ok(Invocation::Call(Call::Unknown("NOPE".into())))
    );
    assert_eq!(
        parse(&[(COMMAND, "add")]),
        Ok(Invocation::Call(Call::Unknown("add".into())))
    );
}
