//! A container gets a second interface from a daemon in a container of its own, as from Multus: in a chroot, and with little memory.

use std::{net::IpAddr, process::Command};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_dataplane::kernel;
use underpass_tests::{
    daemon::Daemon,
    leak::Traces,
    memory::MIB,
    netns::Netns,
    runtime::{Call, Conf},
    traffic,
};

use underpass_tests::prelude::*;

/// What Multus' own manifest gives its daemon.
const MEMORY: u64 = 50 * MIB;
/// The interface that it asks for.
const SECOND: &str = "net1";
const INSIDE: u16 = 80;

/// The range of the second network.
const fn range(family: Family) -> &'static str {
    match family {
        V4 => "10.99.0.0/24",
        V6 => "fd00:99::/64",
    }
}

/// The second network, which gives no default route.
fn second(lab: &Lab, version: &str) -> Conf {
    let ranges = Family::BOTH.map(|family| json!([{ "subnet": range(family) }]));
    lab.conf()
        .with("cniVersion", version)
        .with("name", "second")
        .with_ipam("ranges", ranges.to_vec())
        .with_ipam("routes", Vec::<Value>::new())
}

/// A call for the second interface of a pod.
fn call(verb: &str, pod: &Pod, conf: &Conf) -> Call {
    let path = pod.netns().path().display().to_string();
    Call::new(verb)
        .attachment(pod.name(), &path, SECOND)
        .conf(conf)
}

/// The address of a family in a result of any version.
fn ip(result: &Value, family: Family) -> Result<IpAddr> {
    let ips = result["ips"].as_array().context("no ips")?;
    ips.iter()
        .filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
        .find(|&ip| Family::of(ip) == family)
        .with_context(|| format!("no address of {family:?}: {result}"))
}

/// The devices that carry a pod's default routes.
fn default_devices(pod: &Netns, family: Family) -> Result<Vec<String>> {
    let option = if family == V4 { "-4" } else { "-6" };
    let routes = pod.ip_json(&[option, "route", "show", "default"])?;
    let routes = routes.as_array().context("a list")?;
    Ok(routes
        .iter()
        .filter_map(|route| route["dev"].as_str().map(str::to_owned))
        .collect())
}

/// Makes a call by a daemon of its own, and says what it took of memory at most.
fn measured(lab: &Lab, call: &Call, verb: &str) -> Result<Option<Value>> {
    let Some(daemon) = Daemon::on(&lab.node, MEMORY)? else {
        return Ok(None);
    };
    let reply = daemon.call(call)?;
    let peak = daemon.memory.peak()?;
    let said = peak.map_or("unknown".to_owned(), |peak| format!("{} KiB", peak >> 10));
    anstream::println!("{verb}: {said} of memory at most");
    reply
        .succeeded()
        .with_context(|| format!("{verb}, {said}"))?;
    ensure!(
        peak.is_none_or(|peak| peak < MEMORY / 4),
        "{verb} took {said} of memory"
    );
    let text = reply.stdout.trim();
    Ok(Some(serde_json::from_str(text).unwrap_or_default()))
}

#[rstest]
fn a_second_interface(#[values("0.3.1", "0.4.0", "1.0.0", "1.1.0")] version: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.underpass(&["load"])?;
    let pod = lab.pod("both")?;
    let client = lab.pod_with("client", &second(&lab, version))?;
    let before = Traces::of(&lab.node)?;
    let conf = second(&lab, version);
    let Some(result) = measured(&lab, &call("ADD", &pod, &conf), "ADD")? else {
        return Ok(());
    };
    let remembered = conf.clone().with("prevResult", result.clone());
    if version != "0.3.1" {
        measured(&lab, &call("CHECK", &pod, &remembered), "CHECK")?;
    }
    if version == "1.1.0" {
        let valid = [Pod::IFNAME, SECOND]
            .map(|ifname| json!({ "containerID": pod.name(), "ifname": ifname }))
            .into_iter()
            .chain([json!({ "containerID": client.name(), "ifname": Pod::IFNAME })]);
        let list = conf
            .clone()
            .with("cni.dev/valid-attachments", valid.collect::<Vec<_>>());
        measured(&lab, &Call::new("GC").conf(&list), "GC")?;
        measured(&lab, &Call::new("STATUS").conf(&conf), "STATUS")?;
    }
    for family in Family::BOTH {
        let at = ip(&result, family)?;
        let _servers = traffic::serve(pod.netns(), (at, INSIDE).into())?;
        let meter = Meter::start(&lab.node)?;
        let mut visitor = tcp::Client::connect(client.netns(), (at, INSIDE).into())?;
        let seen = visitor.exchange(3_000_000, 3_000_000)?.seen.ip();
        ensure!(seen == client.ip(family), "it saw {seen}");
        ensure!(meter.read()?.bypassed() > 0, "{family:?}: no bypass");
        let devices = default_devices(pod.netns(), family)?;
        ensure!(devices == [Pod::IFNAME], "{devices:?}");
        ping::ping(pod.netns(), family.remote())?;
    }
    measured(&lab, &call("DEL", &pod, &remembered), "DEL")?;
    before.expect_same(&lab.node)?;
    measured(&lab, &call("DEL", &pod, &remembered), "a second DEL")?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// What a daemon's calls leave is charged to its container for as long as it lives.
#[test]
fn many_containers_fit() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.underpass(&["load"])?;
    let Some(daemon) = Daemon::on(&lab.node, MEMORY)? else {
        return Ok(());
    };
    let conf = second(&lab, "1.0.0");
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let add = |number: usize| -> Result<Pod> {
        let pod = lab.pod(&format!("pod{number}"))?;
        daemon.call(&call("ADD", &pod, &conf))?.succeeded()?;
        Ok(pod)
    };
    let pods = (0..30).map(add).collect::<Result<Vec<_>>>()?;
    let held = daemon.memory.usage()?;
    let peak = daemon.memory.peak()?.unwrap_or(held);
    anstream::println!(
        "30 attachments: {} KiB, at most {} KiB",
        held >> 10,
        peak >> 10
    );
    ensure!(peak < MEMORY / 2, "{peak} bytes at most, {held} in the end");
    for pod in pods {
        daemon.call(&call("DEL", &pod, &conf))?.silence()?;
        pod.del()?;
    }
    before.expect_same(&lab.node)
}

