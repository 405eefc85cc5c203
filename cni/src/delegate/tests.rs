use std::fs;

use tempfile::TempDir;

use super::*;

/// A folder of plugins that are shell scripts; each notes its verb in the file `calls`.
struct Plugins {
    folder: TempDir,
}

impl Plugins {
    fn new(scripts: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        for (name, script) in scripts {
            let path = folder.path().join(name);
            let calls = folder.path().join("calls");
            let text = format!(
                "#!/bin/sh\necho $CNI_COMMAND >> {}\n{script}\n",
                calls.display()
            );
            fs::write(&path, text).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("an executable");
        }
        Self { folder }
    }

    fn delegation(&self, stdin: &str) -> Delegation {
        Delegation {
            path: vec!["/nonexistent".into(), self.folder.path().to_owned()],
            stdin: stdin.into(),
            version: Version::V1_0_0,
        }
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.folder.path().join("calls"))
            .unwrap_or_default()
            .replace('\n', " ")
    }
}

#[test]
fn a_result_of_any_version_is_understood() {
    let cases = [
        r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.2/24","gateway":"10.0.0.1"},"ip6":null}"#,
        r#"{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.0.0.2/24","gateway":"10.0.0.1"}],"dns":{}}"#,
        r#"{"ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"}]}"#,
    ];
    for case in cases {
        let plugins = Plugins::new(&[("static", &format!("echo '{case}'"))]);
        let result = plugins.delegation("{}").add("static").expect(case);
        assert_eq!(result.ips.len(), 1);
        assert_eq!(result.ips[0].address.to_string(), "10.0.0.2/24");
        assert_eq!(plugins.calls(), "ADD ");
    }
}

#[test]
fn the_whole_config_is_handed_on() {
    let plugins = Plugins::new(&[("p", "cat > $(dirname $0)/stdin; echo noise >&2")]);
    let long = format!("{{\"name\":\"{}\"}}", "x".repeat(200_000));
    plugins.delegation(&long).check("p").expect("exit 0");
    assert_eq!(
        fs::read_to_string(plugins.folder.path().join("stdin")).expect("a file"),
        long
    );
}

#[test]
fn a_plugin_that_does_not_read_its_config_is_fine() {
    let plugins = Plugins::new(&[("p", "exit 0")]);
    let long = "x".repeat(1_000_000);
    for outcome in [
        plugins.delegation(&long).gc("p"),
        plugins.delegation(&long).status("p"),
    ] {
        assert_eq!(outcome, Ok(()));
    }
    assert_eq!(plugins.calls(), "GC STATUS ");
}

#[test]
fn a_failed_add_is_followed_by_a_del_and_keeps_its_own_error() {
    let reported = r#"echo '{"code":11,"msg":"later","details":"much"}'; exit 1"#;
    let plugins = Plugins::new(&[
        ("p", reported),
        ("silent", "echo why >&2; exit 3"),
        ("garbage", "echo {; exit 1"),
        (
            "talkative",
            "head -c 500 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 1",
        ),
        ("nameless", r#"echo '{"msg":"m"}'; exit 1"#),
        ("speechless", r#"echo '{"code":117}'; exit 1"#),
    ]);
    let delegation = plugins.delegation("{}");
    let error = delegation.add("p").expect_err("exit 1");
    assert_eq!(error, Error::try_again("later").with_details("much"));
    assert_eq!(plugins.calls(), "ADD DEL ");
    let error = delegation.del("silent").expect_err("exit 3");
    assert_eq!(error.msg, r#"plugin "silent" failed (exit status: 3): why"#);
    let error = delegation.del("talkative").expect_err("exit 1");
    assert!(error.msg.ends_with("the end"), "{error}");
    assert!(error.msg.len() < 300, "the rest is on stderr: {error}");
    let error = delegation.del("nameless").expect_err("exit 1");
    assert_eq!(
        (error.code, error.msg.contains("\"nameless\"")),
        (Code::Internal, true),
        "{error}"
    );
    let error = delegation.del("speechless").expect_err("exit 1");
    assert_eq!(
        (error.code, error.msg.contains("\"speechless\"")),
        (Code::Other(117), true),
        "{error}"
    );
    let error = delegation.del("garbage").expect_err("exit 1");
    assert!(
        error
            .msg
            .contains(r#"its message "{\n" could not be decoded"#),
        "{}",
        error.msg
    );
}

#[test]
fn what_is_no_result_is_quoted() {
    let plugins = Plugins::new(&[("p", "echo hello"), ("nothing", "exit 0")]);
    let delegation = plugins.delegation("{}");
    let error = delegation.add("p").expect_err("no JSON");
    assert_eq!(error.code, Code::Decode);
    assert!(error.details.contains("hello"), "{error}");
    let error = delegation.add("nothing").expect_err("nothing at all");
    assert_eq!(error.code, Code::Decode);
    assert!(error.msg.contains("printed no result"), "{error}");
}

#[test]
fn what_cannot_be_started_is_named_and_no_plugin_to_rely_on() {
    let plugins = Plugins::new(&[("p", "")]);
    let path = plugins.folder.path().join("p");
    for (text, word) in [("#!/nowhere/sh\n", "interpreter"), ("garbage", "machine")] {
        fs::write(&path, text).expect("a file");
        let error = plugins.delegation("{}").del("p").expect_err(text);
        assert_eq!(error.code, Code::Io);
        assert!(
            error.msg.contains(path.to_str().expect("a text")),
            "{error}"
        );
        assert!(error.details.contains(word), "{error}");
    }
    for plugin in ["p", "missing"] {
        let error = plugins.delegation("{}").status(plugin).expect_err(plugin);
        assert_eq!(error.code, Code::NotAvailable, "{error}");
    }
}

#[test]
fn a_plugin_has_to_be_an_executable_in_the_path() {
    let plugins = Plugins::new(&[("p", "exit 0")]);
    let delegation = plugins.delegation("{}");
    for wrong in ["", "../p", "/bin/true"] {
        assert_eq!(
            delegation.del(wrong).expect_err("no name").code,
            Code::InvalidConfig
        );
    }
    let error = delegation.add("missing").expect_err("not there");
    assert!(
        error
            .msg
            .starts_with(r#"failed to find plugin "missing" in path [/nonexistent "#),
        "{}",
        error.msg
    );
    fs::set_permissions(
        plugins.folder.path().join("p"),
        fs::Permissions::from_mode(0o644),
    )
    .expect("a mode");
    assert!(delegation.del("p").is_err());
}
