"""Commands of the tools. `quire.cli` loads each by name when it is run."""
