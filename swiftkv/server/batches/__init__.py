"""OpenAI's files and batches: requests that may wait a day, answered in the capacity that clients leave."""
