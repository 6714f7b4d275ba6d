"""Anthropic's Messages API, as a translation to a chat and from its answer."""
