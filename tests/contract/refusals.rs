//! What the kernel, the disk or a person's command refuses: the message says what it was, and what to do.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
};

use nix::mount::{MsFlags, mount};
use rstest::rstest;
use serde_json::json;
use underpass_abi::map;
use underpass_tests::{
    counter::map_pin,
    leak::Traces,
    netns::Netns,
    node::plugin,
    prelude::*,
    privilege::Capability::{self, Bpf, NetAdmin, Perfmon, SysAdmin},
    runtime::{Call, CniError, Conf},
};

/// Longer messages are shortened.
const LENGTH_MAX: usize = 1024;
const NONE: Option<&str> = None;

fn call(netns: &Netns, verb: &str, conf: &Conf) -> Call {
    Call::new(verb)
        .attachment("a", &netns.path().display().to_string(), Pod::IFNAME)
        .conf(conf)
}

/// What an ADD says that must fail, on a node that lacks nothing else.
fn add(lab: &Lab, conf: &Conf) -> Result<CniError> {
    let netns = lab.node.netns().sibling("a")?;
    let error = call(&netns, "ADD", conf).run(&lab.node)?.error()?;
    netns.unlink()?;
    Ok(error)
}

/// The same without some capabilities, and what it logs.
fn add_without(lab: &Lab, dropped: &[Capability]) -> Result<(CniError, String)> {
    let netns = lab.node.netns().sibling("a")?;
    let reply = call(&netns, "ADD", &lab.conf()).run_without(&lab.node, dropped)?;
    Ok((reply.error()?, reply.stderr))
}

fn expect(error: &CniError, code: u64, words: &[&str]) -> Result<()> {
    let text = error.to_string();
    for word in words {
        ensure!(
            error.code == code && text.contains(word),
            "expected code {code} and {word:?}: {error}"
        );
    }
    ensure!(
        error.msg.len() + error.details.len() <= LENGTH_MAX,
        "{error}"
    );
    Ok(())
}

/// What can't be taken away is named, and what can goes; once it can be, another DEL takes the rest.
#[test]
fn a_del_goes_on_past_ports_that_it_cannot_see() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(8080, 80))?;
    let pin = map_pin(&lab.node, map::PORTS);
    let aside = pin.with_file_name("aside");
    lab.node.netns().run(|| fs::rename(&pin, &aside))?;
    let error = pod.call("DEL").run(&lab.node)?.error()?;
    expect(&error, 5, &["PORTS"])?;
    let veth = pod.host_veth();
    ensure!(lab.node.netns().ifindex(veth).is_err(), "{veth} is there");
    lab.node.netns().run(|| fs::rename(&aside, &pin))?;
    pod.del()?;
    let status = lab.node.underpass(&["status", "--json"])?;
    ensure!(!status.contains("8080"), "{status}");
    Ok(())
}

/// Nobody opens the other end of a FIFO.
#[rstest]
fn a_namespace_that_is_a_fifo(#[values("underpass", "loopback")] kind: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU)?;
    let path = path.display().to_string();
    let conf = lab.conf().with("type", kind);
    let call = |verb| {
        Call::new(verb)
            .attachment("a", &path, Pod::IFNAME)
            .conf(&conf)
    };
    let error = call("ADD").run(&lab.node)?.error()?;
    expect(&error, 8, &["is not a namespace"])?;
    call("DEL").run(&lab.node)?.silence()
}

/// The network of one family.
fn of(lab: &Lab, family: Family) -> Conf {
    lab.conf()
        .with_ipam("ranges", json!([[{ "subnet": family.pods() }]]))
        .with_ipam("routes", json!([{ "dst": family.everywhere() }]))
}

/// Makes what is mounted at a path of the node read-only, for the node alone.
fn write_protect(node: &Node, path: &Path) -> Result<()> {
    node.netns().run(|| {
        mount(Some(path), path, NONE, MsFlags::MS_BIND, NONE)?;
        let again = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(NONE, path, NONE, again, NONE)
    })?;
    Ok(())
}

/// The verifier lets nobody without `CAP_PERFMON` compute with pointers as the programs do.
#[test]
fn a_program_that_the_verifier_refuses() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let before = Traces::of(&lab.node)?;
    let (error, stderr) = add_without(&lab, &[SysAdmin, Perfmon])?;
    expect(
        &error,
        5,
        &[
            "program ",
            ": the kernel refused to load it: Permission denied (os error 13): ",
            "CAP_PERFMON",
            "uname -r",
            "all of it is on stderr",
        ],
    )?;
    // The last lines are those that say why.
    let log = stderr.trim_end();
    ensure!(log.len() > LENGTH_MAX, "not the whole of it: {log}");
    let last = log.lines().rev().take(2).collect::<Vec<_>>();
    for line in last {
        ensure!(error.msg.contains(line), "{line:?} is missing: {error}");
    }
    // The lock of the folder has made it.
    lab.node
        .netns()
        .run(|| fs::remove_dir(lab.node.bpf_root()))
        .ok();
    before.expect_same(&lab.node)
}

