//! Leases that can't be read, as a disk that lost power may leave them: each costs its own address, and stops nobody.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use nix::unistd::{Uid, setfsuid};

use crate::file_systems::without_hard_links;
use crate::network::{Network, Of, Via};
use crate::sandbox::{parts_of, words};

const C1: Of<'_> = Of("c1", "eth0");

/// Root without capabilities is a user like any other, who can't read a file without a mode.
const SPOIL: &str = r#"
as='setpriv --bounding-set=-all'
spoil() { for ip in "$@"; do chmod 000 "$folder/net/$ip"; done; }
mend() { for ip in "$@"; do chmod 600 "$folder/net/$ip"; done; }
said() { grep -c 'cannot read the lease .* so its address stays taken' "$ids/said" || true; echo =; }
"#;

#[test]
fn after_a_reboot_every_verb_goes_on_and_each_call_names_it_once() {
    let parts = parts_of(&format!(
        r#"{SPOIL}
        ranges='[{{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.2","rangeEnd":"10.0.0.11"}}]'
        for container in old bad other; do call ADD $container > /dev/null; done
        spoil 10.0.0.3
        reboot
        call ADD new > /dev/null 2> "$ids/said"; said
        leases; echo =
        keys='"cni.dev/valid-attachments":[{{"containerID":"new","ifname":"eth0"}}],' call GC x 2> "$ids/said"; said
        for call in 'CHECK new' 'STATUS new' 'DEL bad' 'ADD more' 'DEL more'; do call $call > /dev/null 2>&1 || echo $call; done
        echo =
        # Nobody is given it, also where it is the last one.
        for container in $(seq 8); do call ADD c$container > /dev/null 2>&1 || echo $container; done
        call ADD nobody 2> /dev/null || true; echo =
        leases | wc -l; echo =
        keys='"args":{{"cni":{{"ips":["10.0.0.3"]}}}},' call ADD asks 2> /dev/null || true; echo =
        # When it can be read it is a lease like any other.
        mend 10.0.0.3
        call ADD bad || true; echo =
        call DEL bad
        leases | grep -c '[.]3$' || true
        "#
    ));
    assert_eq!(parts[0], "1");
    assert_eq!(words(&parts[1]), ["10.0.0.3", "10.0.0.5"]);
    assert_eq!(parts[2..4], ["1", ""]);
    let full = &parts[4];
    assert!(full.contains("no IP addresses available"), "{full}");
    assert_eq!(parts[5], "10");
    let asked = &parts[6];
    assert!(
        asked.contains("\"code\": 11") && asked.contains("its file there cannot be read"),
        "{asked}"
    );
    let duplicate = &parts[7];
    assert!(duplicate.contains("\"code\": 101"), "{duplicate}");
    assert_eq!(parts[8], "0");
}

#[test]
fn the_del_of_its_owner_says_that_it_stays() {
    let parts = parts_of(&format!(
        r"{SPOIL}
        for container in one two; do call ADD $container > /dev/null; done
        spoil 10.0.0.2
        call DEL one || true; echo =
        leases; echo =
        call DEL two 2>&1; echo =
        mend 10.0.0.2
        call DEL one
        leases
        "
    ));
    assert!(
        parts[0].contains("\"code\": 5") && parts[0].contains("/net/10.0.0.2: Permission denied"),
        "{}",
        parts[0]
    );
    assert_eq!(words(&parts[1])[0], "10.0.0.2");
    assert_eq!(
        words(&parts[1]).len(),
        3,
        "its other lease went: {}",
        parts[1]
    );
    assert_eq!(parts[2..], ["", ""]);
}

/// There each call reads every lease.
#[test]
fn without_an_index_it_is_passed_over_by_all() {
    without_hard_links(libc::EPERM, || {
        if Uid::effective().is_root() {
            // For the files of this thread alone.
            setfsuid(Uid::from_raw(65_534));
        }
        let network = Network::with_subnets(&["10.0.0.0/24"]);
        let add = |of| network.add(Via::Library, of);
        for (of, ip) in [(Of("bad", "eth0"), "10.0.0.2"), (C1, "10.0.0.3")] {
            assert_eq!(add(of), Ok(vec![ip.to_owned()]));
        }
        let bad = network.dir().join("10.0.0.2");
        fs::set_permissions(&bad, Permissions::from_mode(0o000)).expect("another mode");
        let (code, _) = add(C1).expect_err("a duplicate");
        assert_eq!(code, 101);
        assert_eq!(
            add(Of("c2", "eth0")),
            Ok(vec!["10.0.0.4".to_owned()]),
            "the next one"
        );
        for of in [C1, Of("bad", "eth0")] {
            network.del(Via::Library, of);
        }
        assert!(bad.exists() && !network.dir().join("10.0.0.3").exists());
    });
}
