"""vLLM's HTTP tests that are not run against Quire, by file and test (`*`: all of a file), and why."""

SKIPPED: dict[str, dict[str, str]] = {}
