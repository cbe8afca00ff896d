//! What a server waits for.

/// What a descriptor is watched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch<Id> {
    /// Connections that come.
    Listener,
    /// Another thread of the server.
    Waker,
    /// The first message of a connection.
    Greeting,
    /// The messages of a participant, and its hang-up.
    Socket(Id),
    /// The hang-up alone of a participant that is not read any more.
    Silenced(Id),
    /// The end of a participant's process.
    Process(Id),
    /// The end of one of its descendants.
    Descendant(Id, usize),
    /// A descriptor of the handler's own.
    Extra,
}
