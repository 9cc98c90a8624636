"""Text and token ids: vocabularies, chat templates, prompts in, answers out. Knows no engine."""
