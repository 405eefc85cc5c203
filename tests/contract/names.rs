//! One executable under several names: what existing configs and other plugins ask for.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::{
    plugins::{Installed, Name, Program, reference, run, run_here},
    schema,
};

/// The config that `ptp` is installed with: nothing in it is ours.
fn ptp(lab: &Lab) -> Conf {
    let conf = lab
        .conf()
        .with("type", "ptp")
        .with("ipMasqBackend", "iptables");
    conf.with("mtu", 1460)
}

fn call(verb: &str, netns: &Netns, conf: &Conf, plugin: Option<&Installed>) -> Call {
    let call = Call::new(verb)
        .attachment(
            netns.name(),
            &netns.path().display().to_string(),
            Pod::IFNAME,
        )
        .conf(conf);
    match plugin {
        Some(plugin) => call.env("CNI_PATH", &plugin.cni_path()),
        None => call,
    }
}

#[test]
fn ptp_is_the_interface_plugin() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let plugin = Name::new("ptp", Program::Underpass).install()?;
    let conf = ptp(&lab);
    let result = run(&lab.node, &plugin.path, &call("ADD", &netns, &conf, None))?.result()?;
    schema::validate("1.1.0", &result)?;
    ensure!(result["interfaces"][1]["mtu"] == 1460, "{result}");
    ping::ping(&netns, V4.remote())?;
    let conf = conf.with("prevResult", result);
    run(&lab.node, &plugin.path, &call("CHECK", &netns, &conf, None))?.silence()?;
    // What one name made the other name unmakes.
    call("DEL", &netns, &conf, None).run(&lab.node)?.silence()?;
    ensure!(Traces::of(&lab.node)?.leases.is_empty());
    Ok(())
}

#[rstest]
#[case("host-local", Program::Underpass)]
#[case("host-local", Program::Ipam)]
#[case("underpass-ipam", Program::Ipam)]
fn host_local_is_the_allocator(#[case] name: &'static str, #[case] program: Program) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let plugin = Name::new(name, program).install()?;
    let conf = lab.conf().with("type", "bridge");
    let before = Traces::of(&lab.node)?;
    let ask =
        |verb: &str, conf: &Conf| run(&lab.node, &plugin.path, &call(verb, &netns, conf, None));
    let result = ask("ADD", &conf)?.result()?;
    schema::validate("1.1.0", &result)?;
    ensure!(
        result.get("interfaces").is_none(),
        "an allocator makes no interfaces: {result}"
    );
    ensure!(result["ips"][0].get("interface").is_none(), "{result}");
    ensure!(result["ips"][0]["address"] == "10.88.0.2/24", "{result}");
    let folder = lab.node.data_dir().join("lab");
    let read = |file: &str| {
        lab.node
            .netns()
            .run(|| std::fs::read_to_string(folder.join(file)))
    };
    ensure!(read("10.88.0.2")? == "a\r\neth0");
    ensure!(read("fd00:88::2")? == "a\r\neth0");
    ensure!(read("last_reserved_ip.0")? == "10.88.0.2");
    ensure!(read("last_reserved_ip.1")? == "fd00:88::2");
    ask("CHECK", &conf.clone().with("prevResult", result))?.silence()?;
    ask("STATUS", &conf)?.silence()?;
    ask("GC", &conf.clone().with("cni.dev/attachments", json!([])))?.silence()?;
    ensure!(read("10.88.0.2").is_err(), "GC of an empty list frees all");
    ask("DEL", &conf)?.silence()?;
    before.expect_same(&lab.node)
}

