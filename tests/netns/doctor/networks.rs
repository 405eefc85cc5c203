//! Faults of what is written on a node's disk: the folder of networks, and the configuration of systemd-networkd.

use std::fs;

use rstest::rstest;
use serde_json::json;
use underpass_tests::prelude::*;

use super::{HOST, NET_DIR, ask, conflist, lab, network, put};

const OTHER: &str = r#"{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "bridge"}]}"#;

#[test]
fn a_network_before_ours_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    put(&lab, network("99-other.conflist"), OTHER)?;
    ask(&lab)?.expect(&[])?;
    put(&lab, network("05-other.conflist"), OTHER)?;
    let said = ask(&lab)?;
    said.expect(&["network-order"])?;
    said.expect_words(&["\"other\"", "mv /run/net.d/05-other.conflist"])
}

/// Multus takes the network that its config names.
#[rstest]
#[case::a_file(r#", "clusterNetwork": "/host/run/net.d/05-other.conflist""#, &["clusterNetwork", "/run/net.d/00-multus.conf"])]
#[case::a_whole_network(r#", "delegates": [{ "name": "other", "type": "bridge" }]"#, &["delegates", "\"other\""])]
#[case::our_file(r#", "clusterNetwork": "/host/run/net.d/10-underpass.conflist""#, &[])]
#[case::a_name_of_the_api(r#", "clusterNetwork": "other""#, &[])]
#[case::its_daemon_knows("", &[])]
#[case::ours_as_a_whole(r#", "delegates": [{ "name": "lab", "type": "underpass" }]"#, &[])]
fn where_multus_leads_to_is_found(#[case] keys: &str, #[case] words: &[&str]) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let multus = format!(r#"{{ "cniVersion": "1.0.0", "name": "m", "type": "multus"{keys} }}"#);
    put(&lab, network("00-multus.conf"), &multus)?;
    put(&lab, network("05-other.conflist"), OTHER)?;
    let said = ask(&lab)?;
    if words.is_empty() {
        return said.expect(&[]);
    }
    said.expect(&["network-order"])?;
    said.expect_words(words)
}

/// Our plugin serves host ports in the chain of another one, whose network the containers get.
#[test]
fn a_chain_of_another_plugin_before_ours_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let ports = r#"{"type": "underpass", "capabilities": {"portMappings": true}}"#;
    let chain = OTHER.replace("}]", &format!("}}, {ports}]"));
    put(&lab, network("05-other.conflist"), &chain)?;
    let said = ask(&lab)?;
    said.expect(&["network-order"])?;
    said.expect_words(&["\"other\"", "mv /run/net.d/05-other.conflist"])?;
    // Alone it is what calls us.
    lab.node
        .netns()
        .run(|| fs::remove_file(network("10-underpass.conflist")))?;
    ask(&lab)?.expect(&[])
}

#[rstest]
#[case::before("00-broken.conflist", "error")]
#[case::after("99-broken.conflist", "warning")]
fn a_broken_file_is_found(#[case] name: &str, #[case] severity: &str) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    // As a power failure leaves one.
    put(&lab, network(name), "")?;
    let said = ask(&lab)?;
    said.expect(&["network-broken"])?;
    said.expect_words(&[name])?;
    ensure!(said.first("severity") == severity, "{said:#?}");
    Ok(())
}

#[test]
fn a_config_that_no_add_takes_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let wrong = conflist(&lab).replace("\"ipMasq\":true", "\"bypass\":\"sometimes\"");
    put(&lab, network("10-underpass.conflist"), &wrong)?;
    let said = ask(&lab)?;
    said.expect(&["network-refused"])?;
    said.expect_words(&["sometimes"])
}

#[test]
fn a_node_without_a_network_of_ours_is_told_so() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    lab.node.netns().run(|| fs::remove_dir_all(NET_DIR))?;
    let said = ask(&lab)?;
    said.expect(&["no-network"])?;
    put(&lab, network("05-other.conflist"), OTHER)?;
    ask(&lab)?.expect(&["no-network"])
}

#[test]
fn a_network_that_an_uninstall_has_set_aside_is_found() -> Result<()> {
    const ASIDE: &str = ".10-underpass.conflist.uninstall";
    needs_root!();
    let lab = lab()?;
    let text = conflist(&lab);
    lab.node.netns().run(|| fs::remove_dir_all(NET_DIR))?;
    put(&lab, network(ASIDE), &text)?;
    let said = ask(&lab)?;
    said.expect(&["network-set-aside"])?;
    said.expect_words(&[ASIDE, "underpass uninstall", "underpass install"])?;
    // Where it is there again, the other is nobody's concern.
    put(&lab, network("10-underpass.conflist"), &text)?;
    ask(&lab)?.expect(&[])
}

