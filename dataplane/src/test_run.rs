//! Runs of a program on a frame that somebody made (`BPF_PROG_TEST_RUN`).

use std::time::Duration;

use aya::{
    TestRunOptions,
    programs::{ProgramError, SchedClassifier, TestRun as _},
};

/// Offset of `ifindex` in the kernel's `struct __sk_buff`, and the size of the struct up to `gso_size` and more.
const SK_BUFF_IFINDEX: usize = 40;
const SK_BUFF: usize = 192;
/// So many bytes may a program add to a frame.
const GROWTH: usize = 256;

/// What a program is run on, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    frame: &'a [u8],
    device: Option<u32>,
    repeat: u32,
}

/// What a run did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// What the program returned, the last time.
    pub return_value: u32,
    /// How long one run took, as the kernel timed it.
    pub duration: Duration,
}

impl<'a> Run<'a> {
    /// Runs on this frame, once, and on a device of the kernel's choice.
    #[must_use]
    pub const fn on(frame: &'a [u8]) -> Self {
        Self {
            frame,
            device: None,
            repeat: 1,
        }
    }

    /// Has the frame be on this device of the calling thread's network namespace.
    #[must_use]
    pub const fn at(mut self, device: u32) -> Self {
        self.device = Some(device);
        self
    }

    /// Runs so many times, each time on what the time before has left.
    #[must_use]
    pub const fn times(mut self, repeat: u32) -> Self {
        self.repeat = repeat;
        self
    }

    /// Runs the program.
    pub fn of(self, program: &SchedClassifier) -> Result<Outcome, ProgramError> {
        Ok(self.run(program, None)?.0)
    }

    /// Runs the program, and returns the frame that it leaves as well.
    pub fn frame_of(self, program: &SchedClassifier) -> Result<(Outcome, Vec<u8>), ProgramError> {
        let mut left = vec![0; self.frame.len() + GROWTH];
        let (outcome, length) = self.run(program, Some(&mut left))?;
        left.truncate(length as usize);
        Ok((outcome, left))
    }

    fn run(
        self,
        program: &SchedClassifier,
        left: Option<&mut [u8]>,
    ) -> Result<(Outcome, u32), ProgramError> {
        let context = self.device.map(|device| {
            let mut context = [0; SK_BUFF];
            context[SK_BUFF_IFINDEX..SK_BUFF_IFINDEX + 4].copy_from_slice(&device.to_ne_bytes());
            context
        });
        let result = program.test_run(TestRunOptions {
            data_in: Some(self.frame),
            data_out: left,
            ctx_in: context.as_ref().map(<[u8; SK_BUFF]>::as_slice),
            repeat: self.repeat,
            ..TestRunOptions::new()
        })?;
        let outcome = Outcome {
            return_value: result.return_value,
            duration: result.duration,
        };
        Ok((outcome, result.data_size_out))
    }
}
