"""OpenAI's Responses API: schemas, translation, events, and the stored responses."""
