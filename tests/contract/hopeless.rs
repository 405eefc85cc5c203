//! A network to which every ADD fails: STATUS says so ahead of it, and the commands that read the folder of networks name it.

use std::{fs, path::Path, process::Command};

use nix::mount::{MsFlags, mount};
use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    node::plugin,
    prelude::*,
    runtime::{Call, CniError, Conf},
};

/// The folder of networks, in the node's own `/run`.
const NET_DIR: &str = "/run/cni/net.d";

/// The network of one family, with keys of its range.
fn range(lab: &Lab, family: Family, keys: &[(&str, &str)]) -> Conf {
    let mut range = json!({ "subnet": family.pods() });
    for (key, value) in keys {
        range[key] = Value::from(*value);
    }
    let conf = lab.conf().with_ipam("ranges", json!([[range]]));
    conf.with_ipam("routes", json!([]))
}

/// The same with one route to everywhere.
fn route(lab: &Lab, family: Family, keys: Value) -> Conf {
    let mut route = keys;
    route["dst"] = Value::from(family.everywhere());
    range(lab, family, &[]).with_ipam("routes", json!([route]))
}

fn other(family: Family) -> &'static str {
    match family {
        V4 => "fd00:88::7",
        V6 => "10.88.0.7",
    }
}

fn of(family: Family, v4: &'static str, v6: &'static str) -> &'static str {
    match family {
        V4 => v4,
        V6 => v6,
    }
}

/// What no ADD takes, by a name for it. None where the family has no such thing.
fn fault(lab: &Lab, name: &str, family: Family) -> Option<Conf> {
    let subnet = |text: &str| range(lab, family, &[("subnet", text)]);
    Some(match name {
        "resolvConf" => range(lab, family, &[]).with_ipam("resolvConf", "/run/nosuch.conf"),
        "nine ranges" => {
            let one = |number: usize| match family {
                V4 => json!([{ "subnet": format!("10.88.{number}.0/24") }]),
                V6 => json!([{ "subnet": format!("fd00:88:{number}::/64") }]),
            };
            range(lab, family, &[]).with_ipam("ranges", (1..=9).map(one).collect::<Vec<_>>())
        }
        "mtu" if family == V6 => range(lab, family, &[]).with("mtu", 1279),
        "gw of the other family" => route(lab, family, json!({ "gw": other(family) })),
        "gw of nobody" => route(lab, family, json!({ "gw": of(family, "0.0.0.0", "::") })),
        "scope" if family == V4 => route(lab, family, json!({ "scope": 253 })),
        "mtu of a route" => route(lab, family, json!({ "mtu": 1 })),
        "gateway of the other family" => range(lab, family, &[("gateway", other(family))]),
        "gateway that is a group" => range(
            lab,
            family,
            &[("gateway", of(family, "224.0.0.1", "ff02::1"))],
        ),
        "range of groups" => subnet(of(family, "224.0.0.0/24", "ff05::/64")),
        "range of the loopback" if family == V4 => subnet("127.0.0.0/24"),
        "masqueradeAddress" => {
            let address = of(family, "203.0.113.77", "2001:db8:77::77");
            range(lab, family, &[]).with("masqueradeAddress", address)
        }
        "full disk" => range(lab, family, &[]).with_ipam("dataDir", "/run/full/networks"),
        "host bits" => subnet(of(family, "10.88.0.1/24", "fd00:88::1/64")),
        "loopback as IPAM" | "dhcp as IPAM" | "nosuch as IPAM" => {
            let kind = name.split(' ').next().unwrap_or_default();
            range(lab, family, &[]).with("ipam", json!({ "type": kind }))
        }
        _ => return None,
    })
}

/// A file system without room for one more file.
fn fill(lab: &Lab) -> Result<()> {
    lab.node.netns().run(|| {
        fs::create_dir_all("/run/full")?;
        let small = Some("size=8k");
        mount(
            Some("full"),
            "/run/full",
            Some("tmpfs"),
            MsFlags::empty(),
            small,
        )?;
        fs::create_dir("/run/full/networks")?;
        let _ = fs::write("/run/full/large", vec![1; 64 * 1024]);
        anyhow::Ok(())
    })
}

