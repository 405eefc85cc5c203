//! Single runs of a node's pinned programs on crafted frames, by `BPF_PROG_TEST_RUN`.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::{
    TestRunOptions,
    programs::{SchedClassifier, TestRun as _},
};

use crate::{Node, counter::pins};

/// `TC_ACT_UNSPEC`: not mine, to the next filter or the stack.
pub const UNSPEC: i32 = -1;
/// `TC_ACT_SHOT`: dropped.
pub const SHOT: i32 = 2;
/// `TC_ACT_REDIRECT`: to another device.
pub const REDIRECT: i32 = 7;

/// Offset of `ifindex` in the kernel's `struct __sk_buff`, and the size of the struct up to it.
const SK_BUFF_IFINDEX: usize = 40;
const SK_BUFF: usize = 192;

/// A program of a node, ready to run as if at one device.
#[derive(Debug)]
pub struct Bench<'a> {
    node: &'a Node,
    program: SchedClassifier,
    ifindex: u32,
}

/// What a run did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The program's return value.
    pub action: i32,
    /// The frame after it.
    pub frame: Vec<u8>,
}

impl<'a> Bench<'a> {
    /// Opens the pin of a program; `device` is the interface that frames seem to be on.
    pub fn open(node: &'a Node, program: &str, device: &str) -> Result<Self> {
        Self::of(node, &pins(node).join("programs").join(program), device)
    }

    /// Opens any pin of a program in the node's own mounts.
    pub fn of(node: &'a Node, path: &Path, device: &str) -> Result<Self> {
        let program = node
            .netns()
            .run(|| SchedClassifier::from_pin(path))
            .with_context(|| format!("open the pinned program {}", path.display()))?;
        Ok(Self {
            node,
            program,
            ifindex: node.netns().ifindex(device)?,
        })
    }

    /// Runs the program on a frame.
    pub fn run(&self, frame: &[u8]) -> Result<Verdict> {
        self.node.netns().run(|| self.run_here(frame))
    }

    /// As [`Self::run`], for a thread that is in the node's network namespace.
    pub fn run_here(&self, frame: &[u8]) -> Result<Verdict> {
        let mut context = [0; SK_BUFF];
        context[SK_BUFF_IFINDEX..SK_BUFF_IFINDEX + 4].copy_from_slice(&self.ifindex.to_ne_bytes());
        let mut out = vec![0; frame.len() + 256];
        let result = self.program.test_run(TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ..TestRunOptions::new()
        });
        let result = result.context("BPF_PROG_TEST_RUN")?;
        out.truncate(result.data_size_out as usize);
        Ok(Verdict {
            action: result.return_value.cast_signed(),
            frame: out,
        })
    }
}
