//! Faults of a shell: each one breaks a promise that the rules can not keep alone. A simulation that runs with one of
//! them has to fail; that shows that it looks.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Says 200 before the commit.
    AcknowledgesEarly,
    /// A crash in a commit leaves the head without the writes.
    TearsCommits,
    /// What is to be done is only in memory.
    ForgetsEffects,
    /// Messages to other threads are not stored.
    LosesLetters,
    /// Does not look at a call again before it sends its invocation.
    InvokesBlindly,
    /// Does not record an acknowledgement.
    InvokesOnAndOn,
    /// Sends notifications again after a restart.
    StoresNotifications,
    /// Sends each notification again when nobody answers.
    RetriesNotifications,
    /// Does not remember the ids of events.
    ForgetsMarks,
    /// Does not remember the keys of clients.
    ForgetsKeys,
    /// Releases held input in the wrong order.
    ReversesHeld,
    /// A child goes on seeing what its parent writes after its birth.
    SharesHistory,
    /// Takes a model's call id without looking whether it is new.
    TrustsIds,
    /// A crash in a commit leaves the writes without the head.
    KeepsOldHeads,
    /// Forks a thread exactly where it was told to.
    ForksAnywhere,
    /// A fork goes on with the subscriptions of its source.
    ForksSubscriptions,
    /// Offers a thread that an event set going whatever its agent may use.
    TrustsEvents,
    /// Takes a call for lost at the first word.
    BelievesAtOnce,
    /// Does not write down that a server does not know a call.
    ForgetsDoubts,
    /// Remembers only until the next crash what was spent.
    ForgetsSpending,
    /// Resumes a thread of a session that was paused, and no other.
    ResumesOne,
    /// Shows whoever makes a summary the whole history.
    SummarisesAll,
}
