"""Vocabularies rebuilt as tokenizers: byte-level pairs and SentencePiece pieces. Knows no text."""
