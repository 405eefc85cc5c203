//! Calls that are killed, and disks that are full or read-only.

use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::Duration;

use crate::file_systems::without_hard_links;
use crate::network::{Network, Of, Via, ours};
use crate::sandbox::{output_of, parts_of, words};

/// The number of calls to kill, each at another moment of its life.
const KILLS: u64 = 150;

/// How much later each next call is killed.
const STEP: Duration = Duration::from_micros(20);

#[test]
fn a_call_killed_at_any_moment_leaves_a_valid_directory() {
    kill_calls();
}

#[test]
fn a_call_killed_where_there_are_no_hard_links_does_too() {
    without_hard_links(libc::EPERM, kill_calls);
}

fn kill_calls() {
    let network = Network::with_subnets(&["10.0.0.0/22", "2001:db8::/64"]);
    let Via::Executable(plugin) = ours() else {
        unreachable!("ours is an executable")
    };
    for kill in 0..KILLS {
        let id = format!("c{kill}");
        let of = Of(&id, "eth0");
        let verb = if kill % 3 == 2 {
            network.add(Via::Library, of).expect("room");
            "DEL"
        } else {
            "ADD"
        };
        let mut child = network.start(plugin, verb, of);
        thread::sleep(STEP * u32::try_from(kill).expect("a few"));
        // It may be done by now.
        let _ = child.kill();
        child.wait().expect("it ends");
        for (name, content) in network.leases() {
            assert!(
                content.starts_with('c') && content.ends_with("\r\neth0"),
                "{name} holds {content:?}"
            );
        }
        let of_call = |network: &Network| {
            network
                .leases()
                .values()
                .filter(|owner| **owner == format!("{id}\r\neth0"))
                .count()
        };
        assert!(of_call(&network) <= 2);
        if kill % 2 == 0 {
            network.del(Via::Library, of);
            assert_eq!(
                of_call(&network),
                0,
                "DEL did not find what a killed {verb} left"
            );
        }
    }
    // Nothing was leased twice, and everything can be found again by its owner.
    for kill in 0..KILLS {
        network.del(Via::Library, Of(&format!("c{kill}"), "eth0"));
    }
    assert!(network.leases().is_empty(), "{:?}", network.leases());
}

#[test]
fn a_full_disk_is_a_clear_error_and_loses_nothing() {
    let output = output_of(
        r#"
        mount -t tmpfs -o nr_inodes=40 tmpfs "$folder"
        added=0
        while call ADD c$added > "$folder.answer"; do added=$((added + 1)); done
        cat "$folder.answer"; rm "$folder.answer"; echo
        echo "=$added"; (cd "$folder/net"; grep -l . 1* 2*); echo =
        call DEL c0
        call ADD again > /dev/null; echo again
        for c in $(seq 0 $added) gain; do call DEL c$c; done; call DEL again
        ls "$folder/net"
        "#,
    );
    let mut parts = output.split('=');
    let answer = parts.next().expect("an answer");
    assert!(
        answer.contains("\"code\": 5") && answer.contains("No space left on device"),
        "{answer}"
    );
    assert!(answer.contains("free space or inodes"), "{answer}");
    let mut lines = parts.next().expect("leases").lines();
    let added: usize = lines.next().expect("a count").parse().expect("a number");
    let leases: BTreeSet<&str> = lines.collect();
    assert!(added >= 3, "too small a disk for this test");
    assert_eq!(
        leases.len(),
        2 * added,
        "each ADD that succeeded has its leases, the failed one has none"
    );
    let rest: Vec<_> = parts.next().expect("the rest").split_whitespace().collect();
    assert_eq!(
        rest,
        ["again", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]
    );
}

#[test]
fn on_a_disk_with_little_room_an_add_takes_all_or_nothing_and_a_del_frees() {
    // Files of one page or less, each of which needs an inode, too.
    let output = output_of(
        r#"
        ranges='[{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.7"}],[{"subnet":"2001:db8::/64","rangeStart":"2001:db8::d"}]'
        for limit in size=512k nr_inodes=128; do
            for room in 0 1 2 3 4 5 6 7 8 9 10 11 12; do
                mount -t tmpfs -o $limit tmpfs "$folder"
                for c in 1 2 3; do call ADD c$c > /dev/null; done
                call DEL c2
                dd if=/dev/zero of="$folder/page.0" bs=4096 count=1 2> /dev/null
                page=0
                while cp "$folder/page.0" "$folder/page.$page.copy" 2> /dev/null; do page=$((page + 1)); done
                rm -f "$folder/page.$page.copy"
                for give in $(seq $room); do rm "$folder/page.$give.copy"; done
                before=$(leases | wc -l)
                if call ADD new > /dev/null; then taken=2; echo room; else taken=0; echo none; fi
                [ $(leases | wc -l) = $((before + taken)) ] || echo half an ADD with $limit and $room
                cat "$folder/page.0" > "$folder/last" 2> /dev/null || true
                for c in c1 c3 new; do call DEL $c; done
                [ $(leases | wc -l) = 0 ] || echo half a DEL with $limit and $room
                umount "$folder"
            done
        done
        "#,
    );
    let answers: BTreeSet<&str> = output.lines().collect();
    assert_eq!(answers, BTreeSet::from(["none", "room"]));
}

