//! An address that a living container has is nobody else's, whatever an IPAM says.

use std::{fs, net::IpAddr};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    prelude::*,
    rtnl::Rtnl,
    runtime::{Call, CniError, Conf},
};

const PORT: u16 = 8080;
const INSIDE: u16 = 80;

/// A network whose containers have the addresses that are asked for, be they somebody's.
fn fixed(lab: &Lab, addresses: &[IpAddr]) -> Conf {
    let addresses: Vec<Value> = addresses
        .iter()
        .map(|address| {
            let length = if address.is_ipv4() { 24 } else { 64 };
            json!({ "address": format!("{address}/{length}") })
        })
        .collect();
    // The plugin `static` of Debian speaks no newer one.
    let conf = lab.conf().with("cniVersion", "1.0.0");
    conf.with("name", "fixed").with(
        "ipam",
        json!({ "type": "static", "addresses": addresses, "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }] }),
    )
}

fn refused(lab: &Lab, name: &str, conf: &Conf) -> Result<CniError> {
    let netns = lab.node.netns().sibling(name)?;
    let path = netns.path().display().to_string();
    let add = Call::new("ADD").attachment(name, &path, Pod::IFNAME);
    let error = add.conf(conf).run(&lab.node)?.error()?;
    netns.unlink()?;
    Ok(error)
}

fn expect_refusal(error: &CniError, address: IpAddr, owner: &Pod) -> Result<()> {
    ensure!(error.code == 11, "{error}");
    for part in [&address.to_string(), owner.host_veth()] {
        ensure!(error.msg.contains(part), "{part} is missing: {error}");
    }
    Ok(())
}

/// The world reaches it in both families, and it is what its ADD has made.
fn expect_alive(lab: &Lab, pod: &Pod) -> Result<()> {
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// Somebody empties the folder of leases while a container lives.
#[rstest]
fn a_lost_lease_gives_no_address_away(#[values("with", "without")] its_route: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let old = lab.pod("old")?;
    let folder = lab.node.data_dir().join(lab.conf().name());
    let aside = lab.node.data_dir().join(".aside");
    lab.node.netns().run(|| -> std::io::Result<()> {
        fs::rename(&folder, &aside)?;
        fs::remove_dir_all(lab.node.data_dir().join(".underpass"))
    })?;
    // The allocator passes over what has a route. Where somebody took that away, too, the runtime has to ask again.
    if its_route == "without" {
        let routes = Family::BOTH.map(|family| format!("route del {}", old.ip(family)));
        lab.node.netns().ip(&routes)?;
        let before = Traces::of(&lab.node)?;
        expect_refusal(&refused(&lab, "new", &lab.conf())?, old.ip(V4), &old)?;
        before.expect_same(&lab.node)?;
    }
    let new = lab.pod("new")?;
    if its_route == "without" {
        let routes = Family::BOTH
            .map(|family| format!("route add {} dev {}", old.ip(family), old.host_veth()));
        lab.node.netns().ip(&routes)?;
    }
    for family in Family::BOTH {
        ensure!(new.ip(family) != old.ip(family), "{}", new.result());
        ping::ping(new.netns(), family.remote())?;
    }
    lab.node.netns().run(|| -> std::io::Result<()> {
        for address in old.addresses() {
            let name = address.to_string();
            fs::copy(aside.join(&name), folder.join(&name))?;
        }
        Ok(())
    })?;
    expect_alive(&lab, &old)
}

#[rstest]
fn who_asks_for_it_is_refused(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let old = lab.pod("old")?;
    let conf = fixed(&lab, &[old.ip(family)]);
    let before = Traces::of(&lab.node)?;
    expect_refusal(&refused(&lab, "new", &conf)?, old.ip(family), &old)?;
    before.expect_same(&lab.node)?;
    expect_alive(&lab, &old)?;
    // It is free when the container is gone, be it without a DEL.
    let address = old.ip(family);
    old.netns().delete_link(Pod::IFNAME)?;
    old.abandon();
    let new = lab.pod_with("new", &conf)?;
    ensure!(new.ip(family) == address, "{}", new.result());
    ping::ping(new.netns(), family.remote())?;
    new.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// Nor does the container itself get it by another interface: with the first of the two to go it would be reached by neither.
#[rstest]
fn who_has_it_gets_it_no_second_time(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("pod")?;
    let before = Traces::of(&lab.node)?;
    let path = pod.netns().path().display().to_string();
    let add = Call::new("ADD").attachment(pod.name(), &path, "net1");
    let conf = fixed(&lab, &[pod.ip(family)]);
    let error = add.conf(&conf).run(&lab.node)?.error()?;
    expect_refusal(&error, pod.ip(family), &pod)?;
    before.expect_same(&lab.node)?;
    expect_alive(&lab, &pod)
}

/// The host ports of another plugin's container lead to no container of ours.
#[rstest]
fn host_ports_in_a_chain_take_no_address(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let old = lab.pod("old")?;
    let theirs = lab.node.netns().sibling("theirs")?;
    let add = |rtnl: &Rtnl| rtnl.add_veth("theirs", 1500, Pod::IFNAME, Some(&theirs));
    lab.node.netns().rtnl(add)?;
    lab.node.netns().set_up("theirs")?;
    theirs.set_up(Pod::IFNAME)?;
    let path = theirs.path().display().to_string();
    let length = if family == V4 { 24 } else { 64 };
    let previous = json!({
        "cniVersion": "1.1.0",
        "interfaces": [{ "name": Pod::IFNAME, "sandbox": path }],
        "ips": [{ "address": format!("{}/{length}", old.ip(family)), "interface": 0 }],
    });
    let conf = lab
        .conf()
        .with("name", "theirs")
        .with("ipMasq", false)
        .with("ipam", json!({}))
        .with("prevResult", previous)
        .with_host_port(PORT, INSIDE);
    let add = Call::new("ADD").attachment("theirs", &path, Pod::IFNAME);
    let error = add.conf(&conf).run(&lab.node)?.error()?;
    expect_refusal(&error, old.ip(family), &old)?;
    expect_alive(&lab, &old)
}

/// A range that begins with what the node itself hears at a place, and goes on.
fn around(lab: &Lab, family: Family, place: &str) -> Result<(IpAddr, Value)> {
    let lan = family.gateway();
    Ok(match place {
        "uplink" => {
            let (subnet, next) = match family {
                V4 => ("192.0.2.0/24", "192.0.2.3"),
                V6 => ("2001:db8:1::/64", "2001:db8:1::3"),
            };
            let own = family.node();
            (
                own,
                json!({ "subnet": subnet, "rangeStart": own, "rangeEnd": next, "gateway": lan }),
            )
        }
        // The broadcast address of the uplink's link, and the anycast address of its routers.
        "everybody" => {
            let (subnet, own, next) = match family {
                V4 => ("192.0.0.0/16", "192.0.2.255", "192.0.3.0"),
                V6 => ("2001:db8::/32", "2001:db8:1::", "2001:db8:1::3"),
            };
            (
                own.parse()?,
                json!({ "subnet": subnet, "rangeStart": own, "rangeEnd": next, "gateway": lan }),
            )
        }
        _ => {
            let own = family.unused_pod();
            let next = match own {
                IpAddr::V4(own) => IpAddr::from((own.to_bits() + 1).to_be_bytes()),
                IpAddr::V6(own) => IpAddr::from((own.to_bits() + 1).to_be_bytes()),
            };
            lab.node.netns().ip(&[
                "link add own9 type veth peer name own8".to_owned(),
                format!("address add {own}/{} dev own9 nodad", family.host_bits()),
                "link set own8 up".to_owned(),
                "link set own9 up".to_owned(),
            ])?;
            (
                own,
                json!({ "subnet": family.pods(), "rangeStart": own, "rangeEnd": next }),
            )
        }
    })
}

/// One that the node itself has would get nothing: what is sent to it stays on the node. It is passed over.
#[rstest]
fn an_address_of_the_node_is_no_containers(
    #[values(V4, V6)] family: Family,
    #[values("uplink", "everybody", "another device")] place: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let (own, range) = around(&lab, family, place)?;
    let conf = lab.conf().with("name", "own");
    let conf = conf.with_ipam("ranges", json!([[range]]));
    let conf = conf.with_ipam("routes", json!([]));
    let pod = lab.pod_with("a", &conf)?;
    ensure!(pod.ip(family) != own, "{}", pod.result());
    pod.del()?;
    let before = Traces::of(&lab.node)?;
    // Whoever asks for it, or has another plugin give it, is told.
    let asked = conf.with("runtimeConfig", json!({ "ips": [own] }));
    let asked = asked.with("capabilities", json!({ "ips": true }));
    let given = fixed(&lab, &[own]).with_ipam("routes", json!([]));
    for conf in [asked, given] {
        let error = refused(&lab, "b", &conf)?;
        ensure!(
            error.code == 7
                && error
                    .msg
                    .contains(&format!("address {own} from the IPAM: the node")),
            "{error}"
        );
    }
    before.expect_same(&lab.node)
}
