//! `underpass metrics`: text as `OpenMetrics` has it, with what really happened on the node.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::bail;
use rstest::rstest;
use serde_json::json;
use underpass_tests::{counter::Counters, prelude::*};

use crate::net_dir::{self, NET_DIR};

const PORT: u16 = 443;
const HOST: u16 = 8080;
const INSIDE: u16 = 80;
const METRICS: [&str; 3] = ["metrics", "--net-dir", NET_DIR];

/// The samples of a text that is as the format asks for, by name and labels as they are written.
struct Samples(BTreeMap<String, String>);

impl Samples {
    fn of(lab: &Lab) -> Result<Self> {
        let text = lab.node.underpass(&METRICS)?;
        Self::parse(&text).with_context(|| text.clone())
    }

    fn parse(text: &str) -> Result<Self> {
        let body = text.strip_suffix("# EOF\n").context("no end")?;
        let mut samples = BTreeMap::new();
        let mut families = BTreeSet::new();
        let (mut family, mut suffix, mut has_help) = (String::new(), "", true);
        for line in body.lines() {
            let mut words = line.splitn(4, ' ');
            match [words.next(), words.next(), words.next()] {
                [Some("#"), Some("TYPE"), Some(name)] => {
                    ensure!(has_help, "{family} has no HELP");
                    ensure!(families.insert(name.to_owned()), "{name} comes twice");
                    suffix = match words.next() {
                        Some("gauge") => "",
                        Some("counter") => "_total",
                        Some("info") => "_info",
                        other => bail!("{name} has the type {other:?}"),
                    };
                    name.clone_into(&mut family);
                    has_help = false;
                }
                [Some("#"), Some("HELP"), Some(name)] => {
                    ensure!(name == family, "HELP of {name} in {family}");
                    has_help = words.next().is_some_and(|help| help.ends_with('.'));
                }
                [Some("#"), Some("UNIT"), Some(name)] => {
                    let unit = words.next().context("no unit")?;
                    ensure!(name == family && name.ends_with(&format!("_{unit}")));
                }
                _ => {
                    let (key, value) = line.rsplit_once(' ').context("no value")?;
                    let name = key.split('{').next().unwrap_or_default();
                    ensure!(name == format!("{family}{suffix}"), "{line} in {family}");
                    value.parse::<f64>().with_context(|| line.to_owned())?;
                    let double = samples.insert(key.to_owned(), value.to_owned());
                    ensure!(double.is_none(), "{key} comes twice");
                }
            }
        }
        ensure!(has_help, "{family} has no HELP");
        Ok(Self(samples))
    }

    fn text(&self, key: &str) -> Result<&str> {
        let value = self.0.get(key).with_context(|| format!("no {key}"))?;
        Ok(value)
    }

    fn get(&self, key: &str) -> Result<u64> {
        let value = self.text(key)?;
        value.parse().with_context(|| format!("{key} is {value}"))
    }

    fn expect(&self, expected: &[(&str, u64)]) -> Result<()> {
        for (key, value) in expected {
            let found = self.get(key)?;
            ensure!(found == *value, "{key} is {found}, not {value}");
        }
        Ok(())
    }
}

#[test]
fn where_nothing_is_loaded_it_says_so() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    // One that was mistyped would look like this.
    let error = lab.node.underpass_error(&METRICS)?;
    ensure!(
        error.contains(NET_DIR) && error.contains("--net-dir"),
        "{error}"
    );
    lab.node.netns().run(|| fs::create_dir_all(NET_DIR))?;
    let empty = Samples::of(&lab)?;
    empty.expect(&[("underpass_loaded", 0), ("underpass_broken_networks", 0)])?;
    ensure!(!empty.0.contains_key("underpass_attachments"));
    // It loads nothing either.
    let bpf_root = lab.node.bpf_root();
    ensure!(!lab.node.netns().run(|| bpf_root.exists()));
    // The folder of leases is there all the same.
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let pool = r#"underpass_pool_addresses{network="lab",pool="10.88.0.1-10.88.0.254"}"#;
    Samples::of(&lab)?.expect(&[(pool, 253)])
}

