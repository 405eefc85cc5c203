use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::path::Path;

use super::*;
use crate::error::Code;
use crate::result::{Dns, Interface, IpConfig, Route};

const ABOUT: About<'_> = About {
    name: "fake",
    version: "1.2.3",
    supported: &Version::ALL,
};

/// Answers with one fixed result and counts its calls.
#[derive(Default)]
struct Fake {
    result: CniResult,
    calls: Cell<usize>,
}

impl Fake {
    fn call<T>(&self, answer: T) -> T {
        self.calls.set(self.calls.get() + 1);
        answer
    }
}

impl Plugin for Fake {
    fn add(&self, _: &Request) -> Result<CniResult, Error> {
        self.call(Ok(self.result.clone()))
    }

    fn del(&self, _: &Request) -> Result<(), Error> {
        self.call(Ok(()))
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        self.call(request.conf.prev_result().map(drop))
    }

    fn gc(&self, request: &NetworkRequest) -> Result<(), Error> {
        self.call(request.conf.valid_attachments().map(drop))
    }

    fn status(&self, _: &NetworkRequest) -> Result<(), Error> {
        self.call(Err(Error::not_available("pool is exhausted")))
    }
}

fn result() -> CniResult {
    let interface = |name: &str, mac: &str, sandbox: &str| Interface {
        name: name.into(),
        mac: mac.into(),
        mtu: Some(1400),
        sandbox: sandbox.into(),
        ..Interface::default()
    };
    let ip = |address: &str, gateway: &str| IpConfig {
        interface: Some(1),
        address: address.parse().expect("an address"),
        gateway: gateway.parse().ok(),
    };
    let route = |dst: &str, gw: &str| Route::new(dst.parse().expect("a network"), gw.parse().ok());
    CniResult {
        interfaces: vec![
            interface("veth1a2b3c4d", "aa:aa:aa:aa:aa:01", ""),
            interface("eth0", "aa:aa:aa:aa:aa:02", "/run/netns/n1"),
        ],
        ips: vec![
            ip("10.1.2.5/24", "10.1.2.1"),
            ip("2001:db8:1::5/64", "2001:db8:1::1"),
        ],
        routes: vec![
            Route {
                mtu: Some(1300),
                ..route("0.0.0.0/0", "")
            },
            route("2001:db8:2::/64", "2001:db8:3::1"),
        ],
        dns: Dns::default(),
    }
}

fn run(plugin: &Fake, vars: &[(&str, &str)], stdin: impl Read) -> Outcome {
    let vars: HashMap<_, _> = vars.iter().copied().collect();
    answer(
        &ABOUT,
        plugin,
        |name| vars.get(name).map(OsString::from),
        stdin,
    )
}

fn env(verb: &str) -> Vec<(&str, &str)> {
    vec![
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_NETNS", "/run/netns/that-does-not-exist"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin"),
    ]
}

fn refusal(outcome: &Outcome) -> (u64, String, String) {
    assert!(!outcome.success);
    let document: serde_json::Value =
        serde_json::from_str(&outcome.stdout).expect("one JSON document");
    let text = |key: &str| document[key].as_str().unwrap_or_default().to_owned();
    (
        document["code"].as_u64().expect("a code"),
        text("msg"),
        text("details"),
    )
}

#[test]
fn every_verb_in_every_version_answers_as_recorded() {
    let dns = Dns {
        nameservers: vec!["10.1.0.1".into()],
        domain: "example.org".into(),
        search: vec!["a.example.org".into()],
        options: vec!["ndots:2".into()],
    };
    let cases = [
        ("ADD", "add", result()),
        ("ADD", "add-with-dns", CniResult { dns, ..result() }),
        (
            "ADD",
            "add-without-ips",
            CniResult {
                ips: vec![],
                routes: vec![],
                ..result()
            },
        ),
        ("DEL", "del", CniResult::default()),
        ("CHECK", "check", CniResult::default()),
        ("GC", "gc", CniResult::default()),
        ("STATUS", "status", CniResult::default()),
        ("VERSION", "version", CniResult::default()),
    ];
    for (verb, folder, result) in cases {
        let plugin = Fake {
            result,
            ..Fake::default()
        };
        for version in Version::ALL {
            let conf = format!(
                r#"{{"cniVersion":"{version}","name":"n","type":"fake","cni.dev/attachments":[]}}"#
            );
            let outcome = run(&plugin, &env(verb), conf.as_bytes());
            let file = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(format!("testdata/{folder}/{version}.json"));
            let expected = std::fs::read_to_string(&file).expect("a golden file");
            assert_eq!(outcome.stdout, expected, "{}", file.display());
            assert_eq!(
                outcome.success,
                !expected.contains("\"code\""),
                "{}",
                file.display()
            );
        }
    }
}

