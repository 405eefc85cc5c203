//! Addresses of the network's range for which the node has a route of somebody else: those stay his.

use std::process::Command;

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    leak::Traces,
    prelude::*,
    runtime::{Call, Conf},
};

/// Where another plugin has its container.
const OTHER: &str = "other";
/// More than anybody would try of a range that the node has.
const MANY: u16 = 300;

/// The first address that the network gives, and the second.
fn first(family: Family) -> [&'static str; 2] {
    match family {
        V4 => ["10.22.0.2", "10.22.0.3"],
        V6 => ["fd00:22::2", "fd00:22::3"],
    }
}

fn ip(lab: &Lab, family: Family, arguments: &str) -> Result<String> {
    let flag = match family {
        V4 => "-4",
        V6 => "-6",
    };
    let mut command = Command::new("ip");
    command.arg(flag).args(arguments.split(' '));
    lab.node.netns().expect(&mut command, &[])
}

fn lab(family: Family) -> Result<Lab> {
    let lab = Lab::new()?;
    let netns = lab.node.netns();
    netns.rtnl(|rtnl| rtnl.add_veth(OTHER, 1500, "its", None))?;
    netns.set_up(OTHER)?;
    netns.set_up("its")?;
    let [taken, _] = first(family);
    ip(&lab, family, &format!("route add {taken} dev {OTHER}"))?;
    Ok(lab)
}

/// A network that gives its container this address, whatever the node has for it.
fn asking(lab: &Lab, family: Family, address: &str) -> Conf {
    let address = match family {
        V4 => format!("{address}/24"),
        V6 => format!("{address}/64"),
    };
    // The plugin `static` of Debian speaks no newer one.
    lab.conf().with("cniVersion", "1.0.0").with(
        "ipam",
        json!({ "type": "static", "addresses": [{ "address": address }] }),
    )
}

/// A network of the range that [`first`] has addresses of.
fn in_range(lab: &Lab, family: Family) -> Conf {
    let subnet = match family {
        V4 => "10.22.0.0/24",
        V6 => "fd00:22::/64",
    };
    lab.conf()
        .with_ipam("ranges", json!([[{ "subnet": subnet }]]))
}

/// As the reference plugin `ptp` leaves it.
#[rstest]
fn a_container_of_another_plugin_keeps_its_route(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab(family)?;
    let [taken, next] = first(family);
    let theirs = || ip(&lab, family, &format!("route show {taken}"));
    let before = theirs()?;
    ensure!(before.contains(OTHER), "{before}");
    let conf = in_range(&lab, family);
    let pod = lab.pod_with("a", &conf)?;
    ensure!(pod.ip(family).to_string() == next, "{}", pod.result());
    ensure!(theirs()? == before, "{}", theirs()?);
    pod.del()?;
    ensure!(theirs()? == before, "{}", theirs()?);
    Ok(())
}

/// The folder of leases was lost, and its containers live: a route is there for each.
#[rstest]
fn behind_many_that_are_led_is_one_that_is_not(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab(family)?;
    let address = |place: u16| match family {
        V4 => format!("10.22.{}.{}", (place + 2) >> 8, (place + 2) & 0xff),
        V6 => format!("fd00:22::{:x}", place + 2),
    };
    let routes = (1..MANY).map(|place| format!("route add {} dev {OTHER}", address(place)));
    lab.node.netns().ip(&routes.collect::<Vec<_>>())?;
    let subnet = match family {
        V4 => "10.22.0.0/16",
        V6 => "fd00:22::/64",
    };
    let conf = lab
        .conf()
        .with_ipam("ranges", json!([[{ "subnet": subnet }]]));
    for (place, name) in [(MANY, "a"), (MANY + 1, "b")] {
        let pod = lab.pod_with(name, &conf)?;
        ensure!(
            pod.ip(family).to_string() == address(place),
            "{}",
            pod.result()
        );
        pod.del()?;
    }
    Ok(())
}

#[rstest]
fn who_asks_for_it_is_refused(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab(family)?;
    // What is loaded stays.
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let [taken, _] = first(family);
    let conf = asking(&lab, family, taken);
    let route = ip(&lab, family, &format!("route show {taken}"))?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = |verb| {
        let call = Call::new(verb).attachment("a", &path, Pod::IFNAME);
        call.conf(&conf)
    };
    let error = call("ADD").run(&lab.node)?.error()?;
    ensure!(error.code == 11, "{error}");
    for part in [taken, OTHER] {
        ensure!(error.msg.contains(part), "{part} is missing: {error}");
    }
    call("DEL").run(&lab.node)?.silence()?;
    ensure!(ip(&lab, family, &format!("route show {taken}"))? == route);
    netns.unlink()?;
    before.expect_same(&lab.node)
}

