//! STATUS, as a runtime asks it beside containers.

use anyhow::{Result, ensure};
use underpass_tests::{Lab, needs_root, runtime::Call};

#[test]
fn status_says_whether_an_add_would_work() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let status = Call::new("STATUS").conf(&lab.conf());
    status.run(&lab.node)?.silence()?;
    let _pod = lab.pod("a")?;
    status.run(&lab.node)?.silence()?;
    let nowhere = lab.conf().with("bpfRoot", "/run/no-bpffs/underpass");
    let error = Call::new("STATUS").conf(&nowhere).run(&lab.node)?.error()?;
    // The container has no programs there.
    ensure!(error.code == 51, "{error}");
    Ok(())
}

#[test]
fn status_names_every_device_without_its_program() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let node = lab.node.netns();
    // A netkit has no filters. Those of so many veths are more than are asked for in one go.
    let conf = lab.conf().with("device", "veth");
    let pods = (0..40)
        .map(|number| lab.pod_with(&format!("pod{number}"), &conf))
        .collect::<Result<Vec<_>>>()?;
    let status = Call::new("STATUS").conf(&conf);
    status.run(&lab.node)?.silence()?;
    // The filters of this one go with it.
    node.delete_link(pods[13].host_veth())?;
    status.run(&lab.node)?.silence()?;
    let directions = ["ingress", "egress"].into_iter().cycle();
    for (pod, direction) in pods.iter().step_by(3).zip(directions) {
        node.take_filters_off(pod.host_veth(), direction)?;
    }
    let reply = status.run(&lab.node)?;
    reply.silence()?;
    for (number, pod) in pods.iter().enumerate() {
        let named = reply.stderr.contains(pod.host_veth());
        ensure!(
            named == number.is_multiple_of(3),
            "{number}: {}",
            reply.stderr
        );
    }
    Ok(())
}

/// It is well all the same.
#[test]
fn status_says_what_strict_connection_tracking_costs() -> Result<()> {
    const REMARK: &str = "nf_conntrack_tcp_be_liberal is 0";
    needs_root!();
    let lab = Lab::new()?;
    let _pod = lab.pod("a")?;
    let status = Call::new("STATUS").conf(&lab.conf());
    let strict = status.run(&lab.node)?;
    strict.silence()?;
    ensure!(strict.stderr.contains(REMARK), "{}", strict.stderr);
    lab.firewall.set_liberal(true)?;
    let liberal = status.run(&lab.node)?;
    liberal.silence()?;
    ensure!(!liberal.stderr.contains(REMARK), "{}", liberal.stderr);
    Ok(())
}
