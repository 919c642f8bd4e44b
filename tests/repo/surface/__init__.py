"""Everything that users and programs can name, one a line. `python -m tests.repo.surface` prints it; surface.txt keeps it."""
