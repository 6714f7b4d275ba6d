"""OpenAI's files and batches: requests that may wait a day, answered in the room that the others leave."""