#[rstest]
#[case(&[NetAdmin], 999, &["cannot create the veth pair ", "Operation not permitted", "CAP_NET_ADMIN"])]
#[case(&[SysAdmin], 8, &["cannot enter the network namespace \"/run/netns/a\"", "CAP_SYS_ADMIN"])]
fn an_add_that_may_not_do_all(
    #[case] dropped: &[Capability],
    #[case] code: u64,
    #[case] words: &[&str],
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let before = Traces::of(&lab.node)?;
    let (error, _) = add_without(&lab, dropped)?;
    expect(&error, code, words)?;
    before.expect_same(&lab.node)
}

#[test]
fn a_first_add_that_may_not_use_bpf() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let (error, _) = add_without(&lab, &[SysAdmin, Bpf])?;
    expect(
        &error,
        5,
        &[
            "Operation not permitted (os error 1): ",
            "as root",
            "CAP_BPF",
        ],
    )
}

#[rstest]
#[case(V4, "/proc/sys/net/ipv4/ip_forward")]
#[case(V6, "/proc/sys/net/ipv6/conf/")]
fn settings_that_cannot_be_made(#[case] family: Family, #[case] path: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        lab.node.netns().set_sysctl(key, "0")?;
    }
    let before = Traces::of(&lab.node)?;
    let conf = of(&lab, family);
    let netns = lab.node.netns().sibling("a")?;
    write_protect(&lab.node, Path::new("/proc/sys"))?;
    let error = call(&netns, "ADD", &conf).run(&lab.node)?.error()?;
    expect(
        &error,
        5,
        &[
            &format!("cannot set {path}"),
            "Read-only file system",
            "it has to be 1; make /proc/sys writable",
        ],
    )?;
    before.expect_same(&lab.node)
}

/// The host's end takes no router advertisement if nobody can say so to the kernel: the programs drop them.
#[rstest]
fn what_can_stay_of_settings_stays_where_the_programs_filter(
    #[values(true, false)] anti_spoof: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = of(&lab, V4).with("antiSpoof", anti_spoof);
    // Forwarding is on from here.
    lab.pod_with("warm", &conf)?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    write_protect(&lab.node, Path::new("/proc/sys"))?;
    let reply = call(&netns, "ADD", &conf).run(&lab.node)?;
    if anti_spoof {
        reply.result()?;
        ensure!(
            reply.stderr.contains("/accept_ra: Read-only file system"),
            "{}",
            reply.stderr
        );
        ping::ping(&netns, V4.remote())?;
        call(&netns, "DEL", &conf).run(&lab.node)?.silence()?;
    } else {
        let words = [
            "/accept_ra: Read-only file system",
            "make /proc/sys writable",
        ];
        expect(&reply.error()?, 5, &words)?;
    }
    before.expect_same(&lab.node)
}

#[test]
fn pins_that_cannot_be_made() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let dotted = lab.conf().with("bpfRoot", "/sys/fs/bpf/a.b");
    let words = [" /sys/fs/bpf/a.b", "no names with a dot"];
    expect(&add(&lab, &dotted)?, 5, &words)?;
    let status = Call::new("STATUS").conf(&dotted).run(&lab.node)?;
    expect(&status.error()?, 50, &words)?;
    let lab = Lab::unloaded()?;
    write_protect(&lab.node, Path::new("/sys/fs/bpf"))?;
    let error = add(&lab, &lab.conf())?;
    expect(
        &error,
        5,
        &[
            "cannot create /sys/fs/bpf/",
            "Read-only file system",
            "writable",
        ],
    )?;
    let lab = Lab::unloaded()?;
    lab.node
        .netns()
        .run(|| fs::write("/run/underpass", "no folder"))?;
    let error = add(&lab, &lab.conf())?;
    expect(
        &error,
        5,
        &[
            "cannot create /run/underpass: ",
            "no folder is in its place",
        ],
    )
}

#[test]
fn pins_that_somebody_has_removed() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    lab.node.underpass(&["load"])?;
    let pin = map_pin(&lab.node, map::OWNERS);
    lab.node.netns().run(|| fs::remove_file(pin))?;
    let words = [
        "map OWNERS: ",
        "No such file or directory (os error 2): ",
        "rm -r",
    ];
    let netns = lab.node.netns().sibling("a")?;
    for (verb, code) in [("ADD", 5), ("DEL", 5), ("STATUS", 50)] {
        let error = call(&netns, verb, &lab.conf()).run(&lab.node)?.error();
        expect(&error?, code, &words)?;
    }
    let said = lab.node.underpass_error(&["status"])?;
    ensure!(words.iter().all(|word| said.contains(word)), "{said}");
    Ok(())
}

