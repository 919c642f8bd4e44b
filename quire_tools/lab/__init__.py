"""The lab of a recording: the page of a gateway's lab, with data from a replay. Used by `quire lab --recording`."""
