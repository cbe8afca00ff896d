//! What AMD's runtime does otherwise than others.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use driver::calls::{Calls, Stream};
use driver::code::Code;
use driver::{Backend, Descriptor, DmaBuf, Driver, Quirks, Scope, Vendor, Words};
use gpu_api::{
    AddressRange, BackendKind, DeviceId, DevicePtr, DeviceUuid, DriverError, Error, MemHandle,
    MemoryKind, PointerInfo, RawStream, Result, StreamInfo, StreamOp, WordOps,
};

use crate::handles::Handles;
use crate::hip::Hip;
use crate::kernel::IpcMode;
use crate::proof::{Proof, Step};
use crate::sys::Symbols;
use crate::version::Version;
use crate::{call, error, library, pointer, start};

/// What a runtime says of itself, which needs no device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// Its version.
    pub version: Version,
    /// The functions that it lacks, of those that this backend would call.
    pub missing: Vec<&'static str>,
}

/// AMD's runtime, loaded at run time.
///
/// Beyond plain memory with 64-byte handles, waits on the host and functions that streams call, it
/// does only what a [`Proof`] says was seen to work.
///
/// # Portability
///
/// - Only streams of this backend and adopted ones have an identity where the runtime does not
///   number streams.
/// - `classify` offers no memory for sharing that this backend did not allocate or adopt: the
///   runtime does not tell which of it can be exported.
/// - `export_handle` asks the runtime once for each allocation, and gives the same bytes again
///   afterwards. `is_served` has it asked again where the runtime's server has gone.
/// - `open_handle` gives up where the exporter dies, or does not answer for 12 s.
/// - A stream's wait compares words as unsigned numbers on some runtimes, which is the same as the
///   trait's comparison as long as word and value are below 2^63.
/// - A batch of operations on words is queued one by one: after an error its beginning may be
///   queued.
/// - `close` of a handle waits for all work of the device, whichever stream it is on.
///
/// # Examples
///
/// ```
/// use backend_hip::HipBackend;
/// use gpu_api::{Error, GpuDevices};
///
/// match HipBackend::load() {
///     Ok(hip) => println!("HIP {}: {} devices", hip.version(), hip.device_count()?),
///     Err(Error::Unavailable { why, remedy, .. }) => println!("no HIP here: {why}; {remedy}"),
///     Err(other) => return Err(other),
/// }
/// # Ok::<(), Error>(())
/// ```
pub type HipBackend = Backend<Hip>;

impl Hip {
    /// Loads the runtime and starts it, with a proof, or with none.
    ///
    /// # Errors
    ///
    /// As [`HipBackend::load`](Backend::load), and [`Error::Mismatch`] for a proof of another
    /// runtime or kernel.
    pub fn load_with(proof: Option<Proof>) -> Result<Arc<HipBackend>> {
        let hip = Hip::start(|version| proof.clone().filter(|proof| proof.is_of(version)))?;
        match (&proof, hip.proof()) {
            (Some(given), None) => Err(Error::mismatch(
                "the proof",
                given,
                Proof::new(hip.version(), []),
                "run the probe again (`gpu-ipc doctor`)",
            )),
            _ => Ok(Arc::new(Backend::new(hip))),
        }
    }

    /// Loads the runtime and asks what it is, without starting it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a library, or with one that is not AMD's.
    ///
    /// # Examples
    ///
    /// ```
    /// match backend_hip::Hip::inspect() {
    ///     Ok(found) => println!("HIP {}, without {:?}", found.version, found.missing),
    ///     Err(error) => println!("{error}"),
    /// }
    /// ```
    pub fn inspect() -> Result<Inspection> {
        let (calls, symbols) = find()?;
        Ok(Inspection {
            version: start::version_of(&symbols)?,
            missing: symbols.missing(&calls),
        })
    }

    fn start(choose: impl FnOnce(Version) -> Option<Proof>) -> Result<Arc<Hip>> {
        let (calls, symbols) = find()?;
        let (version, count) = start::start(&symbols)?;
        let mode = IpcMode::here(version);
        let hip = Hip {
            driver: Driver::new(calls),
            device_files: start::device_files(&symbols),
            signs: start::signs(&symbols),
            symbols,
            version,
            quirks: version.quirks(mode),
            mode,
            proof: choose(version),
            identities: vec![None; count],
            places: vec![None; count],
            handles: Handles::default(),
        };
        Ok(Arc::new(hip.identified()))
    }
}

