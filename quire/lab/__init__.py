"""The lab of a recording: the same page as a gateway's, told by a replay. Used by `quire lab --recording`."""
