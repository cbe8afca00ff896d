//! A connection to a broker.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::Duration;

use crate::boundary::{array, call, out, out_handle, put, text, timeout};
use crate::engine::{Client, CreateOptions, Epoch, Identity, Readers, Selector, Standing};
use crate::failure::{Failure, Outcome, null};
use crate::kinds::{gpu_ipc_client, gpu_ipc_device, gpu_ipc_reader, gpu_ipc_writer};
use crate::object::part::{gpu_ipc_identity, gpu_ipc_part_spec, layout_of};
use crate::sized::{self, sized_struct};

/// Nobody but the owner may open the object.
pub const GPU_IPC_READERS_OWNER: u32 = 0;
/// Every user that may connect to the broker may open the object, and so could write to it.
pub const GPU_IPC_READERS_EVERYBODY: u32 = 1;
/// The users of the list may open the object, and so could write to it.
pub const GPU_IPC_READERS_UIDS: u32 = 2;

/// The object became visible.
pub const GPU_IPC_OUTCOME_COMMITTED: u32 = 1;
/// The object is still being filled, or about to become visible.
pub const GPU_IPC_OUTCOME_UNFINISHED: u32 = 2;
/// No such object is known: it never became visible, or was removed long ago.
pub const GPU_IPC_OUTCOME_UNKNOWN: u32 = 3;

/// What a client connects with; all zero is a good choice.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_client_options {
    /// `sizeof(gpu_ipc_client_options)`.
    pub size: usize,
    /// The broker's directory; null for `$NVIDIA_DRA_LOCAL_IPC_DIR`, or `broker` in the runtime
    /// directory.
    pub dir: *const c_char,
    /// What it calls itself, for people; null for nothing.
    pub name: *const c_char,
    /// How long a question may take, in nanoseconds; 0 for 60 seconds.
    pub patience_ns: u64,
}
sized_struct!(gpu_ipc_client_options of 32 { size, dir, name, patience_ns });

/// How an object is made; all zero is a good choice.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_create_options {
    /// `sizeof(gpu_ipc_create_options)`.
    pub size: usize,
    /// Bytes of the user's own that lie beside the parts.
    pub user: *const c_void,
    /// How many they are.
    pub user_len: usize,
    /// Users beside the owner that may open it, with `GPU_IPC_READERS_UIDS`.
    pub uids: *const u32,
    /// How many they are, at most 16.
    pub uid_count: usize,
    /// `GPU_IPC_READERS_...`.
    pub readers: u32,
    /// 1 to refuse the commit unless the name's epoch is `expected`.
    pub expect: u32,
    /// The epoch that the name must have with `expect`; 0 for a name that has none.
    pub expected: u64,
    /// 1 to give the name's epochs up before memory is asked for, where there is no room for two.
    pub replace: u32,
    /// Zero.
    pub reserved: u32,
    /// The group of each part, as many as there are parts; null to lay all of them together. A
    /// group has memory of its own, so that it can be taken over without the others. At most 16
    /// groups, in the order of their numbers.
    pub groups: *const u32,
    /// Names of parts that are as in the name's newest epoch: its memory is taken over, without a
    /// copy, and may not be written to. All parts of a group or none, and each epoch with the same
    /// groups.
    pub unchanged: *const *const c_char,
    /// How many they are.
    pub unchanged_count: usize,
}
sized_struct!(gpu_ipc_create_options of 88 { size, user, user_len, uids, uid_count, readers, expect, expected, replace, reserved, groups, unchanged, unchanged_count });

