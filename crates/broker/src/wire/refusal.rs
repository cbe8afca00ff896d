//! Why a broker refuses, as a number that stays the same in every version.

/// Why a broker refuses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
#[non_exhaustive]
pub enum Refusal {
    /// No version is spoken by both sides.
    Version = 1,
    /// This user may not connect, open, or write to the name.
    User = 2,
    /// The message makes no sense at this point.
    Protocol = 3,
    /// A limit of the broker is reached.
    Limit = 4,
    /// Something failed at the broker.
    Failed = 5,
    /// The name, epoch or identity does not exist.
    NotFound = 6,
    /// The identity belongs to another object.
    Exists = 7,
    /// The name has another epoch than was expected.
    Conflict = 8,
    /// No memory is left.
    OutOfMemory = 9,
    /// The object was aborted, or this participant is not its writer.
    NotWriter = 10,
    /// The keeper does not take the object.
    Keeper = 11,
    /// The participant shares a context with other processes, so that its death proves nothing.
    SharedContext = 12,
    /// The broker does not serve that device.
    Device = 13,
    /// The draft is not a valid manifest.
    Layout = 14,
    /// The name is written on another host.
    Home = 15,
}

impl Refusal {
    const ALL: [Refusal; 15] = [
        Refusal::Version,
        Refusal::User,
        Refusal::Protocol,
        Refusal::Limit,
        Refusal::Failed,
        Refusal::NotFound,
        Refusal::Exists,
        Refusal::Conflict,
        Refusal::OutOfMemory,
        Refusal::NotWriter,
        Refusal::Keeper,
        Refusal::SharedContext,
        Refusal::Device,
        Refusal::Layout,
        Refusal::Home,
    ];

    /// Reads the number; `None` for one that names nothing.
    pub fn from_number(number: u16) -> Option<Refusal> {
        Refusal::ALL
            .into_iter()
            .find(|&refusal| refusal as u16 == number)
    }

    /// Returns what to do about it.
    pub const fn remedy(self) -> &'static str {
        match self {
            Refusal::Version => "update the older side",
            Refusal::User => {
                "let the object's owner name this uid when it creates, or start the broker with `--allow-uid`"
            }
            Refusal::Protocol => "connect to a broker of gpu-ipc, with its own client",
            Refusal::Limit => "remove objects, or raise the broker's limit",
            Refusal::Failed => "read the broker's log",
            Refusal::NotFound => "`gpu-ipc objects` lists what there is",
            Refusal::Exists => "draw another identity",
            Refusal::Conflict => "open the epoch that is there, then create anew",
            Refusal::OutOfMemory => "remove objects, or create with `replace`",
            Refusal::NotWriter => "create it anew",
            Refusal::Keeper => "start `gpu-ipc keep` with more room, then commit again",
            Refusal::SharedContext => "write from a process that is not a client of MPS",
            Refusal::Device => "start the broker with this device",
            Refusal::Layout => "mend the layout",
            Refusal::Home => "write it there, or give the object another name here",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_survives_its_number() {
        for refusal in Refusal::ALL {
            assert_eq!(Refusal::from_number(refusal as u16), Some(refusal));
            assert!(!refusal.remedy().is_empty());
        }
        assert_eq!(Refusal::from_number(0), None);
        assert_eq!(Refusal::from_number(16), None);
    }
}
