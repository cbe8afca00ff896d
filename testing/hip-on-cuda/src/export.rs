//! How a function comes to be one of C's: its result by a code, what it makes through a pointer.

use std::cell::Cell;

use crate::machine::{INVALID_VALUE, Outcome};

thread_local! {
    /// What `hipGetLastError` gives.
    pub(crate) static LAST: Cell<u32> = const { Cell::new(0) };
}

/// Returns a code, and keeps it for `hipGetLastError` where it is an error.
pub(crate) fn finish(outcome: Outcome) -> u32 {
    match outcome {
        Ok(()) => 0,
        Err(code) => {
            LAST.set(code);
            code
        }
    }
}

/// Runs a function's body, which may leave early.
pub(crate) fn run<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    body()
}

/// Writes what a function made to where its caller wants it.
///
/// # Safety
///
/// `to` is null or points to a place for a `T`.
pub(crate) unsafe fn put<T>(to: *mut T, made: Outcome<T>) -> Outcome {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let made = made?;
    // SAFETY: `write` asks for a place for a `T`: our caller vouches for it.
    unsafe { to.write(made) };
    Ok(())
}

/// Writes a text of at most `room` bytes, its zero included.
///
/// # Safety
///
/// `to` points to `room` bytes.
pub(crate) unsafe fn put_text(to: *mut std::ffi::c_char, room: i32, text: &str) -> Outcome {
    let room = usize::try_from(room)
        .ok()
        .filter(|room| *room > 0 && !to.is_null())
        .ok_or(INVALID_VALUE)?;
    let len = text.len().min(room - 1);
    // SAFETY: `copy_nonoverlapping` asks for `len` bytes on both sides: `text` has them, and `to`,
    // says our caller.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), len) };
    // SAFETY: `add` stays within the room: `len` is below it.
    let end = unsafe { to.cast::<u8>().add(len) };
    // SAFETY: `write`: the place is within the room.
    unsafe { end.write(0) };
    Ok(())
}

/// Declares functions of HIP's. What stands before the semicolon is written through the pointer of
/// that name.
macro_rules! hip {
    ($($name:ident($($out:ident: $made:ty)?; $($argument:ident: $type:ty),*) $body:block)*) => {$(
        /// HIP's function of that name.
        ///
        /// # Safety
        ///
        /// As in HIP's manual.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the name is HIP's")]
        pub unsafe extern "C" fn $name($($out: *mut $made,)? $($argument: $type),*) -> u32 {
            let outcome = $crate::export::run(|| $body);
            $(
                // SAFETY: `put` asks for a place for what was made: HIP's caller gave it.
                let outcome = unsafe { $crate::export::put::<$made>($out, outcome) };
            )?
            $crate::export::finish(outcome)
        }
    )*};
}
pub(crate) use hip;
