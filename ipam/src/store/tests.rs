use std::os::unix::fs::{MetadataExt, PermissionsExt};

use nix::unistd::{Uid, setfsuid};
use serde_json::json;
use tempfile::TempDir;
use underpass_cni::NetConf;

use super::*;

struct Fixture {
    folder: TempDir,
    store: Store,
}

impl Fixture {
    fn new() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let store = Store::new(folder.path(), "net");
        Self { folder, store }
    }

    fn lock(&self) -> Locked {
        self.store.lock().expect("the lock")
    }

    fn reserve(&self, ip: &str, owner: &Owner) -> bool {
        self.lock()
            .reserve(address(ip), owner)
            .expect("a reservation")
    }

    fn owned(&self, owner: &Owner) -> Vec<String> {
        self.lock()
            .owned(owner)
            .expect("a look-up")
            .iter()
            .map(|(ip, _)| ip.to_string())
            .collect()
    }

    /// What another program writes.
    fn write(&self, name: &str, content: &str) {
        fs::create_dir_all(self.store.dir()).expect("a folder");
        fs::write(self.store.dir().join(name), content).expect("a file");
    }

    /// A file of the index.
    fn state(&self, name: &str) -> PathBuf {
        self.folder.path().join(".underpass/net").join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.store.dir()).expect("a folder");
        let mut names: Vec<_> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }
}

/// Ends a call as a signal does: the lock goes, no mark is left.
fn kill(locked: Locked) {
    std::mem::forget(locked.index);
}

/// A network whose leases are in a folder.
pub(crate) fn conf_of(folder: &Path) -> NetConf {
    let text = json!({
        "cniVersion": "1.1.0",
        "name": "net",
        "type": "underpass",
        "ipam": { "type": "host-local", "dataDir": folder },
    });
    NetConf::parse(text.to_string().as_bytes()).expect("a config")
}

/// While it lives, files are subject to their modes for this thread, also where root runs the test. What the thread makes is
/// its own.
#[must_use]
pub(crate) struct WithoutPrivileges(Uid);

pub(crate) fn without_privileges() -> WithoutPrivileges {
    let uid = Uid::effective();
    let other = Uid::from_raw(65_534);
    WithoutPrivileges(setfsuid(if uid.is_root() { other } else { uid }))
}

impl Drop for WithoutPrivileges {
    fn drop(&mut self) {
        setfsuid(self.0);
    }
}

/// Makes a lease one that can't be read, as a disk that lost power may leave it.
pub(crate) fn spoil(lease: &Path) {
    fs::set_permissions(lease, fs::Permissions::from_mode(0o000)).expect("another mode");
}

