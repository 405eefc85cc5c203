//! Leases through the whole plugin: across reboots, on unusual mounts, and where the disk refuses.

use std::{collections::BTreeSet, fs, net::IpAddr, path::Path};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
};
use rstest::rstest;
use serde_json::json;
use underpass_tests::{leak::Traces, prelude::*, runtime::Call};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NEW_ID: &str = "/proc/sys/kernel/random/uuid";
/// What the node believes, in its own `/run`.
const BOOT: &str = "/run/boot_id";

/// Mounts something that only the node sees.
fn mount_on(
    lab: &Lab,
    source: &str,
    target: &Path,
    kind: Option<&str>,
    flags: MsFlags,
) -> Result<()> {
    lab.node
        .netns()
        .run(|| mount(Some(source), target, kind, flags, None::<&str>))
        .with_context(|| format!("mount {source} on {}", target.display()))
}

/// A node that can be told that it booted, and that knows which machine it is.
fn bootable() -> Result<Lab> {
    let lab = Lab::new()?;
    boot(&lab)?;
    mount_on(&lab, BOOT, Path::new(BOOT_ID), None, MsFlags::MS_BIND)?;
    // There may be none on this machine, and none should be made.
    mount_on(
        &lab,
        "etc",
        Path::new("/etc"),
        Some("tmpfs"),
        MsFlags::empty(),
    )?;
    let machine = "0123456789abcdef0123456789abcdef\n";
    lab.node
        .netns()
        .run(|| fs::write("/etc/machine-id", machine))?;
    Ok(lab)
}

/// Names another boot of the node's kernel.
fn boot(lab: &Lab) -> Result<()> {
    let copied = || fs::write(BOOT, fs::read_to_string(NEW_ID)?);
    lab.node.netns().run(copied).context("name another boot")
}

/// What a reboot leaves of a node with these pods: the disk.
fn reboot(lab: &Lab, pods: &mut Vec<Pod>) -> Result<()> {
    pods.drain(..).try_for_each(lose)?;
    lab.node.underpass(&["unload", "--force"])?;
    boot(lab)
}

/// A container that is gone as after a reboot: without a DEL.
fn lose(pod: Pod) -> Result<()> {
    pod.netns().delete_link(Pod::IFNAME)?;
    pod.netns().unlink()?;
    pod.abandon();
    Ok(())
}

/// The addresses that are leased, by their files.
fn leases(lab: &Lab) -> Result<BTreeSet<String>> {
    let folder = lab.node.data_dir().join(lab.conf().name());
    let entries = lab
        .node
        .netns()
        .run(|| fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>())?;
    let names = entries
        .iter()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names
        .filter(|name| name.parse::<IpAddr>().is_ok())
        .collect())
}

#[test]
fn reboots_without_a_del_use_no_address_up_and_the_same_container_comes_back() -> Result<()> {
    needs_root!();
    let lab = bootable()?;
    // Three can be leased of each.
    let ranges = json!([[{ "subnet": "10.88.0.0/29", "rangeEnd": "10.88.0.4" }], [{ "subnet": "fd00:88::/64", "rangeEnd": "fd00:88::4" }]]);
    let conf = lab.conf().with_ipam("ranges", ranges);
    let (mut gone, first) = (Vec::new(), lab.pod_with("same", &conf)?);
    gone.push(first);
    for round in 0..4 {
        gone.push(lab.pod_with(&format!("other{round}"), &conf)?);
        ensure!(leases(&lab)?.len() == 4, "two containers, of both families");
        reboot(&lab, &mut gone)?;
        Call::new("STATUS").conf(&conf).run(&lab.node)?.silence()?;
        let same = lab.pod_with("same", &conf)?;
        for family in [V4, V6] {
            ping::ping(same.netns(), family.remote())?;
        }
        gone.push(same);
    }
    for pod in gone {
        pod.del()?;
    }
    ensure!(leases(&lab)?.is_empty());
    Ok(())
}

#[test]
fn a_note_of_an_operator_and_what_lives_since_the_boot_stay() -> Result<()> {
    needs_root!();
    let lab = bootable()?;
    let write = |name: &str, content: &str| {
        let path = lab.node.data_dir().join(lab.conf().name()).join(name);
        lab.node.netns().run(|| fs::write(path, content))
    };
    let before = lab.pod("before")?;
    let notes = ["10.88.0.77", "fd00:88::77"];
    for ip in notes {
        write(ip, "reserved for the printer\n")?;
    }
    lab.pod("learns")?.del()?;
    lose(before)?;
    boot(&lab)?;
    write("10.88.0.78", "another\r\neth0")?;
    let pods = ["a", "b"].map(|name| lab.pod(name));
    let during = leases(&lab)?;
    ensure!(during.len() == 3 + 4, "{during:?}");
    for pod in pods {
        pod?.del()?;
    }
    let after = leases(&lab)?;
    ensure!(
        after
            == ["10.88.0.77", "10.88.0.78", "fd00:88::77"]
                .map(str::to_owned)
                .into(),
        "{after:?}"
    );
    Ok(())
}

