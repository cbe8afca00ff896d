//! How many devices there are, and how large.

use std::path::PathBuf;

use gpu_api::{Error, Result};

/// How the host backend is set up.
#[derive(Clone, Debug)]
pub struct HostConfig {
    pub(crate) devices: u32,
    pub(crate) bytes: u64,
    pub(crate) blocking_waits: bool,
    pub(crate) stream_writes: bool,
    pub(crate) stream_waits: bool,
    pub(crate) shared_context: bool,
    pub(crate) signs_of_life: Option<PathBuf>,
}

impl Default for HostConfig {
    /// One device of 1 GiB.
    fn default() -> HostConfig {
        HostConfig {
            devices: 1,
            bytes: 1 << 30,
            blocking_waits: false,
            stream_writes: true,
            stream_waits: true,
            shared_context: false,
            signs_of_life: None,
        }
    }
}

impl HostConfig {
    /// Reads `GPU_IPC_HOST_DEVICES` and `GPU_IPC_HOST_BYTES`; what is not set stays at its default.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] that names the variable, for a value that is no number.
    pub fn from_env() -> Result<HostConfig> {
        let mut config = HostConfig::default();
        if let Some(devices) = variable("GPU_IPC_HOST_DEVICES", "a number from 0 to 64")? {
            if devices > 64 {
                return Err(invalid(
                    "GPU_IPC_HOST_DEVICES",
                    devices.to_string(),
                    "a number from 0 to 64",
                ));
            }
            config.devices = devices as u32;
        }
        if let Some(bytes) = variable("GPU_IPC_HOST_BYTES", "a number of bytes")? {
            config.bytes = bytes;
        }
        Ok(config)
    }

    /// Sets the number of devices.
    #[must_use]
    pub fn devices(mut self, devices: u32) -> HostConfig {
        self.devices = devices;
        self
    }

    /// Sets the bytes of each device. They are counted in this process; other processes count their
    /// own.
    #[must_use]
    pub fn bytes_per_device(mut self, bytes: u64) -> HostConfig {
        self.bytes = bytes;
        self
    }

    /// Lets free, close and unregister block while any stream of this backend waits for a word, as
    /// CUDA does.
    #[must_use]
    pub fn blocking_waits(mut self, blocking: bool) -> HostConfig {
        self.blocking_waits = blocking;
        self
    }

    /// Takes away the streams' ability to write and wait for words, as on devices that have none.
    #[must_use]
    pub fn stream_words(mut self, has: bool) -> HostConfig {
        (self.stream_writes, self.stream_waits) = (has, has);
        self
    }

    /// Takes away the streams' ability to wait for words alone; they still write them.
    #[must_use]
    pub fn stream_waits(mut self, has: bool) -> HostConfig {
        self.stream_waits = has;
        self
    }

    /// Names, in this folder, a file with each process' pid for a name, and one with the number that
    /// it gave as its sign, as a driver that shows for how long a process' GPU work may run:
    /// [`GpuDevices::signs_of_life`](gpu_api::GpuDevices::signs_of_life). The quarantine of a process
    /// without such a file is an hour.
    #[must_use]
    pub fn signs_of_life(mut self, folder: impl Into<PathBuf>) -> HostConfig {
        self.signs_of_life = Some(folder.into());
        self
    }

    /// Says of the devices that processes share one context on them, as under NVIDIA MPS: a death
    /// proves nothing there.
    #[must_use]
    pub fn shared_context(mut self, shared: bool) -> HostConfig {
        self.shared_context = shared;
        self
    }
}

fn variable(name: &'static str, must: &'static str) -> Result<Option<u64>> {
    match std::env::var(name) {
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(invalid(name, error.to_string(), must)),
        Ok(text) => match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(invalid(name, text, must)),
        },
    }
}

fn invalid(what: &'static str, got: String, must: &'static str) -> Error {
    Error::invalid(what, got, must)
}