#[rstest]
fn what_happens_is_counted(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let _other = lab.pod("other")?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(HOST, INSIDE))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.chat(20)?;
    let counters = Counters::read(&lab.node)?;
    let samples = Samples::of(&lab)?;
    let (name, other) = match family {
        V4 => ("ipv4", "ipv6"),
        V6 => ("ipv6", "ipv4"),
    };
    samples.expect(&[
        ("underpass_loaded", 1),
        ("underpass_other_build_loaded", 0),
        ("underpass_left_behind", 0),
        ("underpass_attachments", 2),
        (r#"underpass_endpoints{family="ipv4"}"#, 2),
        (r#"underpass_endpoints{family="ipv6"}"#, 2),
        (r#"underpass_host_ports{state="serving"}"#, 4),
        (r#"underpass_host_ports{state="waiting"}"#, 0),
        ("underpass_uplinks", 1),
        (r#"underpass_uplink_missing_programs{device="eth0"}"#, 0),
        (
            r#"underpass_pool_addresses_in_use{network="lab",pool="10.88.0.1-10.88.0.254"}"#,
            2,
        ),
    ])?;
    // A masqueraded flow has two entries.
    let flows =
        |family: &str, path: &str| format!("underpass_flows{{family={family:?},path={path:?}}}");
    let bypassed = samples.get(&flows(name, "bypass"))?;
    ensure!(bypassed == 2, "{bypassed} flows of {name}");
    samples.expect(&[(&flows(other, "bypass"), 0)])?;
    for family in ["ipv4", "ipv6"] {
        let room = format!("underpass_flow_table_entries{{family={family:?}}}");
        ensure!(samples.get(&room)? >= 1024);
    }
    for counter in Counter::ALL {
        let name = counter.name();
        let key = match name.strip_prefix("drop_") {
            Some(reason) => format!("underpass_drops_total{{reason={reason:?}}}"),
            None => format!("underpass_packets_total{{event={name:?}}}"),
        };
        let now = samples.get(&key)?;
        ensure!(now >= counters.get(*counter), "{key} is {now}");
    }
    let past = samples.get(r#"underpass_bypass_packets_total{path="bypass"}"#)?;
    ensure!(past >= counters.bypassed() && past >= 20, "{past}");
    samples.get(r#"underpass_bypass_packets_total{path="stack"}"#)?;
    let link: f64 = samples
        .text(r#"underpass_last_add_seconds{step="link"}"#)?
        .parse()?;
    let whole: f64 = samples
        .text("underpass_last_add_duration_seconds")?
        .parse()?;
    ensure!(0.0 < link && link < whole && whole < 60.0, "{link} {whole}");
    let build = samples
        .0
        .keys()
        .any(|key| key.starts_with("underpass_build_info{version="));
    ensure!(build);
    let uplink = samples
        .0
        .keys()
        .find(|key| key.starts_with("underpass_uplink_info{"));
    let uplink = uplink.context("no uplink")?;
    let address = format!("{name}=\"{}\"", family.node());
    ensure!(uplink.contains(&address), "{uplink}");
    Ok(())
}

#[rstest]
fn what_is_wrong_is_counted(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let name = "a\"b";
    let odd = lab.conf().with("name", name);
    net_dir::write(&lab.node, "10-broken.conflist", "{")?;
    let ranges = json!([[{ "subnet": family.pods(), "rangeStart": family.pod_gateway(), "rangeEnd": family.pod_gateway() }]]);
    net_dir::put(
        &lab.node,
        "20-full.conflist",
        &lab.conf().with("name", "full").with_ipam("ranges", ranges),
    )?;
    let pod = lab.pod("a")?;
    let node = lab.node.netns();
    node.take_filters_off(Node::UPLINK, "egress")?;
    let samples = Samples::of(&lab)?;
    let full = format!("{0}-{0}", family.pod_gateway());
    samples.expect(&[
        ("underpass_broken_networks", 1),
        (r#"underpass_uplink_missing_programs{device="eth0"}"#, 1),
        (
            &format!("underpass_pool_addresses{{network=\"full\",pool={full:?}}}"),
            0,
        ),
    ])?;
    // A name that no ADD takes counts as broken, and breaks no label.
    net_dir::put(&lab.node, "30-odd.conflist", &odd)?;
    let samples = Samples::of(&lab)?;
    samples.expect(&[("underpass_broken_networks", 2)])?;
    node.run(|| fs::remove_file(Path::new(NET_DIR).join("10-broken.conflist")))?;
    lab.node
        .netns()
        .run(|| fs::remove_dir_all(lab.node.bpf_root()))?;
    let samples = Samples::of(&lab)?;
    samples.expect(&[("underpass_loaded", 0), ("underpass_left_behind", 1)])?;
    pod.del()
}
