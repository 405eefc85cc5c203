//! After a reboot: what the containers of the boot before held is free, and nothing else.

use crate::interop::REFERENCE;
use crate::sandbox::{output_of, parts_of, words};

/// Room for ten containers.
const SMALL: &str = r#"
ranges='[{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.2","rangeEnd":"10.0.0.11"}],[{"subnet":"2001:db8::/64","rangeStart":"2001:db8::2","rangeEnd":"2001:db8::b"}]'
"#;

#[test]
fn two_hundred_reboots_without_a_del_use_nothing_up() {
    let output = output_of(&format!(
        r#"{SMALL}
        for boot in $(seq 200); do
            for container in same other-$boot third; do
                call ADD $container > "$ids/answer" || {{ echo "boot $boot:"; cat "$ids/answer"; exit 1; }}
            done
            [ $(leases | wc -l) = 6 ] || {{ echo "boot $boot:"; leases; exit 1; }}
            reboot
        done
        for container in 1 2 3 4 5 6 7 8 9 10; do call ADD all-$container > "$ids/answer"; done
        leases | wc -l
        "#
    ));
    assert_eq!(output.trim(), "20");
}

#[test]
fn the_first_call_of_any_kind_frees_what_has_ended() {
    let output = output_of(&format!(
        r#"{SMALL}
        for verb in ADD DEL GC; do
            for container in a b c; do call ADD $container > /dev/null; done
            reboot
            keys='"cni.dev/valid-attachments":[],' call $verb x > /dev/null
            call DEL x
            echo $verb $(leases | wc -l)
        done
        "#
    ));
    assert_eq!(words(&output), ["ADD", "0", "DEL", "0", "GC", "0"]);
}

#[test]
fn status_counts_no_lease_that_has_ended() {
    let parts = parts_of(&format!(
        r"{SMALL}
        for container in 1 2 3 4 5 6 7 8 9 10; do call ADD c$container > /dev/null; done
        call STATUS x || true; echo =
        reboot
        call STATUS x; leases | wc -l; echo =
        call ADD c1 > /dev/null
        leases | wc -l
        "
    ));
    assert!(parts[0].contains("\"code\": 50"), "{}", parts[0]);
    assert_eq!(parts[1], "20", "STATUS only looks");
    assert_eq!(parts[2], "2");
}

#[test]
fn what_others_made_since_the_boot_and_notes_of_operators_stay() {
    if crate::interop::reference().is_none() {
        return;
    }
    let output = output_of(&format!(
        r#"
        call ADD gone > /dev/null
        (plugin={REFERENCE} version=1.0.0 call ADD gone-too > /dev/null)
        cd "$folder/net"
        echo 'reserved for the printer' > 10.0.0.40
        printf 'the printer\r\neth0' > 10.0.0.41
        echo printer > 10.0.0.42
        for ip in 10.0.0.43 10.0.0.44 2001:db8::44 10.0.0.45; do printf 'old\r\neth0' > $ip; done
        call ADD gone-as-well > /dev/null
        [ -e ../.underpass/net/address/lease-10.0.0.43 ]
        reboot
        # Written over, with an editor and in place; the others' files under another name.
        printf 'edited\r\neth0' > new; mv new 10.0.0.43
        printf 'written-over\r\neth0' > 10.0.0.44
        mv 10.0.0.45 10.0.0.46
        (plugin={REFERENCE} version=1.0.0 call ADD lives > /dev/null)
        # The same container, again by the reference, on the address that it had.
        rm 10.0.0.2; printf 'gone\r\neth0' > 10.0.0.2
        call ADD new > /dev/null
        grep -H . [0-9]* | tr -d '\r' | tr ' \n' '_ ' 
        "#
    ));
    let mut kept: Vec<_> = output
        .split_whitespace()
        .filter(|line| !line.ends_with(":eth0"))
        .collect();
    kept.sort_unstable();
    assert_eq!(
        kept,
        [
            "10.0.0.2:gone",
            "10.0.0.40:reserved_for_the_printer",
            "10.0.0.41:the_printer",
            "10.0.0.42:printer",
            "10.0.0.43:edited",
            "10.0.0.44:written-over",
            "10.0.0.46:old",
            "10.0.0.5:lives",
            "10.0.0.6:new",
            "2001:db8::5:lives",
            "2001:db8::6:new",
        ]
    );
}

