"""A chat on the terminal: its state, input and slash commands, and the display of answers."""
