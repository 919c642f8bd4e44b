"""From a request to its events: the path behind both doors."""
