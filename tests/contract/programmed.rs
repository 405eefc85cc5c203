//! What a config asks for, as the kernel has it afterwards.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{leak::Traces, netns::Netns, prelude::*, rtnl::Change, runtime::Conf};

fn routes(netns: &Netns, family: Family, table: &str) -> Result<Vec<Value>> {
    let version = match family {
        V4 => "-4",
        V6 => "-6",
    };
    let listed = netns.ip_json(&[version, "-details", "route", "show", "table", table])?;
    Ok(listed.as_array().cloned().unwrap_or_default())
}

fn route<'a>(routes: &'a [Value], dst: &str) -> Result<&'a Value> {
    routes
        .iter()
        .find(|route| route["dst"] == dst)
        .with_context(|| format!("no route to {dst} in {routes:#?}"))
}

/// The network of a lab with addresses from Debian's `static`.
pub(crate) fn fixed(lab: &Lab, addresses: &Value) -> Conf {
    let routes = Family::BOTH.map(|family| json!({ "dst": family.everywhere() }));
    lab.conf().with("cniVersion", "1.0.0").with(
        "ipam",
        json!({ "type": "static", "addresses": addresses, "routes": routes }),
    )
}

#[test]
fn routes_have_the_attributes_that_were_asked_for() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let asked = json!([
        { "dst": "0.0.0.0/0", "mtu": 1300, "advmss": 1200 },
        { "dst": "::/0", "mtu": 1310, "advmss": 1210 },
        { "dst": "192.0.2.0/24", "priority": 77, "table": 4242 },
        { "dst": "2001:db8:2::/48", "priority": 78, "table": 4243 },
        { "dst": "198.18.0.0/15", "gw": "10.88.0.9", "scope": 0 },
        { "dst": "203.0.113.7/32", "priority": 5 },
        { "dst": "2001:db8:3::1/128", "gw": "fd00:88::9", "priority": 6 },
    ]);
    let pod = lab.pod_with("a", &lab.conf().with_ipam("routes", asked.clone()))?;
    ensure!(pod.result()["routes"] == asked, "{}", pod.result());

    let main = routes(pod.netns(), V4, "main")?;
    let default = route(&main, "default")?;
    ensure!(
        default["metrics"][0]["mtu"] == 1300 && default["metrics"][0]["advmss"] == 1200,
        "{default}"
    );
    ensure!(default["gateway"] == "10.88.0.1", "{default}");
    ensure!(route(&main, "203.0.113.7")?["metric"] == 5, "{main:#?}");
    ensure!(
        route(&main, "198.18.0.0/15")?["gateway"] == "10.88.0.9",
        "{main:#?}"
    );
    ensure!(route(&main, "192.0.2.0/24").is_err(), "{main:#?}");
    let other = routes(pod.netns(), V4, "4242")?;
    let moved = route(&other, "192.0.2.0/24")?;
    ensure!(
        moved["metric"] == 77 && moved["gateway"] == "10.88.0.1",
        "{moved}"
    );

    let main = routes(pod.netns(), V6, "main")?;
    let default = route(&main, "default")?;
    ensure!(
        default["metrics"][0]["mtu"] == 1310 && default["metrics"][0]["advmss"] == 1210,
        "{default}"
    );
    let single = route(&main, "2001:db8:3::1")?;
    ensure!(
        single["metric"] == 6 && single["gateway"] == "fd00:88::9",
        "{single}"
    );
    let other = routes(pod.netns(), V6, "4243")?;
    ensure!(
        route(&other, "2001:db8:2::/48")?["metric"] == 78,
        "{other:#?}"
    );

    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}

#[test]
fn a_route_on_the_link_has_its_scope() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // Without a next hop of its own it takes the gateway; a scope that forbids one is what was asked for.
    let conf = lab.conf().with_ipam(
        "routes",
        json!([{ "dst": "0.0.0.0/0" }, { "dst": "198.18.7.0/24", "scope": 200 }]),
    );
    let pod = lab.pod_with("a", &conf)?;
    let main = routes(pod.netns(), V4, "main")?;
    let found = route(&main, "198.18.7.0/24")?;
    ensure!(found["scope"] == "site", "{found}");
    Ok(())
}

