//! Faults by which packets are lost: the firewall, forwarding, programs of others, and sizes.

use std::process::Command;

use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, tc::TcAttachOptions};
use rstest::rstest;
use underpass_tests::{
    counter::pins,
    prelude::*,
    second::{Kind, Second},
    wire::Wire,
};

use super::{ask, lab, open_lab};

/// It is found as soon as a network has such a range, and with each container; and what the doctor says mends it.
#[rstest]
fn a_firewall_that_drops_is_found_and_mended(
    #[values(V4, V6)] family: Family,
    #[values("nft", "iptables")] by: &str,
) -> Result<()> {
    needs_root!();
    let lab = open_lab()?;
    let shell = |line: &str| {
        let mut shell = Command::new("sh");
        let node = lab.node.netns();
        node.expect(shell.args(["-ec", line]), &[]).map(drop)
    };
    let (table, iptables) = match family {
        V4 => ("ip", "iptables"),
        V6 => ("ip6", "ip6tables"),
    };
    // As Docker does, for its own containers alone.
    let program = if by == "nft" {
        shell(&format!(
            "nft 'add table {table} t; add chain {table} t f {{ type filter hook forward priority 0; policy drop; }}; \
             add rule {table} t f iifname \"docker0\" accept'"
        ))?;
        by
    } else {
        shell(&format!(
            "{iptables} -P FORWARD DROP && {iptables} -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
        ))?;
        iptables
    };
    ask(&lab)?.expect(&["forward-policy"])?;
    let pod = lab.pod("a")?;
    let said = ask(&lab)?;
    said.expect(&["forward-policy"])?;
    said.expect_words(&["may drop", program, &pod.ip(family).to_string()])?;
    ensure!(ping::ping(pod.netns(), family.remote()).is_err());
    let commands = said.first("fix").split(';').next().unwrap_or_default();
    shell(commands)?;
    ask(&lab)?.expect(&[])?;
    ping::ping(pod.netns(), family.remote())
}

#[rstest]
fn forwarding_that_is_off_is_found(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let (path, sysctl) = match family {
        V4 => ("net/ipv4/ip_forward", "net.ipv4.ip_forward"),
        V6 => (
            "net/ipv6/conf/all/forwarding",
            "net.ipv6.conf.all.forwarding",
        ),
    };
    let node = lab.node.netns();
    // The first ADD switches it on.
    node.set_sysctl(path, "0")?;
    ask(&lab)?.expect(&[])?;
    let _pod = lab.pod("a")?;
    ask(&lab)?.expect(&[])?;
    node.set_sysctl(path, "0")?;
    let said = ask(&lab)?;
    said.expect(&["forwarding-off"])?;
    said.expect_words(&[&format!("sysctl -w {sysctl}=1")])?;
    node.set_sysctl(path, "1")?;
    ask(&lab)?.expect(&[])
}

/// As a program of another plugin would be put there: an ordinary filter that accepts, and one behind ours.
#[rstest]
fn a_filter_before_ours_is_found(#[values("ingress", "egress")] direction: &str) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod_with("a", &lab.conf().with("device", "veth"))?;
    let filter = |what: &str, device: &str, priority: &str| {
        let mut tc = Command::new("tc");
        tc.args(["filter", what, "dev", device, direction, "protocol", "all"]);
        tc.args(["prio", priority, "bpf"]);
        if what == "add" {
            // A program of one instruction: return 0.
            tc.args(["bytecode", "1,6 0 0 0,", "flowid", "1:1"]);
        }
        lab.node.netns().expect(&mut tc, &[]).map(drop)
    };
    for device in [pod.host_veth(), Node::UPLINK] {
        filter("add", device, "65000")?;
        ask(&lab)?.expect(&[])?;
        filter("add", device, "1")?;
        let said = ask(&lab)?;
        said.expect(&["foreign-filter"])?;
        said.expect_words(&[device, direction, "bpf at priority 1"])?;
        filter("delete", device, "1")?;
        ask(&lab)?.expect(&[])?;
    }
    Ok(())
}

/// Programs at tcx are asked before all filters.
#[rstest]
fn a_program_at_tcx_is_found(
    #[values(TcAttachType::Ingress, TcAttachType::Egress)] side: TcAttachType,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod("a")?;
    let pin = pins(&lab.node).join("programs/to_wire");
    let attached = lab.node.netns().run(|| -> Result<_> {
        let mut program = SchedClassifier::from_pin(&pin)?;
        let order = TcAttachOptions::TcxOrder(LinkOrder::default());
        let attached = program.attach_with_options(Node::UPLINK, side, order);
        Ok(attached.is_ok().then_some(program))
    })?;
    // It goes with the handle.
    let Some(program) = attached else {
        anstream::eprintln!("not on this kernel: tcx, which came with Linux 6.6");
        return Ok(());
    };
    let said = ask(&lab)?;
    said.expect(&["foreign-filter"])?;
    said.expect_words(&[Node::UPLINK, "1 program at tcx"])?;
    drop(program);
    ask(&lab)?.expect(&[])
}

#[test]
fn a_container_larger_than_its_way_out_is_found() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    lab.node.netns().set_mtu(Node::UPLINK, 1400)?;
    // Its entry is as it was until the next ADD, which is of no matter here.
    let said = ask(&lab)?;
    said.expect(&["mtu"])?;
    said.expect_words(&[pod.host_veth(), "(1500)", "\"mtu\": 1400"])?;
    lab.node.netns().set_mtu(Node::UPLINK, 9000)?;
    ask(&lab)?.expect(&[])
}

/// A strict filter of reverse paths is no finding, and with one uplink not even a hint.
#[test]
fn a_strict_reverse_path_between_uplinks_is_a_hint() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    lab.node
        .netns()
        .set_sysctl("net/ipv4/conf/all/rp_filter", "1")?;
    let _pod = lab.pod("a")?;
    let said = ask(&lab)?;
    said.expect(&[])?;
    ensure!(
        !said.ids("hints").contains(&"rp-filter-strict"),
        "{said:#?}"
    );
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let _pod = lab.pod("b")?;
    let said = ask(&lab)?;
    said.expect(&[])?;
    ensure!(said.ids("hints").contains(&"rp-filter-strict"), "{said:#?}");
    Ok(())
}