/// Of two routes to one address the kernel takes the one with the smaller metric, and refuses none: ours has 0 by IPv4, and 1024 by IPv6. As `ptp`
/// does it, ours goes before one that a routing daemon has made; where it does not, nobody would reach the container.
#[rstest]
fn a_route_of_another_metric(
    #[values(V4, V6)] family: Family,
    #[values(100, 5000)] metric: u32,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns();
    netns.rtnl(|rtnl| rtnl.add_veth(OTHER, 1500, "its", None))?;
    netns.set_up(OTHER)?;
    netns.set_up("its")?;
    lab.pod("first")?.del()?;
    let [taken, _] = first(family);
    ip(
        &lab,
        family,
        &format!("route add {taken} dev {OTHER} metric {metric}"),
    )?;
    let before = Traces::of(&lab.node)?;
    let conf = asking(&lab, family, taken);
    if family == V6 && metric < 1024 {
        let netns = lab.node.netns().sibling("a")?;
        let path = netns.path().display().to_string();
        let call = Call::new("ADD").attachment("a", &path, Pod::IFNAME);
        let error = call.conf(&conf).run(&lab.node)?.error()?;
        ensure!(error.code == 11 && error.msg.contains(OTHER), "{error}");
        netns.unlink()?;
    } else {
        let pod = lab.pod_with("a", &conf)?;
        let way = ip(&lab, family, &format!("route get {taken}"))?;
        ensure!(way.contains(pod.host_veth()), "{way}");
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
        pod.del()?;
    }
    before.expect_same(&lab.node)
}

/// A lab with a route that stops what goes to the first address, before ours by IPv6; and with one for the whole range, as
/// `underpass-agent` makes it, which is no reason to give none of it.
fn stopped(family: Family, kind: &str, is_range_stopped: bool) -> Result<Lab> {
    let lab = Lab::new()?;
    // What is loaded stays.
    lab.pod("first")?.del()?;
    let [taken, _] = first(family);
    let (metric, range) = match family {
        V4 => ("", "10.22.0.0/24"),
        V6 => (" metric 100", "fd00:22::/64"),
    };
    ip(&lab, family, &format!("route add {kind} {taken}{metric}"))?;
    if is_range_stopped {
        let covering = format!("route add unreachable {range} metric 2000");
        ip(&lab, family, &covering)?;
    }
    Ok(lab)
}

#[rstest]
fn an_address_that_nothing_is_sent_to_is_passed_over(
    #[values(V4, V6)] family: Family,
    #[values("blackhole", "unreachable", "prohibit")] kind: &str,
    #[values(true, false)] is_range_stopped: bool,
) -> Result<()> {
    needs_root!();
    let lab = stopped(family, kind, is_range_stopped)?;
    let before = Traces::of(&lab.node)?;
    let [_, next] = first(family);
    let conf = in_range(&lab, family);
    let pod = lab.pod_with("a", &conf)?;
    ensure!(pod.ip(family).to_string() == next, "{}", pod.result());
    ping::ping(lab.node.netns(), pod.ip(family))?;
    pod.del()?;
    before.expect_same(&lab.node)
}

#[rstest]
fn who_asks_for_one_that_nothing_is_sent_to_is_refused(
    #[values(V4, V6)] family: Family,
    #[values("blackhole", "unreachable", "prohibit")] kind: &str,
    #[values(true, false)] is_range_stopped: bool,
) -> Result<()> {
    needs_root!();
    let lab = stopped(family, kind, is_range_stopped)?;
    let before = Traces::of(&lab.node)?;
    let [taken, next] = first(family);
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = Call::new("ADD").attachment("a", &path, Pod::IFNAME);
    let conf = asking(&lab, family, taken);
    let error = call.conf(&conf).run(&lab.node)?.error()?;
    ensure!(error.code == 11, "{error}");
    for part in [taken, "by no device", kind] {
        ensure!(error.msg.contains(part), "{part} is missing: {error}");
    }
    netns.unlink()?;
    before.expect_same(&lab.node)?;
    let pod = lab.pod_with("b", &asking(&lab, family, next))?;
    let way = ip(&lab, family, &format!("route get {next}"))?;
    ensure!(way.contains(pod.host_veth()), "{way}");
    pod.del()?;
    before.expect_same(&lab.node)
}

/// The node has them all: nobody looks for one that it has not, through so many.
#[rstest]
fn a_range_of_the_node_itself_is_refused(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let subnet = match family {
        V4 => "10.22.0.0/16",
        V6 => "fd00:22::/64",
    };
    ip(&lab, family, &format!("route add local {subnet} dev lo"))?;
    let before = Traces::of(&lab.node)?;
    let conf = lab
        .conf()
        .with_ipam("ranges", json!([[{ "subnet": subnet }]]));
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = Call::new("ADD").attachment("a", &path, Pod::IFNAME);
    let error = call.conf(&conf).run(&lab.node)?.error()?;
    ensure!(error.code == 7, "{error}");
    ensure!(error.msg.contains("the node's own"), "{error}");
    netns.unlink()?;
    before.expect_same(&lab.node)
}
