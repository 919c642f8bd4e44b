"""Release of this build, and the revision of the internal protocol, which peers must share."""

VERSION = "0.1.0"
PROTOCOL_REVISION = 3
