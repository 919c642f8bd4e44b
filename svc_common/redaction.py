"""Remove the client's text from library errors, so that messages name a place and repeat nothing.

redacted('line 1, column 8: unknown name: "secret"', 'start: secret')  ->  'line 1, column 8: unknown name: "..."'
"""

import re

_WORD = re.compile(r"[^\s:;,'\"`()\[\]{}]+")
_PART = re.compile(r"\w{3,}")
# Keywords of the grammar languages, which may stay: they say what is wrong and reveal nothing.
_KEYWORDS = """
    additionalproperties allof and any anyof array boolean char character characters class column common const
    contains declare default definitions defs dependencies dependentrequired empty enum error exclusivemaximum
    exclusiveminimum expected false following format for from group has https import integer invalid items json
    length lexeme line lookahead lookaround lookbehind maximum maxitems maxlength maxproperties minimum minitems
    minlength minproperties multipleof name names not null number numbers object oneof only ordered pattern
    patternproperties prefixitems properties property quantifier range ref regex repetition required rule rules
    schema start string strings supported support syntax terminal the this token true type types
    unevaluatedproperties unexpected uniqueitems unknown unsupported value values with
"""
_KEYWORD_SET = frozenset(_KEYWORDS.split())


def redacted(message: str, text: str) -> str:
    """Return `message` with "..." for each word that also occurs in `text` and is no keyword."""
    return _WORD.sub(lambda match: "..." if _is_quoted(match.group(), text) else match.group(), message)


def _is_quoted(word: str, text: str) -> bool:
    parts = [part for part in _PART.findall(word) if part.lower() not in _KEYWORD_SET and not part.isdecimal()]
    return any(part in text for part in parts)