#[test]
fn results_of_every_version_can_be_read_again() {
    let full = result();
    for version in Version::ALL {
        let text = full.to_json(version).expect("it has addresses");
        let value = serde_json::from_str(&text).expect("JSON");
        let read = CniResult::from_previous(&value, version).expect("its own version");
        assert_eq!(read.to_json(version), Ok(text));
    }
}

#[test]
fn a_previous_result_has_to_be_of_a_version_that_goes_with_the_config() {
    let parse = |config: &str, result: &str| {
        let conf = format!(
            r#"{{"cniVersion":"{config}","name":"n","prevResult":{{"CNIVersion":"{result}","ips":[{{"address":"10.0.0.2/24"}}]}}}}"#
        );
        NetConf::parse(conf.as_bytes())
            .expect("a config")
            .prev_result()
    };
    for (config, accepted) in [
        ("0.3.1", ["0.3.0", "0.4.0", ""]),
        ("1.1.0", ["1.0.0", "1.1.0", ""]),
    ] {
        for version in accepted {
            let previous = parse(config, version).expect("accepted").expect("present");
            assert_eq!(previous.ips.len(), 1);
        }
    }
    let error = parse("1.1.0", "0.4.0").expect_err("too old");
    assert_eq!(error.code, Code::Decode);
    assert!(
        error.msg.ends_with(
            r#"result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is "0.4.0""#
        )
    );
    assert!(error.details.contains("1.1.0"), "{error}");
    assert!(parse("0.4.0", "1.0.0").is_err());
    assert!(parse("1.0.0", "7.7.7").is_err());
}

#[test]
fn the_negative_probes_get_the_known_replies() {
    let plugin = Fake::default();
    let ask = |verb: &'static str, stdin: &'static str| {
        refusal(&run(&plugin, &env(verb), stdin.as_bytes()))
    };
    // The message is the reference's; what to do is in the details.
    for (verb, stdin, code, msg, details) in [
        ("ADD", "{}", 7, "missing network name", "\"name\""),
        (
            "STATUS",
            r#"{"name":"a b"}"#,
            7,
            "invalid characters found in network name",
            "a b: correct \"name\"",
        ),
        (
            "NOPE",
            r#"{"name":"a"}"#,
            4,
            "unknown CNI_COMMAND: NOPE",
            "ADD, DEL, CHECK",
        ),
        (
            "CHECK",
            r#"{"name":"a","cniVersion":"0.3.1"}"#,
            1,
            "config version does not allow CHECK",
            "0.4.0",
        ),
        (
            "ADD",
            " ",
            6,
            "error unmarshall network config: nothing came on standard input",
            "",
        ),
    ] {
        let (actual, message, remedy) = ask(verb, stdin);
        assert_eq!(actual, code, "{message}");
        assert!(message.starts_with(msg), "{message}");
        assert!(remedy.contains(details), "{remedy}");
    }
    assert_eq!(ask("NOPE", "{}").1, "missing network name");
    assert_eq!(ask("CHECK", r#"{"name":"a","cniVersion":"x"}"#).0, 6);
    assert_eq!(
        ask("DEL", r#"{"name":"a","cniVersion":"99.9.9"}"#),
        (
            1,
            "incompatible CNI versions".into(),
            r#"config is "99.9.9", plugin supports ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#.into()
        )
    );
    let (code, msg, _) = ask("ADD", "garbage");
    assert_eq!(code, 6);
    assert!(
        msg.starts_with("error unmarshall network config: "),
        "{msg}"
    );
    assert_eq!(plugin.calls.get(), 0);
}

#[test]
fn an_add_whose_result_cannot_be_expressed_is_undone() {
    let plugin = Fake::default();
    let conf = r#"{"cniVersion":"0.2.0","name":"n"}"#;
    let outcome = run(&plugin, &env("ADD"), conf.as_bytes());
    assert_eq!(refusal(&outcome).1, "cannot convert: no valid IP addresses");
    assert_eq!(plugin.calls.get(), 2, "an ADD and a DEL");
}

/// A stdin that must not be read.
struct Broken;

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::other("no such luck"))
    }
}

