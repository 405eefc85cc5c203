//! Compiles the eBPF programs and leaves them in `OUT_DIR`, by name, for the crate to embed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use object::{
    build::elf::{Builder, SectionData},
    elf,
};
use underpass_toolchain::{self as toolchain, Toolchain};

/// What the object is made from, relative to the workspace.
const SOURCES: [&str; 6] = [
    "ebpf/src",
    "ebpf/Cargo.toml",
    "ebpf/abi/src",
    "ebpf/abi/Cargo.toml",
    "Cargo.toml",
    "Cargo.lock",
];

/// What an embedded object begins with, so that it can be found in an executable. The last byte has no meaning, and is part of the build's
/// number all the same.
const HEADER: [u8; 16] = *b"underpass eBPF\0\0";

/// The level of deflate: the best that is usual.
const COMPRESSION: u8 = 9;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("cargo::error={message}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let root = variable("CARGO_MANIFEST_DIR")?
        .parent()
        .map(Path::to_path_buf)
        .ok_or("this crate's folder has no parent: build it inside its workspace")?;
    let out = variable("OUT_DIR")?;
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    println!("cargo::rerun-if-env-changed={}", toolchain::CHOICE);

    let toolchain = Toolchain::find(&root).map_err(|missing| missing.to_string())?;
    println!(
        "cargo::rerun-if-changed={}",
        toolchain.compiler.rustc.display()
    );
    println!("cargo::rerun-if-changed={}", toolchain.linker.display());

    let target = out.join("ebpf");
    let status = toolchain
        .cargo("build", &root, &target, &[])
        .and_then(|mut cargo| cargo.status())
        .map_err(|e| format!("cannot start the eBPF build: {e}: run `cargo xtask setup`"))?;
    if !status.success() {
        return Err(format!(
            "the eBPF programs do not build ({status}): the compiler's messages are above"
        ));
    }
    for name in toolchain::OBJECTS {
        embed(&Toolchain::object(&target, name), &out.join(name))?;
    }
    Ok(())
}

/// Leaves an object that was linked where the crate finds it, deflated behind a header, as `src/object.rs` expects it.
fn embed(object: &Path, embedded: &Path) -> Result<(), String> {
    let linked = fs::read(object).map_err(|e| format!("cannot read {}: {e}", object.display()))?;
    let stripped =
        without_dwarf(&linked).map_err(|e| format!("cannot strip {}: {e}", object.display()))?;
    let deflated = miniz_oxide::deflate::compress_to_vec(&stripped, COMPRESSION);
    fs::write(embedded, [&HEADER[..], &deflated].concat())
        .map_err(|e| format!("cannot write {}: {e}", embedded.display()))
}

/// The object without its DWARF sections, four fifths of it: BTF was made from them, and the kernel
/// takes BTF.
fn without_dwarf(object: &[u8]) -> Result<Vec<u8>, object::build::Error> {
    let mut builder = Builder::read(object)?;
    for section in &mut builder.sections {
        let name: &[u8] = &section.name;
        section.delete = name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
    }
    builder.delete_orphans();
    // The linker has one table for the names of symbols and sections; the builder wants two.
    let names = builder.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    builder.write(&mut stripped)?;
    Ok(stripped)
}

/// A variable that cargo sets for build scripts.
fn variable(name: &str) -> Result<PathBuf, String> {
    env::var_os(name)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{name} is not set: this program is run by cargo"))
}
