//! What is dropped with the interpreter's lock, whichever thread gives it up.

use super::process::process;

/// Something of Python's. Its drop leaves it to the keeper, and takes no lock of Python's.
pub(crate) struct Later<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Later<T> {
    pub fn new(one: T) -> Later<T> {
        Later(Some(one))
    }
}

impl<T: Send + 'static> Drop for Later<T> {
    fn drop(&mut self) {
        if let Some(one) = self.0.take() {
            process().queue.drop_later(Box::new(one));
        }
    }
}
