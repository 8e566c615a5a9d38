-- The header `traceparent` of the invocation, which goes back with the callbacks.
ALTER TABLE calls ADD COLUMN traceparent TEXT;