#[test]
fn what_others_make_after_the_first_call_of_a_boot_lives_through_that_boot() {
    let output = output_of(
        r"
        call ADD a > /dev/null
        reboot
        call ADD b > /dev/null
        write 10.0.0.99 'other\r\neth0'
        for verb in ADD DEL; do call $verb x > /dev/null; done
        for call in 1 2 3; do call ADD b$call > /dev/null; call DEL a; done
        leases
        ",
    );
    let leases = words(&output);
    assert!(leases.contains(&"10.0.0.99"), "{leases:?}");
    assert_eq!(leases.len(), 9, "{leases:?}");
}

#[test]
fn in_doubt_about_the_machine_nothing_is_freed() {
    let parts = parts_of(
        r#"
        call ADD a > /dev/null
        reboot; machine fedcba9876543210fedcba9876543210
        call ADD b > /dev/null
        leases | wc -l; echo =
        # Two machines have worked here now, whatever boots.
        reboot; call ADD c > /dev/null
        reboot; machine 0123456789abcdef0123456789abcdef
        call ADD d > /dev/null
        reboot; call ADD e > /dev/null
        leases | wc -l; echo =
        # GC has the word of a runtime.
        keys='"cni.dev/valid-attachments":[{"containerID":"e","ifname":"eth0"}],' call GC x
        leases | wc -l; echo =
        reboot; call ADD f > /dev/null
        leases | wc -l; echo =
        for unknown in '' uninitialized 00000000000000000000000000000000; do
            reboot; machine "$unknown"; call ADD g$unknown > /dev/null
        done
        leases | wc -l
        "#,
    );
    assert_eq!(parts, ["4", "10", "2", "2", "8"]);
}

#[test]
fn in_doubt_about_the_boot_the_mark_or_the_file_system_nothing_is_freed() {
    let parts = parts_of(
        r#"
        lines() { leases | wc -l; echo =; }
        mark=$folder/.underpass/net/mark
        call ADD a > /dev/null
        echo > "$ids/boot"; call ADD b > /dev/null; lines
        reboot; call ADD c > /dev/null; lines
        # A crash has lost the mark, or half of it.
        reboot; rm "$mark"; call ADD d > /dev/null; lines
        reboot; cut -c1-50 "$mark" | tr -d '\n' > "$ids/half"; cp "$ids/half" "$mark"; call ADD e > /dev/null; lines
        # Or the links; or what was noted of the owners.
        reboot; rm "$folder"/.underpass/net/address/*; call ADD f > /dev/null; lines
        reboot; rm "$folder"/.underpass/net/owner/*; call ADD g > /dev/null; lines
        # What was in doubt once is known by the next boot.
        reboot; call ADD h > /dev/null; lines
        mount -t ramfs ramfs "$folder"
        call ADD a > /dev/null; reboot; call ADD b > /dev/null; lines
        "#,
    );
    assert_eq!(
        parts,
        ["4", "6", "8", "10", "12", "14", "2", "4", ""],
        "leases of both families"
    );
}

/// As plugin and agent do on a node that is a container: LXC, Incus and systemd-nspawn mount a boot of its own, and pods that mount
/// a procfs see the kernel's.
#[test]
fn who_sees_the_boot_of_the_kernel_and_who_that_of_a_container_free_nothing_of_each_other() {
    let parts = parts_of(
        r#"
        lines() { leases | wc -l; echo =; }
        boot=/proc/sys/kernel/random/boot_id
        kernel() { umount "$boot"; }
        container() { mount --bind "$ids/boot" "$boot"; }
        call ADD a > /dev/null
        kernel; call ADD b > /dev/null; lines
        container; call ADD c > /dev/null; lines
        # When the container starts anew its boot ends all that was there before.
        reboot; call ADD d > /dev/null; lines
        # What the kernel's boot was noted with last, that of a container does not end.
        kernel; call ADD e > /dev/null
        container; reboot; call ADD f > /dev/null; lines
        # Of a machine that is no container only the kernel speaks.
        kernel; call ADD g > /dev/null; lines
        sed -i "s/^[^ ]*/$(cat /proc/sys/kernel/random/uuid)/" "$folder/.underpass/net/mark"
        call ADD h > /dev/null; lines
        container
        "#,
    );
    assert_eq!(
        parts,
        ["4", "6", "2", "6", "8", "2", ""],
        "leases of both families"
    );
}

