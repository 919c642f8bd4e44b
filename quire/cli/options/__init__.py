"""Options shared by several commands, most of them generated from the settings classes."""
