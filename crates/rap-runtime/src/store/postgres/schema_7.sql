-- Tool servers that nodes start themselves. Every node starts its own process of each, and one node at a time is its host: calls
-- are sent to the process of that node only. The lease of the host decides how long it is the host.

CREATE TABLE tool_hosts (
    server text COLLATE "C" PRIMARY KEY, -- name of the tool server, as in `calls`
    node bigint NOT NULL
);
