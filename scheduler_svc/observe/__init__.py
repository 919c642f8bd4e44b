"""What looks at steps and requests without changing them: step log, spans, timelines, explanations."""
