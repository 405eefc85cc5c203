use std::fs::File;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::store::Holder;
use crate::store::tests::{conf_of, spoil, without_privileges};

const HOME: Home = Home(7);
const GRACE: Duration = Duration::from_mins(10);

struct Fixture {
    folder: TempDir,
    conf: NetConf,
}

impl Fixture {
    fn new() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let conf = conf_of(folder.path());
        Self { folder, conf }
    }

    fn lock(&self) -> Locked {
        Store::new(self.folder.path(), "net")
            .lock()
            .expect("the lock")
    }

    fn path(&self, ip: &str) -> PathBuf {
        self.folder.path().join("net").join(ip)
    }

    fn age(&self, ip: &str) {
        let file = File::options().write(true).open(self.path(ip));
        let long_ago = SystemTime::now() - 2 * GRACE;
        file.and_then(|file| file.set_modified(long_ago))
            .expect("an older lease");
    }

    fn take(&self, ip: &str, container: &str, home: Option<Home>) {
        let owner = Owner::new(container, "eth0");
        let holder = Holder {
            owner: &owner,
            home,
        };
        let taken = self.lock().reserve_for(address(ip), holder);
        assert!(taken.expect("a reservation"));
        self.age(ip);
    }

    /// What an interface plugin of this program took in [`HOME`].
    fn ours(&self, ip: &str, container: &str) {
        self.take(ip, container, Some(HOME));
    }

    fn found(&self, attached: &[&str]) -> Vec<Orphan> {
        find_orphans(&self.conf, HOME, GRACE, |container, _| {
            attached.contains(&container)
        })
        .expect("a look")
    }

    fn found_ips(&self, attached: &[&str]) -> Vec<String> {
        let found = self.found(attached).into_iter();
        found.map(|orphan| orphan.ip.to_string()).collect()
    }

    fn freed_ips(&self, found: &[Orphan], attached: &[&str]) -> Vec<String> {
        let mut freed = Vec::new();
        let is_attached = |container: &str, _: &str| attached.contains(&container);
        free_orphans(&self.conf, HOME, found, is_attached, &mut freed).expect("a call");
        freed.iter().map(|freed| freed.ip.to_string()).collect()
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn only_old_leases_of_ours_without_an_attachment_are_orphans() {
    let fixture = Fixture::new();
    fixture.ours("10.0.0.2", "dead");
    fixture.ours("fd00::2", "dead");
    fixture.ours("10.0.0.3", "living");
    fixture.take("10.0.0.4", "foreign", None);
    fixture.take("10.0.0.5", "elsewhere", Some(Home(8)));
    fixture.ours("10.0.0.6", "young");
    File::options()
        .write(true)
        .open(fixture.path("10.0.0.6"))
        .and_then(|file| file.set_modified(SystemTime::now()))
        .expect("a young lease");
    fixture.ours("10.0.0.7", "tomorrow");
    File::options()
        .write(true)
        .open(fixture.path("10.0.0.7"))
        .and_then(|file| file.set_modified(SystemTime::now() + GRACE))
        .expect("a lease of the future");
    // The reference's, with the same owner as one of ours.
    fs::write(fixture.path("10.0.0.8"), "dead\r\neth0").expect("a lease");
    fs::write(fixture.path("10.0.0.9"), "reserved for the printer").expect("a note");
    fixture.age("10.0.0.8");
    fixture.age("10.0.0.9");
    assert_eq!(fixture.found_ips(&["living"]), ["10.0.0.2", "fd00::2"]);
    let found = fixture.found(&["living"]);
    assert_eq!(
        fixture.freed_ips(&found, &["living"]),
        ["10.0.0.2", "fd00::2"]
    );
    assert_eq!(fixture.found_ips(&["living"]), [""; 0]);
    for kept in 3..=9 {
        assert!(fixture.path(&format!("10.0.0.{kept}")).exists(), "{kept}");
    }
}

#[test]
fn what_is_not_the_same_any_more_stays() {
    let fixture = Fixture::new();
    for (ip, container) in [
        ("10.0.0.2", "again"),
        ("10.0.0.3", "attached"),
        ("10.0.0.4", "dead"),
        ("10.0.0.5", "taken"),
    ] {
        fixture.ours(ip, container);
    }
    let found = fixture.found(&[]);
    assert_eq!(found.len(), 4);
    // A DEL and an ADD of the same container came meanwhile: another lease of the same address.
    let mut locked = fixture.lock();
    locked
        .release_all(&Owner::new("again", "eth0"))
        .expect("released");
    locked.remove(address("10.0.0.5")).expect("removed");
    drop(locked);
    fixture.ours("10.0.0.2", "again");
    fixture.take("10.0.0.5", "taken", None);
    assert_eq!(fixture.freed_ips(&found, &["attached"]), ["10.0.0.4"]);
}

#[test]
fn an_owner_is_ours_only_by_the_last_lease_of_the_address() {
    let fixture = Fixture::new();
    fixture.ours("10.0.0.2", "c");
    // Somebody removes it by hand, and the reference leases it to the same container.
    fs::remove_file(fixture.path("10.0.0.2")).expect("removed");
    fs::write(fixture.path("10.0.0.2"), "c\r\neth0").expect("a lease");
    fixture.age("10.0.0.2");
    assert_eq!(fixture.found_ips(&[]), [""; 0]);
    // The other way round.
    let mut locked = fixture.lock();
    locked
        .release_all(&Owner::new("c", "eth0"))
        .expect("released");
    drop(locked);
    fixture.ours("10.0.0.2", "c");
    assert_eq!(fixture.found_ips(&[]), ["10.0.0.2"]);
}

#[test]
fn whose_a_lease_is_outlives_a_rebuilt_index_and_no_lost_one() {
    let fixture = Fixture::new();
    fixture.ours("10.0.0.2", "a");
    fixture.take("10.0.0.3", "b", None);
    fixture.lock().rebuild_index().expect("an index");
    assert_eq!(fixture.found_ips(&[]), ["10.0.0.2"]);
    fs::remove_dir_all(fixture.folder.path().join(".underpass")).expect("removed");
    assert_eq!(fixture.found_ips(&[]), [""; 0]);
}

#[test]
fn one_that_cannot_be_read_stays_and_hides_no_other() {
    let _user = without_privileges();
    let fixture = Fixture::new();
    for ip in ["10.0.0.2", "10.0.0.3", "10.0.0.4"] {
        fixture.ours(ip, "dead");
    }
    spoil(&fixture.path("10.0.0.2"));
    assert_eq!(fixture.found_ips(&[]), ["10.0.0.3", "10.0.0.4"]);
    let found = fixture.found(&[]);
    spoil(&fixture.path("10.0.0.3"));
    assert_eq!(fixture.freed_ips(&found, &[]), ["10.0.0.4"]);
    assert!(fixture.path("10.0.0.2").exists() && fixture.path("10.0.0.3").exists());
}
