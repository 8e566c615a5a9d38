//! Faults of the tool server.

/// A single violation of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The server behaves correctly.
    None,
    // Discovery.
    ServesNoToolset,
    OffersAToolTwice,
    ChangesItsToolsAndNotItsVersion,
    // Calls.
    NeverDelivers,
    AcknowledgesWith202,
    AcknowledgesLate,
    AcknowledgesAfterDelivery,
    SendsTwoResults,
    RunsRepeatedInvocations,
    SendsPlainText,
    SendsWrongTypes,
    RefusesUnknownFields,
    // Errors.
    RefusesUnknownOperations,
    DropsUnknownOperations,
    RunsInvalidArguments,
    RefusesDefects,
    ErrorsWithoutDescription,
    ShowsFilePaths,
    RepeatsTheCallbackUrl,
    AcceptsGarbage,
    FailsAtDeepJson,
    IgnoresTheVersion,
    DropsStaleCalls,
    // Delivery.
    GivesUpAfter503,
    GivesUpAfterALostConnection,
    NeverPauses,
    RetriesAfter404,
    RetriesAfter400,
    // Identity.
    SendsResultsWithAnotherId,
    SendsResultsWithAnotherThread,
    DropsTheCallId,
    DropsTheQueryOfTheCallbackUrl,
    KeepsOneCallbackUrlForAThread,
    IdentifiesCallsByIdAlone,
    MixesCallsUnderLoad,
    // Notifications.
    Answers404ToUnknownThreads,
    Answers500ToClosings,
    Answers409ToASecondClosing,
    WaitsForItsCleanUp,
    FailsAtHostileThreadIds,
    RevealsWhetherAThreadIsKnown,
    RefusesCallsOfClosedThreads,
    Answers404ToUnknownCalls,
    SendsAResultAfterCancellingAFinishedCall,
    Answers409ToASecondCancellation,
    FailsAtHostileCallIds,
    RevealsWhetherACallIsKnown,
    HasNoRateLimit,
    // Subscriptions.
    ConfirmsWithoutSubscriptionFlag,
    SendsEventsBeforeItConfirms,
    ConfirmsWithoutAnIdentifier,
    SendsEventsWithoutToolCallId,
    DropsEventsAfter503,
    RetriesEventsAfter400,
    SendsEventsAfterTheFinalOne,
    SendsEventsAfterCancellation,
    SendsEventsAfterClosing,
    CancelsByIdAlone,
    ClosesAllThreads,
    // Authentication.
    LetsAnyoneInvoke,
    LetsAnyoneClose,
    LetsAnyoneCancel,
}
