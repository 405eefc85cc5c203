//! What a guest's kernel unpacks into memory: busybox, the modules that reach the host's root, and a script.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};

use super::kernel::Kernel;

const INIT: &str = include_str!("init.sh");

/// What it takes to mount the host's root. Newer kernels have some of it built in.
const MODULES: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];

/// The archive, in cpio's "new ASCII" format, as the kernel's documentation describes it.
pub(super) fn build(kernel: &Kernel, busybox: &Path) -> anyhow::Result<Vec<u8>> {
    let folder = kernel.modules();
    let table = folder.join("modules.dep");
    let table =
        fs::read_to_string(&table).with_context(|| format!("cannot read {}", table.display()))?;
    let modules = order(&table, &MODULES);
    if !modules.iter().any(|path| file_name(path) == "9p.ko") {
        bail!(
            "kernel {} has no module 9p, by which a guest reads the host's root",
            kernel.release()
        );
    }

    let mut archive = Archive::default();
    for name in ["bin", "dev", "modules", "proc", "sys"] {
        archive.add(name, DIRECTORY | 0o755, &[]);
    }
    let busybox =
        fs::read(busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    archive.add("bin/busybox", FILE | 0o755, &busybox);
    archive.add("init", FILE | 0o755, INIT.as_bytes());
    let mut names = String::new();
    for path in modules {
        let module = folder.join(path);
        let content =
            fs::read(&module).with_context(|| format!("cannot read {}", module.display()))?;
        archive.add(
            &format!("modules/{}", file_name(path)),
            FILE | 0o644,
            &content,
        );
        names += file_name(path);
        names.push('\n');
    }
    archive.add("modules/order", FILE | 0o644, names.as_bytes());
    Ok(archive.finish())
}

/// The files of modules and of all that they need, each after what it needs. Modules that the table lacks are left out.
fn order<'a>(table: &'a str, names: &[&str]) -> Vec<&'a str> {
    let mut order = Vec::new();
    for name in names {
        let found = table
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(path, _)| file_name(path).strip_suffix(".ko") == Some(name));
        let Some((path, needed)) = found else {
            continue;
        };
        // The table lists what is needed in the order of unloading.
        for path in needed.split_whitespace().rev().chain([path]) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    order
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

const DIRECTORY: usize = 0o040_000;
const FILE: usize = 0o100_000;

/// A cpio archive under construction.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    files: usize,
}

impl Archive {
    fn add(&mut self, name: &str, mode: usize, content: &[u8]) {
        self.files += 1;
        let links = 1;
        self.bytes.extend(b"070701");
        for field in [
            self.files,
            mode,
            0,
            0,
            links,
            0,
            content.len(),
            0,
            0,
            0,
            0,
            name.len() + 1,
            0,
        ] {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_comes_after_what_it_needs() {
        let table = "kernel/a/ring.ko:\n\
                     kernel/a/virtio.ko: kernel/a/ring.ko\n\
                     kernel/b/virtio_pci.ko: kernel/a/virtio.ko kernel/a/ring.ko\n\
                     kernel/c/9p.ko: kernel/c/9pnet.ko\n\
                     kernel/c/9pnet.ko:\n";
        assert_eq!(
            order(table, &["virtio_pci", "built_in", "9p"]),
            [
                "kernel/a/ring.ko",
                "kernel/a/virtio.ko",
                "kernel/b/virtio_pci.ko",
                "kernel/c/9pnet.ko",
                "kernel/c/9p.ko"
            ]
        );
    }

    #[test]
    fn an_archive_is_aligned_and_ends_with_its_trailer() {
        let mut archive = Archive::default();
        archive.add("file", FILE | 0o644, b"12345");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let header = b"07070100000001000081a4";
        assert_eq!(&bytes[..header.len()], header);
        // 110 bytes of header and the name with its zero, padded.
        assert_eq!(&bytes[116..121], b"12345");
        assert!(bytes.windows(11).any(|bytes| bytes == b"TRAILER!!!\0"));
    }
}
