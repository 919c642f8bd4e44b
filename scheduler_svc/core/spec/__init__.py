"""A policy as data: its parts and settings by name, and what each of them needs and offers."""
