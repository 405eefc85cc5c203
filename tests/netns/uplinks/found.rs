//! Which devices are taken for uplinks, where the node has many others, or many routes.

use std::process::Command;

use nix::net::if_::if_nametoindex;
use rstest::rstest;
use underpass_netlink::Netlink;
use underpass_tests::{netns::Netns, prelude::*};

use super::set;

/// More devices than are asked about one by one.
const MANY: usize = 12;

/// With and without an address, up and down: none of them leads anywhere.
#[rstest]
fn an_uplink_is_found_among_many_devices(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().rtnl(|node| {
        for number in 0..MANY {
            let (near, far) = (format!("near{number}"), format!("far{number}"));
            node.add_veth(&near, 1500, &far, None)?;
            node.set_up(&near)?;
            node.add_address(&near, format!("198.18.7.{}", number + 1).parse()?, 32)?;
            node.add_address(&near, format!("2001:db8:99::{number:x}").parse()?, 128)?;
        }
        Ok(())
    })?;
    let scene = set(family, lab)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 100_000)?;
    meter.expect(Counter::BypassWire, 10)?;
    meter.expect(Counter::BypassPeer, 10)?;
    ensure!(
        has_programs(&scene.lab.node, Node::UPLINK)?,
        "no program on the uplink"
    );
    for device in ["near0", "far0"] {
        ensure!(
            !has_programs(&scene.lab.node, device)?,
            "a program on {device}"
        );
    }
    Ok(())
}

/// Two devices of the node, `near` and `far`, that are up and have no addresses of their own.
fn add_pair(netns: &Netns) -> Result<()> {
    netns.rtnl(|node| {
        node.add_veth("near", 1500, "far", None)?;
        node.set_up("near")?;
        node.set_up("far")
    })
}

fn has_programs(node: &Node, device: &str) -> Result<bool> {
    let mut list = Command::new("tc");
    list.args(["filter", "show", "dev", device, "ingress"]);
    let filters = node.netns().expect(&mut list, &[])?;
    Ok(filters.contains("underpass"))
}

/// Without an address a device is an uplink by its default route alone: among more routes than the kernel lists at once, behind another one of a smaller metric, and
/// where a rule leads packets by another table.
#[rstest]
fn an_uplink_is_found_by_its_default_route(
    #[values(V4, V6)] family: Family,
    #[values(false, true)] with_rule: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns();
    add_pair(netns)?;
    let everywhere = family.everywhere();
    let mut lines = vec![format!("route add {everywhere} dev near metric 7000")];
    for number in 1..500 {
        lines.push(match family {
            V4 => format!(
                "route add 10.77.{}.{}/32 dev far",
                number / 250,
                number % 250
            ),
            V6 => format!("route add 2001:db8:77::{number:x}/128 dev far"),
        });
    }
    if with_rule {
        if family == V4 {
            // Whatever nobody has does not leave by a default route then.
            lines.push("route add blackhole 240.0.0.0/4".to_owned());
        }
        lines.push(format!("route add {everywhere} dev near table 100"));
        lines.push(format!(
            "rule add from {everywhere} lookup 100 priority 100"
        ));
    }
    netns.ip(&lines)?;
    let _pod = lab.pod("a")?;
    for (device, is_uplink) in [(Node::UPLINK, true), ("near", true), ("far", false)] {
        ensure!(has_programs(&lab.node, device)? == is_uplink, "of {device}");
    }
    Ok(())
}

/// For a list the kernel looks at the routes of all containers. The one that it prefers it finds without that.
#[rstest]
fn the_default_route_by_a_device_is_looked_up(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let node = Node::new()?;
    let netns = node.netns();
    add_pair(netns)?;
    let everywhere = family.everywhere();
    let metrics = [7000, 7001];
    netns.ip(&metrics.map(|metric| format!("route add {everywhere} dev near metric {metric}")))?;
    let [listed, looked_up] = netns.run(|| -> Result<_> {
        let (netlink, near) = (Netlink::open()?, if_nametoindex("near")?);
        Ok(
            [netlink.default_routes()?, netlink.default_routes_by(near)?].map(|routes| {
                let by_near = routes.into_iter().filter(|route| route.index == near);
                by_near
                    .map(|route| route.route.priority)
                    .collect::<Vec<_>>()
            }),
        )
    })?;
    ensure!(listed == metrics.map(Some), "{listed:?}");
    ensure!(looked_up == [Some(metrics[0])], "{looked_up:?}");
    Ok(())
}
