"""Communication with the workers: links, lanes, row tables, and results in the core's terms."""
