use super::*;

fn parse(text: &str) -> Result<NetworkFile, Error> {
    NetworkFile::parse(PathBuf::from("10-pods.conflist"), text.as_bytes())
}

#[test]
fn a_list_hands_its_name_and_version_to_each_plugin() {
    let file = parse(
        r#"{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "underpass", "mtu": 1400}, {"type": "istio-cni"}]}"#,
    )
    .expect("a list");
    assert_eq!(file.name(), "pods");
    assert_eq!(file.plugins().len(), 2);
    let confs = file.confs(&["underpass", "ptp"]).expect("a config");
    assert_eq!(confs.len(), 1);
    assert_eq!(
        (confs[0].name.as_str(), confs[0].plugin_type.as_str()),
        ("pods", "underpass")
    );
    assert_eq!(confs[0].get("mtu"), Some(&Value::from(1400)));
}

#[test]
fn a_single_plugin_is_a_network_too() {
    let file =
        parse(r#"{"cniVersion": "1.0.0", "name": "pods", "type": "underpass"}"#).expect("a plugin");
    assert_eq!(file.confs(&["underpass"]).expect("a config").len(), 1);
    assert_eq!(file.confs(&["bridge"]).expect("none").len(), 0);
}

#[test]
fn what_is_no_network_is_said_with_its_path() {
    for (text, complaint) in [
        ("", "no JSON"),
        ("[]", "must be a JSON object"),
        (r#"{"name": "pods"}"#, "has no plugin"),
        (r#"{"name": "pods", "plugins": {}}"#, "has no plugin"),
        (r#"{"name": "pods", "plugins": []}"#, "has no plugin"),
        (r#"{"name": "pods", "type": ""}"#, "no \"type\""),
        (
            r#"{"name": "pods", "plugins": [{"type": "bridge"}, {}]}"#,
            "no \"type\"",
        ),
        (
            r#"{"name": "pods", "plugins": [{"type": "bridge"}, "tuning"]}"#,
            "no \"type\"",
        ),
        (
            r#"{"plugins": [{"type": "bridge"}]}"#,
            "\"name\" is missing",
        ),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(
            error.contains("10-pods.conflist") && error.contains(complaint),
            "{error}"
        );
    }
    let nameless = parse(r#"{"cniVersion": "1.0.0", "type": "underpass"}"#).expect("a plugin");
    let error = nameless
        .confs(&["underpass"])
        .expect_err("no name")
        .to_string();
    assert!(error.contains("10-pods.conflist"), "{error}");
}

#[test]
fn a_folder_is_read_in_the_order_of_a_runtime() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    for name in [
        "20-b.conf",
        "10-a.conflist",
        "9-c.json",
        "10-a.conflist.bak",
        ".tmp",
    ] {
        fs::write(
            folder.path().join(name),
            r#"{"name": "n", "type": "underpass"}"#,
        )?;
    }
    fs::create_dir(folder.path().join("0-folder.conf"))?;
    fs::write(folder.path().join("30-half.conf"), r#"{"name": "#)?;
    let files = read(folder.path())?;
    let names: Vec<_> = files
        .iter()
        .flatten()
        .filter_map(|file| file.path.file_name()?.to_str())
        .collect();
    assert_eq!(names, ["10-a.conflist", "20-b.conf", "9-c.json"]);
    assert_eq!(files.iter().filter(|file| file.is_err()).count(), 1);
    assert!(read(&folder.path().join("missing"))?.is_empty());
    Ok(())
}
