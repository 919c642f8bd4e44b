"""The cell as routers see it: its load under their names and forms, and their headers."""
