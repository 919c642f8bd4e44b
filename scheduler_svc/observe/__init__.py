"""Observers of steps and requests: step log, spans, timelines, explanations, metrics, recordings."""
