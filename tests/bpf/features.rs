//! Whether the plugin knows what the running kernel can do: a helper that is given a flag it does not
//! know answers `EINVAL`.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use underpass_tests::{
    Lab,
    frame::Ends,
    needs_root,
    program::{FRAME, Instruction, pin},
    test_run::Bench,
};

const EINVAL: i32 = -22;

/// `bpf_l4_csum_replace(skb, 50, 0, 0, flags)`.
fn l4_csum_replace(flags: i32) -> Vec<Instruction> {
    vec![
        Instruction::set(2, 50),
        Instruction::set(3, 0),
        Instruction::set(4, 0),
        Instruction::set(5, flags),
        Instruction::call(11),
        Instruction::EXIT,
    ]
}

/// `bpf_fib_lookup(skb, params, 64, flags)` for 0.0.0.0 by the loopback device.
fn fib_lookup(flags: i32) -> Vec<Instruction> {
    /// `AF_INET` in the first byte; everything else is zero.
    const FAMILY: i32 = 2;
    let mut program: Vec<_> = (1..8)
        .map(|word| Instruction::store(-8 * word, 0))
        .collect();
    program.extend([
        Instruction::store(-64, FAMILY),
        Instruction::copy(2, FRAME),
        Instruction::add(2, -64),
        Instruction::set(3, 64),
        Instruction::set(4, flags),
        Instruction::call(69),
        Instruction::EXIT,
    ]);
    program
}

#[test]
fn the_plugin_knows_what_the_kernel_can_do() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("pod")?;
    let status = lab.node.underpass(&["status", "--json"])?;
    let status: Value = serde_json::from_str(&status).context("the status is no JSON")?;
    let features = status["features"].as_array().context("no features")?;
    // With a flag that no kernel knows the probes must fail, with none they must not: else they prove nothing.
    let unknown = 1 << 30;
    for (name, probe, flag) in [
        ("BPF_FIB_LOOKUP_SRC", fib_lookup as fn(i32) -> _, 1 << 4),
        ("BPF_F_IPV6", l4_csum_replace, 1 << 7),
    ] {
        let answer = |flags: i32, file: &str| -> Result<bool> {
            let path = Path::new("/sys/fs/bpf").join(file);
            lab.node.netns().run(|| pin(&probe(flags), &path))?;
            let bench = Bench::of(&lab.node, &path, pod.host_veth())?;
            let ends = Ends {
                src_mac: [2; 6],
                dst_mac: [4; 6],
                src: "2001:db8::1".parse()?,
                dst: "2001:db8::2".parse()?,
            };
            Ok(bench.run(&ends.udp(1, 2, &[0; 64]))?.action != EINVAL)
        };
        ensure!(
            answer(0, &format!("{name}-none"))?,
            "{name}: the probe fails by itself"
        );
        ensure!(
            !answer(unknown, &format!("{name}-unknown"))?,
            "{name}: the kernel takes any flag"
        );
        let is_there = answer(flag, &format!("{name}-flag"))?;
        let told = features
            .iter()
            .find(|feature| feature["name"] == name)
            .with_context(|| format!("the status does not name {name}"))?;
        ensure!(
            told["present"] == is_there,
            "{name}: the kernel has it: {is_there}; the status says {told}"
        );
    }
    pod.del()
}
