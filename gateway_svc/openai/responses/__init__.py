"""OpenAI's Responses API: request bodies, conversations of items, answers and their events, and stored responses."""
