use std::{collections::BTreeMap, io::Read as _};

use serde_json::Value;
use tempfile::TempDir;

use super::*;

const X86_64: u8 = 62;
const AARCH64: u8 = 183;

/// Where licences of others are.
const OF_OTHERS: &str = "of-others";

/// The header of an executable for a machine.
fn executable(machine: u8) -> Vec<u8> {
    let mut file = vec![0; 0x40];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[0x12] = machine;
    file
}

/// A folder with all that belongs into an image: the executables for these machines, and something else.
fn folder(machines: [u8; 3]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, content: Vec<u8>| {
        fs::write(folder.path().join(name), content).expect("a file");
    };
    for (name, machine) in EXECUTABLES.into_iter().zip(machines) {
        write(name, executable(machine));
    }
    for name in LICENCES {
        write(name, vec![b'x'; 600]);
    }
    write("sh", executable(X86_64));
    fs::create_dir(folder.path().join(OF_OTHERS)).expect("a folder");
    write(&format!("{OF_OTHERS}/crates.txt"), vec![b'x'; 700]);
    folder
}

fn packed(folder: &TempDir, time: u64) -> Result<Vec<u8>, Error> {
    archive(&Source {
        executables: folder.path(),
        licences: folder.path(),
        of_others: &folder.path().join(OF_OTHERS),
        version: "1.2.3",
        time,
    })
}

/// All files of a tarball with their headers' modes, in their order.
fn files(tarball: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
    let mut tarball = tar::Archive::new(tarball);
    let entries = tarball.entries().expect("a tarball");
    let file = |entry: io::Result<tar::Entry<'_, _>>| {
        let mut entry = entry.expect("an entry");
        let header = entry.header();
        assert_eq!(
            (header.uid().ok(), header.gid().ok(), header.mtime().ok()),
            (Some(0), Some(0), Some(7))
        );
        let mode = header.mode().expect("a mode");
        let path = entry.path().expect("a path").display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).expect("the content");
        (path, mode, content)
    };
    entries.map(file).collect()
}

/// Follows a descriptor, and sees that it names what is there.
fn blob(files: &BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Vec<u8> {
    let digest = descriptor["digest"].as_str().expect("a digest");
    let content = files
        .get(&format!("blobs/{}", digest.replace(':', "/")))
        .expect("the blob");
    assert_eq!(descriptor["size"], content.len());
    assert_eq!(Blob::new(content.clone()).digest(), digest);
    content.clone()
}

fn json(content: &[u8]) -> Value {
    serde_json::from_slice(content).expect("JSON")
}

#[test]
fn every_blob_is_what_its_digest_and_size_say() {
    let folder = folder([X86_64; 3]);
    let archive = packed(&folder, 7).expect("an image");
    let entries = files(&archive);
    assert!(entries.is_sorted(), "entries are in their order");
    let files: BTreeMap<_, _> = entries
        .into_iter()
        .map(|(path, _, content)| (path, content))
        .collect();
    assert_eq!(json(&files["oci-layout"])["imageLayoutVersion"], "1.0.0");

    let index = json(&files["index.json"]);
    let entry = &index["manifests"][0];
    assert_eq!(entry["platform"]["architecture"], "amd64");
    let annotations = &entry["annotations"];
    assert_eq!(annotations["org.opencontainers.image.ref.name"], "1.2.3");
    assert_eq!(
        annotations["io.containerd.image.name"],
        "localhost/underpass-agent:1.2.3"
    );
    let manifest = json(&blob(&files, entry));
    let config = json(&blob(&files, &manifest["config"]));
    assert_eq!(
        config["config"]["Entrypoint"],
        serde_json::json!(["/underpass-agent"])
    );
    assert_eq!(config["architecture"], "amd64");
    assert_eq!(
        config["config"]["Labels"]["org.opencontainers.image.version"],
        "1.2.3"
    );
    // The layer is stored as it is.
    assert_eq!(
        config["rootfs"]["diff_ids"][0],
        manifest["layers"][0]["digest"]
    );
    blob(&files, &manifest["layers"][0]);
    // Two folders, two documents of the layout, and three blobs.
    assert_eq!(files.len(), 2 + 2 + 3, "{:?}", files.keys());
}

#[test]
fn the_root_has_executables_and_licences_and_nothing_else() {
    let folder = folder([AARCH64; 3]);
    let archive = files(&packed(&folder, 7).expect("an image"));
    let is_layer = |content: &[u8]| content.starts_with(b"licences/\0");
    let layer = archive.iter().find(|(.., content)| is_layer(content));
    let (.., layer) = layer.expect("a layer that begins with the first file");
    let listed: Vec<_> = files(layer)
        .into_iter()
        .map(|(path, mode, content)| (path, mode, content.len()))
        .collect();
    assert_eq!(
        listed,
        [
            ("licences/", 0o755, 0),
            ("licences/LICENSE-APACHE", 0o644, 600),
            ("licences/LICENSE-GPL-2.0", 0o644, 600),
            ("licences/LICENSE-MIT", 0o644, 600),
            ("licences/crates.txt", 0o644, 700),
            ("underpass", 0o755, 0x40),
            ("underpass-agent", 0o755, 0x40),
            ("underpass-ipam", 0o755, 0x40),
        ]
        .map(|(path, mode, length)| (path.to_owned(), mode, length))
    );
}

#[test]
fn the_same_files_give_the_same_bytes() {
    let [one, other] = [folder([X86_64; 3]), folder([X86_64; 3])];
    assert_eq!(
        packed(&one, 7).expect("an image"),
        packed(&other, 7).expect("an image")
    );
    assert_ne!(
        packed(&one, 7).expect("an image"),
        packed(&one, 8).expect("an image")
    );
}

#[test]
fn executables_are_for_one_machine() {
    let error = packed(&folder([X86_64, X86_64, AARCH64]), 7).expect_err("two machines");
    assert!(matches!(error, Error::Mixed(_)), "{error}");
    let error = packed(&folder([X86_64, 3, X86_64]), 7).expect_err("a machine without a name");
    assert!(matches!(error, Error::Machine(_)), "{error}");
    let folder = folder([X86_64; 3]);
    fs::remove_file(folder.path().join("underpass")).expect("a file");
    let error = packed(&folder, 7).expect_err("no such executable");
    assert!(matches!(error, Error::Unreadable { .. }), "{error}");
}