/// Connects to a broker of objects, for objects on a device. It reconnects by itself when the
/// broker was started again.
///
/// Keeps: nothing; texts are copied. Thread: any. Blocks: for the broker's welcome. Errors:
/// `BAD_HANDLE`, `CONNECT`, `REFUSED`, `INVALID`, `UNSUPPORTED`.
///
/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says and good pointers in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_client_connect(
    device: *mut gpu_ipc_device,
    options: *const gpu_ipc_client_options,
    client: Option<&mut MaybeUninit<*mut gpu_ipc_client>>,
) -> i32 {
    call(|process| {
        let client = out_handle(client, "client")?;
        // SAFETY: `read` asks for what this function asks for.
        let options = unsafe { sized::read(options) }?;
        let mut builder = Client::builder(process.get(device)?.clone());
        if !options.dir.is_null() {
            // SAFETY: `text` asks for what this function asks for.
            builder = builder.dir(unsafe { text(options.dir, "the directory of a broker") }?);
        }
        if !options.name.is_null() {
            // SAFETY: `text` asks for what this function asks for.
            builder = builder.name(unsafe { text(options.name, "the name of a client") }?);
        }
        if options.patience_ns > 0 {
            builder = builder.patience(Duration::from_nanos(options.patience_ns));
        }
        client.set(process.open(builder.connect()?)?);
        Ok(())
    })
}

/// Makes an object to be filled: all its memory is there, readable and writable by this process
/// alone. Nobody sees it before `gpu_ipc_writer_commit`.
///
/// Keeps: nothing; what describes the parts is copied. Thread: any. Blocks: for the broker, which
/// may scrub memory first. Errors: `BAD_HANDLE`, `OUT_OF_MEMORY`, `REFUSED` for a limit, a name of
/// another user, or parts that are not as in the newest epoch, `NOT_FOUND` where there is none,
/// `INVALID`, `WRITER_LOST`, `DEADLINE`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there are `count` parts with good pointers in them; `options` is
/// null, or has as many bytes as its `size` says and good pointers in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_object_create(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    parts: *const gpu_ipc_part_spec,
    count: usize,
    options: *const gpu_ipc_create_options,
    writer: Option<&mut MaybeUninit<*mut gpu_ipc_writer>>,
) -> i32 {
    call(|process| {
        let writer = out_handle(writer, "writer")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of an object") }?;
        // SAFETY: `read` asks for what this function asks for.
        let given = unsafe { sized::read(options) }?;
        // SAFETY: `layout_of` asks for what this function asks for.
        let layout = unsafe { layout_of(parts, count, given.groups, given.user, given.user_len) }?;
        // SAFETY: `array` asks for what this function asks for.
        let unchanged = unsafe { array(given.unchanged, given.unchanged_count, "unchanged") }?;
        let name_of = |&name: &*const c_char| {
            // SAFETY: `text` asks for what this function asks for.
            unsafe { text(name, "the name of an unchanged part") }.map(str::to_owned)
        };
        let options = CreateOptions {
            // SAFETY: `readers_of` asks for what this function asks for.
            readers: unsafe { readers_of(&given) }?,
            expect: (given.expect != 0).then_some(Epoch(given.expected)),
            replace: given.replace != 0,
            unchanged: unchanged.iter().map(name_of).collect::<Outcome<_>>()?,
            identity: None,
            replica_of: None,
        };
        let made = process.get(client)?.create_with(name, layout, &options)?;
        writer.set(process.open(Mutex::new(Some(made)))?);
        Ok(())
    })
}

/// Maps an object read-only: an epoch of a name, 0 for the newest.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
/// `REFUSED`, `MISMATCH` for one of another device, `INVALID`, `DEADLINE`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_object_open(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    epoch: u64,
    reader: Option<&mut MaybeUninit<*mut gpu_ipc_reader>>,
) -> i32 {
    call(|process| {
        let reader = out_handle(reader, "reader")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of an object") }?;
        let made = process.get(client)?.open_one(&selector(name, epoch))?;
        reader.set(process.open(Mutex::new(made))?);
        Ok(())
    })
}

/// Maps the object of an identity read-only.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: as `gpu_ipc_object_open`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_object_open_identity(
    client: *mut gpu_ipc_client,
    identity: Option<&gpu_ipc_identity>,
    reader: Option<&mut MaybeUninit<*mut gpu_ipc_reader>>,
) -> i32 {
    call(|process| {
        let reader = out_handle(reader, "reader")?;
        let made = process
            .get(client)?
            .open_one(&Selector::Identity(identity_of(identity)?))?;
        reader.set(process.open(Mutex::new(made))?);
        Ok(())
    })
}