/// What the folder of leases has in the place of something else.
#[rstest]
#[case("lab", "no folder is in its place; remove it")]
#[case("lab/lock/", "a folder is in the place of that file; remove it")]
#[case(
    "lab/last_reserved_ip.0/",
    "a folder is in the place of that file; remove it"
)]
fn leases_that_cannot_be_written(#[case] file: &str, #[case] words: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    let data_dir = lab.node.data_dir().with_file_name("others");
    let path = data_dir.join(file);
    lab.node.netns().run(|| {
        if file.ends_with('/') {
            return fs::create_dir_all(&path);
        }
        fs::create_dir_all(&data_dir)?;
        fs::write(&path, "no folder")
    })?;
    let before = Traces::of(&lab.node)?;
    let shown = path.display().to_string();
    for family in Family::BOTH {
        let conf = of(&lab, family).with_ipam("dataDir", data_dir.display().to_string());
        let error = add(&lab, &conf)?;
        expect(&error, 5, &[shown.trim_end_matches('/'), words])?;
    }
    before.expect_same(&lab.node)
}

#[test]
fn names_that_are_too_long_for_the_disk() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let error = add(&lab, &lab.conf().with("name", "n".repeat(300)))?;
    expect(
        &error,
        5,
        &[
            "name too long (os error 36)",
            "shorten ipam.dataDir or the network's name",
        ],
    )
}

#[test]
fn a_person_who_may_not_look() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("warm")?.del()?;
    for verb in ["flows", "trace", "unload"] {
        let mut command = Command::new(plugin());
        command.env_clear().arg(verb).uid(65_534).gid(65_534);
        let output = lab.node.netns().output(&mut command, &[])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success()
                && said.contains("Permission denied (os error 13): run it as root"),
            "{verb}: {said}"
        );
    }
    Ok(())
}

#[rstest]
#[case(&["trace", "--level", "loud"], 2, "it must be one of off, error, warn, info, debug, trace")]
#[case(&["--bpf-root", "bpf", "status"], 2, "it must be an absolute path")]
#[case(&["--bpf-root", "/sys/fs/bpf/nobody", "flows"], 1, "`underpass load` loads them; name the folder with --bpf-root")]
#[case(&["--bpf-root", "/sys/fs/bpf/nobody", "trace"], 1, "`underpass load` loads them; name the folder with --bpf-root")]
fn commands_that_ask_for_nothing_there_is(
    #[case] arguments: &[&str],
    #[case] code: i32,
    #[case] words: &str,
) -> Result<()> {
    let output = Command::new(plugin())
        .env_clear()
        .args(arguments)
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(code) && said.contains(words),
        "{said}"
    );
    Ok(())
}

#[test]
fn one_container_is_no_containers() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _one = lab.pod("a")?;
    let said = lab.node.underpass_error(&["unload"])?;
    ensure!(said.contains("1 container is attached: "), "{said}");
    let _two = lab.pod("b")?;
    let said = lab.node.underpass_error(&["unload"])?;
    ensure!(said.contains("2 containers are attached: "), "{said}");
    Ok(())
}

#[rstest]
fn a_gateway_that_is_the_address_itself(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let own = family.unused_pod();
    let bits = if family == V4 { 24 } else { 64 };
    let ipam = json!({ "type": "static", "addresses": [{ "address": format!("{own}/{bits}"), "gateway": own }] });
    let conf = lab.conf().with("cniVersion", "1.0.0").with("ipam", ipam);
    let words = [
        format!("invalid gateway {own}"),
        "that address itself".to_owned(),
    ];
    expect(&add(&lab, &conf)?, 7, &words.each_ref().map(String::as_str))
}

/// Neither the addresses nor whose they were.
#[test]
fn a_failed_add_leaves_nothing_where_leases_are() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let owners = lab
        .node
        .data_dir()
        .join(".underpass")
        .join(lab.conf().name());
    let noted = || -> Result<usize> {
        let count = || fs::read_dir(owners.join("owner")).map(Iterator::count);
        Ok(lab.node.netns().run(count)?)
    };
    ensure!(noted()? == 0);
    // The kernel has no IPv6 below 1280.
    add(&lab, &lab.conf().with("mtu", 1000))?;
    ensure!(noted()? == 0, "the owner is still noted");
    Ok(())
}
