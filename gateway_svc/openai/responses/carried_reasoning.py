"""`encrypted_content` of reasoning items: reasoning carried by the client, for conversations that are not stored. Pure.

The text is encoded, not encrypted: a key would hide nothing, since the API returns reasoning as text, and a client
may send any text as an item's `content`. Any gateway reads it, also after a restart.
"""

import base64
import binascii

from svc_common.errors import InvalidArgument

_PREFIX = "quire1."


def carried(text: str) -> str:
    """Encode reasoning for `encrypted_content`."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def carried_text(given: str, field: str) -> str:
    """Decode `encrypted_content`. Raises InvalidArgument naming `field` for content of another server."""
    try:
        if given.startswith(_PREFIX):
            return base64.b64decode(given.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidArgument.field(field, "was not made by this server; leave it out, and send content or summary")
