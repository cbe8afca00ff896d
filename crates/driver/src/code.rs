//! The codes that CUDA-shaped drivers return.
//!
//! HIP took CUDA's numbers. A code that only one vendor has is declared in its backend.

/// What every function of a driver returns.
pub type Code = u32;

/// The call succeeded.
pub const SUCCESS: Code = 0;
/// An argument is wrong.
pub const INVALID_VALUE: Code = 1;
/// The device has no room.
pub const OUT_OF_MEMORY: Code = 2;
/// The address is none of the device's (`hipErrorInvalidDevicePointer`); CUDA never returns it.
pub const INVALID_DEVICE_POINTER: Code = 17;
/// There is no device.
pub const NO_DEVICE: Code = 100;
/// No context is current, or the handle is this process' own.
pub const INVALID_CONTEXT: Code = 201;
/// A call of the operating system failed.
pub const OPERATING_SYSTEM: Code = 304;
/// A handle is wrong.
pub const INVALID_HANDLE: Code = 400;
/// What was named was not found.
pub const NOT_FOUND: Code = 500;
/// The work has not finished.
pub const NOT_READY: Code = 600;
/// The way to the peer is open already.
pub const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
/// The device or the driver cannot do that.
pub const NOT_SUPPORTED: Code = 801;
/// A capture orders the default stream that was named.
pub const STREAM_CAPTURE_IMPLICIT: Code = 906;
/// The driver does not say what went wrong.
pub const UNKNOWN: Code = 999;

/// Codes by which a driver says that it does not know an address.
pub const NO_SUCH_ADDRESS: [Code; 4] = [
    INVALID_VALUE,
    INVALID_DEVICE_POINTER,
    INVALID_HANDLE,
    NOT_FOUND,
];