#[test]
fn a_folder_that_was_copied_with_its_index_keeps_what_it_holds() {
    // As a backup, and the image of a disk, are brought to another machine.
    let output = output_of(
        r#"
        call ADD a > /dev/null
        cp -a "$folder" "$ids/copy"
        reboot; machine fedcba9876543210fedcba9876543210
        folder=$ids/copy
        call ADD b > /dev/null
        leases | wc -l
        "#,
    );
    assert_eq!(output.trim(), "4");
}

#[test]
fn a_call_killed_while_it_frees_harms_nobody() {
    let parts = parts_of(
        r#"
        conf > "$ids/conf"
        kill_add() {
            CNI_COMMAND=ADD CNI_CONTAINERID=$1 "$plugin" < "$ids/conf" > /dev/null &
            sleep $2
            kill -9 $! 2> /dev/null || true
            wait $! || true
        }
        for round in $(seq 30); do
            rm -rf "$folder"; mkdir "$folder"
            for container in 1 2 3 4 5 6 7 8; do call ADD c$container > /dev/null; done
            reboot
            write 10.0.0.77 'lives\r\neth0'
            kill_add first 0.00$((round / 10))$((round % 10))
            write 10.0.0.78 'lives\r\neth0'
            kill_add second 0.00$((round / 10))$((round % 10))
            call ADD third > /dev/null
            # As long as any of them lives, so does its lease.
            grep -q third "$folder/net/"10.0.0.*
            [ -e "$folder/net/10.0.0.77" ] && [ -e "$folder/net/10.0.0.78" ] || echo lost in $round
            for container in first second third; do call DEL $container; done
            leases | grep -v '10.0.0.7[78]' || true
        done
        "#,
    );
    assert_eq!(parts, [""], "leases that were lost, or left");
}

#[test]
fn a_call_killed_while_it_learns_takes_nothing_new_for_old() {
    let parts = parts_of(
        r#"
        call ADD a > /dev/null
        reboot
        # In whatever order they are read, one with a short name comes before the long one,
        for ip in 10.0.0.7 10.0.0.100 10.0.0.8; do write $ip "lives-$ip\r\neth0"; done
        # and the kernel kills who writes a file of more bytes than a line for it has.
        as='prlimit --fsize=9' call ADD killed > /dev/null && echo not killed
        ls "$folder/.underpass/net/address" | grep -c '[78]$'; echo =
        for call in 1 2; do call ADD b$call > /dev/null; done
        leases | grep -c '0[.][78]$\|100$'
        "#,
    );
    assert_ne!(parts[0], "0", "links were made in this boot");
    assert_eq!(parts[1], "3", "each of them lives");
}

#[test]
fn while_another_holds_the_lock_nothing_is_freed() {
    let parts = parts_of(
        r#"
        call ADD a > /dev/null
        reboot
        exec 9< "$folder/net/lock"
        flock 9
        call ADD b > /dev/null 9<&- & sleep 0.3
        leases; echo =
        flock -u 9
        wait $!
        leases
        "#,
    );
    assert_eq!(words(&parts[0]), ["10.0.0.2", "2001:db8::2"]);
    assert_eq!(words(&parts[1]), ["10.0.0.3", "2001:db8::3"]);
}