/// What a command says of the folder of networks, on both streams, and whether it succeeded.
fn command(lab: &Lab, arguments: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(plugin());
    command.env_clear().args(arguments);
    command.args(["--net-dir", NET_DIR]);
    let output = lab.node.netns().output(&mut command, &[])?;
    let text = [output.stdout, output.stderr].concat();
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    ))
}

fn put(lab: &Lab, conf: &Conf) -> Result<()> {
    let mut entry = conf.json().clone();
    let name = entry["name"].take();
    let list = json!({ "cniVersion": "1.1.0", "name": name, "plugins": [entry] });
    lab.node.netns().run(|| {
        fs::create_dir_all(NET_DIR)?;
        fs::write(Path::new(NET_DIR).join("10-lab.conflist"), list.to_string())
    })?;
    Ok(())
}

fn add(lab: &Lab, conf: &Conf) -> Result<CniError> {
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = Call::new("ADD").attachment("a", &path, Pod::IFNAME);
    let error = call.conf(conf).run(&lab.node)?.error()?;
    netns.unlink()?;
    Ok(error)
}

#[rstest]
fn who_asks_ahead_is_told(
    #[values(
        "resolvConf",
        "nine ranges",
        "mtu",
        "gw of the other family",
        "gw of nobody",
        "scope",
        "mtu of a route",
        "gateway of the other family",
        "gateway that is a group",
        "range of groups",
        "range of the loopback",
        "masqueradeAddress",
        "full disk",
        "host bits",
        "loopback as IPAM",
        "dhcp as IPAM",
        "nosuch as IPAM"
    )]
    name: &str,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let Some(conf) = fault(&lab, name, family) else {
        return Ok(());
    };
    fill(&lab)?;
    let warm = lab.pod("warm")?;
    let added = add(&lab, &conf)?;
    let before = Traces::of(&lab.node)?;
    let status = Call::new("STATUS").conf(&conf).run(&lab.node)?.error()?;
    // What is wrong with the config has the same code; what the node can't do now is a node that is not available.
    let expected = if added.code == 7 || added.code == 2 {
        added.code
    } else {
        50
    };
    ensure!(status.code == expected, "{added}, and then {status}");
    // It may be about another address of the same range.
    let begins = |error: &CniError| error.msg.split(' ').take(2).collect::<String>();
    ensure!(
        expected != added.code || begins(&status) == begins(&added),
        "{added}, and then {status}"
    );
    put(&lab, &conf)?;
    let (_, metrics) = command(&lab, &["metrics"])?;
    ensure!(
        metrics.contains("\nunderpass_broken_networks 1\n"),
        "{metrics}"
    );
    let (doctored, said) = command(&lab, &["doctor"])?;
    ensure!(
        !doctored && said.contains("error: network-refused: "),
        "{said}"
    );
    for arguments in [&["apply"][..], &["gc", "--orphans"]] {
        let (succeeded, said) = command(&lab, arguments)?;
        ensure!(
            !succeeded && said.contains("10-lab.conflist"),
            "{arguments:?}: {said}"
        );
    }
    before.expect_same(&lab.node)?;
    warm.del()
}

/// What the same answers where nothing is wrong, be it with a pool that is exhausted: an ADD to that one fails for another reason.
#[rstest]
fn a_network_that_works_is_not_accused(#[values(true, false)] is_exhausted: bool) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = if is_exhausted {
        let one = [("rangeStart", "10.88.0.2"), ("rangeEnd", "10.88.0.2")];
        range(&lab, V4, &one)
    } else {
        lab.conf()
    };
    let conf = conf.with_ipam("resolvConf", "/run/resolv.conf");
    let conf = conf.with(
        "masqueradeAddress",
        json!([V4.node().to_string(), V6.node().to_string()]),
    );
    lab.node
        .netns()
        .run(|| fs::write("/run/resolv.conf", "nameserver 192.0.2.53\n"))?;
    put(&lab, &conf)?;
    let _pod = lab.pod_with("a", &conf)?;
    let (_, metrics) = command(&lab, &["metrics"])?;
    ensure!(
        metrics.contains("\nunderpass_broken_networks 0\n"),
        "{metrics}"
    );
    let (_, said) = command(&lab, &["doctor"])?;
    ensure!(!said.contains("network-refused"), "{said}");
    for arguments in [&["apply"][..], &["gc", "--orphans"]] {
        let (succeeded, said) = command(&lab, arguments)?;
        ensure!(succeeded, "{arguments:?}: {said}");
    }
    Ok(())
}