#[test]
fn a_networkd_that_takes_routes_away_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let file = |path: &str| format!("{HOST}/{path}");
    let main = file("etc/systemd/networkd.conf");
    put(&lab, &main, "[Network]\n#ManageForeignRoutes=yes\n")?;
    // It does not run.
    ask(&lab)?.expect(&[])?;
    put(&lab, file("run/systemd/netif/leases/2"), "")?;
    ask(&lab)?.expect(&[])?;
    put(&lab, file("run/systemd/netif/state"), "")?;
    // It did once.
    let services = "sys/fs/cgroup/system.slice";
    put(
        &lab,
        file(&format!("{services}/ssh.service/cgroup.procs")),
        "",
    )?;
    ask(&lab)?.expect(&[])?;
    let service = format!("{services}/systemd-networkd.service/cgroup.procs");
    put(&lab, file(&service), "")?;
    let said = ask(&lab)?;
    said.expect(&["networkd-routes"])?;
    said.expect_words(&["ManageForeignRoutes=no"])?;
    let drop_in = "systemd/networkd.conf.d/10-routes.conf";
    put(
        &lab,
        file(&format!("usr/lib/{drop_in}")),
        "[Network]\nManageForeignRoutes=no\n",
    )?;
    ask(&lab)?.expect(&[])?;
    // One in /etc hides its namesake.
    put(&lab, file(&format!("etc/{drop_in}")), "")?;
    ask(&lab)?.expect(&["networkd-routes"])
}

#[test]
fn a_locked_down_kernel_is_found_where_nothing_is_loaded() -> Result<()> {
    needs_root!();
    let lab = super::with_network(Lab::unloaded()?)?;
    put(
        &lab,
        format!("{HOST}/sys/kernel/security/lockdown"),
        "none integrity [confidentiality]\n",
    )?;
    ask(&lab)?.expect(&["lockdown"])?;
    lab.node.underpass(&["load"])?;
    ask(&lab)?.expect(&[])
}

/// A range that covers the link of an uplink: the node's address there, and the router's.
#[rstest]
fn a_range_on_a_link_of_the_node_is_found(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let (subnet, first, last) = match family {
        V4 => ("192.0.2.0/24", "192.0.2.16", "192.0.2.31"),
        V6 => ("2001:db8:1::/64", "2001:db8:1::16", "2001:db8:1::31"),
    };
    let with = |range: serde_json::Value| {
        let conf = lab.conf().with_ipam("ranges", json!([[range]]));
        let list = json!({ "cniVersion": "1.0.0", "name": "lab", "plugins": [conf.json()] });
        put(&lab, network("10-underpass.conflist"), &list.to_string())
    };
    with(json!({ "subnet": subnet }))?;
    let said = ask(&lab)?;
    said.expect(&["range-overlap"])?;
    let text = said.report.to_string();
    for address in [family.node(), family.gateway()] {
        ensure!(text.contains(&format!("cover {address}, ")), "{text}");
    }
    with(json!({ "subnet": subnet, "rangeStart": first, "rangeEnd": last }))?;
    ask(&lab)?.expect(&[])
}

/// Nothing masquerades what a network of ours sends to the world.
#[test]
fn a_masquerade_without_uplinks_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let with = |uplinks: serde_json::Value| {
        let conf = lab.conf().with("uplinks", uplinks);
        let list = json!({ "cniVersion": "1.0.0", "name": "lab", "plugins": [conf.json()] });
        put(&lab, network("10-underpass.conflist"), &list.to_string())
    };
    with(json!(["wann", "wan?"]))?;
    let said = ask(&lab)?;
    said.expect(&["no-uplink"])?;
    said.expect_words(&["wann, wan?", "10-underpass.conflist"])?;
    for uplinks in [json!([]), json!(["eth0"])] {
        with(uplinks)?;
        ask(&lab)?.expect(&[])?;
    }
    lab.node.netns().ip(&[
        "link set eth0 down".to_owned(),
        "address flush dev eth0".to_owned(),
    ])?;
    with(serde_json::Value::Null)?;
    ask(&lab)?.expect(&["no-uplink"])
}