/// Waits until a name has an epoch newer than `seen`, and says which.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
/// `DEADLINE`, `REFUSED`, `INVALID`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_object_watch(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    seen: u64,
    timeout_ns: i64,
    epoch: Option<&mut MaybeUninit<u64>>,
) -> i32 {
    call(|process| {
        let epoch = out(epoch, "epoch")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of an object") }?;
        let client = process.get(client)?;
        // A century stands for ever: the client adds it to a clock.
        let time = timeout(timeout_ns).unwrap_or(Duration::from_secs(100 * 365 * 86_400));
        match client.watch(name, Epoch(seen), time)? {
            Some((newer, _)) => {
                epoch.set(newer.0);
                Ok(())
            }
            None => Err(crate::engine::Error::deadline("a newer epoch").into()),
        }
    })
}

/// Removes an epoch of a name, with 0 all; a process that has one mapped keeps it. `last` gets the
/// last epoch that the name had, and may be null.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
/// `REFUSED` for another user's, `INVALID`, `DEADLINE`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_object_remove(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    epoch: u64,
    last: Option<&mut MaybeUninit<u64>>,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of an object") }?;
        let removed = process.get(client)?.remove_epoch(name, Epoch(epoch))?;
        put(last, removed.0);
        Ok(())
    })
}

/// Asks for the outcome of a commit, by the identity of its object: `GPU_IPC_OUTCOME_...`. `epoch`
/// gets the epoch of one that was committed, else 0, and may be null.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `DEADLINE`,
/// `INVALID`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_object_outcome(
    client: *mut gpu_ipc_client,
    identity: Option<&gpu_ipc_identity>,
    outcome: Option<&mut MaybeUninit<u32>>,
    epoch: Option<&mut MaybeUninit<u64>>,
) -> i32 {
    call(|process| {
        let outcome = out(outcome, "outcome")?;
        let (became, number) = match process.get(client)?.outcome(identity_of(identity)?)? {
            Standing::Committed(epoch) => (GPU_IPC_OUTCOME_COMMITTED, epoch.0),
            Standing::Unfinished => (GPU_IPC_OUTCOME_UNFINISHED, 0),
            Standing::Unknown => (GPU_IPC_OUTCOME_UNKNOWN, 0),
        };
        outcome.set(became);
        put(epoch, number);
        Ok(())
    })
}

/// Closes a client; its writers and readers go on. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_client_close(client: *mut gpu_ipc_client) -> i32 {
    call(|process| process.close(client))
}

/// Reads who may open what is made.
///
/// # Safety
///
/// The pointers in the options are good.
pub(super) unsafe fn readers_of(given: &gpu_ipc_create_options) -> Outcome<Readers> {
    // SAFETY: `array` asks for what this function asks for.
    let uids = unsafe { array(given.uids, given.uid_count, "uids") }?;
    match given.readers {
        GPU_IPC_READERS_OWNER => Ok(Readers::Owner),
        GPU_IPC_READERS_EVERYBODY => Ok(Readers::Everybody),
        GPU_IPC_READERS_UIDS => Ok(Readers::Uids(uids.to_vec())),
        other => Err(Failure::invalid(
            "the readers",
            other.to_string(),
            "one of GPU_IPC_READERS_...",
        )),
    }
}

pub(super) fn selector(name: &str, epoch: u64) -> Selector {
    match epoch {
        0 => Selector::Latest(name.into()),
        epoch => Selector::Epoch(name.into(), Epoch(epoch)),
    }
}

pub(super) fn identity_of(identity: Option<&gpu_ipc_identity>) -> Outcome<Identity> {
    identity
        .map(|identity| Identity(identity.bytes))
        .ok_or_else(|| null("identity"))
}