#[rstest]
#[case("ptp", "host-local", Program::Underpass)]
#[case("ptp", "host-local", Program::Ipam)]
#[case("bridge", "underpass-ipam", Program::Ipam)]
fn plugins_of_others_get_their_addresses_from_us(
    #[case] interface: &str,
    #[case] name: &'static str,
    #[case] program: Program,
    #[values("0.2.0", "0.4.0", "1.0.0")] version: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let plugin = Name::new(name, program).install()?;
    let conf = lab
        .conf()
        .with("type", interface)
        .with("cniVersion", version)
        .with("bridge", "bridge0")
        .with("isGateway", true)
        .with_ipam("type", name)
        // Debian's plugins wait long for addresses of IPv6.
        .with_ipam("ranges", json!([[{ "subnet": V4.pods() }]]))
        .with_ipam("routes", json!([{ "dst": V4.everywhere() }]));
    let theirs = reference(interface)?;
    let ask =
        |verb: &str, conf: &Conf| run(&lab.node, &theirs, &call(verb, &netns, conf, Some(&plugin)));
    let result = ask("ADD", &conf)?.result()?;
    let address = match version {
        "0.2.0" => &result["ip4"]["ip"],
        _ => &result["ips"][0]["address"],
    };
    ensure!(address == "10.88.0.2/24", "{result}");
    ping::ping(&netns, "10.88.0.1".parse()?)?;
    let conf = conf.with("prevResult", result);
    if version != "0.2.0" {
        ask("CHECK", &conf)?.silence()?;
    }
    ask("DEL", &conf)?.silence()?;
    ensure!(Traces::of(&lab.node)?.leases.is_empty());
    Ok(())
}

#[test]
fn ours_by_one_name_delegates_to_ours_by_another() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    // `host-local` is answered in the same process; no executable of that name is needed.
    let conf = ptp(&lab);
    let call = call("ADD", &netns, &conf, None).env("CNI_PATH", "/nowhere");
    let plugin = Name::new("ptp", Program::Underpass).install()?;
    let result: Value = run(&lab.node, &plugin.path, &call)?.result()?;
    ensure!(result["ips"][0]["address"] == "10.88.0.2/24", "{result}");
    Ok(())
}

/// To act as the interface plugin where `bridge` was asked for would be worse than to fail.
#[rstest]
fn a_name_that_is_not_served_is_an_error(
    #[values("bridge", "static", "macvlan", "firewall", "tuning", "portmap.bak")]
    name: &'static str,
    #[values("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION")] verb: &str,
) -> Result<()> {
    let plugin = Name::new(name, Program::Underpass).install()?;
    let call = Call::new(verb)
        .attachment("a", "/run/netns/nowhere", Pod::IFNAME)
        .stdin(br#"{"cniVersion":"1.1.0","name":"lab","type":"any"}"#);
    let error = run_here(&plugin.path, &call)?.error()?;
    ensure!(error.code == 4, "{error}");
    let served = [
        "underpass",
        "ptp",
        "host-local",
        "underpass-ipam",
        "portmap",
        "bandwidth",
        "loopback",
    ];
    for word in [name].into_iter().chain(served) {
        ensure!(error.msg.contains(word), "{error}");
    }
    Ok(())
}

/// The allocator's own executable has two names.
#[rstest]
fn a_name_that_the_allocator_does_not_serve_is_an_error(
    #[values("static", "dhcp", "underpass", "ptp", "host-local.bak")] name: &'static str,
    #[values("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION")] verb: &str,
) -> Result<()> {
    let plugin = Name::new(name, Program::Ipam).install()?;
    let call = Call::new(verb)
        .attachment("a", "/run/netns/nowhere", Pod::IFNAME)
        .stdin(br#"{"cniVersion":"1.1.0","name":"lab","type":"any"}"#);
    let error = run_here(&plugin.path, &call)?.error()?;
    ensure!(error.code == 4, "{error}");
    for word in [name, "underpass-ipam", "host-local"] {
        ensure!(error.msg.contains(word), "{error}");
    }
    let longer = Name::new("underpass-ipam-0.2", Program::Ipam).install()?;
    let version = Call::new("VERSION").without("CNI_PATH");
    run_here(&longer.path, &version)?.result()?;
    Ok(())
}

#[rstest]
#[case("bridge", false)]
#[case("loopback", false)]
#[case("underpass", true)]
#[case("underpass-0.2", true)]
fn the_command_line_is_under_our_own_name(
    #[case] name: &'static str,
    #[case] is_served: bool,
) -> Result<()> {
    let plugin = Name::new(name, Program::Underpass).install()?;
    let output = std::process::Command::new(&plugin.path)
        .arg("--version")
        .env_clear()
        .stdin(std::process::Stdio::null())
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(
        text.starts_with("underpass ") == is_served,
        "{name} --version prints {text:?}"
    );
    // A plugin without a verb introduces itself.
    ensure!(output.status.success() == (name != "bridge"));
    Ok(())
}
