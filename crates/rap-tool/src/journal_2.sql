-- `calls.deliver_at` is now 0 if the first message may be sent at once, else the time of its next attempt. Messages that
-- may be sent are found by caller and host, messages that wait for a retry by caller and time. So a caller's hosts
-- that wait for a retry do not slow down the search, and no caller's messages hide those of another.

DROP INDEX calls_to_deliver;
CREATE INDEX calls_ready ON calls (caller, origin, seq) WHERE deliver_at = 0;
CREATE INDEX calls_retrying ON calls (caller, deliver_at) WHERE deliver_at > 0;

-- Threads whose close hook has not finished, in the order in which they were closed.
CREATE INDEX closings_pending ON closings (caller, closed_at) WHERE pending = 1;
