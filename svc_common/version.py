"""What this build is: the release, and the revision of the internal protocol that peers must share."""

VERSION = "0.1.0"
PROTOCOL_REVISION = 2