#[test]
fn a_read_only_disk_is_a_clear_error_where_something_has_to_change() {
    let parts = parts_of(
        r#"
        for state in indexed unindexed unlocked rebooted; do
            mount -t tmpfs tmpfs "$folder"
            call ADD c1 > /dev/null
            case $state in
                unindexed) rm -r "$folder/.underpass" ;;
                unlocked) rm "$folder/net/lock" ;;
                rebooted) reboot ;;
            esac
            mount -o remount,ro "$folder"
            for call in 'ADD c2' 'DEL c1' 'STATUS c1'; do call $call && echo succeeded; echo =; done
            # Nothing to do is done.
            call DEL c2; call CHECK c1
            keys='"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}],' call GC c1
            leases; echo =
            call CHECK c2 || true; echo =
            keys='"cni.dev/valid-attachments":[],' call GC c1 && echo succeeded; echo =
            umount "$folder"
        done
        "#,
    );
    for answers in parts.chunks_exact(6) {
        for (answer, code) in answers.iter().zip([5, 5, 50]) {
            assert!(answer.contains(&format!("\"code\": {code}")), "{answer}");
            assert!(answer.contains("Read-only file system"), "{answer}");
            assert!(answer.contains("make"), "{answer}");
        }
        for answer in [&answers[1], &answers[5]] {
            assert!(
                answer.contains("/net/10.0.0.2, /") && answer.contains("/net/2001:db8::2: "),
                "it names what stays: {answer}"
            );
            assert!(answer.contains("repeat the call"), "{answer}");
        }
        assert_eq!(words(&answers[3]), ["10.0.0.2", "2001:db8::2"]);
        let unknown = "Failed to find address added by container c2";
        assert!(answers[4].contains(unknown), "{}", answers[4]);
    }
}

#[test]
fn a_del_frees_what_it_can_and_names_what_stays() {
    let parts = parts_of(
        r#"
        call ADD c1 > /dev/null
        # What is mounted can't be removed.
        mount --bind "$folder/net/10.0.0.2" "$folder/net/10.0.0.2"
        call DEL c1 && echo succeeded; echo =
        leases; echo =
        umount "$folder/net/10.0.0.2"
        call DEL c1
        leases
        "#,
    );
    assert!(
        parts[0].contains("\"code\": 5") && parts[0].contains("/net/10.0.0.2: "),
        "{}",
        parts[0]
    );
    assert!(parts[0].contains("repeat the call"), "{}", parts[0]);
    assert_eq!(parts[1..], ["10.0.0.2", ""]);
}

#[test]
fn a_folder_without_permission_is_a_clear_error() {
    // Root without capabilities is a user like any other.
    let output = output_of(
        r#"
        mount -t tmpfs tmpfs "$folder"
        call ADD c1 > /dev/null
        chmod 555 "$folder/net"
        as='setpriv --bounding-set=-all'
        for call in 'ADD c2' 'DEL c1' 'STATUS c1'; do call $call && echo succeeded; echo =; done
        ls "$folder/net"
        "#,
    );
    let answers: Vec<_> = output.split('=').collect();
    for (answer, code) in answers.iter().zip([5, 5, 50]) {
        assert!(answer.contains(&format!("\"code\": {code}")), "{answer}");
        assert!(answer.contains("ermission denied"), "{answer}");
    }
    assert!(
        answers[0].contains("correct the owner and mode") && !answers[0].contains("run the plugin"),
        "{}",
        answers[0]
    );
    assert!(answers[3].contains("10.0.0.2"), "{}", answers[3]);
}

#[test]
fn a_folder_of_somebody_else_is_a_clear_error() {
    let mut network = Network::with_subnets(&["10.0.0.0/24"]);
    let in_the_way = network.dir().with_extension("file");
    fs::create_dir_all(network.dir()).expect("a folder");
    fs::write(&in_the_way, "").expect("a file");
    network.set(
        "ipam",
        serde_json::json!({"dataDir": in_the_way, "subnet": "10.0.0.0/24"}),
    );
    let (code, msg) = network
        .add(Via::Library, Of("c1", "eth0"))
        .expect_err("no folder");
    assert_eq!(code, 5);
    assert!(
        msg.contains("Not a directory") && msg.contains("something that is no folder"),
        "{msg}"
    );
}
