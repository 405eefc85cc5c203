//! Every verb in every version, with real attachments.

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{leak::Traces, prelude::*, runtime::Call};

use crate::schema;

/// What a result must say of one address, whatever its version.
fn facts(version: &str, result: &Value, family: Family) -> Result<(String, String, Vec<Value>)> {
    let of_family = |text: &str| text.contains(':') == (family == V6);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if version < "0.3.0" {
        let key = match family {
            V4 => "ip4",
            V6 => "ip6",
        };
        let ip = &result[key];
        let routes = ip["routes"].as_array().cloned().unwrap_or_default();
        return Ok((text(&ip["ip"]), text(&ip["gateway"]), routes));
    }
    let ips = result["ips"].as_array().context("ips")?;
    let ip = ips
        .iter()
        .find(|ip| of_family(&text(&ip["address"])))
        .with_context(|| format!("no {family:?} address in {result}"))?;
    ensure!(ip["interface"] == 1, "{result}");
    let number = match family {
        V4 => "4",
        V6 => "6",
    };
    ensure!(version >= "1.0.0" || ip["version"] == number, "{result}");
    let routes = result["routes"].as_array().into_iter().flatten();
    let routes = routes.filter(|route| of_family(&text(&route["dst"])));
    Ok((
        text(&ip["address"]),
        text(&ip["gateway"]),
        routes.cloned().collect(),
    ))
}

#[rstest]
fn every_verb(
    #[values("", "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")] version: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = match version {
        // No version at all means the oldest.
        "" => lab.conf().with("cniVersion", Value::Null),
        version => lab.conf().with("cniVersion", version),
    };
    let conf = conf.with("mtu", 1400);
    let version = if version.is_empty() { "0.1.0" } else { version };
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;

    let pod = lab.pod_with("a", &conf)?;
    schema::validate(version, pod.result())?;
    for (family, address, gateway) in [
        (V4, "10.88.0.3/", "10.88.0.1"),
        (V6, "fd00:88::3/", "fd00:88::1"),
    ] {
        let (ip, gw, routes) = facts(version, pod.result(), family)?;
        ensure!(ip.starts_with(address) && gw == gateway, "{}", pod.result());
        ensure!(
            routes == [json!({ "dst": family.everywhere() })],
            "{}",
            pod.result()
        );
        ping::ping(pod.netns(), gateway.parse()?)?;
        ping::ping(pod.netns(), family.remote())?;
    }
    interfaces(version, &pod)?;

    let check = pod.call_with_result("CHECK").run(&lab.node)?;
    if version < "0.4.0" {
        let error = check.error()?;
        ensure!(
            error.code == 1 && error.msg == "config version does not allow CHECK",
            "{error}"
        );
    } else {
        check.silence()?;
    }
    for verb in ["GC", "STATUS"] {
        let valid = json!([{ "containerID": pod.name(), "ifname": Pod::IFNAME }]);
        let conf = conf.clone().with("cni.dev/valid-attachments", valid);
        let reply = Call::new(verb).conf(&conf).run(&lab.node)?;
        if version < "1.1.0" {
            let error = reply.error()?;
            let msg = format!("config version does not allow {verb}");
            ensure!(error.code == 1 && error.msg == msg, "{error}");
        } else {
            reply.silence()?;
        }
    }
    // Later runtimes send the result along, older ones do not.
    let del = if version < "0.4.0" {
        pod.call("DEL")
    } else {
        pod.call_with_result("DEL")
    };
    for _ in 0..2 {
        del.run(&lab.node)?.silence()?;
    }
    pod.abandon();
    before.expect_same(&lab.node)
}

fn interfaces(version: &str, pod: &Pod) -> Result<()> {
    let result = pod.result();
    let link = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
    ensure!(link[0]["mtu"] == 1400, "{link}");
    if version < "0.3.0" {
        return Ok(());
    }
    let interfaces = result["interfaces"].as_array().context("interfaces")?;
    ensure!(interfaces.len() == 2, "{result}");
    ensure!(
        interfaces[1]["mac"] == link[0]["address"],
        "{result} is not {link}"
    );
    for interface in interfaces {
        let mtu = interface.get("mtu");
        if version < "1.0.0" {
            ensure!(mtu.is_none(), "{result}");
        } else {
            ensure!(mtu == Some(&json!(1400)), "{result}");
        }
    }
    Ok(())
}

#[rstest]
fn results_of_one_family(
    #[values("0.1.0", "0.4.0", "1.1.0")] version: &str,
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let routes = Family::BOTH.map(|family| json!({ "dst": family.everywhere() }));
    let conf = lab
        .conf()
        .with("cniVersion", version)
        .with_ipam("ranges", json!([[{ "subnet": family.pods() }]]))
        .with_ipam("routes", json!(routes));
    let pod = lab.pod_with("a", &conf)?;
    schema::validate(version, pod.result())?;
    facts(version, pod.result(), family)?;
    let (other, key) = match family {
        V4 => (V6, "ip6"),
        V6 => (V4, "ip4"),
    };
    if version < "0.3.0" {
        // Routes of a family without address have no place.
        ensure!(pod.result().get(key).is_none(), "{}", pod.result());
    } else {
        ensure!(
            facts(version, pod.result(), other).is_err(),
            "{}",
            pod.result()
        );
    }
    ping::ping(pod.netns(), family.remote())
}

#[test]
fn a_result_that_an_old_version_has_no_words_for_is_no_attachment() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let call = |conf: &underpass_tests::runtime::Conf| {
        Call::new("ADD")
            .attachment("a", &netns.path().display().to_string(), Pod::IFNAME)
            .conf(conf)
            .run(&lab.node)
    };
    let conf = lab.conf().with("cniVersion", "0.2.0");
    let without = conf.clone().with("ipam", json!({}));
    let error = call(&without)?.error()?;
    ensure!(
        error.msg == "cannot convert: no valid IP addresses",
        "{error}"
    );
    before.expect_same(&lab.node)?;
    let two = json!([[{ "subnet": "10.88.0.0/24" }], [{ "subnet": "10.89.0.0/24" }]]);
    let error = call(&conf.with_ipam("ranges", two))?.error()?;
    ensure!(
        error.code == 7
            && error.msg == "CNI version 0.2.0 does not support more than 1 address per family",
        "{error}"
    );
    before.expect_same(&lab.node)
}

#[test]
fn a_previous_result_of_a_kindred_version_is_understood() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    for (version, others) in [
        ("0.4.0", &["0.3.0", "0.3.1"][..]),
        ("1.0.0", &["1.1.0"]),
        ("1.1.0", &["1.0.0"]),
    ] {
        let pod = lab.pod_with("a", &lab.conf().with("cniVersion", version))?;
        let with = |result: Value| {
            let conf = lab
                .conf()
                .with("cniVersion", version)
                .with("prevResult", result);
            pod.call("CHECK").conf(&conf).run(&lab.node)
        };
        for other in others {
            let mut result = pod.result().clone();
            result["cniVersion"] = json!(other);
            with(result)?.silence()?;
        }
        let mut result = pod.result().clone();
        // Its version is the config's if it says none, and keys have no case.
        result
            .as_object_mut()
            .context("a result")?
            .remove("cniVersion");
        with(result.clone())?.silence()?;
        result["CNIVersion"] = json!(version);
        with(result.clone())?.silence()?;
        result["CNIVersion"] = json!("0.2.0");
        let error = with(result)?.error()?;
        ensure!(
            error.code == 6 && error.msg.contains("result type supports"),
            "{error}"
        );
        pod.netns().unlink()?;
        pod.del()?;
    }
    Ok(())
}
