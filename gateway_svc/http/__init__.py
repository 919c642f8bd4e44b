"""HTTP/1.1 listeners: connections, limits, bodies, server-sent events, errors."""