/// Mounts on a folder what shows another place, or the same one. False if this kernel has no such mounts.
fn mount_over(lab: &Lab, folder: &Path, kind: &str) -> Result<bool> {
    lab.node.netns().run(|| -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        ["lower", "upper", "work"]
            .iter()
            .try_for_each(|layer| fs::create_dir(Path::new("/run").join(layer)))
    })?;
    if kind == "bind" {
        let itself = folder.display().to_string();
        mount_on(lab, &itself, folder, None, MsFlags::MS_BIND)?;
        return Ok(true);
    }
    let layers = "lowerdir=/run/lower,upperdir=/run/upper,workdir=/run/work";
    let options = (kind == "overlay").then_some(layers);
    let mounted = lab.node.netns().run(|| {
        mount(
            Some("leases"),
            folder,
            Some(kind),
            MsFlags::empty(),
            options,
        )
    });
    if mounted == Err(Errno::ENODEV) {
        anstream::println!("not on this kernel: {kind}");
        return Ok(false);
    }
    mounted.with_context(|| format!("mount {kind}"))?;
    Ok(true)
}

#[rstest]
fn a_folder_of_leases_may_be_a_mount(
    #[values("bind", "tmpfs", "overlay")] kind: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let folder = lab.node.data_dir().join(lab.conf().name());
    if !mount_over(&lab, &folder, kind)? {
        return Ok(());
    }
    let [kept, gone] = ["kept", "gone"].map(|name| lab.pod(name));
    let (kept, gone) = (kept?, gone?);
    ping::ping(kept.netns(), V4.remote())?;
    Call::new("STATUS")
        .conf(&lab.conf())
        .run(&lab.node)?
        .silence()?;
    lose(gone)?;
    let valid = json!([{ "containerID": kept.name(), "ifname": Pod::IFNAME }]);
    let conf = lab.conf().with("cni.dev/valid-attachments", valid);
    Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
    kept.call_with_result("CHECK").run(&lab.node)?.silence()?;
    kept.del()?;
    let left = lab
        .node
        .netns()
        .run(|| fs::read_dir(&folder).map(Iterator::count))?;
    ensure!(
        left == 4,
        "lock, two addresses leased last, and the index: {left}"
    );
    Ok(())
}

#[test]
fn del_on_a_read_only_disk_says_what_stays_and_the_next_one_frees_it() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let remount =
        |flags: MsFlags| mount_on(&lab, "leases", lab.node.data_dir(), Some("tmpfs"), flags);
    remount(MsFlags::empty())?;
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let pod = lab.pod("a")?;
    remount(MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    let status = Call::new("STATUS")
        .conf(&lab.conf())
        .run(&lab.node)?
        .error()?;
    ensure!(
        status.code == 50 && status.msg.contains("cannot be written"),
        "{status}"
    );
    // Of a container without a lease nothing stays.
    let nobody = Call::new("DEL").attachment("nobody", "", "eth0");
    nobody.conf(&lab.conf()).run(&lab.node)?.silence()?;
    let error = pod.call_with_result("DEL").run(&lab.node)?.error()?;
    ensure!(error.code == 5, "{error}");
    for part in [
        &pod.ip(V4).to_string(),
        &pod.ip(V6).to_string(),
        "Read-only file system",
        "repeat the call",
    ] {
        ensure!(error.msg.contains(part), "{part} is missing: {error}");
    }
    remount(MsFlags::MS_REMOUNT)?;
    pod.del()?;
    before.expect_same(&lab.node)
}

#[test]
fn a_lease_that_is_there_already_and_a_pool_that_is_full_name_the_folder() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let ranges = json!([[{ "subnet": "10.88.0.0/29", "rangeEnd": "10.88.0.2" }], [{ "subnet": "fd00:88::/64" }]]);
    let conf = lab.conf().with_ipam("ranges", ranges);
    let folder = lab.node.data_dir().join(conf.name());
    lab.node.netns().run(|| {
        fs::create_dir(&folder)?;
        // As an ADD leaves it that was killed before it came to the interface.
        fs::write(folder.join("10.88.0.2"), "a\r\neth0")
    })?;
    let folder = folder.display();
    let refusal = |name: &str| {
        let netns = lab.node.netns().sibling(name)?;
        let add = Call::new("ADD").attachment(name, &netns.path().display().to_string(), "eth0");
        add.conf(&conf).run(&lab.node)?.error()
    };
    let again = refusal("a")?;
    ensure!(again.code == 101, "{again}");
    let said = format!("the lease is in {folder}; DEL this attachment first");
    ensure!(again.msg.contains(&said), "{again}");
    let full = refusal("b")?;
    ensure!(full.code == 11, "{full}");
    for part in [
        "no IP addresses available in range set: 10.88.0.1-10.88.0.2: ",
        &format!("{folder} holds 1 lease, such as 10.88.0.2 of a (eth0); "),
    ] {
        ensure!(full.msg.contains(part), "{part} is missing: {full}");
    }
    Ok(())
}
