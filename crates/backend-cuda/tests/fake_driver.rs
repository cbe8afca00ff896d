//! The backend over a driver that is not there.
fn main() {}
