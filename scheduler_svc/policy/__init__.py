"""Operators' policy settings: presets, policy files and KEY=VALUE options, resolved to a policy and limits."""
