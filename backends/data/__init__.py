"""Samples as people have them: flat files of tokens, folders of shards, texts with a tokenizer."""
