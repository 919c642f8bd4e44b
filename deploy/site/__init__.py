"""Builds the documentation site from docs/ with Zensical; mkdocs.yml is its configuration (docs/decisions/0049)."""