/// Finds the runtime's functions.
fn find() -> Result<(Calls, Symbols)> {
    // Never unloaded: the runtime has threads of its own, and its functions and names are used until
    // the end.
    let library = ManuallyDrop::new(library::load()?);
    // SAFETY: `Symbols::find` asks for a HIP runtime, which the library's name says it is, that
    // stays loaded.
    Ok(unsafe { Symbols::find(&library) })
}

impl Vendor for Hip {
    const KIND: BackendKind = BackendKind::Hip;
    const NAME: &'static str = "HipBackend";
    const WORDS: Words = Words {
        topology: "share within one device, or see `rocm-smi --showtopo`",
        plain: "hipMalloc",
        virtual_memory: "hipMemCreate",
        managed: "hipMallocManaged",
        host: "hipHostMalloc, hipHostRegister",
        pool: "hipMallocAsync",
        instead: "allocate it with hipMalloc, or with `Session::alloc`",
    };

    type Thread = call::Former;

    /// Loads the runtime with the proof that [`PROOF`](crate::PROOF) holds; [`Error::Invalid`] when
    /// the variable holds what is no proof.
    fn load() -> Result<Arc<Hip>> {
        let proof = Proof::from_env()?;
        Hip::start(|version| proof.filter(|proof| proof.is_of(version)))
    }

    /// The runtime's threads and its context stay.
    fn closes(&self) -> bool {
        false
    }

    unsafe fn release(&self) {}

    fn driver(&self) -> &Driver {
        &self.driver
    }

    fn quirks(&self) -> &Quirks {
        &self.quirks
    }

    fn code(&self, code: Code) -> DriverError {
        self.symbols.error(code)
    }

    fn missing(&self, name: &'static str) -> Error {
        error::missing(name)
    }

    fn unsupported(&self, what: &'static str, _: DeviceId) -> Error {
        error::unproved(what)
    }