#[test]
fn two_next_hops_of_one_destination_are_both_there() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_ipam(
        "routes",
        json!([
            { "dst": "198.18.0.0/15", "gw": "10.88.0.7" },
            { "dst": "198.18.0.0/15", "gw": "10.88.0.8" },
            { "dst": "2001:db8:2::/48", "gw": "fd00:88::7" },
            { "dst": "2001:db8:2::/48", "gw": "fd00:88::8" },
        ]),
    );
    let pod = lab.pod_with("a", &conf)?;
    for (family, hops) in [
        (V4, ["10.88.0.7", "10.88.0.8"]),
        (V6, ["fd00:88::7", "fd00:88::8"]),
    ] {
        let text = Value::from(routes(pod.netns(), family, "main")?).to_string();
        ensure!(
            hops.iter().all(|hop| text.contains(&format!("\"{hop}\""))),
            "{text}"
        );
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn prefixes_of_any_length_and_routes_of_any_kind() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab
        .conf()
        .with_ipam("ranges", json!([[{ "subnet": "10.1.2.0/24" }], [{ "subnet": "2001:db8:99::/66" }]]))
        .with_ipam(
            "routes",
            json!([{ "dst": "0.0.0.0/0" }, { "dst": "192.168.0.0/16" }, { "dst": "1.2.3.4/32" }, { "dst": "::/0" }]),
        );
    let pod = lab.pod_with("a", &conf)?;
    let main = routes(pod.netns(), V4, "main")?;
    for dst in ["default", "192.168.0.0/16", "1.2.3.4", "10.1.2.0/24"] {
        ensure!(route(&main, dst)?["gateway"] == "10.1.2.1", "{main:#?}");
    }
    let on_link = route(&main, "10.1.2.1")?;
    ensure!(
        on_link["scope"] == "link" && on_link["prefsrc"] == "10.1.2.2",
        "{on_link}"
    );
    let main = routes(pod.netns(), V6, "main")?;
    ensure!(
        route(&main, "2001:db8:99::/66")?["gateway"] == "2001:db8:99::1",
        "{main:#?}"
    );
    for gateway in ["10.1.2.1", "2001:db8:99::1"] {
        ping::ping(pod.netns(), gateway.parse()?)?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn single_addresses_and_several_of_one_family() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let addresses = json!([
        { "address": "10.88.0.20/32" },
        { "address": "10.77.0.21/24", "gateway": "10.77.0.1" },
        { "address": "fd00:88::20/128" },
        { "address": "fd00:77::21/64", "gateway": "fd00:77::1" },
    ]);
    let pod = lab.pod_with("a", &fixed(&lab, &addresses))?;
    let other = lab.pod("b")?;
    ensure!(pod.addresses().len() == 4, "{}", pod.result());
    let ips = pod.result()["ips"].as_array().context("ips")?;
    for (ip, asked) in ips.iter().zip(addresses.as_array().into_iter().flatten()) {
        ensure!(
            ip["address"] == asked["address"] && ip["interface"] == 1,
            "{ip}"
        );
    }
    for address in pod.addresses() {
        for _ in 0..2 {
            ping::ping(other.netns(), address)?;
            ping::ping(lab.node.netns(), address)?;
        }
    }
    for family in Family::BOTH {
        ping::ping(pod.netns(), other.ip(family))?;
        ping::ping(pod.netns(), family.remote())?;
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn without_ipam_there_is_a_link_and_nothing_more() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    for ipam in [json!({}), Value::Null, json!({ "type": "" })] {
        let conf = lab.conf().with("ipam", ipam);
        let pod = lab.pod_with("a", &conf)?;
        let result = pod.result();
        ensure!(
            result.get("ips").is_none() && result.get("routes").is_none(),
            "{result}"
        );
        ensure!(
            result["interfaces"].as_array().map(Vec::len) == Some(2),
            "{result}"
        );
        let link = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
        ensure!(link[0]["operstate"] == "UP", "{link}");
        pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
        pod.netns().unlink()?;
        pod.del()?;
        before.expect_same(&lab.node)?;
    }
    Ok(())
}

#[test]
fn an_address_of_ipv6_survives_its_link_going_down() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    pod.netns().rtnl(|pod| pod.set("eth0", Change::down))?;
    let addresses = pod
        .netns()
        .ip_json(&["-6", "address", "show", "dev", "eth0"])?;
    ensure!(
        addresses.to_string().contains(&pod.ip(V6).to_string()),
        "{addresses}"
    );
    Ok(())
}

#[rstest]
fn default_gateways(#[values(true, false)] given: bool) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let routes = if given {
        json!([{ "dst": "0.0.0.0/0", "gw": "10.88.0.1" }, { "dst": "::/0", "gw": "fd00:88::1" }])
    } else {
        json!([])
    };
    let conf = lab
        .conf()
        .with("isDefaultGateway", true)
        .with("isGateway", true)
        .with("hairpinMode", true)
        .with_ipam("routes", routes);
    let pod = lab.pod_with("a", &conf)?;
    let routes = pod.result()["routes"].as_array().context("routes")?;
    ensure!(
        routes.len() == 2,
        "one for each family, once: {}",
        pod.result()
    );
    for (family, gateway) in [(V4, "10.88.0.1"), (V6, "fd00:88::1")] {
        let expected = json!({ "dst": family.everywhere(), "gw": gateway });
        ensure!(routes.contains(&expected), "{}", pod.result());
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}

#[rstest]
#[case("iptables")]
#[case("nftables")]
#[case("")]
fn masquerade_by_any_backend_is_the_same(#[case] backend: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("ipMasqBackend", backend).with("mtu", 5000);
    let pod = lab.pod_with("a", &conf)?;
    for family in Family::BOTH {
        // The world knows no way back to pods.
        ping::ping(pod.netns(), family.remote())?;
    }
    let link = pod.netns().ip_json(&["link", "show", "dev", "eth0"])?;
    ensure!(link[0]["mtu"] == 5000, "{link}");
    Ok(())
}

/// Four containers with one address, as an address that is leased anew after its old container was gone and before its DEL: the
/// newest has it, and no DEL of another takes it away.
#[test]
fn an_address_belongs_to_its_newest_owner() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let addresses = json!([
        { "address": "10.88.0.20/24", "gateway": "10.88.0.1" },
        { "address": "fd00:88::20/64", "gateway": "fd00:88::1" },
    ]);
    let conf = fixed(&lab, &addresses);
    let mut pods = Vec::new();
    for name in ["a", "b", "c"] {
        let pod = lab.pod_with(name, &conf)?;
        pod.netns().delete_link(Pod::IFNAME)?;
        pods.push(pod);
    }
    let newest = lab.pod_with("d", &conf)?;
    for pod in pods {
        pod.del()?;
        for family in Family::BOTH {
            ping::ping(newest.netns(), family.remote())?;
            ping::ping(lab.node.netns(), newest.ip(family))?;
        }
        newest.call_with_result("CHECK").run(&lab.node)?.silence()?;
    }
    Ok(())
}