#[test]
fn stdin_is_read_only_when_it_is_needed() {
    let plugin = Fake::default();
    let outcome = run(&plugin, &env("DEL"), Broken);
    let (code, msg, details) = refusal(&outcome);
    assert_eq!(
        (code, msg.as_str()),
        (5, "error reading from stdin: no such luck")
    );
    assert!(details.contains("the config"), "{details}");
    assert!(run(&plugin, &[("CNI_COMMAND", "VERSION")], Broken).success);
    let outcome = run(&plugin, &[], Broken);
    assert!(outcome.success && outcome.stdout.is_empty());
    assert_eq!(
        outcome.stderr,
        "CNI fake plugin 1.2.3\nCNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n"
    );
}

#[test]
fn the_own_netns_is_refused_before_anything_is_touched() {
    let with_own = |verb: &'static str, insist: &'static str| {
        let plugin = Fake {
            result: result(),
            ..Fake::default()
        };
        let mut vars = env(verb);
        vars.retain(|(name, _)| *name != "CNI_NETNS");
        vars.extend([
            ("CNI_NETNS", "/proc/self/ns/net"),
            ("CNI_NETNS_OVERRIDE", insist),
        ]);
        let outcome = run(
            &plugin,
            &vars,
            r#"{"cniVersion":"1.0.0","name":"n"}"#.as_bytes(),
        );
        (outcome, plugin.calls.get())
    };
    let (outcome, calls) = with_own("ADD", "");
    let (code, msg, details) = refusal(&outcome);
    assert_eq!(
        (code, msg.as_str()),
        (
            8,
            "plugin's netns and netns from CNI_NETNS should not be the same"
        )
    );
    assert!(
        details.starts_with("/proc/self/ns/net ") && details.contains("CNI_NETNS_OVERRIDE"),
        "{details}"
    );
    assert_eq!(calls, 0);
    for insist in ["1", "TRUE", "true"] {
        assert!(with_own("ADD", insist).0.success);
    }
    for verb in ["DEL", "CHECK"] {
        let (outcome, calls) = with_own(verb, "");
        assert!(outcome.success, "{verb}: {}", outcome.stdout);
        assert_eq!(calls, 1, "{verb}");
    }
}

/// A plugin with a bug.
struct Buggy;

impl Plugin for Buggy {
    fn add(&self, _: &Request) -> Result<CniResult, Error> {
        panic!("index out of range");
    }

    fn del(&self, _: &Request) -> Result<(), Error> {
        Ok(())
    }

    fn check(&self, _: &Request) -> Result<(), Error> {
        Ok(())
    }

    fn gc(&self, _: &NetworkRequest) -> Result<(), Error> {
        Ok(())
    }

    fn status(&self, _: &NetworkRequest) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
#[ignore = "the process that the next test starts"]
fn panicking_process() {
    serve(&ABOUT, &Buggy);
}

#[test]
fn a_panic_is_answered_with_an_error_document() {
    let mut child = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args([
            "--exact",
            "serve::tests::panicking_process",
            "--ignored",
            "--nocapture",
        ])
        .envs(env("ADD"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("this test starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin
        .write_all(br#"{"cniVersion":"1.0.0","name":"n"}"#)
        .expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    // The test harness has its say first.
    let stdout = String::from_utf8(output.stdout).expect("text");
    let document = &stdout[stdout.find('{').expect("a document")..];
    let outcome = Outcome {
        stdout: document.into(),
        stderr: String::new(),
        success: false,
    };
    let (code, msg, details) = refusal(&outcome);
    assert_eq!(code, 999);
    assert_eq!(
        msg,
        "the plugin panicked: index out of range: this is a bug, please report it"
    );
    assert!(details.contains("tests.rs:"), "{details}");
}
