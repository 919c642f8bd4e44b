"""The way to the workers and back: links, lanes, what each of them knows, what a result says in the core's terms."""
