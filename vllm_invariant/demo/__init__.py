"""A tiny random GDN hybrid with a real tokenizer, and a demonstration on a real server."""
