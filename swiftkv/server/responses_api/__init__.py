"""OpenAI's Responses API, as a translation to a chat and from its answer."""
