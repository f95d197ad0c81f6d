"""Asks a server the same requests under other circumstances, and compares every answer bit for bit."""
