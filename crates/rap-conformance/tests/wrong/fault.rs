//! What a tool server can do wrong.

/// One mistake. Everything else the server does right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It makes no mistake.
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
    CountsRepeats,
    SendsPlainText,
    SendsWrongTypes,
    RefusesUnknownFields,
    // Errors.
    RefusesUnknownOperations,
    DropsUnknownOperations,
    RunsInvalidArguments,
    RefusesDefects,
    SaysOnlyError,
    ShowsItsPaths,
    RepeatsTheCallbackUrl,
    AcceptsGarbage,
    FallsOverDeepJson,
    IgnoresTheVersion,
    DropsStaleCalls,
    // Delivery.
    GivesUpAfter503,
    GivesUpAfterALostConnection,
    NeverPauses,
    RetriesAfter404,
    RetriesAfter400,
    // Identity.
    NamesAnotherCall,
    NamesNoThread,
    ForgetsTheCallId,
    LeavesOutTheQuery,
    KeepsOneCallbackUrlForAThread,
    KnowsCallsByIdAlone,
    MixesCallsUnderLoad,
    // Notifications.
    Answers404ToUnknownThreads,
    Answers500ToClosings,
    Answers409ToASecondClosing,
    WaitsForItsCleanUp,
    TrustsThreadIds,
    TellsWhetherAThreadIsKnown,
    RefusesCallsOfClosedThreads,
    Answers404ToUnknownCalls,
    SendsAResultForACancelledCallThatIsOver,
    Answers409ToASecondCancellation,
    TrustsCallIds,
    TellsWhetherACallIsKnown,
    HasNoRateLimit,
    // Subscriptions.
    ConfirmsLikeAnyCall,
    SendsEventsBeforeItConfirms,
    ConfirmsWithoutAnIdentifier,
    NamesEventsLikeResults,
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