#[rstest]
#[case("{}", "", None)]
#[case(
    r#"{"runtimeConfig":{"mac":"02:00:00:00:00:03"},"args":{"cni":{"mac":"02:00:00:00:00:02"}}}"#,
    "MAC=02:00:00:00:00:01",
    Some("02:00:00:00:00:03")
)]
#[case(
    r#"{"args":{"cni":{"mac":"02:00:00:00:00:02"}}}"#,
    "MAC=02:00:00:00:00:01",
    Some("02:00:00:00:00:02")
)]
#[case(
    r#"{"runtimeConfig":{"mac":""}}"#,
    "IgnoreUnknown=1;MAC=02:00:00:00:00:01;K8S_POD_NAME=a",
    Some("02:00:00:00:00:01")
)]
fn the_mac_of_the_strongest_source(
    #[case] keys: &str,
    #[case] args: &str,
    #[case] mac: Option<&str>,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let keys: Value = serde_json::from_str(keys)?;
    let conf = keys
        .as_object()
        .into_iter()
        .flatten()
        .fold(lab.conf(), |conf, (key, value)| {
            conf.with(key, value.clone())
        });
    let result = underpass_tests::runtime::Call::new("ADD")
        .attachment("a", &netns.path().display().to_string(), Pod::IFNAME)
        .env("CNI_ARGS", args)
        .conf(&conf)
        .run(&lab.node)?
        .result()?;
    let link = netns.ip_json(&["link", "show", "dev", "eth0"])?;
    ensure!(
        link[0]["address"] == result["interfaces"][1]["mac"],
        "{link} is not {result}"
    );
    ensure!(mac.is_none_or(|mac| link[0]["address"] == mac), "{link}");
    ping::ping(&netns, V4.remote())?;
    ping::ping(&netns, V6.remote())
}

#[test]
fn check_notices_another_mac() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    pod.netns()
        .ip(&["link set eth0 address 02:00:00:00:00:77".to_owned()])?;
    let error = pod.call_with_result("CHECK").run(&lab.node)?.error()?;
    ensure!(error.to_string().contains("02:00:00:00:00:77"), "{error}");
    Ok(())
}

#[test]
fn a_failure_after_the_lease_gives_it_back() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    // The kernel does not take a next hop of the other family.
    let conf = lab.conf().with_ipam(
        "routes",
        json!([{ "dst": "2001:db8::/32", "gw": "10.88.0.1" }]),
    );
    let netns = lab.node.netns().sibling("a")?;
    let error = underpass_tests::runtime::Call::new("ADD")
        .attachment("a", &netns.path().display().to_string(), Pod::IFNAME)
        .conf(&conf)
        .run(&lab.node)?
        .error()?;
    ensure!(error.to_string().contains("2001:db8::/32"), "{error}");
    before.expect_same(&lab.node)?;
    let links = netns.ip_json(&["link", "show"])?;
    ensure!(
        links.as_array().map(Vec::len) == Some(1),
        "only lo: {links}"
    );
    Ok(())
}
