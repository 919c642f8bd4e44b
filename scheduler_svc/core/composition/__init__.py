"""The composition of a core: the policy's parts and their values, presets, and changes while it runs."""
