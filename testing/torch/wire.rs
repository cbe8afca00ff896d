//! What both programs need: frames, patterns, copies, and a list of checks.

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use gpu_ipc::torch::{Dtype, Layout};
use gpu_ipc::{BackendKind, Gpu, detect};

/// A process that takes longer counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// No frame of these programs is longer.
const LONGEST: usize = 64 << 20;

pub type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Finds a device.
pub fn open(backend: &str) -> Result<Gpu> {
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == backend);
    Ok(detect()?.first(kind.ok_or_else(|| format!("no backend is named {backend}"))?)?)
}

/// Frames over a socket: a length of four bytes, little-endian, and the content.
pub struct Wire(UnixStream);

impl Wire {
    pub fn new(socket: UnixStream) -> Result<Wire> {
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Wire(socket))
    }

    pub fn send(&mut self, content: impl AsRef<[u8]>) -> Result<()> {
        let content = content.as_ref();
        let mut frame = u32::try_from(content.len())?.to_le_bytes().to_vec();
        frame.extend(content);
        Ok(self.0.write_all(&frame)?)
    }

    pub fn receive(&mut self) -> Result<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > LONGEST {
            return Err(format!("a frame of {length} bytes").into());
        }
        let mut content = vec![0; length];
        self.0.read_exact(&mut content)?;
        Ok(content)
    }

    pub fn text(&mut self) -> Result<String> {
        Ok(String::from_utf8(self.receive()?)?)
    }

    /// Waits for the other side's agreement.
    #[allow(dead_code, reason = "for the side that asks")]
    pub fn agreed(&mut self) -> Result<()> {
        match self.text()?.as_str() {
            "ok" => Ok(()),
            other => Err(format!("the other side says: {other}").into()),
        }
    }
}

/// Returns the bytes of a small whole number.
fn element(dtype: Dtype, value: u8) -> Vec<u8> {
    let float = f32::from(value);
    match dtype {
        Dtype::I16 => i16::from(value).to_le_bytes().to_vec(),
        Dtype::I32 => i32::from(value).to_le_bytes().to_vec(),
        Dtype::I64 => i64::from(value).to_le_bytes().to_vec(),
        Dtype::F16 => {
            // Five bits of exponent, ten of mantissa; every number below 97 is exact.
            let exponent = u16::from(value).checked_ilog2().map_or(0, |e| e as u16);
            let bits = if value == 0 {
                0
            } else {
                ((exponent + 15) << 10) | ((u16::from(value) << (10 - exponent)) & 0x3ff)
            };
            bits.to_le_bytes().to_vec()
        }
        Dtype::Bf16 => float.to_le_bytes()[2..].to_vec(),
        Dtype::F32 => float.to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
        Dtype::Bool => vec![value % 2],
        Dtype::C64 => [float.to_le_bytes(), [0; 4]].concat(),
        Dtype::C128 => [f64::from(value).to_le_bytes(), [0; 8]].concat(),
        _ => vec![value],
    }
}

/// Returns the contents of a storage of this many bytes: element `k` is `(31 k + seed) mod 97`.
pub fn pattern(dtype: Dtype, bytes: usize, seed: u64) -> Vec<u8> {
    let period: Vec<u8> = (0..97)
        .flat_map(|k| element(dtype, ((31 * k + seed) % 97) as u8))
        .collect();
    let mut all = period.repeat(bytes / period.len() + 1);
    all.truncate(bytes);
    all
}

/// Returns the elements of a view, one after the other.
pub fn gather(layout: &Layout, storage: &[u8]) -> Result<Vec<u8>> {
    layout.check(storage.len() as u64)?;
    let (width, count) = (
        layout.dtype.bytes() as usize,
        layout.elements().ok_or("too many elements")?,
    );
    let mut all = Vec::with_capacity(count as usize * width);
    for mut index in 0..count {
        let mut at = layout.offset;
        for (extent, stride) in layout.shape.iter().zip(&layout.strides).rev() {
            at += index % extent * stride;
            index /= extent;
        }
        let at = at as usize * width;
        all.extend(&storage[at..at + width]);
    }
    Ok(all)
}

/// Names a file of shared memory that a process left, if there is one.
#[allow(dead_code, reason = "for the side that asks")]
pub fn left_behind(pid: u32) -> Option<String> {
    let names = std::fs::read_dir("/dev/shm").ok()?.flatten();
    let mut names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.find(|name| name.starts_with(&format!("torch_{pid}_")) || *name == format!("torch_{pid}"))
}

/// Counts what was checked, and prints each as it comes.
#[derive(Default)]
#[allow(dead_code, reason = "for the side that asks")]
pub struct Checks {
    pub passed: usize,
    pub failed: usize,
}

#[allow(dead_code, reason = "for the side that asks")]
impl Checks {
    pub fn note(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("ok      {name}");
            }
            Err(error) => {
                self.failed += 1;
                println!("FAILED  {name}: {error}");
            }
        }
    }
}
