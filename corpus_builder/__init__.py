"""Corpus building: text to tokens to n-gram tables, the shards and manifest of a reference corpus."""
