"""Run one request two ways in process and name the first tensor that differs."""