/// Takes back what [`spoil`] did.
fn mend(lease: &Path) {
    fs::set_permissions(lease, fs::Permissions::from_mode(0o600)).expect("another mode");
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn owner() -> Owner {
    Owner::new("c1", "eth0")
}

#[test]
fn files_are_those_of_the_reference() {
    let fixture = Fixture::new();
    let mut locked = fixture.lock();
    for ip in ["10.1.2.2", "2001:db8:1::2"] {
        assert!(locked.reserve(address(ip), &owner()).expect("free"));
        assert!(
            !locked
                .reserve(address(ip), &Owner::new("c2", "eth0"))
                .expect("taken")
        );
    }
    locked
        .set_last_reserved(1, address("2001:db8:1::2"))
        .expect("written");
    drop(locked);
    assert_eq!(
        fixture.names(),
        ["10.1.2.2", "2001:db8:1::2", "last_reserved_ip.1", "lock"]
    );
    let mode = |name: &str| {
        fs::metadata(fixture.store.dir().join(name))
            .expect("a file")
            .permissions()
            .mode()
            & 0o7777
    };
    for (name, content) in [
        ("10.1.2.2", "c1\r\neth0"),
        ("last_reserved_ip.1", "2001:db8:1::2"),
        ("lock", ""),
    ] {
        assert_eq!(
            fs::read_to_string(fixture.store.dir().join(name)).expect("a file"),
            content
        );
    }
    assert_eq!(
        (
            mode("10.1.2.2"),
            mode("last_reserved_ip.1"),
            mode("lock"),
            mode(".")
        ),
        (0o600, 0o600, 0o750, 0o755)
    );
}

#[test]
fn leases_that_others_make_and_remove_are_seen() {
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2"]);
    fixture.write("10.0.0.3", "c1\r\neth0");
    fixture.write("10.0.0.4", " c1\n");
    fixture.write("10.0.0.5", "c1\r\neth1");
    assert_eq!(
        fixture.owned(&owner()),
        ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    );
    fs::remove_file(fixture.store.dir().join("10.0.0.2")).expect("removed");
    // The same name for somebody else.
    fixture.write("10.0.0.2", "c9\r\neth0");
    assert_eq!(fixture.owned(&owner()), ["10.0.0.3", "10.0.0.4"]);
    assert_eq!(fixture.owned(&Owner::new("c9", "eth0")), ["10.0.0.2"]);
}

#[test]
fn a_lease_known_to_the_index_is_not_read_again() {
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    // In place, which changes neither the directory nor the inode: only a reading would tell.
    fs::write(fixture.store.dir().join("10.0.0.2"), "c2\r\neth0").expect("overwritten");
    fixture.write("10.0.0.3", "c2\r\neth0");
    assert_eq!(
        fixture.owned(&Owner::new("c2", "eth0")),
        ["10.0.0.3"],
        "10.0.0.2 was read without need"
    );
    assert_eq!(
        fixture.owned(&owner()),
        [""; 0],
        "the lease itself is always read before it counts"
    );
}

#[test]
fn the_index_is_built_anew_when_it_is_lost_or_of_another_boot() {
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    fs::remove_dir_all(fixture.state("")).expect("removed");
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2"]);
    let mark = fixture.state("mark");
    let text = fs::read_to_string(&mark).expect("a mark");
    let (_, time) = text.split_once(' ').expect("boot and time");
    fs::write(&mark, format!("another-boot {time}")).expect("written");
    fs::remove_dir_all(fixture.state("owner")).expect("removed");
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2"]);
}

#[test]
fn an_index_that_lost_its_folders_in_this_boot_gets_them_back() {
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    for folder in ["address", "owner"] {
        fs::remove_dir_all(fixture.state(folder)).expect("removed");
    }
    fixture.write("10.0.0.3", "c1\r\neth0");
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2", "10.0.0.3"]);
    assert!(fixture.reserve("10.0.0.4", &owner()));
}

#[test]
fn empty_files_are_free_and_foreign_things_are_not() {
    let fixture = Fixture::new();
    fixture.write("10.0.0.2", "");
    fixture.write("10.0.0.3", "\n");
    fs::create_dir(fixture.store.dir().join("10.0.0.4"))
        .expect("a folder with an address for a name");
    assert!(fixture.reserve("10.0.0.2", &owner()));
    assert!(!fixture.reserve("10.0.0.3", &owner()));
    assert!(!fixture.reserve("10.0.0.4", &owner()));
    // As a power failure leaves it: known to the index, and empty.
    fs::write(fixture.store.dir().join("10.0.0.2"), "").expect("truncated");
    assert!(fixture.reserve("10.0.0.2", &Owner::new("c2", "eth0")));
}

#[test]
fn only_the_owner_releases_and_legacy_leases_go_last() {
    let fixture = Fixture::new();
    fixture.write("10.0.0.9", "c1");
    assert!(fixture.reserve("10.0.0.2", &owner()));
    assert!(
        !fixture
            .lock()
            .release(address("10.0.0.2"), &Owner::new("c1", "eth1"))
            .expect("not theirs")
    );
    fixture
        .lock()
        .release_all(&Owner::new("c2", "eth0"))
        .expect("nothing to do");
    assert_eq!(fixture.names(), ["10.0.0.2", "10.0.0.9", "lock"]);
    fixture.lock().release_all(&owner()).expect("released");
    assert_eq!(fixture.names(), ["10.0.0.9", "lock"]);
    fixture.lock().release_all(&owner()).expect("released");
    assert_eq!(fixture.names(), ["lock"]);
}

#[test]
fn owners_that_are_no_file_names_are_found_all_the_same() {
    let fixture = Fixture::new();
    let long = Owner::new(&"a".repeat(300), "eth0");
    assert!(fixture.reserve("10.0.0.2", &long));
    fixture.write("10.0.0.3", "a/b\r\neth0");
    assert_eq!(fixture.owned(&long), ["10.0.0.2"]);
    assert_eq!(fixture.owned(&Owner::new("a/b", "eth0")), ["10.0.0.3"]);
}

#[test]
fn a_call_killed_between_any_two_steps_leaves_a_valid_directory() {
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    // Staged, not linked.
    let mut locked = fixture.lock();
    assert!(locked.index.bring_up_to_date().expect("an index"));
    let staged = fixture.state("address/lease-10.0.0.3");
    fs::write(fixture.state("owner/c1:eth0"), "\n10.0.0.2\n10.0.0.3").expect("noted");
    fs::write(&staged, owner().content()).expect("staged");
    kill(locked);
    assert!(staged.exists());
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2"]);
    assert!(!staged.exists(), "the next call clears it away");
    // Linked, not marked.
    let mut locked = fixture.lock();
    assert!(locked.reserve(address("10.0.0.3"), &owner()).expect("free"));
    kill(locked);
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2", "10.0.0.3"]);
    // The lease is gone, the index does not know.
    fs::remove_file(fixture.store.dir().join("10.0.0.2")).expect("removed");
    assert_eq!(fixture.owned(&owner()), ["10.0.0.3"]);
    assert!(fixture.reserve("10.0.0.2", &Owner::new("c2", "eth0")));
}

#[test]
fn a_failure_says_what_to_do() {
    let fixture = Fixture::new();
    fs::write(fixture.store.dir(), "in the way").expect("a file");
    let error = fixture.store.lock().expect_err("no folder").to_string();
    assert!(
        error.starts_with("cannot create the folder ") && error.contains("/net: "),
        "{error}"
    );
    // To be root does not help against what nobody may do.
    let forbidden = io::Error::from_raw_os_error(nix::errno::Errno::EPERM as i32);
    let error = Err::<(), _>(forbidden).attempt("remove", Path::new("/lease"));
    let error = error.expect_err("forbidden").to_string();
    assert!(
        error.contains("immutable") && !error.contains("as root"),
        "{error}"
    );
}

#[test]
fn a_lease_is_a_link_in_the_index_and_the_lock_is_none() {
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    let links = |path: PathBuf| fs::metadata(path).expect("a file").nlink();
    assert_eq!(links(fixture.store.dir().join("10.0.0.2")), 2);
    assert_eq!(links(fixture.store.dir().join("lock")), 1);
    let linked = fixture.state("address/lease-10.0.0.2");
    assert!(linked.exists());
    fixture.lock().release_all(&owner()).expect("released");
    assert!(!linked.exists());
}

#[test]
fn a_lease_that_cannot_be_read_costs_its_address_alone() {
    let _user = without_privileges();
    let fixture = Fixture::new();
    let [bad, good] = ["bad", "good"].map(|id| Owner::new(id, "eth0"));
    assert!(fixture.reserve("10.0.0.2", &bad) && fixture.reserve("10.0.0.3", &good));
    spoil(&fixture.store.dir().join("10.0.0.2"));
    fs::remove_dir_all(fixture.state("")).expect("removed");
    assert_eq!(fixture.owned(&good), ["10.0.0.3"]);
    assert!(fixture.reserve("10.0.0.4", &owner()));
    assert!(!fixture.reserve("10.0.0.2", &owner()));
    for gone in [&bad, &good] {
        fixture.lock().release_all(gone).expect("released");
    }
    fixture.lock().rebuild_index().expect("an index");
    assert_eq!(fixture.owned(&owner()), ["10.0.0.4"]);
    assert!(fixture.store.is_leased(address("10.0.0.2")));
    assert!(fixture.state("mark").exists(), "the index is complete");
}

#[test]
fn a_lease_is_learned_as_soon_as_it_can_be_read() {
    let _user = without_privileges();
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    let lease = fixture.store.dir().join("10.0.0.2");
    spoil(&lease);
    fs::remove_dir_all(fixture.state("")).expect("removed");
    for _ in 0..2 {
        assert_eq!(fixture.owned(&owner()), [""; 0]);
    }
    mend(&lease);
    assert_eq!(fixture.owned(&owner()), ["10.0.0.2"]);
    // And the folder's time says so from now on.
    let changed = fixture.state("owner/c1:eth0");
    fs::remove_file(changed).expect("removed");
    assert_eq!(fixture.owned(&owner()), [""; 0], "nothing was read again");
}

#[test]
fn who_owns_a_lease_that_cannot_be_read_is_told() {
    let _user = without_privileges();
    let fixture = Fixture::new();
    assert!(fixture.reserve("10.0.0.2", &owner()));
    let lease = fixture.store.dir().join("10.0.0.2");
    spoil(&lease);
    let stays = fixture.lock().release_all(&owner());
    let error = stays.expect_err("it can't be freed").to_string();
    assert!(error.contains("cannot read the lease"), "{error}");
    // Others hear nothing of it.
    let other = fixture.lock().release_all(&Owner::new("c2", "eth0"));
    other.expect("nothing to do");
    mend(&lease);
    fixture.lock().release_all(&owner()).expect("released");
    assert!(!lease.exists());
}