    fn out_of_memory_hint(&self) -> &'static str {
        self.version.out_of_memory_hint()
    }

    fn on_device(&self, device: DeviceId) -> Result<Scope<'_, Hip>> {
        self.enter(device)
    }

    fn anywhere(&self) -> Result<Scope<'_, Hip>> {
        self.relaxed()
    }

    fn leave(&self, former: &mut call::Former) {
        self.put_back(former);
    }

    fn failed(&self) {
        self.clear_error();
    }

    fn current_device(&self, _: &Scope<'_, Hip>) -> Option<DeviceId> {
        None
    }

    fn count(&self) -> usize {
        self.identities.len()
    }

    fn ordinal(&self, device: DeviceId) -> Result<c_int> {
        if (device.0 as usize) < self.identities.len() {
            Ok(device.0 as c_int)
        } else {
            Err(driver::device::no_device(device, self.identities.len()))
        }
    }

    fn numbered(&self, ordinal: c_int) -> Option<DeviceId> {
        let number = u32::try_from(ordinal).ok()?;
        ((number as usize) < self.identities.len()).then_some(DeviceId(number))
    }

    fn uuid(&self, device: DeviceId) -> Result<DeviceUuid> {
        self.identity(device)
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        self.place(self.ordinal(device)?).map(Some)
    }

    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        self.numa_node(device)
    }

    fn shares_handles(&self, _: DeviceId) -> bool {
        let calls = &self.driver.calls;
        calls.handle_get.function.is_some() && calls.handle_open.function.is_some()
    }

    fn shares_events(&self, device: DeviceId) -> bool {
        self.proved(Step::Events, device) && self.driver.calls.event_handle_get.function.is_some()
    }

    fn maps_read_only(&self, device: DeviceId) -> bool {
        self.proved(Step::ReadOnly, device)
            && matches!(self.way_of_descriptors(device), Ok(Some(Descriptor::Vmm)))
    }

    fn word_ops(&self, device: DeviceId) -> WordOps {
        let own = self.own();
        let words = self.proved(Step::Words, device);
        WordOps {
            writes: words && own.hipStreamWriteValue64.function.is_some(),
            waits: words
                && self.proved(Step::Waits, device)
                && own.hipStreamWaitValue64.function.is_some(),
        }
    }

    fn has_managed(&self, _: DeviceId) -> bool {
        false
    }

    fn shared_context(&self, device: DeviceId) -> Result<bool> {
        self.ordinal(device).map(|_| false)
    }

    fn descriptor(&self, device: DeviceId) -> Result<Option<Descriptor>> {
        self.way_of_descriptors(device)
    }

    /// Its virtual memory is not known to hold on every runtime.
    fn require_ranges(&self, _: DeviceId) -> Result<()> {
        Err(Error::unsupported(
            "memory apart from addresses",
            "this backend has no ranges",
            "ask `Caps::ranges` first, or choose another backend",
        ))
    }

    fn require_pools(&self, device: DeviceId) -> Result<()> {
        self.proved_pools(device)
    }

    fn device_files(&self) -> &[&'static str] {
        &self.device_files
    }

    fn own_sign(&self, device: DeviceId) -> Result<u32> {
        self.ordinal(device)?;
        let own = || {
            self.signs
                .as_ref()?
                .own(|len, then| self.hold(device, len, then))
        };
        Ok(own().unwrap_or(0))
    }

    fn signs_of_life(&self, pid: u32, sign: u32) -> Vec<PathBuf> {
        let signs = self.signs.iter();
        signs.flat_map(|signs| signs.of(pid, sign)).collect()
    }

    fn quarantine(&self, is_shown: bool) -> Duration {
        if is_shown {
            gpu_api::QUARANTINE
        } else {
            BackendKind::Hip.quarantine_unseen()
        }
    }

    fn open_way(&self, scope: &Scope<'_, Hip>, peer: DeviceId) -> Result<(&'static str, Code)> {
        let (symbol, ordinal) = (&self.own().hipDeviceEnablePeerAccess, self.ordinal(peer)?);
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipDeviceEnablePeerAccess` refuses what is no device. Its flags are 0.
            unsafe { function(ordinal, 0) }
        })?;
        Ok((symbol.name, code))
    }

    /// Runtimes before ROCm 7 know the legacy default stream as 0 only.
    fn stream(raw: RawStream) -> Stream {
        let handle = if raw.handle == 1 {
            RawStream::LEGACY
        } else {
            raw.handle
        };
        ptr::with_exposed_provenance_mut(handle as usize)
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        // SAFETY: `identify_stream` has our condition.
        unsafe { self.identify_stream(stream) }
    }

    unsafe fn call_back(
        &self,
        scope: &Scope<'_, Hip>,
        stream: RawStream,
        queued: *mut c_void,
    ) -> Result<()> {
        // SAFETY: `add_callback` has our conditions.
        unsafe { self.add_callback(scope, stream, queued) }
    }

    unsafe fn queue_words(
        &self,
        scope: &Scope<'_, Hip>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()> {
        // SAFETY: `operate` has our conditions.
        unsafe { self.operate(scope, stream, ops) }
    }

    fn classify(&self, scope: &Scope<'_, Hip>, ptr: DevicePtr) -> Result<PointerInfo> {
        self.classify_foreign(scope, ptr)
    }

    fn refusal(&self, kind: MemoryKind) -> Option<(&'static str, &'static str)> {
        pointer::refusal(kind)
    }

    fn export_handle(self: &Arc<Self>, base: DevicePtr) -> Result<MemHandle> {
        self.plain_handle(base)
    }

    fn open_handle(self: &Arc<Self>, device: DeviceId, handle: &MemHandle) -> Result<AddressRange> {
        self.open_plain(device, handle)
    }

    fn is_handle_served(self: &Arc<Self>, base: DevicePtr) -> Result<bool> {
        self.is_plain_served(base)
    }

    fn forgotten(&self, base: DevicePtr) {
        self.handles.forget(base);
    }

    fn dma_buf(&self) -> Option<&dyn DmaBuf> {
        Some(self)
    }

    fn alloc_managed(&self, _: DeviceId, _: u64) -> Result<DevicePtr> {
        Err(Error::unsupported(
            "managed memory",
            "this backend or device has none",
            "ask `Caps::managed` first, or allocate device memory",
        ))
    }
}