/// Nobody has run `underpass load`, and the first ADD of all comes from the daemon: the kernel would end the daemon, or us, somewhere in the
/// middle. Once they are loaded elsewhere, the same call works.
#[rstest]
fn nothing_is_loaded_where_there_is_no_room(#[values(2, 40, 50, 80)] mib: u64) -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let Some(daemon) = Daemon::on(&lab.node, mib * MIB)? else {
        return Ok(());
    };
    // A small one has no room for the maps, others have none for the verifier.
    let (major, minor) = if mib < 16 { (5, 11) } else { (6, 17) };
    if kernel::version() < (major, minor) {
        anstream::println!(
            "not on this kernel: it counts against a control group since {major}.{minor}"
        );
        return Ok(());
    }
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let conf = lab.conf().with_host_port(8080, INSIDE);
    let call = |verb| {
        Call::new(verb)
            .attachment("a", &path, Pod::IFNAME)
            .conf(&conf)
    };
    let before = Traces::of(&lab.node)?;
    let error = daemon.call(&call("ADD"))?.error()?;
    ensure!(error.code == 5, "{error}");
    for word in [&format!("{mib} MiB"), "underpass load"] {
        ensure!(error.msg.contains(word), "{error}");
    }
    let after = Traces::of(&lab.node)?;
    ensure!(
        (after.pins, after.leases, after.devices) == (before.pins, before.leases, before.devices),
        "something is left"
    );

    // The usual programs are there, and the one for host ports is not.
    lab.pod("elsewhere")?.del()?;
    let error = daemon.call(&call("ADD"))?.error()?;
    ensure!(error.msg.contains("underpass load"), "{error}");
    lab.node.underpass(&["load"])?;
    daemon.call(&call("ADD"))?.succeeded()?;
    ping::ping(&netns, V4.remote())?;
    ping::ping(&netns, V6.remote())?;
    daemon.call(&call("DEL"))?.silence()
}

/// The annotation `default-route`: Multus takes the default routes of the first interface away, in the container and in the result that it
/// remembers, and gives the container one by the second.
#[rstest]
fn the_second_interface_takes_over_the_default_route(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("both")?;
    let conf = second(&lab, "1.0.0");
    let also = pod.also(SECOND, &conf)?;
    let ips = also.result()["ips"].as_array().context("no ips")?;
    let gateway = ips
        .iter()
        .filter_map(|ip| ip["gateway"].as_str()?.parse().ok())
        .find(|&gateway: &IpAddr| Family::of(gateway) == family)
        .context("no gateway")?;
    let option = if family == V4 { "-4" } else { "-6" };
    for arguments in [
        vec!["route", "del", "default", "dev", Pod::IFNAME],
        vec![
            "route",
            "add",
            "default",
            "via",
            &gateway.to_string(),
            "dev",
            SECOND,
        ],
    ] {
        let mut ip = Command::new("ip");
        ip.arg(option).args(arguments);
        pod.netns().expect(&mut ip, &[])?;
    }
    let remote = family.remote_at(443);
    let _servers = traffic::serve(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    ensure!(client.local()?.ip() == also.ip(family), "by the first");
    let seen = client.exchange(3_000_000, 3_000_000)?.seen.ip();
    ensure!(seen == family.node(), "the world saw {seen}");
    meter.expect(Counter::BypassWire, 1)?;
    let check = |call: Call, conf: Conf, result: Value| {
        let conf = conf.with("prevResult", result);
        call.conf(&conf).run(&lab.node)?.silence()
    };
    let mut first = pod.result().clone();
    if let Some(routes) = first["routes"].as_array_mut() {
        routes.retain(|route| route["dst"] != family.everywhere());
    }
    check(pod.call("CHECK"), lab.conf(), first)?;
    let mut second = also.result().clone();
    // As Multus writes it.
    let everywhere = if family == V4 { "0.0.0.0/0" } else { "::0/0" };
    second["routes"] = json!([{ "dst": everywhere, "gw": gateway }]);
    check(also.call("CHECK"), conf, second)
}
