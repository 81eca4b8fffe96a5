"""OpenAI's endpoints, without Responses."""
