//! Why a command failed.

use std::fmt;

use gpu_ipc::ClaimError;
use gpu_ipc::backend::explain;
use gpu_ipc::broker::ObjectError;

/// What went wrong, for people: an error with its causes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(String);

/// What a part of a command returns.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! explained {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                Failure(explain(&error))
            }
        })*
    };
}

explained!(gpu_ipc::Error, ClaimError, ObjectError);

impl From<String> for Failure {
    fn from(why: String) -> Failure {
        Failure(why)
    }
}

impl From<&str> for Failure {
    fn from(why: &str) -> Failure {
        Failure(why.to_owned())
    }
}

impl From<Failure> for String {
    fn from(failure: Failure) -> String {
        failure.0
    }
}
