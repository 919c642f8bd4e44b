"""Checks of installation, machine, model and service, with one finding per check."""
