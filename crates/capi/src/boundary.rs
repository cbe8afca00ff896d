//! Where C's calls come in: panics end here, pointers are looked at, failures become codes.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::engine::Error;
use crate::failure::{Failure, GPU_IPC_OK, Outcome, keep, null};
use crate::process::Process;

/// Runs a call, and turns what it gives into a code.
#[inline]
pub(crate) fn call(run: impl FnOnce(&'static Process) -> Outcome) -> i32 {
    match value(run) {
        Ok(()) => GPU_IPC_OK,
        Err(failure) => keep(failure),
    }
}

/// Runs a call that returns a value, and `else_` when it fails.
#[inline]
pub(crate) fn value_or<T>(else_: T, run: impl FnOnce(&'static Process) -> Outcome<T>) -> T {
    value(run).unwrap_or_else(|failure| {
        keep(failure);
        else_
    })
}

#[inline]
fn value<T>(run: impl FnOnce(&'static Process) -> Outcome<T>) -> Outcome<T> {
    // What a panic leaves behind is the library's own state, which it takes poisoned locks of; C
    // sees the code.
    catch_unwind(AssertUnwindSafe(|| run(Process::current()?)))
        .unwrap_or_else(|panic| Err(of_panic(&*panic)))
}

#[cold]
fn of_panic(panic: &(dyn std::any::Any + Send)) -> Failure {
    let said = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Failure::panic(said.unwrap_or("no text"))
}

/// A place that C gave for a result.
pub(crate) struct Out<'a, T>(&'a mut MaybeUninit<T>);

impl<T> Out<'_, T> {
    #[inline]
    pub fn set(self, value: T) {
        self.0.write(value);
    }
}

/// Takes the place for a result.
#[inline]
pub(crate) fn out<'a, T>(
    place: Option<&'a mut MaybeUninit<T>>,
    what: &'static str,
) -> Outcome<Out<'a, T>> {
    place.map(Out).ok_or_else(|| null(what))
}

/// Writes a result that C may not want.
#[inline]
pub(crate) fn put<T>(place: Option<&mut MaybeUninit<T>>, value: T) {
    if let Some(place) = place {
        place.write(value);
    }
}

/// Takes the place for a handle, and makes it null, so that it can be closed whatever becomes of
/// the call.
#[inline]
pub(crate) fn out_handle<'a, T>(
    place: Option<&'a mut MaybeUninit<*mut T>>,
    what: &'static str,
) -> Outcome<Out<'a, *mut T>> {
    let place = place.ok_or_else(|| null(what))?;
    place.write(std::ptr::null_mut());
    Ok(Out(place))
}

/// Reads a text of C's.
///
/// # Safety
///
/// Null, or a text that ends with a zero byte and stays as it is for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &'static str) -> Outcome<&'a str> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: `CStr::from_ptr` asks for what this function asks for.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes
        .to_str()
        .map_err(|_| Failure::invalid(what, format!("{bytes:?}"), "UTF-8"))
}

/// Reads an array of C's.
///
/// # Safety
///
/// Null with a count of 0, or `count` values that stay as they are for `'a`.
#[inline]
pub(crate) unsafe fn array<'a, T>(
    first: *const T,
    count: usize,
    what: &'static str,
) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(null(what));
    }
    if count
        .checked_mul(size_of::<T>())
        .is_none_or(|bytes| isize::try_from(bytes).is_err())
    {
        return Err(Failure::invalid(
            what,
            format!("{count} of them"),
            "as many as fit into memory",
        ));
    }
    if !first.is_aligned() {
        return Err(Failure::invalid(
            what,
            format!("{first:?}"),
            "aligned for its type",
        ));
    }
    // SAFETY: `from_raw_parts` asks for an aligned array of this many values that nothing changes,
    // of less than half of the addresses: looked at above, and for the rest this function asks.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Takes a buffer of C's that is to be filled.
///
/// # Safety
///
/// Null with a length of 0, or `len` bytes that nobody else uses for `'a`.
pub(crate) unsafe fn room<'a>(bytes: *mut c_void, len: usize) -> Outcome<&'a mut [u8]> {
    if len == 0 {
        return Ok(&mut []);
    }
    if bytes.is_null() {
        return Err(null("bytes"));
    }
    if isize::try_from(len).is_err() {
        return Err(Failure::invalid(
            "the length of a buffer",
            format!("{len} bytes"),
            "as long as fits into memory",
        ));
    }
    // SAFETY: `from_raw_parts_mut` asks for this many bytes that nothing else uses: so does this
    // function. Bytes have no alignment.
    Ok(unsafe { std::slice::from_raw_parts_mut(bytes.cast(), len) })
}

/// Copies a descriptor of the application's.
///
/// # Safety
///
/// `fd` is open, and nobody closes it during the call; what is below 0 is refused.
pub(crate) unsafe fn copy_of(fd: c_int) -> Outcome<OwnedFd> {
    if fd < 0 {
        return Err(Failure::invalid(
            "a descriptor",
            fd.to_string(),
            "an open one",
        ));
    }
    // SAFETY: `borrow_raw` asks for a descriptor that stays open for as long as the borrow, and is
    // not -1: looked at above, and for the rest this function asks.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().map_err(|error| {
        Error::system(
            "fcntl(F_DUPFD_CLOEXEC)",
            "pass an open descriptor, or raise RLIMIT_NOFILE",
            error,
        )
        .into()
    })
}

/// Reads a time in nanoseconds: below 0 for ever.
#[inline]
pub(crate) fn timeout(ns: i64) -> Option<Duration> {
    u64::try_from(ns).ok().map(Duration::from_nanos)
}

/// Writes a text into a buffer of C's with a zero byte behind, and returns the bytes that it needs
/// with that.
///
/// # Errors
///
/// `GPU_IPC_INVALID` for a buffer that is too small; nothing is written then.
///
/// # Safety
///
/// `buffer` is null with a capacity of 0, or has `capacity` bytes that may be written.
pub(crate) unsafe fn put_text(text: &str, buffer: *mut c_char, capacity: usize) -> Outcome {
    if buffer.is_null() && capacity > 0 {
        return Err(null("buffer"));
    }
    if capacity <= text.len() {
        return Err(Failure::invalid(
            "the capacity for a text",
            format!("{capacity} bytes"),
            "that of the text and a zero byte: below 4,096 for a path, 256 for a name",
        ));
    }
    // SAFETY: `copy_nonoverlapping` asks for this many bytes on both sides that do not overlap: the
    // buffer is larger, and the text is the library's own.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, text.len()) };
    // SAFETY: `add` asks to stay inside the buffer: the capacity is above the length.
    let end = unsafe { buffer.add(text.len()) };
    // SAFETY: `write` asks for a place that may be written: the buffer's, inside its capacity.
    unsafe { end.write(0) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::failure::{GPU_IPC_PANIC, gpu_ipc_last_error_text};

    #[test]
    fn a_panic_ends_at_the_boundary_and_says_what_it_said() {
        assert_eq!(call(|_| panic!("row {}", 7)), GPU_IPC_PANIC);
        // SAFETY: `from_ptr` asks for a text with a zero byte: the header says so of this function.
        let text = unsafe { CStr::from_ptr(gpu_ipc_last_error_text()) };
        assert!(
            text.to_string_lossy().contains("row 7; report it"),
            "{text:?}"
        );
    }
}
