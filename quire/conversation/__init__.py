"""A conversation on the terminal: what was said, what may be typed, how answers are shown."""
