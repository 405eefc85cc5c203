//! Folders of leases on mounts of their own, and on file systems that can't do everything.

use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::thread;

use serde_json::json;

use crate::interop::{REFERENCE, reference};
use crate::network::{Network, Of, Via, ours};
use crate::sandbox::{output_of, parts_of, words};

const C1: Of<'_> = Of("c1", "eth0");
const C2: Of<'_> = Of("c2", "eth0");

/// How file systems without hard links refuse one: vfat; FUSE, 9p and SMB; old FUSE; and where a file
/// may have one name only.
const REFUSALS: [i32; 4] = [libc::EPERM, libc::EOPNOTSUPP, libc::ENOSYS, libc::EMLINK];

/// Does some work on a thread for which, and for whose children, link(2) fails with this error. So
/// any kernel can be asked, whatever file systems it has.
pub(crate) fn without_hard_links<T: Send>(errno: i32, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                refuse_links(errno).expect("a kernel with seccomp");
                work()
            })
            .join()
            .unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn refuse_links(errno: i32) -> io::Result<()> {
    let number = |value: i64| u32::try_from(value).expect("a small number");
    let statement = |code: u32, skipped_if_not: u8, k: u32| libc::sock_filter {
        code: u16::try_from(code).expect("a small number"),
        jt: 0,
        jf: skipped_if_not,
        k,
    };
    let linkat = number(libc::SYS_linkat);
    let refused = libc::SECCOMP_RET_ERRNO | number(errno.into());
    let mut program = [
        // The number of the system call is the first word of what is asked about.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, linkat),
        statement(libc::BPF_RET | libc::BPF_K, 0, refused),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).expect("a few"),
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the filter and its program live until the calls return, and the kernel copies both.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const filter,
            ) == 0
    };
    if installed {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[test]
fn without_hard_links_every_verb_works_and_the_reference_may_share_the_folder() {
    let plugins = [Some(ours()), reference()];
    for errno in REFUSALS {
        for plugin in plugins.into_iter().flatten() {
            without_hard_links(errno, || shared_with(plugin));
        }
    }
}

fn shared_with(other: Via<'_>) {
    let mut network = Network::with_subnets(&["10.0.0.0/29", "2001:db8::/125"]);
    network.set("cniVersion", "1.0.0".into());
    let probe = network.dir().with_file_name("probe");
    fs::create_dir_all(network.dir()).expect("a folder");
    fs::write(&probe, "").expect("a file");
    fs::hard_link(&probe, probe.with_extension("link")).expect_err("there are hard links");
    network.add(ours(), C1).expect("an address");
    network.add(other, C2).expect("an address");
    let ips = ["10.0.0.2", "10.0.0.3", "2001:db8::2", "2001:db8::3"];
    let leases: Vec<_> = network.leases().into_keys().collect();
    assert_eq!(leases, ips);
    for plugin in [ours(), other] {
        for of in [C1, C2] {
            let (_, msg) = network.add(plugin, of).expect_err("a duplicate");
            assert!(msg.contains("duplicate allocation"), "{msg}");
            assert_eq!(network.call(plugin, "CHECK", of), Ok(json!(null)));
        }
    }
    network.del(other, C1);
    network.del(ours(), C2);
    assert!(network.leases().is_empty());
    network.set("cniVersion", "1.1.0".into());
    network.add(ours(), C1).expect("an address");
    assert_eq!(network.call(ours(), "STATUS", C1), Ok(json!(null)));
    network.set("cni.dev/valid-attachments", json!([]));
    assert_eq!(network.call(ours(), "GC", C1), Ok(json!(null)));
    let entries = fs::read_dir(network.dir()).expect("a folder");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
}

/// A call looks at the first addresses one by one, and lists the rest.
#[test]
fn an_empty_lease_is_nobodys_wherever_it_is() {
    for place in [2, 60] {
        let empty = format!("10.0.0.{place}");
        for is_linked in [true, false] {
            let network = Network::with_subnets(&["10.0.0.0/26"]);
            for host in 2..=62 {
                network.write(&format!("10.0.0.{host}"), "c0\r\neth0");
            }
            network.write(&empty, "");
            let calls = || {
                assert_eq!(network.call(Via::Library, "STATUS", C1), Ok(json!(null)));
                assert_eq!(network.add(Via::Library, C1), Ok(vec![empty.clone()]));
                let (code, _) = network.add(Via::Library, C2).expect_err("all are taken");
                assert_eq!(code, 11);
            };
            if is_linked {
                calls();
            } else {
                without_hard_links(libc::EPERM, calls);
            }
        }
    }
}

#[test]
fn hard_links_that_come_and_go_make_no_difference() {
    let network = Network::with_subnets(&["10.0.0.0/24"]);
    for round in 0..6 {
        let [one, two] = ["one", "two"].map(|which| format!("{which}-{round}"));
        let calls = || {
            network.add(ours(), Of(&one, "eth0")).expect("an address");
            network.add(ours(), Of(&two, "eth0")).expect("an address");
            network
                .add(ours(), Of(&one, "eth0"))
                .expect_err("a duplicate");
            network.del(ours(), Of(&one, "eth0"));
        };
        if round % 2 == 0 {
            calls();
        } else {
            without_hard_links(libc::EPERM, calls);
        }
    }
    assert_eq!(network.leases().len(), 6);
    for round in 0..6 {
        network.del(ours(), Of(&format!("two-{round}"), "eth0"));
    }
    assert!(network.leases().is_empty());
}

/// What is asked of any folder. Prints nothing, or what is wrong.
const USE: &str = r#"
use_it() {
    for c in 1 2 3; do call ADD $1$c > "$ids/answer" || { echo ADD; cat "$ids/answer"; }; done
    [ $(leases | wc -l) = 6 ] || { echo "not six leases:"; leases; }
    call ADD ${1}2 > "$ids/answer" && echo 'leased twice'
    call CHECK ${1}2 || echo CHECK
    call STATUS ${1}2 || echo STATUS
    call DEL ${1}2 || echo DEL
    [ $(leases | wc -l) = 4 ] || { echo "not four leases:"; leases; }
    keys='"cni.dev/valid-attachments":[{"containerID":"'${1}'1","ifname":"eth0"}],' call GC x || echo GC
    [ $(leases | wc -l) = 2 ] || { echo "not two leases:"; leases; }
    call DEL ${1}1 || echo DEL
    [ $(leases | wc -l) = 0 ] || { echo "not empty:"; leases; }
}
"#;

#[test]
fn a_bind_mount_of_the_same_file_system_is_a_folder_like_any_other() {
    let parts = parts_of(&format!(
        r#"{USE}
        mkdir "$folder/net"
        mount --bind "$folder/net" "$folder/net"
        use_it a; echo =
        # Once more where nothing beside it can be written.
        mount --bind "$folder" "$folder"
        mount --bind "$folder/net" "$folder/net"
        mount -o remount,bind,ro "$folder"
        use_it b; echo =
        # An index is there, too.
        call ADD c > /dev/null
        ls "$folder/net/.underpass/address"
        "#
    ));
    assert_eq!(parts[..2], ["", ""]);
    assert_eq!(words(&parts[2]).len(), 2, "{}", parts[2]);
}

#[test]
fn mounts_that_come_and_go_make_no_difference() {
    let output = output_of(&format!(
        r#"{USE}
        use_it a
        for c in 1 2 3; do call ADD kept$c > /dev/null; done
        mount --bind "$folder/net" "$folder/net"
        call ADD kept2 > "$ids/answer" && echo 'leased twice'
        call ADD new > "$ids/answer" || {{ echo ADD; cat "$ids/answer"; }}
        call DEL kept1
        [ $(leases | wc -l) = 6 ] || leases
        umount "$folder/net"
        call ADD new > "$ids/answer" && echo 'leased twice'
        call ADD newer > "$ids/answer" || {{ echo ADD; cat "$ids/answer"; }}
        for c in kept1 kept2 kept3 new newer; do call DEL $c; done
        use_it b
        "#
    ));
    assert_eq!(output.trim(), "");
}

#[test]
fn a_mount_of_its_own_serves_and_its_index_is_no_lease_to_the_reference() {
    if reference().is_none() {
        return;
    }
    let output = output_of(&format!(
        r#"{USE}
        mkdir "$folder/net"
        mount -t tmpfs tmpfs "$folder/net"
        use_it a
        call ADD a > /dev/null
        rm "$folder"/net/[0-9]*
        # What the index still has of it is no lease.
        (plugin={REFERENCE} version=1.0.0 call ADD a > "$ids/answer") || cat "$ids/answer"
        "#
    ));
    assert_eq!(output.trim(), "");
}

#[test]
fn an_overlay_is_a_folder_like_any_other() {
    let parts = parts_of(&format!(
        r#"{USE}
        layers=$base/layers
        mkdir -p "$layers"
        mount -t tmpfs tmpfs "$layers"
        mkdir -p "$layers/lower/net" "$layers/upper" "$layers/work"
        printf 'below\r\neth0' > "$layers/lower/net/10.0.0.2"
        printf 'below\r\neth0' > "$layers/lower/net/2001:db8::2"
        printf 'hidden\r\neth0' > "$layers/lower/net/10.0.0.3"
        mount -t overlay -o lowerdir="$layers/lower",upperdir="$layers/upper",workdir="$layers/work",userxattr overlay "$folder"
        call DEL hidden
        call ADD below > "$ids/answer" && echo 'leased twice'
        call CHECK below
        call ADD above > /dev/null
        leases; echo =
        call DEL below
        reboot
        call ADD new > /dev/null
        leases; echo =
        call DEL new
        use_it a
        umount "$folder"; umount -l "$layers"
        "#
    ));
    assert_eq!(
        words(&parts[0]),
        ["10.0.0.2", "10.0.0.3", "2001:db8::2", "2001:db8::3"]
    );
    assert_eq!(words(&parts[1]), ["10.0.0.4", "2001:db8::4"]);
    assert_eq!(parts[2], "");
}
